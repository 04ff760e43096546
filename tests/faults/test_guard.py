"""The guard of test_fuzz_files.py fires: on code from outside the installation, on programs, memory, hangs, writes."""

import ctypes
import importlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support import guard
from support.exports import with_code
from support.guard import guarded
from support.processes import in_new_process

MODULE = "module_beside_the_file"
MODULE_TEXT = "open('marker', 'w').close()\nTABLE = {'KEY': 1}\n"


def load_pt2(table: str, key: str) -> None:
    """As ``predict`` of an earlier version did."""
    archive = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),)), archive)
    Path("hostile.pt2").write_bytes(with_code(archive.getvalue(), table, key))
    guard.GENERATORS += ("/torch/fx/operator_schemas.py",)  # evaluates the types of torch's own operators
    guard_it(lambda: torch.export.load("hostile.pt2"))


def guard_it(deed: Callable[[], object]) -> None:
    """The deed, in the guard's fork, may write below ``mine``; what the guard says of it is written down."""

    def attempt() -> str | None:
        try:
            deed()
        except Exception as error:
            return f"not stopped, but failed: {error!r}"
        return None

    Path("complaint").write_text(guarded(attempt, [Path("mine")]) or "nothing")


def fork_in_vain() -> None:
    if os.fork() == 0:
        os._exit(0)


DEEDS: dict[str, tuple[Callable[[], object], str]] = {
    "reads": (lambda: Path(os.__file__).read_bytes(), "^nothing$"),
    "imports of the standard library": (lambda: importlib.import_module("colorsys"), "^nothing$"),
    "writes where it may": (lambda: Path("mine/file").write_text("x"), "^nothing$"),
    "imports from the folder": (lambda: importlib.import_module(MODULE), f"open: .*{MODULE}.*, which is code"),
    "loads a library": (lambda: ctypes.CDLL("libnothing.so"), "ctypes.dlopen: .*libnothing.so"),
    "executes text": (lambda: eval("1 + 1"), "exec: .*<string>"),
    "compiles a file of its own": (lambda: compile("1", "mine/code.py", "exec"), "compile: mine/code.py"),
    "executes a code object": (lambda: exec(compile("1", "<anything>", "exec")), "exec: .*<anything>"),
    "starts a program": (lambda: subprocess.run(["true"], check=True), "subprocess.Popen: .*true"),
    "starts a shell": (lambda: os.system("true"), "os.system: .*true"),
    "becomes another program": (lambda: os.execv("/bin/true", ["true"]), "os.exec: .*true"),
    "forks": (fork_in_vain, "os.fork"),
    "writes elsewhere": (lambda: Path("file").write_text("x"), "open: file for writing"),
    "writes through a link": (lambda: Path("mine/link").write_text("x"), "open: mine/link for writing"),
    "removes elsewhere": (lambda: Path("victim").unlink(), "os.remove: .*victim"),
    "moves elsewhere": (lambda: Path("mine").rename("yours"), "os.rename: .*yours"),
    "makes a folder elsewhere": (lambda: Path("yours").mkdir(), "os.mkdir: .*yours"),
    "links to elsewhere": (lambda: Path("mine/more").hardlink_to("victim"), "os.link: .*victim"),
    "calls another host": (lambda: socket.create_connection(("192.0.2.1", 9), timeout=1), "socket.*192.0.2.1"),
    "takes memory": (lambda: len(b"x" * 400 * 2**20), "took 4.. MiB of memory"),
    "does not end": (lambda: [None for _ in iter(int, 1)], "killed by signal 27(.|\n)*guard.py"),
    "waits": (lambda: time.sleep(3), r"waited for \d+\.\d s"),
    "waits for ever": (lambda: time.sleep(600), "ended(.|\n)*Timeout(.|\n)*guard.py"),
    "crashes": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "killed by signal 11"),
}


def try_deed(name: str, desk: Path) -> None:
    os.chdir(desk)
    Path("mine").mkdir()
    Path("victim").write_text("precious")
    Path("mine/link").symlink_to("../victim")
    Path(f"{MODULE}.py").write_text(MODULE_TEXT)
    sys.path.insert(0, "")
    guard.CPU_S = 1 if name == "does not end" else 60
    guard.WAITED_S = 1 if name == "waits" else 60
    guard.BLOCKED_S = 2 if name == "waits for ever" else 60
    guard_it(DEEDS[name][0])


@pytest.mark.parametrize("name", DEEDS)
def test_the_guard_says_what_was_tried(name: str, tmp_path: Path) -> None:
    assert in_new_process(try_deed, name, tmp_path) == 0
    complaint = (tmp_path / "complaint").read_text()
    assert re.search(DEEDS[name][1], complaint), complaint
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "marker").exists()


def try_pt2(table: str, key: str, desk: Path) -> None:
    os.chdir(desk)
    Path(f"{MODULE}.py").write_text(MODULE_TEXT)
    sys.path.insert(0, "")
    load_pt2(table, key)


@pytest.mark.parametrize(
    ("table", "key", "complaint"),
    [
        (f"{MODULE}:TABLE", "KEY", f"open: .*{MODULE}.*, which is code"),
        ("ctypes:cdll", "./NOTES", "ctypes.dlopen: .*NOTES"),
    ],
)
def test_the_guard_sees_the_code_that_a_pt2_file_names(table: str, key: str, complaint: str, tmp_path: Path) -> None:
    """``torch.export.load`` imports what the file names; ``codistill predict`` refuses pt2 for that reason."""
    assert in_new_process(try_pt2, table, key, tmp_path) == 0
    assert re.search(complaint, (tmp_path / "complaint").read_text())
    assert not (tmp_path / "marker").exists()
