"""CIFAR's pickles read as data: nothing that a file names is ever imported or called.

The official files mention three numpy names. Each is replaced by an inert stand-in that only keeps what it is given, so
not even numpy's own code runs on a stranger's bytes; any other name ends the reading.
"""

import pickle
import pickletools
from pathlib import Path
from typing import Any, BinaryIO

ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),  # the same, as numpy 2 writes it
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
# The official files memoise about two objects an image. Unpicklers allocate by the largest memo number they are told.
MEMO_LIMIT = 1_000_000


class Inert:
    """Stands for a numpy name, for what calling it would have made, and for what that would have become."""

    state: Any = None

    def __call__(self, *arguments: Any) -> "Inert":
        return Inert()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which CIFAR files never do")
        return Inert()


def read_pickle(path: Path, size_limit: int) -> dict[str, Any]:
    """The dictionary in ``path``, its arrays as raw bytes; text that Python 2 wrote arrives as bytes."""
    size = path.stat().st_size
    if size > size_limit:
        raise ValueError(f"{path}: {size} bytes are more than the {size_limit} that a CIFAR file can have")
    try:
        with path.open("rb") as file:
            _check_memo(file)
            file.seek(0)
            content = _DataUnpickler(file, encoding="bytes").load()
    except OSError:
        raise
    # Damaged pickles raise nearly anything: EOFError, KeyError, TypeError, MemoryError, …
    except Exception as error:
        raise ValueError(f"{path}: refused, not an official CIFAR file: {error or type(error).__name__}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not an official CIFAR file: it holds a {type(content).__name__}, not a dictionary")
    return {key.decode("ascii", "replace") if isinstance(key, bytes) else str(key): content[key] for key in content}


def _check_memo(file: BinaryIO) -> None:
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > MEMO_LIMIT:
            raise pickle.UnpicklingError(f"it asks for {argument} memo entries")
