"""A finished run that is lengthened ends as if it had always been that long, or is refused with the reason."""

import re
from pathlib import Path
from typing import Any

import pytest

from codistill.errors import RunError
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Augment, Constant, Cosine, Evaluation, Length, Steps
from codistill.runs.folder import RunFolder
from support.cli import call
from support.runs import checksums, train
from support.tiny import tiniest_recipe

SAME = {"schedule": Constant().model_dump(), "evaluation": Evaluation(all_every_epochs=1).model_dump()}


def recipe(epochs: int, **changes: Any) -> Recipe:
    return tiniest_recipe(**{**SAME, "length": Length(epochs=epochs).model_dump(), **changes})


@pytest.mark.parametrize("steps", [None, 7], ids=["at once", "stopped on the way"])
def test_a_lengthened_run_is_the_longer_run(tmp_path: Path, steps: int | None) -> None:
    truth = checksums(train(recipe(4), tmp_path / "long"))
    run = train(recipe(2), tmp_path / "run")
    assert checksums(run) != truth
    if steps:
        train(recipe(4), run, steps=steps)
        assert not RunFolder(run).result.exists()
    train(recipe(4), run)
    assert checksums(run) == truth
    assert RunFolder(run).is_finished(recipe(4))
    assert "continues with length.epochs: 2 → 4" in (run / "train.log").read_text()
    with pytest.raises(RunError, match=r"another recipe:\n  length\.epochs: 4 → 2"):
        train(recipe(2), run)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schedule": Steps(milestones=(0.5,)).model_dump()}, "schedule.kind=steps spreads its learning rates"),
        ({"schedule": Cosine().model_dump()}, "schedule.kind=cosine spreads its learning rates"),
        ({"schedule": Constant(warmup=0.5).model_dump()}, "schedule.warmup=0.5 is a share of the length"),
        ({"method": "mutual"}, "method=mutual changes its transfers over the whole length"),
        ({"augment": Augment(half_until=0.5).model_dump()}, "augment.half_until=0.5 is a share of the length"),
    ],
)
def test_what_depends_on_the_length_is_named_and_nothing_is_lost(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    run = train(recipe(1, **changes), tmp_path / "run")
    before = checksums(run)
    with pytest.raises(RunError, match=rf"cannot be lengthened, length\.epochs: 1 → 2: {re.escape(reason)}.*start\.a="):
        train(recipe(2, **changes), run)
    assert RunFolder(run).is_finished(recipe(1, **changes))
    assert checksums(run) == before


def test_pruning_leaves_what_is_finished(tmp_path: Path) -> None:
    run, stopped = train(recipe(1), tmp_path / "runs" / "done"), train(recipe(2), tmp_path / "runs" / "half", steps=2)
    before = checksums(run)
    result = call("prune", tmp_path / "runs")
    assert result.exit_code == 1
    assert re.search(r"done: [\d.]+ MB freed", result.stdout)
    assert re.search(r"warning: kept: .*half is not finished .* codistill train .*half", result.stderr)
    assert not (run / "checkpoints").exists()
    assert (stopped / "checkpoints").exists()
    assert checksums(run) == before
    for command in (["evaluate", run], ["export", run, "--network", "a", "--out", tmp_path / "a"], ["report", run]):
        out = ["-o", tmp_path / "page.html"] if command[0] == "report" else []
        assert call(*command, *out).exit_code == 0
    assert RunFolder(run).is_finished(recipe(1))
    with pytest.raises(RunError, match="cannot be lengthened: its checkpoints are gone"):
        train(recipe(3), run)
    assert call("prune", run).exit_code == 0


def test_a_damaged_run_keeps_the_checkpoint_that_restores_it(tmp_path: Path) -> None:
    run = train(recipe(1), tmp_path / "run")
    before = checksums(run)
    (run / "weights" / "a.safetensors").write_bytes(b"damaged")
    result = call("prune", run)
    assert result.exit_code == 1
    assert "a.safetensors is damaged" in result.stderr
    train(recipe(1), run)
    assert checksums(run) == before
