"""Runs a function in a fork that may not execute a file's content, hang, take much memory or write where it likes.

What Python reports to audit hooks is judged: PEP 578 says that a hook cannot be removed, so each fork has its own.
"""

import faulthandler
import json
import os
import resource
import signal
import site
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import codistill

MEMORY_BYTES = 300 * 2**20
CPU_S = 10
WAITED_S = 10
"""The longest time in which its main thread may neither compute nor wait for a core, where the kernel counts that."""
BLOCKED_S = 120
"""Ends a process that waits and takes no CPU time. Generous, because other processes may have all cores."""
INSTALLED = tuple(
    {
        os.path.realpath(str(place))
        for place in (
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            Path(codistill.__file__).parent,
            Path(__file__).parents[1],
        )
    }
)
CODE = (".py", ".pyc", ".pyd", ".so", ".dylib", ".dll", ".pth")
# They execute text that they have made from classes and graphs: methods, annotations, traced code.
GENERATORS: tuple[str, ...] = (
    *("/dataclasses.py", "/collections/__init__.py", "/typing.py"),
    *("/torch/fx/graph_module.py", "/torch/fx/experimental/proxy_tensor.py"),
)
PROGRAMS = (("git", "-c", "core.fsmonitor=false"), (sys.executable, "-P", "-m", "codistill.data.decoder"))
"""Commands that codistill itself runs; no file can change these words."""
STARTS = (
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"),
    *("os.fork", "os.forkpty", "pty.spawn", "webbrowser.open"),
)
FOREIGN = ("ctypes.dlopen", "ctypes.cdata", "marshal.load", "pickle.find_class", "code.__new__")
CHANGES = (
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate"),
    *("os.link", "os.symlink", "os.chmod", "os.chown"),
)
BELOW_DESCRIPTOR = ("os.remove", "os.rename", "os.rmdir", "os.mkdir")
"""Events whose last argument is the descriptor of the folder that a path is below, or -1."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Forbidden(BaseException):
    """Stops what would have happened; not an Exception, so that no handler takes it for a damaged file."""


@dataclass
class Guard:
    """An audit hook. ``writable`` are the folders in which files may change; ``talks`` allows sockets on loopback."""

    writable: tuple[str, ...]
    talks: bool = False
    seen: list[str] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        try:
            complaint = self.judge(event, arguments)
        except Exception as error:  # a hook that fails silently would allow everything
            complaint = f"cannot be judged: {error!r}"
        if complaint:
            self.seen.append(f"{event}: {complaint}")
            raise Forbidden(self.seen[-1])

    def judge(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        """Return what is wrong with an event, or None."""
        match event, arguments:
            case "open", (path, mode, flags):
                return self._open(path, mode, flags)
            case "import", (name, str(file), *_) if not is_installed(file):
                return f"{name} from {file}"
            case "exec", (CodeType() as code,) if not is_own(code.co_filename):
                return f"{code.co_name} of {code.co_filename}, from {cause()}"
            case "compile", (_, str(file)) if not file.startswith("<") and not is_installed(file):
                return file
            case "subprocess.Popen", (_, command, *_) if any(tuple(command)[: len(own)] == own for own in PROGRAMS):
                return None
            case "os.posix_spawn" | "os.fork", _:  # of the program above
                return None if event_in("subprocess.py") else str(arguments)
            case "socket.connect" | "socket.bind", (_, address):
                return None if self.talks and address[0] == "127.0.0.1" else str(address)
            case "socket.getaddrinfo", (host, *_):
                return None if self.talks and host == "127.0.0.1" else str(host)
        if event in STARTS or event in FOREIGN:
            return str(arguments)
        if event in CHANGES:
            paths = arguments[:2] if event in ("os.rename", "os.link", "os.symlink") else arguments[:1]
            folder = arguments[-1] if event in BELOW_DESCRIPTOR and arguments[-1] >= 0 else None
            return next((f"{path!r}" for path in paths if not self._is_writable(path, folder)), None)
        return None

    def _open(self, path: object, mode: object, flags: int) -> str | None:
        if isinstance(path, int):  # opened before
            return None
        name = os.fsdecode(path)  # type: ignore[arg-type]
        if flags & WRITES and name != os.devnull and not self._is_writable(os.path.realpath(name)):
            return f"{name} for writing ({mode}, {flags:#x})"
        if name.endswith(CODE) and not is_installed(name):
            return f"{name}, which is code"
        return None

    def _is_writable(self, path: object, folder: int | None = None) -> bool:
        """Whether the entry of this name is below a writable folder; the entry itself may be a link."""
        if isinstance(path, int):  # opened before
            return True
        name = os.fsdecode(path)  # type: ignore[arg-type]
        place = Path(name) if folder is None else Path(f"/proc/self/fd/{folder}", name)
        return is_below(str(Path(os.path.realpath(place.parent), place.name)), self.writable)


def is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def is_installed(file: str) -> bool:
    return is_below(os.path.realpath(file), INSTALLED)


def cause() -> str:
    """Return the file of the function that has caused the event."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_filename


def event_in(file: str) -> bool:
    """Whether a function of this file of the installation has caused the event."""
    return cause().endswith(file) and is_installed(cause())


def is_own(file: str) -> bool:
    """Whether code is from the installation: a file of it, or text that one of its generators has made."""
    if file.startswith("<frozen "):
        return True
    if file.startswith("<"):
        return any(event_in(generator) for generator in GENERATORS)
    return is_installed(file)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def waited_s() -> float:
    """Seconds in which this thread has neither computed nor waited for a core, from an arbitrary beginning."""
    try:
        computed_ns, queued_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    except (OSError, ValueError):
        return 0.0
    return time.monotonic() - (computed_ns + queued_ns) / 1e9


def guarded(attempt: Callable[[], str | None], writable: Iterable[Path], *, talks: bool = False) -> str | None:
    """Run ``attempt`` in a fork; return its complaint, the guard's, or how the fork ended; None if all is well."""
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as stacks:
        pid = os.fork()
        if not pid:
            try:
                places = tuple(os.path.realpath(place) for place in writable)
                _attempt(attempt, Guard(places, talks), answer.fileno(), stacks.fileno())
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        answer.seek(0)
        stacks.seek(0)
        content, stack = answer.read().decode(), stacks.read().decode(errors="replace")
    if not content:
        how = f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"ended ({status})"
        return f"{how}, after {CPU_S} s of CPU time or {BLOCKED_S} s at most:\n{stack}"
    complaint: str | None = json.loads(content)
    return complaint


def _attempt(attempt: Callable[[], str | None], guard: Guard, answer: int, stacks: int) -> None:
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(BLOCKED_S, exit=True, file=stacks)
    faulthandler.register(signal.SIGPROF, file=stacks, chain=True)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    sys.dont_write_bytecode = True
    tempfile.tempdir = guard.writable[0] if guard.writable else "/nowhere"
    before, began_s = peak_bytes(), waited_s()
    sys.addaudithook(guard)
    try:
        complaint = attempt()
    except Forbidden:
        complaint = None
    grown, waited = peak_bytes() - before, waited_s() - began_s
    if guard.seen:
        complaint = "; ".join(guard.seen)
    elif grown > MEMORY_BYTES:
        complaint = complaint or f"took {grown / 2**20:.0f} MiB of memory"
    elif waited > WAITED_S:
        complaint = complaint or f"waited for {waited:.1f} s"
    signal.setitimer(signal.ITIMER_PROF, 0)
    os.write(answer, json.dumps(complaint).encode())
