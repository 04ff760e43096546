"""Files that are intact one by one, but of another run or another time, or incomplete, are named too."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from codistill.runs.seal import read_sealed, write_sealed
from support.cli import call
from support.runs import checksums, train
from support.tiny import tiniest_recipe

COMMANDS = ("evaluate", "export", "start", "report", "compare")
DESCRIBED = {"data.json": ("name", "cifar10"), "environment.json": ("torch", "1.0")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three epochs; the same stopped in its third, as ``interrupted``; one of another seed."""
    folder = tmp_path_factory.mktemp("mixed")
    recipe = tiniest_recipe(
        length={"epochs": 3},
        data={**tiniest_recipe().data.model_dump(), "train_limit": 90, "validation": 0.2},
        evaluation={"every_epochs": 1, "all_every_epochs": 3},
        checkpoints={"every_s": 0, "best": True},
    )
    train(recipe, folder / "finished")
    train(recipe, folder / "interrupted", steps=8)
    train(recipe.replace(seed=4), folder / "other")
    train(recipe.replace(seed=4), folder / "other interrupted", steps=8)
    return folder


def started_from(file: Path, out: Path) -> list[object]:
    """The command of a training whose teacher starts from a file."""
    networks = "networks={t: wrn-10-1-dropout-0.3, s: resnet-8}"
    small = "data.train_limit=20", "data.test_limit=20", "length.epochs=1", "--quiet"
    return ["train", "quickstart", "method=kd", networks, f"start={{t: {file}}}", *small, "--out", out]


def said(command: str, run: Path, out: Path) -> tuple[int, str]:
    """The exit code of a command on a run, and what it says on the terminal or on its page."""
    page = out / "page.html"
    arguments: dict[str, list[object]] = {
        "train": ["train", run / "recipe.yaml", "--out", run, "--quiet"],
        "evaluate": ["evaluate", run],
        "export": ["export", run, "--network", "a", "--out", out / "exported"],
        "report": ["report", run, "-o", page],
        "compare": ["compare", run],
        "start": started_from(run / "weights" / "a.safetensors", out / "kd"),
    }
    name, *options = command.split()
    done = call(*arguments[name], *options)
    assert "Traceback" not in done.output
    shown = page.read_text() if command == "report" and done.exit_code == 0 else ""
    return done.exit_code, done.stderr + shown


def other_result(run: Path, runs: Path) -> None:
    """The result and the weights that it describes, of another seed."""
    shutil.copy(runs / "other" / "result.json", run)
    shutil.copytree(runs / "other" / "weights", run / "weights", dirs_exist_ok=True)


def swapped_weights(run: Path, runs: Path) -> None:
    for source, target in (("a", "x"), ("b", "a"), ("x", "b")):
        (run / "weights" / f"{source}.safetensors").rename(run / "weights" / f"{target}.safetensors")


def edited(name: str) -> Callable[[Path, Path], None]:
    def edit(run: Path, runs: Path) -> None:
        key, value = DESCRIBED[name]
        write_sealed(run / name, {**read_sealed(run / name), key: value})

    return edit


MIXED = {
    "result and weights": (other_result, "recipe.yaml and result.json have different recipes", COMMANDS),
    "weights": (swapped_weights, "a.safetensors is damaged", ("evaluate", "export", "start", "report")),
    "data": (edited("data.json"), "data.json is not the one in result.json", COMMANDS),
    "environment": (edited("environment.json"), "environment.json is not the one in result.json", COMMANDS),
}


@pytest.mark.parametrize("what", MIXED)
def test_files_of_another_run(what: str, runs: Path, tmp_path: Path) -> None:
    mix, reason, commands = MIXED[what]
    run = Path(shutil.copytree(runs / "finished", tmp_path / "run"))
    mix(run, runs)
    for command in commands:
        code, text = said(command, run, tmp_path)
        assert reason in text, (command, text)
        assert code == (0 if command in ("report", "compare") else 2), command
    assert not (tmp_path / "exported").exists()
    if what != "data":  # which ones of the two are right, the images say: not those in data.json
        code, text = said("train", run, tmp_path)
        assert (code, reason in text) == (0, True), text
        assert checksums(run) == checksums(runs / "finished")
        for name in ("environment.json", "recipe.yaml"):
            assert (run / name).read_bytes() == (runs / "finished" / name).read_bytes()
        assert read_sealed(run / "result.json")["epochs"] == read_sealed(runs / "finished" / "result.json")["epochs"]


LINES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "the last is missing": lambda lines: lines[:-1],
    "the first is missing": lambda lines: lines[1:],
    "the last is there twice": lambda lines: [*lines, lines[-1]],
    "another order": lambda lines: lines[::-1],
}


@pytest.mark.parametrize("state", ["finished", "interrupted"])
@pytest.mark.parametrize("name", ["journal.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("how", LINES)
def test_lines_that_are_missing_or_elsewhere(how: str, name: str, state: str, runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / state, tmp_path / "run"))
    (run / name).write_bytes(b"".join(LINES[how]((run / name).read_bytes().splitlines(keepends=True))))
    # A training that is killed between its two journals has a time less than evaluations.
    is_normal = (how, name, state) == ("the last is missing", "timing.jsonl", "interrupted")
    for command in ("report", "compare"):
        assert ("have different epochs" in said(command, run, tmp_path)[1]) == (not is_normal), command
    code, text = said("export", run, tmp_path)
    # If a line is there twice, the first is the one that the checkpoint contains.
    is_needed = name == "journal.jsonl" and (state, how) != ("interrupted", "the last is there twice")
    assert code == (2 if is_needed else 0), text
    assert code == 0 or "journal.jsonl" in text
    assert said("train", run, tmp_path)[0] == 0
    assert (run / name).read_bytes().startswith((runs / state / name).read_bytes())
    assert checksums(run) == checksums(runs / "finished")


def test_another_checkpoint_in_the_place_of_the_best(runs: Path, tmp_path: Path) -> None:
    """A checkpoint of this run and intact, but in the middle of an epoch, or of an epoch that is not the best."""
    run = Path(shutil.copytree(runs / "finished", tmp_path / "run"))
    (best,) = (run / "best").iterdir()
    found = [
        path for path in (runs / "interrupted" / "checkpoints").iterdir() if path.name.partition(".")[0] != best.name
    ]
    assert found
    for path in found:
        shutil.rmtree(run / "best")
        shutil.copytree(path, run / "best" / path.name)
        for command in ("evaluate --best", "export --best"):
            code, text = said(command, run, tmp_path)
            assert (code, "is the best by validation error" in text) == (2, True), text


def test_checkpoints_of_another_run_restore_nothing(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "interrupted", tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(runs / "other interrupted" / "checkpoints", run / "checkpoints")
    (run / "environment.json").unlink()
    code, text = said("train", run, tmp_path)
    assert (code, "Nothing was changed" in text) == (2, True), text
    assert not (run / "environment.json").exists()


def test_weights_of_a_run_without_its_result_start_nothing(runs: Path, tmp_path: Path) -> None:
    """They may be of a training that was killed while it wrote them, or anything."""
    run = Path(shutil.copytree(runs / "finished", tmp_path / "run"))
    (run / "result.json").unlink()
    code, text = said("start", run, tmp_path)
    assert (code, "its run is not finished" in text) == (2, True), text


def test_a_damaged_export_starts_nothing(runs: Path, tmp_path: Path) -> None:
    assert said("export", runs / "finished", tmp_path)[0] == 0
    file = (tmp_path / "exported").rename(tmp_path / "weights") / "model.safetensors"
    assert call(*started_from(file, tmp_path / "kd")).exit_code == 0
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = call(*started_from(file, tmp_path / "damaged"))
    assert (done.exit_code, "is not the file that was exported" in done.stderr) == (2, True), done.output


def test_another_version_of_torch_is_named(runs: Path, tmp_path: Path) -> None:
    for name, is_named in (("same", False), ("other", True)):
        run = Path(shutil.copytree(runs / "interrupted", tmp_path / name))
        if is_named:
            edited("environment.json")(run, runs)
        code, text = said("train", run, tmp_path)
        assert (code, "instead of 1.0: its numbers may differ" in text) == (0, is_named), text
