"""What asks a training to stop while it runs: signals, and the end of the process that started it."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Self

# Ctrl-C; `kill` and most schedulers; the usual choice for Slurm to send before the time limit; a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], None]

LAUNCHER = "CODISTILL_LAUNCHER"
"""Holds the process ID of the ``codistill study`` or ``codistill train --nproc`` that started this process."""


def launched_by_this_process() -> dict[str, str]:
    """Return the environment of a training that stops when this process has died, even by SIGKILL."""
    return {**os.environ, LAUNCHER: str(os.getpid())}


def is_orphaned() -> bool:
    """Whether the process that started this one, and would have passed on a signal, has died."""
    launcher = os.environ.get(LAUNCHER)
    return launcher is not None and launcher != str(os.getppid())


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Install ``handler`` for the signals that ask to stop, and restore the earlier handlers afterwards.

    Ignored signals stay ignored, as ``nohup`` and a script's ``&`` set them. Only the main thread may set handlers: in
    another thread, such as a notebook's, nothing is installed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class StoppedEarlyError(KeyboardInterrupt):
    """A stop was requested before there was anything to save."""


class StopRequest:
    """``with StopRequest() as stop:`` the first signal makes ``stop()`` true, and the second ends the command at once.

    It is true for an orphan as well, which no signal would reach. The first signal only sets a flag, because it
    may interrupt anything, printing and saving included. But before the first call of ``stop()`` nothing has been
    trained, and reading data or compiling may take minutes: there it raises StoppedEarlyError at once.
    """

    def __init__(self) -> None:
        self.is_heard = False
        self._is_asked = False
        self._listening = ExitStack()

    def __call__(self) -> bool:
        self._is_asked = True
        return self.is_heard or is_orphaned()

    def __enter__(self) -> Self:
        self._listening.enter_context(handled(self._hear))
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.close()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.is_heard:
            raise KeyboardInterrupt
        self.is_heard = True
        if not self._is_asked:
            raise StoppedEarlyError
