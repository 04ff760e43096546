"""Killed, stopped or slow, a run in which networks become non-finite ends with the bits of the uninterrupted one."""

import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codistill.engine import trainer
from codistill.engine.schedule import Position, StepContext, TrainingSchedule
from codistill.engine.signals import StoppedEarlyError, StopRequest
from codistill.errors import RunError
from codistill.recipes.schema import Recipe
from support.processes import in_new_process
from support.runs import checksums
from support.stress import NON_FINITE_KILLS, NON_FINITE_SIGNALS, Counted
from support.tiny import tiniest_recipe

POLICIES = ("skip", "rollback", "freeze", "stop")
STEPS, STOPPED = 9, 75
BAD_STEPS = (4, 7)
"""Steps in which the gradient of network a is NaN: in the middle of the second epoch and of the third."""
NEVER = 1e6


@dataclass(frozen=True)
class Interruption:
    """Sends this process a signal after a number of steps, or of seconds after its first one."""

    number: int
    after_steps: int = 0
    after_s: float = 0.0
    sleep_s: float = 0.0
    """A slow machine: it sleeps after every step."""


UNDISTURBED = Interruption(0)


def recipe_of(policy: str, every_s: float) -> Recipe:
    """The weights of b overflow in its first update; under ``stop`` that would end the run in the first epoch."""
    lr_of = {"lr_of": {"b": 1e38}} if policy != "stop" else {}
    return tiniest_recipe(
        on_nonfinite=policy,
        length={"epochs": 3},
        evaluation={"every_epochs": 1 if policy == "stop" else 2, "all_every_epochs": 2},
        checkpoints={"every_s": every_s},
        optimizer={**tiniest_recipe().optimizer.model_dump(), **lr_of},
    )


def train(recipe: Recipe, out: Path, interruption: Interruption) -> None:
    """Train with NaN gradients at fixed positions; what a run that ends with an error ends with goes to a file."""
    now = 0
    context, prepare = TrainingSchedule.context, trainer.prepare_training  # type: ignore[attr-defined]
    made: list[Any] = []
    timers: list[threading.Timer] = []

    def noted(schedule: TrainingSchedule, position: Position) -> StepContext:
        nonlocal now
        now = schedule.steps_taken(position)
        return context(schedule, position)

    def spoilt(gradient: Tensor) -> Tensor:
        return gradient * torch.nan if now in BAD_STEPS else gradient

    def prepared(*arguments: Any, **named: Any) -> Any:
        made.append(prepare(*arguments, **named))
        next(made[0].cohort.members["a"].parameters()).register_hook(spoilt)
        return made[0]

    def interrupt() -> None:
        os.kill(os.getpid(), interruption.number)

    def beat(position: Position, schedule: TrainingSchedule) -> None:
        time.sleep(interruption.sleep_s)
        if interruption.after_s and not timers:
            timers.append(threading.Timer(interruption.after_s, interrupt))
            timers[0].start()
        if schedule.steps_taken(position) == interruption.after_steps:
            interrupt()

    TrainingSchedule.context = noted  # type: ignore[assignment, method-assign]
    trainer.prepare_training = prepared  # type: ignore[attr-defined]
    with StopRequest() as stop:
        try:
            for _ in trainer.train(recipe, out, stop=stop, heartbeat=beat):
                pass
        except StoppedEarlyError:
            os._exit(STOPPED)
        except RunError as error:
            found = [(name, tensor.numpy(force=True).tobytes()) for name, tensor in made[0].tensors().items()]
            digests = {name: sha256(content).hexdigest() for name, content in found}
            (out / "stopped.json").write_text(json.dumps({"error": str(error), **digests}))
        os._exit(STOPPED if stop.is_heard else 0)  # without waiting for a timer, which would still be heard


def outcome(out: Path) -> dict[str, Any]:
    """The weights, the journal and the result; under ``stop``, the error and all tensors when it was raised."""
    if (out / "stopped.json").exists():
        assert not (out / "result.json").exists()
        return {**json.loads((out / "stopped.json").read_text()), "journal": (out / "journal.jsonl").read_bytes()}
    result = json.loads((out / "result.json").read_text())
    return {**checksums(out), "networks": result["networks"], "epochs": result["epochs"]}


def interruptions(chance: random.Random, kills: int, signals: int) -> list[Interruption]:
    """Two thirds after a given step, every one in turn; the others at any instant."""
    numbers = [signal.SIGKILL] * kills + [signal.SIGTERM] * signals
    chance.shuffle(numbers)
    return [
        Interruption(number, after_s=chance.uniform(0.001, 0.4), sleep_s=chance.choice((0.0, 0.03)))
        if turn % 3 == 2
        else Interruption(number, after_steps=chance.randrange(1, STEPS), sleep_s=chance.choice((0.0, 0.03)))
        for turn, number in enumerate(numbers)
    ]


@pytest.fixture(scope="module", params=POLICIES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The uninterrupted run of a policy, saved only at its end."""
    out = tmp_path_factory.mktemp(request.param) / "run"
    assert in_new_process(train, recipe_of(request.param, NEVER), out, UNDISTURBED) == 0
    return request.param, outcome(out)


@pytest.mark.promise(
    "non-finite-resume",
    "What a network that is not finite is rolled back to, and when, follows from the position in the training alone: "
    "killed, stopped by signals, saved at other times or on a slower machine, a run ends with the bits of the "
    "uninterrupted one, whatever `on_nonfinite` is. Under `stop` it ends with the same error and the same state.",
    repeated="{NON_FINITE_KILLS} SIGKILLs and {NON_FINITE_SIGNALS} signals, over the four values of `on_nonfinite`",
)
def test_interrupted_as_often_as_one_likes(whole: tuple[str, dict[str, Any]], tmp_path: Path, counted: Counted) -> None:
    policy, expected = whole
    chance = random.Random(policy)
    wanted = {signal.SIGKILL: NON_FINITE_KILLS // len(POLICIES), signal.SIGTERM: NON_FINITE_SIGNALS // len(POLICIES)}
    met = dict.fromkeys(wanted, 0)
    trainings = 0
    while any(met[number] < wanted[number] for number in wanted):
        trainings += 1
        assert trainings < 10 * sum(wanted.values())
        out, exit_code = tmp_path / f"run-{trainings}", 1
        missing = [max(0, wanted[number] - met[number]) for number in wanted]
        for one in interruptions(chance, *missing)[:3]:
            recipe = recipe_of(policy, chance.choice((0.0, 0.05, NEVER)))
            exit_code = in_new_process(train, recipe, out, one)
            if exit_code == 0:
                break
            assert exit_code == (-signal.SIGKILL if one.number == signal.SIGKILL else STOPPED)
            met[signal.Signals(one.number)] += 1
        if exit_code:
            assert in_new_process(train, recipe_of(policy, chance.choice((0.0, NEVER))), out, UNDISTURBED) == 0
        assert outcome(out) == expected
    counted("SIGKILLs of trainings with non-finite networks", met[signal.SIGKILL])
    counted("signals to trainings with non-finite networks", met[signal.SIGTERM])


def test_a_slow_machine_that_saves_at_every_step(whole: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    policy, expected = whole
    assert in_new_process(train, recipe_of(policy, 0.0), tmp_path / "run", Interruption(0, sleep_s=0.02)) == 0
    assert outcome(tmp_path / "run") == expected


def test_networks_have_been_left_out(whole: tuple[str, dict[str, Any]]) -> None:
    """So that the comparisons above mean something."""
    policy, found = whole
    if policy == "stop":
        assert "network 'a' is not finite" in found["error"]
        assert found["journal"].count(b"\n") == 1  # the error is raised at the end of the second epoch
    else:
        skipped = {name: found["networks"][name]["skipped"] for name in ("a", "b")}
        # The first update of an epoch spoils the weights of b; frozen, it is not even updated after the first.
        assert skipped == {"skip": {"a": 2, "b": 6}, "rollback": {"a": 2, "b": 6}, "freeze": {"a": 5, "b": 8}}[policy]


def test_a_stopped_run_raises_the_same_again(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        assert in_new_process(train, recipe_of("stop", 0.0), tmp_path / "run", UNDISTURBED) == 0
        found.append(outcome(tmp_path / "run"))
        (tmp_path / "run" / "stopped.json").unlink()
    assert found[0] == found[1]
    assert "network 'a' is not finite" in found[0]["error"]
