"""A file of a run that can be parsed, but does not contain what a run writes: every command names it and the key."""

import json
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from codistill.recipes.sections import Checkpoints
from codistill.report.server import RunWatcher
from codistill.runs.seal import JSON_END, KEY, LINE_END
from codistill.runs.seal import seal as with_checksum
from support.checkpoints import seal
from support.cli import call
from support.made_up import made_up_run, quick
from support.runs import train
from support.stress import STRESS
from support.tiny import tiniest_recipe

GOOD = "another-run"
REMOVED = object()
HUGE = 10**400
"""An integer that JSON can hold and a float cannot."""

TOP1 = ("test", "a/final", "top1_error")
LAST = ("networks", "a", "last")
Places = dict[tuple[str | int, ...], tuple[object, ...]]
"""By the keys of a place, what is put there."""
RESULT: Places = {
    ("networks",): ([], {}, None, REMOVED),
    ("networks", "b"): (REMOVED, 5),
    LAST: (None, [], REMOVED),
    (*LAST, "top1_error"): (HUGE, None, True, "high", float("nan"), -1, 101),
    ("networks", "a", "best_epoch"): ("x", {}),
    ("epochs",): ([], {}, [1], None),
    ("epochs", 0, "epoch"): (HUGE, "one", REMOVED),
    ("epochs", 0, "test"): (None, {}, {"b/final": {}}),
    ("epochs", 0, "terms", "labels->a/final"): (HUGE, 1e308, "x"),
    ("epochs", 0, "train_error"): (None, [1]),
    ("data",): (None, {}, REMOVED),
    ("environment",): (None, [], REMOVED),
    ("elapsed_s",): ("x", None, HUGE, 1e300, REMOVED),
    ("peak_device_bytes",): (float("inf"), "x", HUGE, {}),
    ("path",): (None, 5),
}
ENVIRONMENT: Places = {
    (): ([], "x", 5),
    ("torch",): (REMOVED, 5),
    ("codistill",): (REMOVED, []),
    ("command",): (5, "codistill train", [5]),
    ("accelerators",): (True, 5, [{}]),
    ("precision",): ("fp99", 5),
    ("commit",): (5, []),
}
DATA: Places = {
    (): ([], 5),
    ("sets",): (REMOVED, None, []),
    ("sets", "test"): (REMOVED, {}, 5),
    ("sets", "train", "images"): (HUGE, "x", None),
    ("sets", "test", "shape"): ([28], None, "x"),
    ("name",): (REMOVED, 5),
}
JOURNAL: Places = {
    (): ([], 5),
    ("epoch",): (HUGE, "one", REMOVED),
    ("test",): (REMOVED, None, [], {}),
    ("test", "a/final"): (REMOVED, None, 5),
    TOP1: (HUGE, None, "high", REMOVED),
    ("skipped",): (5, {"a": "x"}),
}
TIMING: Places = {
    ("epoch",): (HUGE, None),
    ("elapsed_s",): (HUGE, 1e300, "x", float("nan"), REMOVED),
}
STATE: Places = {
    ("position",): (None, [], REMOVED),
    ("position", "epoch"): ("x", -1, REMOVED),
    ("elapsed_s",): ("x", HUGE, REMOVED),
}
FILES = {
    "result.json": RESULT,
    "environment.json": ENVIRONMENT,
    "data.json": DATA,
    "journal.jsonl": JOURNAL,
    "timing.jsonl": TIMING,
    "state.json": STATE,
}
ROWS = [
    pytest.param(file, keys, value, id=f"{file}-{'.'.join(map(str, keys))}-{number}")
    for file, places in FILES.items()
    for number, (keys, value) in enumerate((keys, value) for keys, values in places.items() for value in values)
][:: 1 if STRESS else 3]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = tiniest_recipe(length={"epochs": 1}, checkpoints=Checkpoints(every_s=60).model_dump())
    return train(recipe, tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A folder of two runs, of which ``bad`` is to be damaged."""
    made_up_run(tmp_path / "runs" / GOOD, quick(length={"epochs": 2, "paper_epochs": None}))
    shutil.copytree(trained, tmp_path / "runs" / "bad")
    return tmp_path / "runs"


def put(content: Any, keys: tuple[str | int, ...], value: object) -> Any:
    """Returns the content with another value at these keys, or without the last of them."""
    if not keys:
        return value
    at = content
    for key in keys[:-1]:
        at = at[key]
    if value is REMOVED:
        del at[keys[-1]]
    else:
        at[keys[-1]] = value
    return content


def damage(run: Path, file: str, keys: tuple[str | int, ...], value: object) -> str:
    """Puts the value there; returns the words by which an error must name the place."""
    (checkpoint,) = (run / "checkpoints").iterdir()
    state = checkpoint / "state.json"
    path = state if file == state.name else run / file
    content = json.loads(path.read_text())
    if path != state:
        del content[KEY]
    changed = json.dumps(put(content, keys, value))
    if path != state:  # as an attacker can
        end = LINE_END if file.endswith("jsonl") else JSON_END
        changed = with_checksum(changed.removesuffix("}").encode(), end).decode()
    path.write_text(changed)
    if file == "journal.jsonl":
        saved = json.loads(state.read_text())
        saved["files"][file] = changed
        state.write_text(json.dumps(saved))
    if file in ("journal.jsonl", state.name):
        seal(checkpoint, int(checkpoint.name.removeprefix("step-")))
    line = ", line 1" if file.endswith("jsonl") else ""
    if value is REMOVED and keys[-1] in ("b", "a/final"):  # a network of the recipe, not a key of the format
        return f"{file}{line}: {'.'.join(map(str, keys[:-1]))}: has no {keys[-1]!r}"
    if not keys:
        return f"{file}, line 1" if line else f"{file} is damaged"
    return f"{file}{line}: {'.'.join(map(str, keys))}"


def commands(file: str, runs: Path) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The commands that read the file and must refuse it."""
    bad = runs / "bad"
    training = ("train", bad / "recipe.yaml", "--out", bad)
    export = ("export", bad, "--network", "a", "--out", runs.parent / "exported")
    if file == "result.json":
        yield "finished", ("evaluate", bad)
        yield "finished", training
    else:
        if file not in ("timing.jsonl", "state.json"):
            yield "finished", export
        if file == "state.json":
            yield "interrupted", export
        if file not in ("timing.jsonl", "data.json"):
            yield "interrupted", training


@pytest.mark.promise(
    "malformed",
    "A file of a run that can be parsed but does not contain what a run writes (numbers of 400 digits, null, text, "
    "lists or nothing in the place of a value) is refused in one line that names the file and the key, with exit code "
    "2; a page of several runs shows the others, and a live one keeps answering.",
    repeated="117 values in 6 files, up to 4 commands each",
)
@pytest.mark.parametrize(("file", "keys", "value"), [row for row in ROWS if row.values[0] != "state.json"])
def test_a_page_names_it_and_shows_the_other_runs(
    file: str, keys: tuple[str | int, ...], value: object, runs: Path
) -> None:
    before = unescape(RunWatcher([runs]).page()[1])
    words = damage(runs / "bad", file, keys, value)
    if file == "journal.jsonl":
        (runs / "bad" / "result.json").unlink()
    page = unescape(RunWatcher([runs]).page()[1])
    assert GOOD in before
    assert GOOD in page
    assert words not in before
    assert words in page
    if file == "result.json":
        done = call("compare", runs)
        assert (done.exit_code, type(done.exception)) == (0, type(None)), done.output
        assert words in done.stderr
        last = json.loads((runs / GOOD / "result.json").read_text())["networks"]["a"]["last"]
        assert f"{last['top1_error']:.2f}" in done.stdout


@pytest.mark.promise("malformed")
@pytest.mark.parametrize(("file", "keys", "value"), ROWS)
def test_commands_refuse_it_by_its_key(file: str, keys: tuple[str | int, ...], value: object, runs: Path) -> None:
    words = damage(runs / "bad", file, keys, value)
    for state, arguments in commands(file, runs):
        if state == "interrupted":
            (runs / "bad" / "result.json").unlink(missing_ok=True)
        done = call(*arguments)
        if arguments[0] == "train" and done.exit_code == 0:
            assert "restored from the checkpoint" in done.stderr, arguments
            continue
        assert done.exit_code == 2, (arguments, done.output, done.exception)
        assert done.stderr.startswith("error: ")
        # The result of a finished run has its epochs too, so one that differs is refused before its keys are read.
        differs = state == "finished" and file == "journal.jsonl" and bool(keys)
        assert ("journal.jsonl and result.json have different epochs" if differs else words) in done.stderr, arguments


def test_a_report_of_several_runs_is_written(runs: Path) -> None:
    words = damage(runs / "bad", "result.json", LAST, None)
    done = call("report", runs, "-o", runs.parent / "page.html", "--patience", "0")
    assert done.exit_code == 0, done.output
    page = (runs.parent / "page.html").read_text()
    assert GOOD in page
    assert words in page


def test_a_live_page_goes_on_when_a_file_is_malformed_and_mended(runs: Path) -> None:
    watcher = RunWatcher([runs])
    result = runs / "bad" / "result.json"
    intact = result.read_text()
    _, before = watcher.page()
    words = damage(runs / "bad", "result.json", LAST, None)
    _, during = watcher.page()
    result.write_text(intact)
    _, after = watcher.page()
    assert [words in page for page in (before, during, after)] == [False, True, False]
    assert all(GOOD in page for page in (before, during, after))
