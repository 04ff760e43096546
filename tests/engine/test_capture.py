"""In what order a step is tried, restored and captured, with a CUDA that does nothing: this runs without a GPU.

What a real one computes is in tests/gpu/test_captured.py.
"""

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from codistill.data.batches import Draws
from codistill.engine import trainer
from codistill.engine.bench import random_data
from codistill.engine.fast.capture import OVERLAPS, CapturedStep, Graph, OverlappedExecutor, Variant, WarmStep
from codistill.engine.runtime import prepared
from codistill.engine.schedule import Position, StepContext, TrainingSchedule
from codistill.engine.state import Training, prepare_training
from support.tiny import tiny_recipe

SMALL = {"a": "wrn-10-1", "b": "resnet-8"}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    recipe = tiny_recipe(networks=SMALL)
    with prepared(recipe.runtime) as machine:
        training = prepare_training(recipe, random_data(1, 8, 10, images=70), machine)
    idle_cuda(monkeypatch)  # not before: what an optimizer imports looks at all of torch
    return training


def idle_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and graphs that let everything run at once, and memory without end."""

    def nothing(*_: object, **__: object) -> None:
        pass

    def stream() -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=0, wait_stream=nothing, wait_event=nothing, record_event=nothing)

    replacements = {
        **dict.fromkeys(
            ("empty_cache", "manual_seed", "reset_peak_memory_stats", "set_stream", "synchronize"), nothing
        ),
        **dict.fromkeys(("Stream", "current_stream"), stream),
        **dict.fromkeys(("stream", "graph"), lambda *_, **__: nullcontext()),
        "CUDAGraph": lambda: SimpleNamespace(replay=nothing),
        "graph_pool_handle": nothing,
        "mem_get_info": lambda: (2**40, 2**40),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    side = SimpleNamespace(stream=stream(), pending=deque[object]())
    monkeypatch.setattr("codistill.ops.wgrad_stream.SideStream", lambda: side)


def take_a_step(training: Training, step: CapturedStep | None = None) -> None:
    schedule = TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))
    step = step or CapturedStep(training, "captured")
    step(trainer.draw_epoch(training, 0).step(0), schedule.context(Position()))


def test_images_of_half_the_side_have_a_graph_of_their_own(training: Training) -> None:
    seen: list[tuple[int, ...]] = []
    training.cohort.members["a"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[2:]))
    step = CapturedStep(training, "captured")
    recipe = training.recipe.replace(augment={"half_until": 0.5}, length={"epochs": 2})
    schedule = TrainingSchedule.of(recipe, len(training.data.splits["train"]))
    for epoch, half_size in ((0, True), (1, False)):
        seen.clear()
        step(trainer.draw_epoch(training, epoch).step(0), schedule.context(Position(epoch)))
        side = training.data.splits["train"].pixels.shape[-1] // (2 if half_size else 1)
        assert set(seen) == {(side, side)}
    assert [half_size for _, half_size in step.graphs] == [True, False]


@pytest.mark.parametrize("is_long", [False, True])
def test_algorithms_are_tried_in_long_trainings_only(
    is_long: bool, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is recorded too: a trial there would be an error."""
    monkeypatch.setattr("codistill.engine.state.LONG", 0 if is_long else 10**16)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # as on a GPU
    tries: list[bool] = []
    forward = OverlappedExecutor.forward

    def noted(executor: OverlappedExecutor, images: Tensor, at: StepContext) -> Mapping[str, Tensor]:
        tries.append(torch.backends.cudnn.benchmark)
        return forward(executor, images, at)

    monkeypatch.setattr(OverlappedExecutor, "forward", noted)
    take_a_step(training)
    # Three warm-ups and a capture; then one of each for the other overlaps that are tried, and for the best.
    assert tries == [is_long] * (3 + 1 + 2 * len(OVERLAPS))
    assert torch.backends.cudnn.benchmark


def test_what_is_kept_is_recorded_when_the_training_is_put_back(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: tensor.clone() for name, tensor in training.tensors().items()}
    changed: list[int] = []
    capture = WarmStep.capture

    def noted(warm: WarmStep, *pool: Any) -> Graph:
        changed.append(sum(not torch.equal(tensor, before[name]) for name, tensor in training.tensors().items()))
        return capture(warm, *pool)

    monkeypatch.setattr(WarmStep, "capture", noted)
    take_a_step(training)
    *tried, kept = changed
    assert len(tried) == len(OVERLAPS)
    assert all(tried), "trying trains"
    assert kept == 0


@pytest.mark.parametrize("too_large", [0, 1, 3, 4])
def test_what_does_not_fit_is_passed_over(too_large: int, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up, done = CapturedStep.warm_up, []

    def short_of_memory(step: CapturedStep, batch: Draws, at: StepContext, variant: Variant) -> WarmStep:
        done.append(variant.overlap)
        if variant.overlap in OVERLAPS[:too_large]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return warm_up(step, batch, at, variant)

    monkeypatch.setattr(CapturedStep, "warm_up", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError) if too_large == len(OVERLAPS) else nullcontext():
        take_a_step(training)
    *tried, kept = done
    assert tuple(tried) == OVERLAPS
    assert kept in (OVERLAPS[too_large:] or OVERLAPS[-1:])


@pytest.mark.parametrize(
    ("setting", "faster", "kept", "tries"),
    [
        ("on", False, True, len(OVERLAPS)),
        ("off", True, False, len(OVERLAPS)),
        ("auto", True, True, len(OVERLAPS) + 1),
        ("auto", False, False, len(OVERLAPS) + 1),
    ],
)
def test_winograd_is_timed_against_cudnn_where_the_setting_is_auto(
    setting: str, faster: bool, kept: bool, tries: int, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codistill.engine.fast.capture.may_use_winograd", lambda module: True)
    training = replace(training, machine=replace(training.machine, winograd=setting))
    timed: list[Variant] = []

    def seconds(graph: Graph) -> float:
        timed.append(graph.executor.variant)
        return 1.0 if graph.executor.variant.winograd is faster else 2.0

    monkeypatch.setattr(Graph, "seconds", seconds)
    step = CapturedStep(training, "captured")
    step.programs.full = replace(step.programs.full, has_kernels=True)
    take_a_step(training, step)
    assert len(timed) == tries
    (graph,) = step.graphs.values()
    assert graph.executor.variant.winograd is kept


def test_without_a_suitable_convolution_winograd_is_not_tried(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Variant] = []
    monkeypatch.setattr(Graph, "seconds", lambda graph: timed.append(graph.executor.variant) or 1.0)
    step = CapturedStep(training, "captured")
    step.programs.full = replace(step.programs.full, has_kernels=True)
    take_a_step(training, step)
    assert timed == [Variant(overlap) for overlap in OVERLAPS]
