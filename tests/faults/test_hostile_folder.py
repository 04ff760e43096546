"""A run's folder from elsewhere: no link in it is followed, no pipe is waited for, and each is refused by name."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from codistill.cli.app import app
from codistill.recipes.sections import Length
from support.processes import in_new_process, started_process
from support.runs import train
from support.tiny import tiniest_recipe

TIMEOUT_S = 60  # against a hang; a refusal takes a fraction of a second
FILES = (
    *("lock", "journal.jsonl", "timing.jsonl", "train.log", "recipe.yaml", "data.json", "environment.json"),
    *("result.json", "weights/a.safetensors", "checkpoints/STEP/state.json"),
)
FOLDERS = ("weights", "checkpoints", "best", "checkpoints/STEP", "tensorboard")
COMMANDS = (
    ["train", "recipe.yaml", "--out", "run"],
    ["evaluate", "run"],
    ["export", "run", "--network", "a", "--out", "exported"],
    ["report", "run", "-o", "page.html"],
    ["compare", "run"],
    ["watch", "run", "--json"],
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert in_new_process(train, tiniest_recipe(length=Length(epochs=1).model_dump()), folder) == 0
    return folder


@pytest.fixture
def desk(finished: Path, tmp_path: Path) -> Path:
    """A folder with a run in it that lacks its result, so that a training would go on."""
    shutil.copytree(finished, tmp_path / "desk" / "run")
    (tmp_path / "desk" / "run" / "result.json").unlink()
    shutil.copy(finished / "recipe.yaml", tmp_path / "desk")
    return tmp_path / "desk"


def invoke(desk: Path, arguments: list[str]) -> tuple[int, str, str]:
    """Returns the exit code, standard output and standard error."""
    os.chdir(desk)
    result = CliRunner().invoke(app, arguments, prog_name="codistill")
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout, result.stderr


def all_refused(desk: Path, words: str) -> None:
    for arguments in COMMANDS:
        code, stdout, stderr = invoke(desk, arguments)
        assert (code, stdout) == (2, ""), (arguments, stdout, stderr)
        assert words in stderr, (arguments, stderr)
        assert len(stderr.splitlines()) <= 2, "in one line, below that none of the runs can be read"


def ends_well(function: Callable[..., None], *arguments: object) -> None:
    """Runs it in a process of its own, which must end by itself."""
    process = started_process(function, *arguments)
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail("it hangs")
    assert process.exitcode == 0


def place_of(name: str, run: Path) -> Path:
    step = max((run / "checkpoints").iterdir())
    return run / name.replace("STEP", step.name)


def linked(place: Path, victim: Path) -> None:
    """Moves what is there to ``victim``, or makes something up, and leaves a link."""
    if place.exists():
        place.rename(victim)
    else:
        victim.write_text("precious\n")
    place.symlink_to(victim)


def contents(place: Path) -> dict[str, bytes]:
    files = [place] if place.is_file() else [path for path in sorted(place.rglob("*")) if path.is_file()]
    return {str(file): file.read_bytes() for file in files}


@pytest.mark.promise(
    "hostile-folder",
    "Nothing in a run's folder leads out of it or blocks a reader: a symbolic link, named pipe, socket "
    "or device in the place of one of its files or folders is refused by name, with exit code 2, and "
    "neither followed nor opened; with several runs, the others are shown. The run's folder itself may "
    "be reached through a link.",
    repeated="11 files and 5 folders, 6 commands each",
)
@pytest.mark.parametrize("name", FILES)
def test_a_link_in_the_place_of_a_file(name: str, desk: Path, tmp_path: Path) -> None:
    place, victim = place_of(name, desk / "run"), tmp_path / "victim"
    linked(place, victim)
    before = contents(victim)
    ends_well(all_refused, desk, f"{place.relative_to(desk)} is a symbolic link, not a regular file")
    assert contents(victim) == before
    assert place.is_symlink()


@pytest.mark.promise("hostile-folder")
@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_the_place_of_a_file(name: str, desk: Path) -> None:
    place = place_of(name, desk / "run")
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    ends_well(all_refused, desk, f"{place.relative_to(desk)} is a named pipe, not a regular file")


@pytest.mark.promise("hostile-folder")
@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_in_the_place_of_a_folder(name: str, desk: Path, tmp_path: Path) -> None:
    place, victim = place_of(name, desk / "run"), tmp_path / "victim"
    if not place.exists():
        place.mkdir()
    linked(place, victim)
    (victim / ".tmp-of-another-program").write_text("precious\n")
    before = contents(victim)
    ends_well(all_refused, desk, f"{place.relative_to(desk)} is a symbolic link, not a folder")
    assert contents(victim) == before
    assert place.is_symlink()


def test_a_new_run_is_not_begun_through_a_link(desk: Path, tmp_path: Path) -> None:
    (desk / "new").mkdir()
    shutil.copy(desk / "run" / "recipe.yaml", desk / "new")
    (tmp_path / "victim").write_text("precious\n")
    (desk / "new" / "lock").symlink_to(tmp_path / "victim")
    ends_well(refused_training, desk, "new")
    assert (tmp_path / "victim").read_text() == "precious\n"
    assert sorted(path.name for path in (desk / "new").iterdir()) == ["lock", "recipe.yaml"]


def refused_training(desk: Path, name: str) -> None:
    code, _, stderr = invoke(desk, ["train", f"{name}/recipe.yaml", "--out", name])
    assert (code, "new/lock is a symbolic link, not a regular file" in stderr) == (2, True), stderr


@pytest.mark.promise("hostile-folder")
@pytest.mark.parametrize("name", ["journal.jsonl", "timing.jsonl", "train.log", "recipe.yaml"])
def test_the_other_runs_are_shown(name: str, finished: Path, tmp_path: Path) -> None:
    for run in ("good", "linked", "piped"):
        shutil.copytree(finished, tmp_path / "runs" / run)
    for run in ("linked", "piped"):
        (tmp_path / "runs" / run / name).unlink()
    (tmp_path / "runs" / "linked" / name).symlink_to(name)
    os.mkfifo(tmp_path / "runs" / "piped" / name)
    ends_well(others_are_shown, tmp_path, name)


def others_are_shown(desk: Path, name: str) -> None:
    from codistill.report.server import RunWatcher

    for arguments, shown in (
        (["report", "runs", "-o", "page.html"], "page.html: 1 run,"),
        (["compare", "runs"], "DCM"),
    ):
        code, stdout, stderr = invoke(desk, arguments)
        assert (code, shown in stdout) == (0, True), (stdout, stderr)
        assert f"warning: linked is left out: runs/linked/{name} is a symbolic link, not a regular file" in stderr
        assert f"warning: piped is left out: runs/piped/{name} is a named pipe, not a regular file" in stderr
    _, page = RunWatcher([Path("runs")]).page()
    for words in ("good", f"runs/linked/{name} is a symbolic link", f"runs/piped/{name} is a named pipe"):
        assert words in page


@pytest.mark.promise("hostile-folder")
def test_a_run_reached_through_a_link_is_like_any_other(desk: Path) -> None:
    (desk / "latest").symlink_to("run")
    ends_well(continued, desk)
    assert (desk / "run" / "result.json").is_file()


def continued(desk: Path) -> None:
    for arguments in (["train", "recipe.yaml", "--out", "latest"], ["evaluate", "latest"], ["compare", "latest"]):
        code, _, stderr = invoke(desk, arguments)
        assert code == 0, stderr
