"""One training step: augment, forward, exchange, objective, backward, update.

``step`` is all of it; ``engine/fast/capture.py`` records this very function as a CUDA graph. An ``Executor`` decides
how the networks run and how their weights are updated: one after the other here, overlapping and in bfloat16 there.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from codistill.cohort import Cohort
from codistill.data.batches import Draws
from codistill.engine.fast.compiler import compile_function, compile_network, prepare_compiler
from codistill.engine.schedule import StepContext
from codistill.engine.state import Training
from codistill.ops.dispatch import use_kernels
from codistill.randomness import derive
from codistill.transfer.objective import Loss

PARTS = ("augment", "forward", "objective", "backward", "update")
"""The named ranges of a step in a profile."""


def step(training: Training, executor: "Executor", batch: Draws, at: StepContext) -> None:
    """Train on one batch. ``training.peers`` are the other processes; alone, its methods return what they are given."""
    peers, health = training.peers, training.health
    with record_function("augment"):
        images, labels = executor.program.augment(batch)
    if at.begins_update:
        health.begin_update()
    with record_function("forward"), training.machine.autocast():
        logits = executor.forward(images, at)
    with record_function("objective"):
        logits = peers.exchange(logits, training.classifiers)
        total = objective(training, logits, labels)
    fraction = len(labels) / at.images
    with record_function("backward"), peers.reduce_gradients(fraction, at.updates):
        (total * (at.share_of_update * fraction)).backward()  # type: ignore[no-untyped-call]
    if at.updates:
        with record_function("update"):
            health.decide_update(executor.gradients(), peers.whole_norms)
            executor.update()
            if training.average:
                training.average.update(training.cohort, health, peers.local)
            health.finish_update()


def objective(training: Training, logits: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """The total to minimise; networks with non-finite logits are left out. Adds its terms to the tally."""
    used, peers = training.objective.classifiers, training.peers
    finite_M = training.health.finite_mask([logits[name] for name in used], peers.all)
    if not len(labels):
        # This process has no image of a short batch: the others still wait for its sums and its gradients, of 0.
        training.tally.sums += peers.sum(torch.zeros_like(training.tally.sums))
        return torch.stack([tensor.sum() for tensor in logits.values()]).sum()
    loss: Loss = training.objective(logits, labels, finite_M)
    seen = training.tally.of_batch(loss, logits, labels, dict(zip(used, finite_M, strict=True)))
    training.tally.sums += peers.sum(seen)
    return loss.total


@dataclass(frozen=True)
class Program:
    """The functions that a step calls for batches of one size: plain, compiled, or with Triton kernels enabled."""

    augment: Callable[[Draws], tuple[Tensor, Tensor]]
    """Augmented images and their labels."""
    networks: Mapping[str, Callable[..., Mapping[str, Tensor]]]
    """Images to logits by exit, as ``Member.forward``."""
    has_kernels: bool = False


class Programs:
    """The program for full batches, as ``runtime.kernels`` says, and plain torch for an epoch's short last batch:

    compiling for one batch an epoch would cost more than it saves in the whole training.
    """

    def __init__(self, training: Training, cohort: Cohort) -> None:
        largest = min(training.recipe.batch_size, len(training.data.splits["train"]))
        self.full_size = len(training.peers.share.range_of(largest))
        self.short = self.full = Program(training.augment, cohort.members)
        if training.machine.kernels == "triton":
            self.full = replace(self.short, has_kernels=True)
        elif training.machine.kernels == "inductor":
            prepare_compiler()
            networks = {name: compile_network(member) for name, member in cohort.members.items()}
            self.full = Program(compile_function(training.augment), networks)

    def for_batch_of(self, images: int) -> Program:
        return self.full if images == self.full_size else self.short


class Executor(Protocol):
    program: Program

    def forward(self, images: Tensor, at: StepContext) -> Mapping[str, Tensor]:
        """The logits of every network by classifier name."""

    def gradients(self) -> Mapping[str, list[Tensor]]:
        """The gradients that the backward pass left in this process, by network."""

    def update(self) -> None:
        """Updates the weights from the gradients, and drops the gradients."""


class PlainExecutor:
    """Runs one network after the other. Dropout is seeded by network, so it does not depend on the other networks."""

    def __init__(self, training: Training, program: Program, cohort: Cohort | None = None) -> None:
        self.training, self.program = training, program
        self.cohort = cohort or training.cohort
        """The networks whose parameters get the gradients."""
        self.winograd = training.machine.winograd == "on"

    def forward(self, images: Tensor, at: StepContext) -> Mapping[str, Tensor]:
        share = self.training.peers.share.index
        seed = derive(at.seed, "share", share) if share else at.seed
        logits: dict[str, Tensor] = {}
        with use_kernels(winograd=self.winograd) if self.program.has_kernels else nullcontext():
            for name, network in self.program.networks.items():
                torch.manual_seed(derive(seed, name))
                logits |= {f"{name}/{exit_name}": tensor for exit_name, tensor in network(images).items()}
        return logits

    def gradients(self) -> dict[str, list[Tensor]]:
        local = self.training.peers.local
        return {
            name: [weight.grad for weight in map(local, member.parameters()) if weight.grad is not None]
            for name, member in self.cohort.members.items()
        }

    def update(self) -> None:
        for optimizer in self.training.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


class PlainStep:
    """Launches every operation of the step from Python; ``path`` says how it computes, for the log."""

    def __init__(self, training: Training, path: str) -> None:
        self.training, self.path = training, path
        self.programs = Programs(training, training.cohort)

    def __call__(self, batch: Draws, at: StepContext) -> None:
        step(self.training, self.executor(batch), batch, at)

    def executor(self, batch: Draws) -> PlainExecutor:
        return PlainExecutor(self.training, self.programs.for_batch_of(batch.size))
