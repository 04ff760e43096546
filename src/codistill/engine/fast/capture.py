"""The training step captured as a CUDA graph, one launch instead of thousands, with its bfloat16 shadow weights."""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from codistill.cohort import Cohort
from codistill.data.batches import Draws
from codistill.engine.runtime import without_trials
from codistill.engine.schedule import StepContext
from codistill.engine.state import Training
from codistill.engine.step import Executor, Program, Programs, step
from codistill.log import log
from codistill.networks.backbone import Fork
from codistill.ops.dispatch import may_use_winograd, use_kernels
from codistill.ops.wgrad_stream import WeightGradientStreams, defer_weight_gradients
from codistill.recipes.sections import Sgd

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

    from codistill.ops.sgd import FusedSgd

WARM_UP_STEPS = 3
"""Warm-up steps before the first capture; later captures need one, since everything is compiled and tuned."""
TIMED_REPLAYS = 5
SPARE = 32
"""Keep the backup of the state on the GPU if free memory exceeds this many times its size."""

Overlap = Literal["weight gradients", "heads", "networks", "nothing"]
"""What runs on side streams: networks, heads and weight gradients, or less of that."""
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


@dataclass(frozen=True)
class Variant:
    """One way to run the step; the fastest is found by timing."""

    overlap: Overlap
    winograd: bool = False

    def __str__(self) -> str:
        words = {
            "weight gradients": "networks, heads and weight gradients overlap",
            "heads": "networks and heads overlap",
            "networks": "networks overlap",
            "nothing": "nothing overlaps",
        }
        return words[self.overlap] + (", Winograd" if self.winograd else "")


class CapturedStep:
    """Captures one graph per batch size (the recipe's, autotuned, and an epoch's short last one) and image size.

    Dropout is seeded per step, not per network as in the plain step: a captured graph has one source of random numbers.
    """

    def __init__(self, training: Training, path: str) -> None:
        self.training, self.path = training, path
        self.shadow = ShadowWeights(training.cohort) if training.machine.precision == "bf16" else None
        self.programs = Programs(training, self.shadow.cohort if self.shadow else training.cohort)
        self.graphs: dict[tuple[int, bool], Graph] = {}
        self.streams = Streams()
        self.is_warm = False
        self.pool = torch.cuda.graph_pool_handle()
        """The memory pool of all kept graphs: nothing of a step outlives it, and they never run at once."""

    def __call__(self, batch: Draws, at: StepContext) -> None:
        size, half_size = len(batch.indices), at.half_size
        if (size, half_size) not in self.graphs:
            is_full = size == self.programs.full_size
            captured = self.capture_tuned(batch, at) if is_full else self.capture_untuned(batch, at)
            self.graphs[size, half_size] = captured
        graph = self.graphs[size, half_size]
        graph.batch.copy_(batch)
        if self.shadow:
            self.shadow.refresh_if_changed()
        torch.cuda.manual_seed(at.seed)
        graph.graph.replay()

    def capture_tuned(self, batch: Draws, at: StepContext) -> "Graph":
        """Captures the fastest variant; in long trainings cuDNN times its algorithms first.

        The graph is recorded after the state is restored: the copy of the state takes memory.
        """
        is_long = self.training.is_long
        log.info("cuDNN's convolution algorithms are %s", "timed" if is_long else "chosen by its heuristics")
        with nullcontext() if is_long else without_trials():
            with self.restored_state():
                variant = self.fastest_variant(batch, at)
                log.info("batches of %d are trained with the fastest: %s", len(batch.indices), variant)
                warm = self.warm_up(batch, at, variant)
            if not self.graphs:  # the memory of variants that were tried and dropped is not what training needs
                torch.cuda.reset_peak_memory_stats()
            return warm.capture(self.pool)

    def capture_untuned(self, batch: Draws, at: StepContext) -> "Graph":
        """Captures without tuning: the short last batch runs once an epoch."""
        with without_trials():
            with self.restored_state():
                warm = self.warm_up(batch, at, Variant("networks"))
            return warm.capture(self.pool)

    def fastest_variant(self, batch: Draws, at: StepContext) -> Variant:
        """Times the overlaps, then cuDNN instead of Winograd, and returns the fastest.

        The kernels of small networks gain by overlapping, those of large ones get in each other's way. Runs real steps;
        callers must restore the state.
        """
        winograd = self.training.machine.winograd
        has_choice = self.programs.full.has_kernels and any(map(may_use_winograd, self.training.cohort.modules()))
        starts_with = has_choice and winograd != "off"
        seconds: dict[Variant, float] = {}
        for overlap in OVERLAPS:
            self._time(Variant(overlap, starts_with), batch, at, seconds)
        if starts_with and winograd == "auto" and seconds:
            self._time(Variant(min(seconds, key=seconds.__getitem__).overlap), batch, at, seconds)
        return min(seconds, key=seconds.__getitem__, default=Variant(OVERLAPS[-1], starts_with))

    def _time(self, variant: Variant, batch: Draws, at: StepContext, seconds: dict[Variant, float]) -> None:
        """Adds the variant's seconds for a step, unless it needs too much memory."""
        here = torch.cuda.current_stream()
        try:
            seconds[variant] = self.warm_up(batch, at, variant).capture().seconds()
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            torch.cuda.set_stream(here)
            log.info("batches of %d, %s: not enough memory", len(batch.indices), variant)
        else:
            log.info("batches of %d, %s: %.2f ms a step", len(batch.indices), variant, 1e3 * seconds[variant])

    def has_winograd(self, batch: Draws) -> bool:
        """Whether the captured graph for such a batch uses Winograd convolutions."""
        graph = self.graphs.get((len(batch.indices), False))
        return graph is not None and graph.executor.variant.winograd

    def executor(self, batch: Draws, variant: Variant) -> "OverlappedExecutor":
        program = self.programs.for_batch_of(len(batch.indices))
        return OverlappedExecutor(self.training, program, self.shadow, variant, self.streams)

    def warm_up(self, batch: Draws, at: StepContext, variant: Variant) -> "WarmStep":
        """Runs the step a few times before it is captured. Callers must restore the state."""
        warm = WarmStep(self.training, self.executor(batch, variant), batch.clone(), at)
        stream = self.streams.trunk
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*capturable=True.*")  # these steps are not captured yet
            for _ in range(1 if self.is_warm else WARM_UP_STEPS):
                warm.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.is_warm = True
        return warm

    @contextmanager
    def restored_state(self) -> Iterator[None]:
        """Restores all training state on exit."""
        tensors = self.training.tensors()
        free, _ = torch.cuda.mem_get_info()
        is_roomy = free > SPARE * sum(tensor.nbytes for tensor in tensors.values())
        where = self.training.machine.device if is_roomy else "cpu"
        before = {name: tensor.to(where, copy=True) for name, tensor in tensors.items()}
        yield
        self.training.restore(before)
        if self.shadow:
            self.shadow.refresh()


class ShadowWeights:
    """A copy of the cohort whose convolutions and linear layers have their weights in bfloat16; the rest is shared.

    The values are those of autocast, which casts each weight in a kernel of its own, and each gradient back in another:
    a tenth of a deep network's step. Here all are cast together.
    """

    def __init__(self, cohort: Cohort) -> None:
        layers = [layer for layer in cohort.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        weights = {weight for layer in layers for weight in layer.parameters(recurse=False)}
        self.master: list[Tensor] = [weight for weight in cohort.parameters() if weight in weights]
        self.shadow: list[Tensor] = [nn.Parameter(weight.bfloat16(), weight.requires_grad) for weight in self.master]
        replacement = dict(zip(self.master, self.shadow, strict=True))
        everything = [*cohort.parameters(), *cohort.buffers()]
        self.cohort: Cohort = deepcopy(cohort, {id(tensor): replacement.get(tensor, tensor) for tensor in everything})
        self.versions: list[int] = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the master weights to bfloat16."""
        torch._foreach_copy_(self.shadow, self.master)

    def refresh_if_changed(self) -> None:
        """Cast again if the weights were changed outside of the captured step, as by restoring a checkpoint."""
        versions = [weight._version for weight in self.master]
        if versions != self.versions:
            self.refresh()
            self.versions = versions

    @torch.no_grad()
    def move_gradients_to_master(self) -> None:
        """Cast the gradients to float32, for an optimizer of the master weights."""
        float32: list[Tensor] = []
        bfloat16: list[Tensor] = []
        for master, shadow in zip(self.master, self.shadow, strict=True):
            if shadow.grad is not None:
                master.grad = torch.empty_like(master)
                float32.append(master.grad)
                bfloat16.append(shadow.grad)
                shadow.grad = None
        torch._foreach_copy_(float32, bfloat16)


class OverlappedExecutor(Executor):
    """Runs networks, heads and weight gradients on CUDA streams of their own: once captured, their kernels overlap.

    In bfloat16 it runs the shadow weights' networks; an SGD update writes both kinds of weights in one kernel.
    """

    def __init__(
        self,
        training: Training,
        program: Program,
        shadow: ShadowWeights | None,
        variant: Variant,
        streams: "Streams",
    ) -> None:
        super().__init__(training, program, shadow.cohort if shadow else training.cohort)
        self.shadow, self.variant, self.streams = shadow, variant, streams
        self.weight_gradients = WeightGradientStreams() if variant.overlap == "weight gradients" else None
        self.fused = fused_sgd(shadow, training) if shadow else None

    def forward(self, images: Tensor, at: StepContext) -> Mapping[str, Tensor]:
        if self.shadow and not self.fused:
            self.shadow.refresh()
        overlap, streams = self.variant.overlap, self.streams
        fork: Fork = nullcontext if overlap == "nothing" else streams.fork
        fork_head: Fork = streams.fork if overlap in ("weight gradients", "heads") else nullcontext
        kernels = use_kernels(winograd=self.variant.winograd) if self.program.has_kernels else nullcontext()
        logits: dict[str, Tensor] = {}
        with streams, kernels, defer_weight_gradients(self.weight_gradients):
            for name, network in self.program.networks.items():
                with fork():
                    logits |= {f"{name}/{exit_name}": x for exit_name, x in network(images, fork_head).items()}
        return logits

    def gradients(self) -> dict[str, list[Tensor]]:
        if self.weight_gradients:
            self.weight_gradients.join()
        return super().gradients()

    def update(self) -> None:
        if self.fused:
            self.fused.update()
        elif self.shadow:
            self.shadow.move_gradients_to_master()
        super().update()

    def finish_capture(self) -> None:
        if self.fused and self.fused.addresses:
            self.fused.recorded()


@dataclass(frozen=True)
class WarmStep:
    """A step that has run, ready to be captured."""

    training: Training
    executor: OverlappedExecutor
    batch: Draws
    at: StepContext

    def run(self) -> None:
        step(self.training, self.executor, self.batch, self.at)
        for cohort in (self.training.cohort, self.executor.cohort):
            cohort.zero_grad(set_to_none=True)

    def capture(self, pool: "_POOL_HANDLE | None" = None) -> "Graph":
        """Captures the step, in a memory ``pool`` that graphs share or in its own, which is freed with the graph."""
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self.executor.streams.trunk):
            self.run()
        self.executor.finish_capture()
        return Graph(graph, self.batch, self.executor)


@dataclass(frozen=True)
class Graph:
    graph: torch.cuda.CUDAGraph
    batch: Draws
    """The memory from which the graph reads its batch."""
    executor: OverlappedExecutor
    """Owns memory that the graph uses, so it must live as long."""

    def seconds(self) -> float:
        """The fastest of a few replays."""
        seconds = []
        for _ in range(TIMED_REPLAYS):
            torch.cuda.synchronize()
            started_at = time.perf_counter()
            self.graph.replay()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started_at)
        return min(seconds)


def lacks_memory(error: BaseException | None) -> bool:
    """True for an out-of-memory error anywhere in the exception chain."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or lacks_memory(error.__context__))


def fused_sgd(shadow: ShadowWeights, training: Training) -> "FusedSgd | None":
    settings = training.recipe.optimizer
    if training.machine.kernels != "triton" or not isinstance(settings, Sgd) or not settings.momentum:
        return None
    from codistill.ops.sgd import FusedSgd

    factors = {name: training.health.factor(name) for name in training.optimizers}
    return FusedSgd(shadow.master, shadow.shadow, training.optimizers, factors)


class Streams:
    """Forks branches of device work onto side streams; leaving the block joins them.

    Every step forks into the same ones: for each stream, and each thread that uses it, cuBLAS keeps 32 MiB for good.
    """

    def __init__(self) -> None:
        self.trunk = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.branches: list[torch.cuda.Stream] = []
        self.opened = 0

    def __enter__(self) -> "Streams":
        self.here = torch.cuda.current_stream()
        self.opened = 0
        return self

    def fork(self) -> AbstractContextManager[object]:
        if self.opened == len(self.branches):
            self.branches.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        stream = self.branches[self.opened]
        stream.wait_stream(torch.cuda.current_stream())
        self.opened += 1
        return torch.cuda.stream(stream)

    def __exit__(self, *_: object) -> None:
        for stream in self.branches[: self.opened]:
            self.here.wait_stream(stream)
