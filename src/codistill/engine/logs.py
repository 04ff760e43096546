"""What the package says while it works: everything goes to one logger, and whoever wants to hear adds a handler."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("codistill")


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """For a while, what is said from INFO upwards reaches the handler too."""
    level = log.level
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()


def file_handler(file: Path) -> logging.Handler:
    """Plain lines with their time."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handler
