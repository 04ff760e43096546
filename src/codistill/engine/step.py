"""One training step: augment, forward, exchange, objective, backward, update.

``engine/fast/capture.py`` captures ``step`` as a CUDA graph. An ``Executor`` runs the networks and updates their
weights: one after the other here; there on parallel streams, with bfloat16 weights beside float32 master weights. A
network has a classifier at its end and at each exit, named ``network/exit``. Axes: M classifiers.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
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
    """Train on one batch: the indices of its images and the random draws of their augmentation.

    With gradient accumulation, ``at`` says whether the batch is the first or last of an update, and its share of the
    update's images. ``peers`` are the other processes, which train other networks, other shards of the batch, or both;
    in one process its methods return what they are given. ``health`` is a mask on the device over the networks: one
    with a logit or gradient that is not finite is left out of the update. The loop sets the learning rates.
    """
    peers, health = training.peers, training.health
    with record_function("augment"):
        images, labels = executor.program.augment(batch)
        if at.half_size:  # in the first epochs, with augment.half_until
            images = F.avg_pool2d(images, 2)
    if at.begins_update:
        health.begin_update()  # every network takes part again
    with record_function("forward"), training.machine.autocast():
        logits = executor.forward(images, at)
    with record_function("objective"):
        logits = peers.exchange(logits, training.classifiers)  # those of other processes are constants
        total = objective(training, logits, labels)
    # A mean over this process's images: weighted so that gradients sum to those of the mean over the update's images.
    fraction = len(labels) / at.images  # of the whole batch; reduce_gradients needs it for running statistics alone
    with record_function("backward"), peers.reduce_gradients(fraction, at.updates):
        (total * (at.fraction_of_update * fraction)).backward()  # type: ignore[no-untyped-call]
    if at.updates:
        with record_function("update"):
            health.decide_update(executor.gradients(), peers.whole_norms)
            executor.update()  # optimizers skip what health left out, by flags on the device
            if training.average:
                training.average.update(training.cohort, health, peers.local)
            health.finish_update()


def objective(training: Training, logits: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """The total to minimise; networks with non-finite logits are left out. Adds its terms to ``tally``, for the log.

    ``logits`` are of all classifiers; the graph may use fewer.
    """
    used, peers = training.objective.classifiers, training.peers
    finite_M = training.health.finite_mask([logits[name] for name in used], peers.all)
    if not len(labels):
        # An empty shard of a short batch: the process still joins every all-reduce, with sums and gradients of 0.
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
    """The program for full batches, as ``runtime.kernels`` says, and plain torch for an epoch's short last batch.

    Compiling for one batch an epoch would cost more than it saves in the whole training.
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


class Executor:
    """Runs one network after the other. Dropout is seeded by network, so it does not depend on the other networks."""

    def __init__(self, training: Training, program: Program, cohort: Cohort | None = None) -> None:
        self.training, self.program = training, program
        self.cohort = cohort or training.cohort
        """The networks that the backward pass reaches: with bfloat16, copies of those that the optimizers update."""
        self.winograd = training.machine.winograd == "on"  # "auto" is timed when a step is captured

    def forward(self, images: Tensor, at: StepContext) -> Mapping[str, Tensor]:
        """The logits of every network by classifier name."""
        share = self.training.peers.share.index
        seed = derive(at.seed, "share", share) if share else at.seed
        logits: dict[str, Tensor] = {}
        with use_kernels(winograd=self.winograd) if self.program.has_kernels else nullcontext():
            for name, network in self.program.networks.items():
                torch.manual_seed(derive(seed, name))
                logits |= {f"{name}/{exit_name}": tensor for exit_name, tensor in network(images).items()}
        return logits

    def gradients(self) -> dict[str, list[Tensor]]:
        """The gradients that the backward pass left in this process, by network."""
        local = self.training.peers.local
        return {
            name: [weight.grad for weight in map(local, member.parameters()) if weight.grad is not None]
            for name, member in self.cohort.members.items()
        }

    def update(self) -> None:
        """Update the weights from the gradients, and drop the gradients."""
        for optimizer in self.training.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


class PlainStep:
    """Launches every operation of the step from Python; ``path`` describes it in the log."""

    def __init__(self, training: Training, path: str) -> None:
        self.training, self.path = training, path
        self.programs = Programs(training, training.cohort)

    def __call__(self, batch: Draws, at: StepContext) -> None:
        step(self.training, self.executor(batch), batch, at)

    def executor(self, batch: Draws) -> Executor:
        return Executor(self.training, self.programs.for_batch_of(batch.size))
