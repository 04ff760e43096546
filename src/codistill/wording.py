"""The wording of errors: the offender, what is allowed, and what to type. Imports neither codistill nor torch."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """``"; did you mean 'dcm'?"`` if an allowed name is close to ``name``, else an empty string."""
    close = get_close_matches(name.lower(), list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def install_hint(extra: str) -> str:
    """The command that installs an extra. codistill is installed from a clone: it is not on PyPI.

    >>> install_hint("zoo")
    "in the clone of codistill, type: pip install '.[zoo]'"
    """
    return f"in the clone of codistill, type: pip install '.[{extra}]'"


def unknown(kind: str, name: str, allowed: Iterable[str]) -> ValueError:
    """The error for a name that is not one of the allowed ones.

    >>> str(unknown("method", "dcmm", ["dml", "dcm"]))
    "unknown method 'dcmm'; did you mean 'dcm'? Allowed: dml, dcm"
    """
    choices = list(allowed)
    hint = did_you_mean(name, choices)
    return ValueError(f"unknown {kind} {name!r}{hint or ';'} Allowed: {', '.join(choices) or 'none'}")
