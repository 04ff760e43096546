"""The speed of the training step on this machine, its share of the matmul rate, and the time of each part."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from codistill.data.images import ImageData, Images
from codistill.engine.fast.capture import CapturedStep
from codistill.engine.parts import PARTS, parts
from codistill.engine.runtime import Machine, prepared
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import Training, prepare_training
from codistill.engine.step import PlainStep, Step, choose_step
from codistill.engine.trainer import draw_epoch
from codistill.networks.cost import training_flops
from codistill.recipes.schema import Recipe

WARM_UP_STEPS = 3
EPOCH_STEPS = 8
"""The number of different batches: the arithmetic does not depend on their content."""


@dataclass(frozen=True)
class Bench:
    """The measurements of ``bench``.

    ``parts_ms`` come from a step without overlap, so they can add up to more than a step takes; ``start_up_s`` is the
    time from building the networks to the end of the first step.
    """

    device: str
    path: str
    images_per_s: float
    flops_per_image: int
    matmul_flops_per_s: float
    parts_ms: dict[str, float]
    start_up_s: float
    peak_device_bytes: int | None

    @property
    def share_of_matmul(self) -> float:
        """The step's FLOP rate as a fraction of this machine's measured rate for large matrix products."""
        return self.images_per_s * self.flops_per_image / self.matmul_flops_per_s


def random_data(channels: int, side: int, classes: int, images: int) -> ImageData:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, channels, side, side), dtype=torch.uint8, generator=generator)
    split = Images(pixels, torch.randint(0, classes, (images,), generator=generator))
    names = tuple(map(str, range(classes)))
    return ImageData("random", split, split, None, names, (0.5,) * channels, (0.25,) * channels, report={})


def bench(recipe: Recipe, channels: int, side: int, classes: int, steps: int, *, images: int | None = None) -> Bench:
    """Measure ``steps`` steps of full batches of random images, after everything is compiled and captured."""
    data = random_data(channels, side, classes, images=recipe.batch_size * EPOCH_STEPS)
    with prepared(recipe.runtime) as machine:
        device = machine.device
        matmul = matmul_flops_per_s(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started_at = time.perf_counter()
        run = Runner.of(recipe, data, machine, images)
        run(1)
        start_up_s = time.perf_counter() - started_at
        run(WARM_UP_STEPS)
        images_per_s = steps * recipe.batch_size / run(steps)
        members, learning = run.training.cohort.members, recipe.graph.learning_networks
        flops = training_flops(members, learning, (channels, side, side))
        return Bench(
            device=torch.cuda.get_device_name() if device.type == "cuda" else device.type,
            path=run.step.path,
            images_per_s=images_per_s,
            flops_per_image=sum(flops.values()),
            matmul_flops_per_s=matmul,
            start_up_s=start_up_s,
            # Before the parts are measured, which takes extra memory.
            peak_device_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
            parts_ms=run.parts_ms(steps),
        )


class Runner:
    """Steps of a training, timed."""

    def __init__(self, training: Training, step: Step) -> None:
        self.training, self.step = training, step
        self.plan = draw_epoch(training, 0)
        self.schedule = TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))

    @classmethod
    def of(cls, recipe: Recipe, data: ImageData, machine: Machine, images: int | None = None) -> "Runner":
        training = prepare_training(recipe, data, machine, images=images)
        return cls(training, choose_step(training))

    def __call__(self, steps: int) -> float:
        """Run the steps; returns the seconds they take."""
        return self._timed(self._take, steps)

    def _take(self, index: int) -> None:
        at = Position(0, index % EPOCH_STEPS)
        self.step(self.plan.step(at.step), self.schedule.context(at))

    def parts_ms(self, steps: int) -> dict[str, float]:
        """Milliseconds by part of the step. A captured step is captured up to the end of each part, and subtracted."""
        if isinstance(self.step, CapturedStep):
            until_ms = [0.0, *(self._recorded_ms(self.step, part, steps) for part in PARTS)]
            return {part: after - before for part, (before, after) in zip(PARTS, pairwise(until_ms), strict=True)}
        assert isinstance(self.step, PlainStep)
        return self._plain_parts_ms(self.step, steps)

    def _recorded_ms(self, step: CapturedStep, until: str, steps: int) -> float:
        # Without overlap: with it, one more part can make the whole shorter.
        recording = step.record(self.plan.step(0), self.schedule.context(Position()), "nothing", until=until)
        self._timed(lambda _: recording.graph.replay(), WARM_UP_STEPS)
        return 1e3 * self._timed(lambda _: recording.graph.replay(), steps) / steps

    def _plain_parts_ms(self, step: PlainStep, steps: int) -> dict[str, float]:
        seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        for index in range(steps):
            at = Position(0, index % EPOCH_STEPS)
            draws, context = self.plan.step(at.step), self.schedule.context(at)
            started_at = time.perf_counter()
            for part in parts(self.training, step.way(draws), draws, context):
                wait_for(self.training.machine.device)
                ended_at = time.perf_counter()
                seconds[part].append(ended_at - started_at)
                started_at = ended_at
        return {part: 1e3 * median(values) for part, values in seconds.items()}

    def _timed(self, action: Callable[[int], None], times: int) -> float:
        device = self.training.machine.device
        wait_for(device)
        started_at = time.perf_counter()
        for index in range(times):
            action(index)
        wait_for(device)
        return time.perf_counter() - started_at


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def matmul_flops_per_s(device: torch.device) -> float:
    """The best of 20 products of large matrices: bfloat16 and 8192³ on a GPU, float32 and 1024³ elsewhere."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(WARM_UP_STEPS + 20):
        wait_for(device)
        started_at = time.perf_counter()
        torch.mm(a, b)
        wait_for(device)
        seconds.append(time.perf_counter() - started_at)
    return 2 * size**3 / min(seconds[WARM_UP_STEPS:])
