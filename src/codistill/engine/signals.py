"""Signals of the system, handled for a while."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Handler) -> Iterator[None]:
    """Inside, ``handler`` hears these signals; afterwards whoever heard them before does.

    Only the main thread may set handlers: in another, as in a notebook's, signals stay whose they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
