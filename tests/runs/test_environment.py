import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from codistill.runs import environment

FACTS = {
    *("codistill", "python", "torch", "numpy", "platform", "cpu", "cores", "threads"),
    *("accelerators", "cuda", "cudnn", "commit", "dirty", "command"),
}


def git(folder: Path, *arguments: Any) -> Any:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    path = tmp_path / "package" / "module.py"
    path.parent.mkdir()
    path.write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("/venv/\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return path


def test_every_fact_is_there_and_is_json() -> None:
    facts = environment.describe()
    assert facts.keys() == FACTS
    assert json.loads(json.dumps(facts)) == facts
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cpu"]
    assert facts["cores"] >= 1


def test_nothing_reaches_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a socket was opened"))
    assert environment.describe()["python"]


def test_the_commit_is_the_working_trees(source: Path) -> None:
    assert environment._commit(source) == git(source.parent, "rev-parse", "HEAD")
    assert environment._dirty(source) is False
    source.write_text("x = 2\n")
    assert environment._dirty(source) is True


def test_an_installed_copy_does_not_take_the_commit_of_the_repository_around_it(source: Path) -> None:
    installed = source.parents[1] / "venv" / "module.py"
    installed.parent.mkdir()
    installed.write_text("x = 1\n")
    for fact in (environment._commit, environment._dirty):
        assert environment._or_none(lambda fact=fact: fact(installed)) is None  # type: ignore[misc]


def test_a_hooks_variables_do_not_name_another_repository(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    commit = environment._commit(source)
    monkeypatch.delenv("GIT_DIR")
    assert commit == git(source.parent, "rev-parse", "HEAD")


def test_nothing_stops_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken driver")

    monkeypatch.setattr(torch.cuda, "device_count", fail)
    monkeypatch.setattr(torch, "get_num_threads", fail)
    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(Path, "read_text", fail)
    monkeypatch.setattr(platform, "platform", fail)
    facts = environment.describe()
    assert facts.keys() == FACTS
    unknown = {"accelerators", "threads", "commit", "dirty", "cpu", "platform"}
    assert {name for name in unknown if facts[name] is None} == unknown


def test_without_git_the_commit_is_unknown(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment._or_none(lambda: environment._commit(source)) is None


@pytest.mark.parametrize(
    ("argument", "recorded"),
    [
        ("cifar100/wrn-28-10-twins", "cifar100/wrn-28-10-twins"),
        ("method=dcm", "method=dcm"),
        ("name=a=b", "name=a=b"),
        ("empty=", "empty="),
        ("--out", "--out"),
        ("runs/try", "runs/try"),
        ("/home/alice/runs", "<path>"),
        ("--out=/home/alice/runs", "--out=<path>"),
        ("data.folder=/home/alice/x=y", "data.folder=<path>"),
        ("/home/alice/x=y", "<path>"),
        ("data={folder: /home/alice}", "data=<path>"),
        ("~alice/runs", "<path>"),
        ("--out=~/runs", "--out=<path>"),
        ("../alice/runs", "<path>"),
        ("alice/runs", "<path>"),
        ("file:///home/alice", "<path>"),
    ],
)
def test_the_command_line_has_no_paths_and_no_user(
    monkeypatch: pytest.MonkeyPatch, argument: Any, recorded: Any
) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(sys, "argv", ["/home/alice/venv/bin/codistill", "train", argument])
    assert environment.describe()["command"] == ["codistill", "train", recorded]


def test_no_path_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(Path.home() / "bin" / "codistill"), str(Path.cwd())])
    text = json.dumps(environment.describe())
    for private in (str(Path.cwd()), str(Path(environment.__file__).parent), sys.prefix):
        assert private not in text
    assert os.sep + "home" not in text


def test_a_copy_without_its_repository_can_be_told_its_commit(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODISTILL_COMMIT", "954ca01")
    assert environment._commit(source) == "954ca01"
