"""In what order a step is tried, put back and recorded, with a CUDA that does nothing: this runs without a GPU.

What a real one computes is in tests/gpu/test_captured.py.
"""

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from codistill.engine import trainer
from codistill.engine.bench import random_data
from codistill.engine.fast.capture import BESIDE, CapturedStep, Rehearsed, SideBySide
from codistill.engine.runtime import prepared
from codistill.engine.schedule import Position, StepContext, TrainingSchedule
from codistill.engine.state import Training, prepare_training
from tiny import tiny_recipe

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


def take_a_step(training: Training) -> None:
    schedule = TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))
    CapturedStep(training, "recorded")(trainer.draw_epoch(training, 0).step(0), schedule.context(Position()))


@pytest.mark.parametrize("is_long", [False, True])
def test_algorithms_are_tried_in_long_trainings_only(
    is_long: bool, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is recorded too: a trial there would be an error."""
    monkeypatch.setattr("codistill.engine.state.LONG", 0 if is_long else 10**16)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # as on a GPU
    tries: list[bool] = []
    forward = SideBySide.forward

    def noted(way: SideBySide, images: Tensor, turn: StepContext) -> Mapping[str, Tensor]:
        tries.append(torch.backends.cudnn.benchmark)
        return forward(way, images, turn)

    monkeypatch.setattr(SideBySide, "forward", noted)
    take_a_step(training)
    # Rehearsed three times and recorded; then both once for each of the others that are tried, and for the best.
    assert tries == [is_long] * (3 + 1 + 2 * len(BESIDE))
    assert torch.backends.cudnn.benchmark


def test_what_is_kept_is_recorded_when_the_training_is_put_back(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: tensor.clone() for name, tensor in training.tensors().items()}
    changed: list[int] = []
    recorded = Rehearsed.recorded

    def noted(step: Rehearsed, *memory: object) -> object:
        changed.append(sum(not torch.equal(tensor, before[name]) for name, tensor in training.tensors().items()))
        return recorded(step, *memory)  # type: ignore[arg-type]

    monkeypatch.setattr(Rehearsed, "recorded", noted)
    take_a_step(training)
    *tried, kept = changed
    assert len(tried) == len(BESIDE)
    assert all(tried), "trying trains"
    assert kept == 0


@pytest.mark.parametrize("too_large", [0, 1, 3, 4])
def test_what_does_not_fit_is_passed_over(too_large: int, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse, done = CapturedStep.rehearse, []

    def short_of_memory(step: CapturedStep, *args: object) -> Rehearsed:
        done.append(args[-1])
        if args[-1] in BESIDE[:too_large]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rehearse(step, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(CapturedStep, "rehearse", lambda *args, until="": short_of_memory(*args))
    monkeypatch.setattr(CapturedStep, "record", lambda *args: short_of_memory(*args).recorded())
    with pytest.raises(torch.OutOfMemoryError) if too_large == len(BESIDE) else nullcontext():
        take_a_step(training)
    *tried, kept = done
    assert tuple(tried) == BESIDE
    assert kept in (BESIDE[too_large:] or BESIDE[-1:])
