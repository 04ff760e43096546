"""Everything that a training step reads and changes: the cohort, its optimizers, and the sums on the device."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from codistill.cohort import Cohort, Member
from codistill.data.augmentation import OnDevice
from codistill.data.batches import Draws
from codistill.data.images import ImageData
from codistill.engine.health import Health
from codistill.engine.optim import MovingAverage, build_optimizers, optimizer_tensors
from codistill.engine.peers import ALONE, Peers
from codistill.engine.runtime import Machine
from codistill.engine.weight_files import begin
from codistill.networks.adapters.architecture import AdaptedBackbone
from codistill.networks.backbone import Architecture
from codistill.networks.parts import freeze, is_frozen
from codistill.recipes.schema import Recipe
from codistill.runs.weights import checkpoint_tensors
from codistill.transfer.objective import Loss, Objective

LARGE_ENOUGH = 32  # pixels: every built-in family has a feature map left at its last stage
SHARPENED = 3
NONE: Mapping[str, Architecture] = MappingProxyType({})
LONG = 10**16
"""Weights times images of a training, from which on cuDNN times its convolution algorithms instead of guessing.

With the paper's recipes and heads: 3·10^15 for WRN-28-10 twins on CIFAR (47 minutes on an H200), 2·10^16 for ResNet-50
& ResNet-18 on ImageNet (hours). The trials take ten seconds or more at every start; they gain 2 % on the WRN-28-10
twins, and no measurable time on smaller networks.
"""


class Tally:
    """Sums since the last evaluation, in one tensor on the device: every term of the loss, and the wrong predictions.

    The second row counts the images of each sum, fewer where a network was left out of a step.
    """

    def __init__(self, terms: tuple[str, ...], finals: tuple[str, ...], device: torch.device) -> None:
        self.terms, self.finals = terms, finals
        self.sums = torch.zeros(2, len(terms) + len(finals), device=device)

    @torch.no_grad()
    def of_batch(
        self, loss: Loss, logits: Mapping[str, Tensor], labels: Tensor, finite: Mapping[str, Tensor]
    ) -> Tensor:
        """The sums of one batch, to be added to ``sums``; ``finite`` is the mask by classifier."""
        hard = labels if labels.ndim == 1 else labels.argmax(dim=-1)
        wrong = torch.stack([(logits[name].argmax(dim=-1) != hard).sum() for name in self.finals])
        counted_finals = torch.stack([finite[name] for name in self.finals])
        images = len(hard)
        counted = torch.cat([loss.counted, counted_finals])
        return torch.stack([torch.cat([loss.values * images, wrong]) * counted, counted * images])

    def read(self) -> dict[str, dict[str, float]]:
        """Return the mean terms and the training errors in percent. Waits for the device: call it after an epoch."""
        means = [value / images if images else math.nan for value, images in self.sums.T.tolist()]
        split = len(self.terms)
        return {
            "terms": dict(zip(self.terms, means[:split], strict=True)),
            "train_error": {name: 100 * x for name, x in zip(self.finals, means[split:], strict=True)},
        }


@dataclass(frozen=True)
class Training:
    """Everything a step reads and changes. ``tensors`` is all of its state: what is saved and restored."""

    recipe: Recipe
    machine: Machine
    cohort: Cohort
    objective: Objective
    optimizers: Mapping[str, torch.optim.Optimizer]
    """By network that learns."""
    average: MovingAverage | None
    health: Health
    tally: Tally
    data: OnDevice
    images: int
    """The number of training images in an epoch; a benchmark's ``data`` may have fewer, standing in for them."""
    starts: Mapping[str, Any]
    """What this process's networks began from, for the run's records; empty if a checkpoint is restored instead."""
    peers: Peers = ALONE
    """``cohort``, ``optimizers`` and ``average`` cover this process's networks, ``objective`` and ``tally`` all."""

    @property
    def classifiers(self) -> list[str]:
        """The names of all classifiers, those of other processes' networks too."""
        exits = self.recipe.graph.exits
        return [f"{name}/{exit}" for name in self.recipe.networks for exit in ("final", *exits[name])]

    @property
    def finals(self) -> list[str]:
        return [f"{name}/final" for name in self.recipe.networks]

    @property
    def is_long(self) -> bool:
        """Whether the training is long enough for trials of cuDNN's algorithms to pay off."""
        weights = sum(weight.numel() for weight in self.cohort.parameters())
        return weights * self.images * self.recipe.length.epochs >= LONG

    def tensors(self) -> dict[str, Tensor]:
        """All state by its name in a checkpoint; of sharded tensors, this process's part."""
        groups: dict[str, Iterable[tuple[str, Tensor]]] = {
            "cohort": self.cohort.state_dict().items(),
            "optimizer": optimizer_tensors(self.optimizers, self.cohort, self.peers.local),
            "average": self.average.backbones.state_dict().items() if self.average else (),
            "health": self.health.tensors(),
            "tally": [("sums", self.tally.sums)],
        }
        local = self.peers.local
        return {name: local(tensor) for name, tensor in checkpoint_tensors(groups).items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        copy_matching(self.tensors(), saved)

    def augment(self, batch: Draws) -> tuple[Tensor, Tensor]:
        """Augment and normalise the images of a batch; returns them with their labels, hard or soft."""
        images, labels = self.data.augmented(batch, self.recipe.label_smoothing)
        return images.contiguous(memory_format=self.machine.memory_format), labels

    def shipped(self) -> dict[str, nn.Module]:
        """The networks as they ship: without heads, and averaged if the recipe says so."""
        backbones: dict[str, nn.Module] = {name: member.backbone for name, member in self.cohort.members.items()}
        return backbones | (dict(self.average.backbones.items()) if self.average else {})

    def set_mode(self, *, learning: bool) -> None:
        """Set the networks that learn to training or evaluation mode; what is frozen stays in evaluation mode."""
        learns = self.recipe.graph.learning_networks
        for name, member in self.cohort.members.items():
            member.train(learning and name in learns)
            for module in member.modules():
                if is_frozen(module):
                    module.eval()

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Inside, all networks are in evaluation mode."""
        self.set_mode(learning=False)
        try:
            yield
        finally:
            self.set_mode(learning=True)


@torch.no_grad()
def copy_matching(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved values into the existing tensors, whose addresses a captured step has recorded."""
    if unmatched := sorted(tensors.keys() ^ saved.keys()):
        differ = f"{len(unmatched)} tensors differ, first {unmatched[0]!r}"
        raise ValueError(f"the checkpoint does not fit this recipe: {differ}")
    for name, tensor in tensors.items():
        if tensor.shape != saved[name].shape:
            shapes = f"{list(saved[name].shape)}, not {list(tensor.shape)}"
            raise ValueError(f"the checkpoint does not fit this recipe: {name} is {shapes}")
        tensor.copy_(saved[name])


def prepare_training(
    recipe: Recipe,
    data: ImageData,
    machine: Machine,
    peers: Peers = ALONE,
    *,
    images: int | None = None,
    own: Mapping[str, Architecture] = NONE,
    begins: bool = True,
) -> Training:
    """Build the cohort with the heads that the graph uses, its optimizers and its objective, on the device.

    ``images`` is the number of training images per epoch if ``data`` only stands in for them, ``own`` are modules of
    the user's in the place of the recipe's networks. Unless it ``begins``, the weights that networks start from are not
    read: those of a checkpoint are restored.
    """
    graph = recipe.graph
    here = [name for name in recipe.networks if peers.holds(name)]
    augmentation = recipe.augment
    image_size = augmentation.crop_size(data.image_size)
    if augmentation.randaugment and min(image_size) < SHARPENED:
        raise ValueError(
            f"augment.randaugment sharpens with a {SHARPENED}×{SHARPENED} kernel, and these images have "
            f"{image_size[0]}×{image_size[1]}; take larger ones with data.image_size, or augment.randaugment=0"
        )
    cohort = cohort_of(recipe, data.num_classes, data.channels, image_size=image_size, only=here, own=own)
    starts = {}
    for name, member in cohort.members.items():
        if begins and (start := begin(member.backbone, recipe, name, data.channels)):
            starts[name] = start
        if name not in graph.learning_networks:
            member.requires_grad_(False)  # and not True for others: of a user's own module, some weights may be frozen
        if name in recipe.freeze:
            freeze(member.backbone, recipe.freeze[name])
        if is_frozen(member.backbone) and f"{name}/final" in [learner.name for learner in graph.learners]:
            raise ValueError(
                f"network {name!r} is to learn, and all of its weights are frozen (requires_grad is False); type "
                "module.requires_grad_(True), at least for its classifier, or let it only teach: method=kd "
                f"teachers=[{name}]"
            )
        member.backbone.recomputes = recipe.runtime.activation_checkpointing
        member.heads_gradient = recipe.heads.gradient
    cohort.to(machine.device).to(memory_format=machine.memory_format)  # type: ignore[call-overload]
    objective = Objective(graph, recipe.kl_epsilon).to(machine.device)
    learning = graph.learning_networks
    average = MovingAverage(cohort, [name for name in learning if name in here], recipe.ema) if recipe.ema else None
    peers.adopt(cohort, average)
    optimizers = build_optimizers(recipe, cohort, machine, peers.local)
    health = Health(cohort, objective.classifiers, recipe, machine.device)
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
        data=OnDevice.of(data, machine.device, augmentation, has_triton=machine.kernels == "triton"),
        images=images or len(data.splits["train"]),
        starts=starts,
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
    own: Mapping[str, Architecture] = NONE,
) -> Cohort:
    """Build the recipe's networks, or ``only`` some, untrained, with the heads that its graph uses.

    They are built on torch's current default device. With ``image_size`` (height, width), raises ValueError if a
    network cannot take images of that size.
    """
    networks = {name: network for name, network in recipe.networks.items() if only is None or name in only}
    cohort = Cohort(
        {name: own.get(name, network) for name, network in networks.items()},
        num_classes=num_classes,
        in_channels=in_channels,
        image_size=image_size,
        heads=recipe.heads.kind,
        exits={name: recipe.graph.exits[name] for name in networks},
        seed=recipe.seed,
        init=recipe.init,
        batchnorm_init=recipe.batchnorm_init,
    )
    if image_size is not None:
        height, width = image_size
        smallest = (height // 2, width // 2) if recipe.augment.half_until else image_size
        if recipe.augment.half_until or min(image_size) < LARGE_ENOUGH:
            for name, network in networks.items():
                backbone = cohort.members[name].backbone
                if recipe.augment.half_until and isinstance(backbone, AdaptedBackbone) and backbone.image_size:
                    raise ValueError(
                        f"augment.half_until halves the side of images, and networks.{name}={network} takes only "
                        f"{backbone.image_size}×{backbone.image_size}; type augment.half_until=0, or choose another"
                    )
                _refuse_too_small(cohort.members[name], f"networks.{name}={network}", (in_channels, *smallest))
    return cohort


@torch.no_grad()
def _refuse_too_small(member: Member, label: str, shape: tuple[int, int, int]) -> None:
    """Run one image; raises ValueError if it is so small that a stage has no pixels left."""
    member.eval()
    try:
        member(torch.zeros(1, *shape))
    except (RuntimeError, AssertionError) as error:
        _, height, width = shape
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{label} cannot take images of {height}×{width} pixels ({reason}); take larger ones with data.image_size "
            "and augment.crop, without augment.half_until, or another network"
        ) from error
    member.train()
