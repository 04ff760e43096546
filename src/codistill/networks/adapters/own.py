"""Names of modules of the user's own: ``own[@path,…]``, in a run ``own:package.Class:FINGERPRINT[@path,…]``.

A file never contains or imports such a module: it is passed from Python, and a name says whether it is the right one.
Imports no torch.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from codistill.networks.adapters.naming import USUAL_EXITS, c_numbers, parse_paths

if TYPE_CHECKING:
    from codistill.networks.adapters.architecture import OwnArchitecture

OWN = "own"
_DESCRIBED = re.compile(r"own(:[\w.]{1,200}:[0-9a-f]{10})?", re.ASCII)
_given: ContextVar[Mapping[str, "OwnArchitecture"]] = ContextVar("own networks", default=MappingProxyType({}))
"""By name without paths: the modules that were passed to the function that runs now."""


@dataclass(frozen=True)
class OwnName:
    """A parsed name."""

    described: str
    """``own:package.Class:FINGERPRINT``: its class, and a hash of the names and shapes of its tensors; or ``own``."""
    paths: tuple[str, ...] | None
    """The modules whose outputs are the exits; None if the module is to show them."""

    @property
    def exits(self) -> dict[str, int]:
        """C-numbers by exit name, C2 first."""
        return c_numbers(USUAL_EXITS if self.paths is None else len(self.paths))


def is_own_name(name: str) -> bool:
    """Whether ``name`` stands for a module of the user's own."""
    return name.partition("@")[0].partition(":")[0] == OWN


def parse_own_name(name: str) -> OwnName:
    """Parses a name that ``is_own_name``, or raises an error that says what to type instead."""
    described, at, modules = name.partition("@")
    if not _DESCRIBED.fullmatch(described):
        raise ValueError(f"{name}: write own, or own@block1,block2 to name the modules whose outputs get heads")
    return OwnName(described, parse_paths(name, modules) if at else None if described == OWN else ())


@contextmanager
def given(architectures: Iterable["OwnArchitecture"]) -> Iterator[None]:
    """Inside, the names of these modules stand for them."""
    token = _given.set({one.described: one for one in architectures})
    try:
        yield
    finally:
        _given.reset(token)


def is_missing(name: str) -> bool:
    """Whether ``name`` is that of a module of the user's own, and it was not passed."""
    return is_own_name(name) and parse_own_name(name).described not in _given.get()


def find_given(name: str) -> "OwnArchitecture":
    """The module that was passed under a name; raises ValueError if none was."""
    if is_missing(name):
        other = "".join(f"; the module passed is {described}" for described in _given.get())
        raise ValueError(missing(name, "networks={NAME: module}, or use an onnx export", other))
    parsed = parse_own_name(name)
    return replace(_given.get()[parsed.described], paths=parsed.paths)


def missing(name: str, call: str, other: str = "") -> str:
    """What to do about a module that was not passed."""
    return f"{name} is a module of your own, which no file contains{other}; pass it from Python: {call}"
