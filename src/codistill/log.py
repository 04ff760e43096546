"""The package's one logger, ``codistill``, and the handlers that commands and runs attach to it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("codistill")


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Attach the handler, from INFO upwards, while the block runs."""
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
    """A handler that writes plain lines with their time."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handler
