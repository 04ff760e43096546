"""Stopped anywhere and continued in a new process, a run ends with the very bits of the uninterrupted one."""

import itertools
import os
from pathlib import Path

import pytest

from codistill.engine import evaluate, trainer
from codistill.engine.run import Run
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import AdamW, Augment, Cosine
from codistill.runs.checkpoint import Store
from support.processes import in_new_process
from support.runs import checksums, train
from support.tiny import tiniest_recipe

STEPS = 6  # 70 images in batches of 32, the last one short, two epochs
RAMP = {"share": 0.6, "initial_share": 0.0, "initial_scale": 1.0, "begin": 0.1, "end": 0.9}
ASKED = STEPS + 2  # and the one batch of an evaluation after each epoch


def stop_when_asked(time: int, recipe: Recipe, out: Path) -> None:
    """The so-many-th time."""
    asked = itertools.count(1)
    for _ in trainer.train(recipe, out, stop=lambda: next(asked) == time):
        pass


def die_at(call: int, where: type, method: str, recipe: Recipe, out: Path) -> None:
    """End the process, as SIGKILL would, when a method is called for the so-many-th time."""
    original, calls = getattr(where, method), itertools.count(1)

    def deadly(*arguments: object, **settings: object) -> object:
        if next(calls) == call:
            os._exit(9)
        return original(*arguments, **settings)

    setattr(where, method, deadly)
    train(recipe, out)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert in_new_process(train, tiniest_recipe(), out) == 0
    return checksums(out)


@pytest.mark.parametrize("time", range(1, ASKED + 1))
def test_stopped_at_any_step_and_in_every_evaluation(time: int, uninterrupted: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert in_new_process(stop_when_asked, time, tiniest_recipe(), out) == 0
    assert not (out / "result.json").exists()
    assert in_new_process(train, tiniest_recipe(), out) == 0
    assert checksums(out) == uninterrupted
    assert set(uninterrupted) == {"a.safetensors", "b.safetensors", "journal.jsonl"}


# An evaluation adds up two networks in batches of 1,000: here 50 images, so one call each; the last one has six more.
DEATHS = {
    "between the networks of the first evaluation": (2, evaluate._Sums, "add"),
    "in the middle of the last evaluation": (5, evaluate._Sums, "add"),
    "when the first epoch is to be recorded": (1, Run, "record"),
    "after the last epoch was recorded and before it was saved": (STEPS + 2, Run, "save"),
    "before the weights are written": (1, Run, "finish"),
    "while the result is made": (1, Run, "_result"),
    "before the older checkpoint is removed": (1, Store, "keep_newest"),
}


@pytest.mark.parametrize("moment", DEATHS)
def test_killed_at_an_awkward_moment(moment: str, uninterrupted: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert in_new_process(die_at, *DEATHS[moment], tiniest_recipe(), out) == 9
    assert in_new_process(train, tiniest_recipe(), out) == 0
    assert checksums(out) == uninterrupted


def test_a_journal_ahead_of_its_checkpoint_is_cut_back(uninterrupted: dict[str, str], tmp_path: Path) -> None:
    """Saved only at the end: both epochs are in the journal when the process dies, and no checkpoint is."""
    recipe, out = tiniest_recipe(checkpoints={"every_s": 1000.0}), tmp_path / "run"
    assert in_new_process(die_at, 1, Run, "save", recipe, out) == 9
    assert len((out / "journal.jsonl").read_text().splitlines()) == 2
    assert in_new_process(train, recipe, out) == 0
    assert checksums(out) == uninterrupted


def test_another_seed_ends_elsewhere(uninterrupted: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert in_new_process(train, tiniest_recipe(seed=4), out) == 0
    differing = {name for name, checksum in checksums(out).items() if checksum != uninterrupted[name]}
    assert differing == set(uninterrupted)


@pytest.mark.parametrize("time", [2, 6])
def test_a_ramp_goes_on_where_it_was(time: int, ramped: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert in_new_process(stop_when_asked, time, tiniest_recipe(transfer=RAMP), out) == 0
    assert not (out / "result.json").exists()
    assert in_new_process(train, tiniest_recipe(transfer=RAMP), out) == 0
    assert checksums(out) == ramped


@pytest.fixture(scope="module")
def ramped(tmp_path_factory: pytest.TempPathFactory, uninterrupted: dict[str, str]) -> dict[str, str]:
    out = tmp_path_factory.mktemp("ramped") / "run"
    assert in_new_process(train, tiniest_recipe(transfer=RAMP), out) == 0
    assert not set(checksums(out).items()) & set(uninterrupted.items())
    return checksums(out)


def test_adamw_with_mixup_and_accumulation_resumes_too(tmp_path: Path) -> None:
    recipe = tiniest_recipe(
        optimizer=AdamW(lr=0.003, weight_decay=0.05).model_dump(),
        schedule=Cosine(warmup=0.2).model_dump(),
        augment=Augment(pad=2, mixup=0.4, randaugment=5, cutout=3, half_until=0.5).model_dump(),
        accumulate=2,
    )
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert in_new_process(train, recipe, whole) == 0
    assert in_new_process(stop_when_asked, 2, recipe, halves) == 0
    assert in_new_process(train, recipe, halves) == 0
    assert checksums(halves) == checksums(whole)
