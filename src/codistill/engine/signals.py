"""How whoever trains hears that it shall stop: the system's signals, handled for a while."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Self

# Ctrl-C; `kill` and most schedulers; what Slurm is usually told to send before the time is up; a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Inside, ``handler`` hears the signals that ask to stop; afterwards whoever heard them before does.

    Those that are ignored stay so: ``nohup`` and a script's ``&`` have had their reasons. Only the main thread may set
    handlers: in another, as in a notebook's, signals stay whose they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class StoppedEarlyError(KeyboardInterrupt):
    """A stop that came when there was nothing to save yet."""


class StopRequest:
    """``with StopRequest() as stop:`` the first signal makes ``stop()`` true, and the second ends the command at once.

    The first only sets a flag: it may interrupt anything, printing and saving included. But until somebody has asked
    for the first time nothing has been learned, and reading data or compiling may take minutes: it ends that at once.
    """

    def __init__(self) -> None:
        self.is_heard = False
        self._is_asked = False
        self._listening = ExitStack()

    def __call__(self) -> bool:
        self._is_asked = True
        return self.is_heard

    def __enter__(self) -> Self:
        self._listening.enter_context(handled(self._hear))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.close()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.is_heard:
            raise KeyboardInterrupt
        self.is_heard = True
        if not self._is_asked:
            raise StoppedEarlyError
