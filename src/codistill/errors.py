"""Exit codes, the error of a run, and the wording of messages: the offender, what is allowed, and what to type.

A leaf: imports no other part of codistill, and no torch.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ends; docs/cli.md has the same table."""

    DONE = 0
    FAILED = 1
    """A part failed and the rest went on: a run of a study, an image of ``predict``, a peer of a process."""
    WRONG_INPUT = 2
    """Also when something essential is missing; the same command would fail again."""
    STOPPED = 75
    """Stopped by a signal and saved (EX_TEMPFAIL); the same command continues."""
    INTERRUPTED = 130
    """Ended by SIGINT, as shells count it; click and Python set it."""


class RunError(ValueError):
    """The run cannot continue, and the recipe is not the cause; everything saved before is intact."""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return ``"; did you mean 'dcm'?"`` if an allowed name is close to ``name``, otherwise an empty string."""
    close = get_close_matches(name.lower(), list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def install_hint(extra: str) -> str:
    """Tell how to install an extra. codistill is installed from a clone: it is not on PyPI.

    >>> install_hint("zoo")
    "in the clone of codistill, type: pip install '.[zoo]'"
    """
    return f"in the clone of codistill, type: pip install '.[{extra}]'"


SAME_BUILD = "install torch and torchvision of the same build, as in: pip install --force-reinstall torch torchvision"


def unknown(kind: str, name: str, allowed: Iterable[str]) -> ValueError:
    """Return the error for a name that is not one of the allowed ones.

    >>> str(unknown("method", "dcmm", ["dml", "dcm"]))
    "unknown method 'dcmm'; did you mean 'dcm'? Allowed: dml, dcm"
    """
    choices = list(allowed)
    hint = did_you_mean(name, choices)
    return ValueError(f"unknown {kind} {name!r}{hint or ';'} Allowed: {', '.join(choices) or 'none'}")


def printable(text: str) -> str:
    """Return the text with control characters replaced, which a terminal would obey; line breaks are kept.

    >>> printable("cat\\x1b[2J")
    'cat\ufffd[2J'
    """
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def number(value: float | None, digits: int) -> str:
    """Format a measured number, or a dash if it is missing or was not finite.

    >>> number(28.274, 2), number(None, 2)
    ('28.27', '–')
    """
    return "–" if value is None else f"{value:.{digits}f}"
