import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from codistill.errors import RunError
from codistill.runs import files
from codistill.runs.files import (
    LOCK_FILE,
    explained,
    lock_run,
    open_regular,
    read_json,
    require_space,
    sweep,
    write_atomically,
)

HOLDER = """
import os, sys, time
from pathlib import Path
from codistill.runs.files import lock_run
with lock_run(Path(sys.argv[1])):
    if "fork" in sys.argv and os.fork() == 0:
        os.write(1, b"worker %d\\n" % os.getpid())
        time.sleep(60)
    time.sleep(0.2 * ("fork" in sys.argv))
    os.write(1, b"held\\n")
    time.sleep(60)
"""


def hold(folder: Path, *words: str) -> Any:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])},
    )
    lines = []
    while "held" not in lines:
        lines.append(holder.stdout.readline().strip())
        assert lines[-1] != "", "the holder died"
    return holder, lines


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def end(holder: Any) -> Any:
    holder.kill()
    holder.wait()
    holder.stdout.close()


def test_a_file_is_replaced_whole_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for content in ("old", "new", b"\x00bytes"):
        write_atomically(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert listed(tmp_path) == ["result.json"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "no space left"), (errno.EROFS, "read-only"), (errno.EIO, "storage failed")]
)
def test_a_failed_write_leaves_the_old_file_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: Any, number: int, words: str
) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old")

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(RunError, match=f"{tmp_path}: .*{words}"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert listed(tmp_path) == ["result.json"]


def test_the_content_is_on_the_disk_before_it_bears_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(("fsync", os.fstat(fd))), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *names: (events.append(("replace", None)), replace(*names)))  # type: ignore[arg-type]
    write_atomically(tmp_path / "a", "content")
    assert [name for name, _ in events] == ["fsync", "replace", "fsync"]
    assert events[0][1].st_ino == (tmp_path / "a").stat().st_ino
    assert events[0][1].st_size == len("content")
    assert events[2][1].st_ino == tmp_path.stat().st_ino


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{tmp_path}/gone: cannot write a .*does not exist"):
        write_atomically(tmp_path / "gone" / "a", "content")


def test_only_errors_of_the_system_are_explained() -> None:
    with pytest.raises(KeyError), explained(Path("x"), "try"):
        raise KeyError


def test_leftovers_are_swept_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "kept", "")
    (tmp_path / ".tmp-file").write_text("half")
    (tmp_path / ".tmp-folder").mkdir()
    (tmp_path / ".tmp-folder" / "half").write_text("half")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".tmp-link").symlink_to(tmp_path / "elsewhere")
    sweep(tmp_path)
    assert listed(tmp_path) == ["elsewhere", "kept"]


def test_json_is_read_back_and_keys_are_sorted(tmp_path: Path) -> None:
    value = {"b": [1, 0.1, 1e-300, True, None, "é"], "a": {"x": -0.0}}
    files.write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    text = (tmp_path / "a.json").read_text()
    assert text.index('"a"') < text.index('"b"')


def test_what_json_lacks_is_null(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"loss": float("nan"), "all": (float("inf"), {"x": float("-inf")}, 1.0)})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"loss": None, "all": [None, {"x": None}, 1.0]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x" * 101, "larger than 100 bytes"),
        (b"{", "not readable as JSON"),
        (b"\xff\xfe\xfa", "not readable as JSON"),
        (b"", "not readable as JSON"),
    ],
)
def test_a_bad_json_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(RunError, match=f"{path} is {words}"):
        read_json(path, max_bytes=100)


def test_a_small_file_takes_little_memory_whatever_its_limit_is(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    tracemalloc.start()
    try:
        assert read_json(tmp_path / "a.json", max_bytes=2**26) == []
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_nesting_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"[" * 500_000)
    with pytest.raises(RunError, match="not readable as JSON"):
        read_json(path)


def irregular(folder: Path) -> Any:
    """One of every kind that is neither a regular file nor a folder, by what it is called; devices by links to them."""
    (folder / "target").write_text("{}")
    (folder / "link").symlink_to("target")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "zeros").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    return {
        **dict.fromkeys(("link", "dangling", "loop", "zeros"), "a symbolic link"),
        "pipe": "a named pipe",
        "folder": "a folder",
        "socket": "a socket",
    }


READ, APPEND, WRITE = os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@pytest.mark.promise("hostile-folder")
@pytest.mark.parametrize("flags", [READ, APPEND, WRITE])
def test_only_regular_files_are_opened(tmp_path: Path, flags: Any) -> None:
    for name, kind in irregular(tmp_path).items():
        with pytest.raises(RunError, match=f"^{tmp_path}/{name} is {kind}, not a regular file; .* move it away"):
            open_regular(tmp_path / name, flags)
    with pytest.raises(RunError, match=r"^/dev/zero is a device, not a regular file"):
        open_regular("/dev/zero", flags)
    assert (tmp_path / "target").read_text() == "{}"
    assert not (tmp_path / "nowhere").exists()


def test_what_takes_a_files_place_while_it_is_opened_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the first look saw: the open itself follows no link and waits for no pipe."""
    kinds = irregular(tmp_path)
    monkeypatch.setattr(files, "refuse_unless", lambda *_, **__: None)
    for name in kinds:
        with pytest.raises((RunError, OSError)):
            open_regular(tmp_path / name, READ)
    with pytest.raises(RunError, match="pipe is a named pipe"):
        open_regular(tmp_path / "pipe", READ)
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(tmp_path / "link", APPEND)


def test_links_that_a_user_named_are_followed_to_regular_files_alone(tmp_path: Path) -> None:
    irregular(tmp_path)
    assert read_json(tmp_path / "link", follow_links=True) == {}
    for name, kind in {"zeros": "a device", "pipe": "a named pipe"}.items():
        with pytest.raises(RunError, match=f"{name} is {kind}, not a regular file"):
            read_json(tmp_path / name, follow_links=True)


def test_a_planted_temporary_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f".tmp-result.json-{os.getpid()}").symlink_to("victim")
    with pytest.raises(RunError, match=r"\.tmp-result\.json-\d+ is a symbolic link"):
        write_atomically(tmp_path / "result.json", "new")
    assert (tmp_path / "victim").read_text() == "precious"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match="pipe is a named pipe, not a regular file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(RunError, match=r"cannot read missing\.json"):
        read_json(tmp_path / "missing.json")


def test_space_is_checked_with_what_is_needed_and_free(tmp_path: Path) -> None:
    require_space(tmp_path, 1)
    with pytest.raises(RunError, match=rf"{tmp_path}: no space left: 1,000,000,000,000\.0 MB are needed.*MB are free"):
        require_space(tmp_path, 10**18)


def test_a_second_process_is_told_who_writes(tmp_path: Path) -> None:
    holder, _ = hold(tmp_path)
    try:
        with pytest.raises(RunError, match=rf"{tmp_path}: another process \(pid {holder.pid}\)"), lock_run(tmp_path):
            pytest.fail("two writers")
    finally:
        end(holder)
    with lock_run(tmp_path):  # released by the kernel: the holder was killed
        assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"


def test_a_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    holder, lines = hold(tmp_path, "fork")
    worker = int(lines[0].removeprefix("worker "))
    end(holder)
    try:
        os.kill(worker, 0)
        with lock_run(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_the_lock_holds_within_a_process_and_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_run(tmp_path), pytest.raises(RunError, match=f"pid {os.getpid()}"), lock_run(tmp_path):
            pytest.fail("two writers")


def test_a_run_that_is_not_there_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot lock the run"), lock_run(tmp_path / "gone"):
        pytest.fail("locked nothing")
