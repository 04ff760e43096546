"""The package's one logger, ``codistill``, to which commands and runs attach handlers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
