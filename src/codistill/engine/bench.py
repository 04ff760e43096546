"""The speed of the training step on this machine, its share of the matmul rate, and the time of each part."""

import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from codistill.data.images import ImageData, Images
from codistill.engine.fast.capture import CapturedStep, Variant
from codistill.engine.runtime import prepared, without_trials
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import Training, prepare_training
from codistill.engine.step import PARTS, Executor, step
from codistill.engine.trainer import choose_step, draw_epoch
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
        run = Runner(prepare_training(recipe, data, machine, images=images, begins=False))
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

    def __init__(self, training: Training) -> None:
        self.training, self.step = training, choose_step(training)
        self.plan = draw_epoch(training, 0)
        self.schedule = TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))

    def __call__(self, steps: int) -> float:
        """Run the steps; returns the seconds they take."""
        wait_for(self.training.machine.device)
        started_at = time.perf_counter()
        for index in range(steps):
            at = Position(0, index % EPOCH_STEPS)
            self.step(self.plan.step(at.step), self.schedule.context(at))
        wait_for(self.training.machine.device)
        return time.perf_counter() - started_at

    def parts_ms(self, steps: int) -> dict[str, float]:
        """Milliseconds a step by part, from the ranges of a profile; a captured step is profiled before its capture."""
        device = self.training.machine.device
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._step_uncaptured(0)  # warm up
        with profile(activities=activities, acc_events=True) as profiled:
            for index in range(steps):
                self._step_uncaptured(index)
        if device.type == "cuda":
            ns = _device_ns_by_part(profiled)
        else:
            ns = dict.fromkeys(PARTS, 0.0) | {x.key: 1000 * x.cpu_time_total for x in profiled.key_averages()}
        return {part: ns[part] / steps / 1e6 for part in PARTS}

    @without_trials()
    def _step_uncaptured(self, index: int) -> None:
        at = Position(0, index % EPOCH_STEPS)
        batch = self.plan.step(at.step)
        if isinstance(self.step, CapturedStep):
            variant = Variant("nothing", winograd=self.step.has_winograd(batch))
            executor: Executor = self.step.executor(batch, variant)
        else:
            executor = self.step.executor(batch)
        step(self.training, executor, batch, self.schedule.context(at))
        wait_for(self.training.machine.device)


def _device_ns_by_part(profiled: profile) -> dict[str, float]:
    """The time of the kernels that were launched during each range, from whatever thread."""
    ns = dict.fromkeys(PARTS, 0.0)
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    kernel_ns = {event.correlation_id(): event.duration_ns() for event in events if _is_on(event, "CUDA")}
    launches = sorted(
        (event.start_ns(), kernel_ns[event.correlation_id()])
        for event in events
        if _is_on(event, "CPU") and event.correlation_id() in kernel_ns and event.name().startswith("cu")
    )
    starts = [start for start, _ in launches]
    for event in events:
        if event.name() in PARTS and _is_on(event, "CPU"):
            end_ns = event.start_ns() + event.duration_ns()
            first, last = (bisect_left(starts, moment) for moment in (event.start_ns(), end_ns))
            ns[event.name()] += sum(duration for _, duration in launches[first:last])
    return ns


def _is_on(event: Any, device: str) -> bool:
    return str(event.device_type()).endswith(device)


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
