"""What happens in a training step, part by part, and how it runs the networks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from codistill.cohort import Cohort
from codistill.data.batches import Draws
from codistill.engine.fast.compiler import prepare_compiler
from codistill.engine.fast.sections import PREPARE, Network, Prepare, arranged, as_it_is
from codistill.engine.optim import Held
from codistill.engine.schedule import StepContext
from codistill.engine.state import Training
from codistill.randomness import derive
from codistill.transfer.objective import Loss

PARTS = ("augment", "forward", "objective", "backward", "update")


@dataclass(frozen=True)
class Functions:
    """What a step calls, as it is or compiled."""

    batch: Callable[[Draws], tuple[Tensor, Tensor]]
    """Augmented images and their labels."""
    networks: Mapping[str, Network]
    judge: Callable[[Mapping[str, Tensor], Tensor], Tensor]
    """Logits and labels to the objective's total; what it is made of is added to the tally."""

    @classmethod
    def of(cls, training: Training, cohort: Cohort, prepare: Prepare) -> "Functions":
        def judge(logits: Mapping[str, Tensor], labels: Tensor) -> Tensor:
            used = training.objective.classifiers
            trusted_M = training.health.finite_mask([logits[name] for name in used], training.peers.agreed)
            if not len(labels):
                return nothing_judged(training, logits)
            loss: Loss = training.objective(logits, labels, trusted_M)
            seen = training.tally.of_batch(loss, logits, labels, dict(zip(used, trusted_M, strict=True)))
            training.tally.sums += training.peers.summed(seen)
            return loss.total

        networks = {name: arranged(member, prepare) for name, member in cohort.members.items()}
        batch = training.batch if training.data.has_kernel else prepare(training.batch)
        return cls(batch, networks, judge)


class FunctionsBySize:
    """For full batches compiled where the recipe says so; for the short last one of an epoch as they are:

    compiling for one batch an epoch would cost more than it saves in the whole training.
    """

    def __init__(self, training: Training, cohort: Cohort) -> None:
        largest = min(training.recipe.batch_size, len(training.data.splits["train"]))
        self.full_size = len(training.peers.share.range_of(largest))
        self.short = self.full = Functions.of(training, cohort, as_it_is)
        kernels = training.machine.kernels
        if kernels == "inductor":
            prepare_compiler()
        if kernels != "torch":
            self.full = Functions.of(training, cohort, PREPARE[kernels])

    def for_batch_of(self, images: int) -> Functions:
        return self.full if images == self.full_size else self.short


class Way(Protocol):
    """How a step calls them."""

    functions: Functions
    cohort: Cohort
    """The networks that they call, whose parameters get the gradients."""

    def forward(self, images: Tensor, turn: StepContext) -> Mapping[str, Tensor]:
        """Every network's logits by classifier name."""

    def backward(self, total: Tensor) -> None:
        """Gradients of every parameter."""

    def update(self) -> None:
        """From gradients to new weights; the gradients are gone afterwards."""


def parts(training: Training, way: Way, draws: Draws, turn: StepContext) -> Iterator[str]:
    """The step, which yields the name of each of its ``PARTS`` when it is done: run it to the end, or measure it."""
    images, labels = way.functions.batch(draws)
    yield "augment"
    if turn.begins_update:
        training.health.begin_update()
    with training.machine.autocast():
        logits = way.forward(images, turn)
    yield "forward"
    logits = training.peers.exchange(logits, training.classifiers)
    total = way.functions.judge(logits, labels)
    yield "objective"
    share_of_batch = len(labels) / turn.images
    with training.peers.completing(share_of_batch=share_of_batch, updates=turn.updates):
        way.backward(total * (turn.share_of_update * share_of_batch))
    yield "backward"
    if turn.updates:
        training.health.decide_update(gradients(way.cohort, training.peers.held), training.peers.norms_of_whole)
        way.update()
        if training.average:
            training.average.update(training.cohort, training.health, training.peers.held)
        training.health.finish_update()
    yield "update"


def nothing_judged(training: Training, logits: Mapping[str, Tensor]) -> Tensor:
    """A short batch may have no image for this process: its peers still wait for its sums and its gradients, of 0."""
    training.tally.sums += training.peers.summed(torch.zeros_like(training.tally.sums))
    return torch.stack([tensor.sum() for tensor in logits.values()]).sum()


def gradients(cohort: Cohort, held: Held) -> dict[str, list[Tensor]]:
    """By network: what the backward pass left here."""
    return {
        name: [weight.grad for weight in map(held, member.parameters()) if weight.grad is not None]
        for name, member in cohort.members.items()
    }


class PlainWay:
    """One network after the other. Dropout is keyed by network: it does not matter who else runs here."""

    def __init__(self, training: Training, functions: Functions) -> None:
        self.training, self.functions = training, functions
        self.cohort = training.cohort

    def forward(self, images: Tensor, turn: StepContext) -> Mapping[str, Tensor]:
        logits: dict[str, Tensor] = {}
        peers = self.training.peers
        seed = derive(turn.seed, "share", peers.share.index) if peers.share.index else turn.seed
        for name, network in self.functions.networks.items():
            torch.manual_seed(derive(seed, name))
            logits |= {f"{name}/{exit}": tensor for exit, tensor in peers.run(name, network, images).items()}
        return logits

    def backward(self, total: Tensor) -> None:
        total.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        for optimizer in self.training.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
