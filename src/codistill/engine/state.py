"""Everything that a training step reads and changes, and the sums it keeps on the device."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from codistill.cohort import Cohort, Member
from codistill.data.batches import Draws
from codistill.data.device import OnDevice
from codistill.data.images import ImageData
from codistill.engine.health import Health, Limits
from codistill.engine.optim import MovingAverage, build_optimizers, optimizer_tensors
from codistill.engine.peers import ALONE, Peers
from codistill.engine.runtime import Machine
from codistill.recipes.schema import Recipe
from codistill.runs.weights import checkpoint_tensors, load_weights, tensors_of_network
from codistill.transfer.objective import Loss, Objective

LARGE_ENOUGH = 32  # pixels: every built-in family has a feature map left at its last stage
SHARPENED = 3
LONG = 10**16
"""Weights times images of a training: with the paper's recipes and heads 3·10^15 for WRN-28-10 twins on CIFAR, which
take 47 minutes on an H200, and 2·10^16 for ResNet-50 & ResNet-18 on ImageNet, which take hours. Trials of convolutions
take ten seconds or more at every start, and gain 2 % of the first; nothing that was seen of smaller ones.
"""


class Tally:
    """Sums since the last evaluation, in one tensor on the device: every term of the loss and the wrong answers.

    Below each the number of its images, which are fewer where a network was left out of a step.
    """

    def __init__(self, terms: tuple[str, ...], finals: tuple[str, ...], device: torch.device) -> None:
        self.terms, self.finals = terms, finals
        self.sums = torch.zeros(2, len(terms) + len(finals), device=device)

    @torch.no_grad()
    def of_batch(
        self, loss: Loss, logits: Mapping[str, Tensor], labels: Tensor, trusted: Mapping[str, Tensor]
    ) -> Tensor:
        """What a batch adds to ``sums``."""
        hard = labels if labels.ndim == 1 else labels.argmax(dim=-1)
        wrong = torch.stack([(logits[name].argmax(dim=-1) != hard).sum() for name in self.finals])
        counted_finals = torch.stack([trusted[name] for name in self.finals])
        images = len(hard)
        counted = torch.cat([loss.counted, counted_finals])
        return torch.stack([torch.cat([loss.values * images, wrong]) * counted, counted * images])

    def read(self) -> dict[str, dict[str, float]]:
        """Mean terms and training errors (%). Waits for the device: call it where an epoch ends."""
        means = [value / images if images else math.nan for value, images in self.sums.T.tolist()]
        split = len(self.terms)
        return {
            "terms": dict(zip(self.terms, means[:split], strict=True)),
            "train_error": {name: 100 * x for name, x in zip(self.finals, means[split:], strict=True)},
        }


@dataclass(frozen=True)
class Training:
    """Everything a step reads and changes. ``tensors`` is all of its state: what is saved, restored and put back."""

    recipe: Recipe
    machine: Machine
    cohort: Cohort
    objective: Objective
    optimizers: Mapping[str, torch.optim.Optimizer]
    """Of every network that learns."""
    average: MovingAverage | None
    health: Health
    tally: Tally
    data: OnDevice
    images: int
    """How many it learns from in an epoch. A benchmark has fewer of its own, which stand in for them."""
    peers: Peers = ALONE
    """``cohort``, ``optimizers`` and ``average`` are of the networks here; ``objective`` and ``tally`` of all."""

    @property
    def classifiers(self) -> list[str]:
        """Of all networks, wherever they are."""
        exits = self.recipe.graph.exits
        return [f"{name}/{exit}" for name in self.recipe.networks for exit in ("final", *exits[name])]

    @property
    def finals(self) -> list[str]:
        return [f"{name}/final" for name in self.recipe.networks]

    @property
    def is_long(self) -> bool:
        """Whether what the library's algorithms gain by being tried is more than the time that it takes."""
        weights = sum(weight.numel() for weight in self.cohort.parameters())
        return weights * self.images * self.recipe.length.epochs >= LONG

    def tensors(self) -> dict[str, Tensor]:
        """What this process holds of each."""
        groups: dict[str, Iterable[tuple[str, Tensor]]] = {
            "cohort": self.cohort.state_dict().items(),
            "optimizer": optimizer_tensors(self.optimizers, self.cohort, self.peers.held),
            "average": self.average.backbones.state_dict().items() if self.average else (),
            "health": self.health.tensors(),
            "tally": [("sums", self.tally.sums)],
        }
        held = self.peers.held
        return {name: held(tensor) for name, tensor in checkpoint_tensors(groups).items()}

    def tensors_of(self, network: str) -> dict[str, Tensor]:
        """Those that are one network's own."""
        return tensors_of_network(network, self.tensors())

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Put saved values into the same memory, so that a recorded step still finds them."""
        tensors = self.tensors()
        if odd := sorted(tensors.keys() ^ saved.keys()):
            raise ValueError(f"the checkpoint does not fit this recipe: {len(odd)} tensors differ, first {odd[0]!r}")
        for name, tensor in tensors.items():
            if tensor.shape != saved[name].shape:
                shapes = f"{list(saved[name].shape)}, not {list(tensor.shape)}"
                raise ValueError(f"the checkpoint does not fit this recipe: {name} is {shapes}")
            tensor.copy_(saved[name])

    def batch(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """The step's augmented, normalised images and its labels, hard or soft."""
        images, labels = self.data.augmented(draws, self.recipe.label_smoothing)
        return images.contiguous(memory_format=self.machine.memory_format), labels

    def shipped(self) -> dict[str, nn.Module]:
        """The networks as users get them: without heads, and averaged where the recipe says so."""
        backbones: dict[str, nn.Module] = {name: member.backbone for name, member in self.cohort.members.items()}
        return backbones | (dict(self.average.backbones.items()) if self.average else {})

    def set_mode(self, *, learning: bool) -> None:
        """Training mode for the networks that learn; a frozen teacher always stays in evaluation mode."""
        learns = self.recipe.graph.learning_networks
        for name, member in self.cohort.members.items():
            member.train(learning and name in learns)


def prepare_training(
    recipe: Recipe, data: ImageData, machine: Machine, peers: Peers = ALONE, *, images: int | None = None
) -> Training:
    """Build the cohort with just the heads that the graph uses, its optimizer and its objective, on the device.

    ``images`` is how many ``data`` stand in for, where there are more.
    """
    graph = recipe.graph
    here = [name for name in recipe.networks if peers.holds(name)]
    augmentation = recipe.augment
    image_size = augmentation.crop_size(data.image_size)
    if augmentation.randaugment and min(image_size) < SHARPENED:
        raise ValueError(
            f"augment.randaugment sharpens by the {SHARPENED}×{SHARPENED} pixels around each, and these images have "
            f"{image_size[0]}×{image_size[1]}; take larger ones with data.image_size, or augment.randaugment=0"
        )
    cohort = cohort_of(recipe, data.num_classes, data.channels, image_size=image_size, only=here)
    for name, file in recipe.start.items():
        if name in here:
            load_weights(cohort.members[name].backbone, Path(file), name)
    for name, member in cohort.members.items():
        member.requires_grad_(name in graph.learning_networks)
        member.backbone.recomputes = recipe.runtime.activation_checkpointing
    cohort.to(machine.device).to(memory_format=machine.memory_format)  # type: ignore[call-overload]
    objective = Objective(graph).to(machine.device)
    learning = graph.learning_networks
    average = MovingAverage(cohort, [name for name in learning if name in here], recipe.ema) if recipe.ema else None
    peers.adopt(cohort, average)
    optimizers = build_optimizers(recipe, cohort, machine, peers.held)
    clip_norms = {name: clip for name in learning if (clip := recipe.optimizer.clip_norm_for(name))}
    limits = Limits(frozenset(graph.frozen), clip_norms, freezes=recipe.sick == "freeze")
    health = Health(cohort, objective.classifiers, limits, machine.device)
    health.guard(optimizers)
    training = Training(
        recipe=recipe,
        machine=machine,
        cohort=cohort,
        objective=objective,
        optimizers=optimizers,
        average=average,
        health=health,
        tally=Tally(objective.names, tuple(f"{name}/final" for name in learning), machine.device),
        data=OnDevice.of(data, machine.device, augmentation, compiled=recipe.runtime.compile),
        images=images or len(data.splits["train"]),
        peers=peers,
    )
    training.set_mode(learning=True)
    return training


def cohort_of(
    recipe: Recipe,
    num_classes: int,
    in_channels: int,
    *,
    image_size: tuple[int, int] | None = None,
    only: Collection[str] | None = None,
) -> Cohort:
    """All of its networks, or ``only`` some, as they are before they learn; on whatever device is current.

    Where ``image_size`` (height, width) is given, images that a network cannot take are refused.
    """
    networks = {name: network for name, network in recipe.networks.items() if only is None or name in only}
    cohort = Cohort(
        networks,
        num_classes=num_classes,
        in_channels=in_channels,
        image_size=image_size,
        heads=recipe.heads.kind,
        exits={name: recipe.graph.exits[name] for name in networks},
        seed=recipe.seed,
        batchnorm_init=recipe.batchnorm_init,
    )
    if image_size is not None and min(image_size) < LARGE_ENOUGH:
        for name, network in networks.items():
            _refuse_vanishing(cohort.members[name], f"networks.{name}={network}", (in_channels, *image_size))
    return cohort


@torch.no_grad()
def _refuse_vanishing(member: Member, words: str, shape: tuple[int, int, int]) -> None:
    """Images so small that nothing is left for a stage to pool: one is tried."""
    member.eval()
    try:
        member(torch.zeros(1, *shape))
    except RuntimeError as error:
        _, height, width = shape
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{words} cannot take images of {height}×{width} pixels ({reason}); take larger ones with data.image_size "
            "and augment.crop, or another network"
        ) from error
    member.train()
