"""What the package says while it works: everything goes to one logger, and whoever wants to hear adds a handler."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from codistill.engine.files import open_regular

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


class RegularFileHandler(logging.FileHandler):
    """Appends to a regular file, or to none."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=open_regular)


def file_handler(file: Path) -> logging.Handler:
    """Plain lines with their time."""
    handler = RegularFileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handler
