"""How a training hears that it shall stop."""

import signal
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Self

from codistill.engine.signals import handled

# Ctrl-C; `kill` and most schedulers; what Slurm is usually told to send before the time is up; a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequest:
    """``with StopRequest() as stop:`` the first signal makes ``stop()`` true, and the second ends the command at once.

    The handler only sets a flag: it may interrupt anything, printing and saving included.
    """

    def __init__(self) -> None:
        self._heard = False
        self._listening = ExitStack()

    def __call__(self) -> bool:
        return self._heard

    def __enter__(self) -> Self:
        self._listening.enter_context(handled(SIGNALS, self._hear))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.close()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True
        for each in SIGNALS:
            signal.signal(each, signal.default_int_handler)
