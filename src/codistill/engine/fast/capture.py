"""The training step captured as a CUDA graph: one launch instead of thousands."""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from codistill.data.batches import Draws
from codistill.engine.fast.sections import Fork
from codistill.engine.fast.shadow import Lowered
from codistill.engine.parts import PARTS, Functions, FunctionsBySize, PlainWay, parts
from codistill.engine.runtime import without_trials
from codistill.engine.schedule import StepContext
from codistill.engine.state import Training
from codistill.log import log
from codistill.ops.wgrad_stream import WeightGradientStreams, defer_weight_gradients
from codistill.recipes.schema import Sgd

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

    from codistill.ops.sgd import FusedSgd

WARM_UP_STEPS = 3
"""Warm-up steps before the first capture; later captures need one, since everything is compiled and tuned."""
TIMED_REPLAYS = 5
SPARE = 32
"""Keep the backup of the state on the GPU if free memory exceeds this many times its size."""

Beside = Literal["weights", "heads", "networks", "nothing"]
"""What overlaps on side streams: networks, heads and weight gradients, or less of that."""
BESIDE: tuple[Beside, ...] = get_args(Beside)
WORDS: dict[Beside, str] = {
    "weights": "networks, heads and weight gradients side by side",
    "heads": "networks and heads side by side",
    "networks": "networks side by side",
    "nothing": "one network after the other",
}


class CapturedStep:
    """Captures one graph per batch size: the recipe's, autotuned, and that of an epoch's short last batch.

    Dropout is seeded per step, not per network as in the plain step: a recorded graph has one source of random numbers.
    """

    def __init__(self, training: Training, path: str) -> None:
        self.training, self.path = training, path
        self.lowered = Lowered(training.cohort) if training.machine.precision == "bf16" else None
        self.functions = FunctionsBySize(training, self.lowered.cohort if self.lowered else training.cohort)
        self.recordings: dict[int, Recording] = {}
        self.streams = Streams()
        self.is_warm = False
        self.memory = torch.cuda.graph_pool_handle()
        """The memory pool of all kept graphs: nothing of a step outlives it, and they never run at once."""

    def __call__(self, draws: Draws, turn: StepContext) -> None:
        size = len(draws.indices)
        if size not in self.recordings:
            is_full = size == self.functions.full_size
            self.recordings[size] = self.fastest(draws, turn) if is_full else self.soonest(draws, turn)
        recording = self.recordings[size]
        recording.inputs.copy_(draws)
        if self.lowered:
            self.lowered.refresh_if_changed()
        torch.cuda.manual_seed(turn.seed)
        recording.graph.replay()

    def fastest(self, draws: Draws, turn: StepContext) -> "Recording":
        """Captures with the fastest overlap level; in long trainings cuDNN tries its algorithms first.

        Recorded only when the training is put back: its copy takes memory.
        """
        is_long = self.training.is_long
        log.info("cuDNN %s convolutions", "tries all of its algorithms for" if is_long else "guesses how to compute")
        with nullcontext() if is_long else without_trials():
            with self.put_back():
                rehearsed = self.rehearse(draws, turn, self.best_beside(draws, turn))
            if not self.recordings:  # what was tried and dropped is not what training needs
                torch.cuda.reset_peak_memory_stats()
            return rehearsed.recorded(self.memory)

    def best_beside(self, draws: Draws, turn: StepContext) -> Beside:
        """Times each overlap level and returns the fastest. Runs real steps; callers must restore the state.

        The kernels of small networks gain by overlapping, those of large ones get in each other's way.
        """
        seconds: dict[Beside, float] = {}
        for beside in BESIDE:
            what = f"batches of {len(draws.indices)}, {WORDS[beside]}"
            here = torch.cuda.current_stream()
            try:
                seconds[beside] = self.record(draws, turn, beside).seconds()
            except RuntimeError as error:
                if not lacks_memory(error):
                    raise
                torch.cuda.set_stream(here)
                log.info("%s: not enough memory", what)
            else:
                log.info("%s: %.2f ms a step", what, 1e3 * seconds[beside])
        return min(seconds, key=seconds.__getitem__, default=BESIDE[-1])

    def soonest(self, draws: Draws, turn: StepContext) -> "Recording":
        """Captures without tuning: the short last batch runs once an epoch."""
        with without_trials():
            with self.put_back():
                rehearsed = self.rehearse(draws, turn, "networks")
            return rehearsed.recorded(self.memory)

    def record(self, draws: Draws, turn: StepContext, beside: Beside, *, until: str = PARTS[-1]) -> "Recording":
        """Captures with a memory pool of its own, freed with the graph. The warm-up runs real steps."""
        return self.rehearse(draws, turn, beside, until=until).recorded()

    def rehearse(self, draws: Draws, turn: StepContext, beside: Beside, *, until: str = PARTS[-1]) -> "Rehearsed":
        """Runs the step, or its beginning up to the end of a part, as a warm-up. Callers must restore the state."""
        functions = self.functions.for_batch_of(len(draws.indices))
        way = SideBySide(self.training, functions, self.lowered, beside, self.streams)
        step = Rehearsed(self.training, way, draws.clone(), turn, until)
        stream = self.streams.trunk
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*capturable=True.*")  # these steps are not captured yet
            for _ in range(1 if self.is_warm else WARM_UP_STEPS):
                step.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.is_warm = True
        return step

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restores all training state on exit."""
        tensors = self.training.tensors()
        free, _ = torch.cuda.mem_get_info()
        is_roomy = free > SPARE * sum(tensor.nbytes for tensor in tensors.values())
        where = self.training.machine.device if is_roomy else "cpu"
        before = {name: tensor.to(where, copy=True) for name, tensor in tensors.items()}
        yield
        self.training.restore(before)
        if self.lowered:
            self.lowered.refresh()


class SideBySide(PlainWay):
    """Networks, and their heads, on CUDA streams of their own: once recorded, their kernels overlap.

    In bfloat16 the networks are those of a lowered cohort, whose weights the update writes too where it is SGD.
    """

    def __init__(
        self, training: Training, functions: Functions, lowered: Lowered | None, beside: Beside, streams: "Streams"
    ) -> None:
        super().__init__(training, functions)
        self.lowered, self.beside, self.streams = lowered, beside, streams
        self.cohort = lowered.cohort if lowered else training.cohort
        self.apart = WeightGradientStreams() if beside == "weights" else None
        self.fused = fused_sgd(lowered, training) if lowered else None

    def forward(self, images: Tensor, turn: StepContext) -> Mapping[str, Tensor]:
        if self.lowered and not self.fused:
            self.lowered.refresh()
        logits: dict[str, Tensor] = {}
        with self.streams as streams, defer_weight_gradients(self.apart):
            fork: Fork = nullcontext if self.beside == "nothing" else streams.fork
            fork_head: Fork = streams.fork if self.beside in ("weights", "heads") else nullcontext
            for name, network in self.functions.networks.items():
                with fork():
                    logits |= {f"{name}/{exit}": x for exit, x in network(images, fork_head).items()}
        return logits

    def backward(self, total: Tensor) -> None:
        super().backward(total)
        if self.apart:
            self.apart.join()

    def update(self) -> None:
        if self.fused:
            self.fused.update()
        elif self.lowered:
            self.lowered.hand_over_gradients()
        super().update()

    def finish_recording(self) -> None:
        if self.fused and self.fused.addresses:
            self.fused.recorded()


@dataclass(frozen=True)
class Rehearsed:
    """A warmed-up step, ready to be captured."""

    training: Training
    way: SideBySide
    inputs: Draws
    turn: StepContext
    until: str
    """The part with which it ends."""

    def run(self) -> None:
        for part in parts(self.training, self.way, self.inputs, self.turn):
            if part == self.until:
                break
        for cohort in (self.training.cohort, self.way.cohort):
            cohort.zero_grad(set_to_none=True)

    def recorded(self, memory: "_POOL_HANDLE | None" = None) -> "Recording":
        """In ``memory`` that recordings share, or in its own."""
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=self.way.streams.trunk):
            self.run()
        self.way.finish_recording()
        return Recording(graph, self.inputs, self.way)


@dataclass(frozen=True)
class Recording:
    graph: torch.cuda.CUDAGraph
    inputs: Draws
    """Where the graph reads its batch."""
    way: SideBySide
    """Whose memory the graph uses: it must live as long."""

    def seconds(self) -> float:
        """Seconds of a replay, the best of a few."""
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


def fused_sgd(lowered: Lowered, training: Training) -> "FusedSgd | None":
    settings = training.recipe.optimizer
    if not isinstance(settings, Sgd) or not settings.momentum or not find_spec("triton"):
        return None
    from codistill.ops.sgd import FusedSgd

    factors = {name: training.health.factor(name) for name in training.optimizers}
    return FusedSgd(lowered.weights, lowered.copies, training.optimizers, factors)


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
