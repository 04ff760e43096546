"""Names of other libraries' networks: ``timm:MODEL[.TAG][:key=value,…][@path,…|@final]``. Imports no torch, no library.

A recipe is read, checked and drawn on machines without the library; whether the model and its modules exist is checked
when it is built. So exits are named by their C-number (``c2``, ``c3``), which every network has, and not by module
paths, which only the library knows.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from codistill.errors import unknown

# The settings that a name may have, all numbers. None of them loads a file, fetches weights or names code.
OPTIONS = {
    "timm": ("img_size", "patch_size", "window_size", "drop_rate", "drop_path_rate"),
    "torchvision": ("image_size", "dropout", "stochastic_depth_prob"),
}
LIBRARIES = tuple(OPTIONS)
SIZES = {"timm": "img_size", "torchvision": "image_size"}
MAX_SIDE, MAX_EXITS = 4096, 8
NO_HEADS = "final"
"""Behind @, instead of modules: only the network's own classifier, no heads."""
USUAL_EXITS = 3  # beside "final"; building a network with fewer stages raises an error

_MODEL = re.compile("[a-z0-9_]{1,80}")
_TAG = re.compile("[A-Za-z0-9_]{1,80}")
_PATH = re.compile(r"\w+(\.\w+)*", re.ASCII)
_INTEGER, _SHARE = re.compile("[1-9][0-9]{0,3}"), re.compile(r"0(\.[0-9]{1,4})?")


@dataclass(frozen=True)
class LibraryName:
    """A parsed name."""

    library: str
    model: str
    options: Mapping[str, int | float]
    paths: tuple[str, ...] | None
    """The modules whose outputs are the exits, in any order; None for the ends of the stages, () for no heads."""
    tag: str = ""
    """The library's pretrained weights that a training begins from; empty for none."""

    @property
    def exits(self) -> dict[str, int]:
        """C-numbers by exit name, C2 first."""
        return c_numbers(USUAL_EXITS if self.paths is None else len(self.paths))


def c_numbers(exits: int) -> dict[str, int]:
    """C-numbers of ``exits`` exits by name, C2 first."""
    return {f"c{number}": number for number in range(2, exits + 2)}


def is_library_name(name: str) -> bool:
    """Whether ``name`` is in timm's or torchvision's namespace."""
    return name.partition(":")[0] in LIBRARIES


def is_tagged(name: str) -> bool:
    """Whether ``name`` has the tag of pretrained weights, as in ``timm:resnet18.a1_in1k``."""
    return is_library_name(name) and bool(parse_library_name(name).tag)


def parse_library_name(name: str) -> LibraryName:
    """Parses a name that ``is_library_name``, or raises an error that says what to type instead."""
    described, at, modules = name.partition("@")
    library, _, rest = described.partition(":")
    model, colon, settings = rest.partition(":")
    model, dot, tag = model.partition(".")
    if not _MODEL.fullmatch(model):
        raise ValueError(f"{name}: write {library}:MODEL in small letters, digits and _, as in {library}:resnet18")
    if dot and not _TAG.fullmatch(tag):
        example = "timm:resnet18.a1_in1k" if library == "timm" else "torchvision:resnet18.IMAGENET1K_V1"
        raise ValueError(f"{name}: after the dot comes the tag of pretrained weights, as in {example}")
    options = _options(name, library, settings) if colon else {}
    return LibraryName(library, model, options, parse_paths(name, modules) if at else None, tag)


def _options(name: str, library: str, settings: str) -> dict[str, int | float]:
    options: dict[str, int | float] = {}
    for setting in settings.split(","):
        key, _, value = setting.partition("=")
        if key not in OPTIONS[library]:
            raise unknown(f"setting in {name}:", key, OPTIONS[library])
        if key in options:
            raise ValueError(f"{name}: {key} is given twice; give it once")
        options[key] = _number(name, key, value)
    return options


def _number(name: str, key: str, text: str) -> int | float:
    if key.endswith("size"):
        if _INTEGER.fullmatch(text) and int(text) <= MAX_SIDE:
            return int(text)
        raise ValueError(f"{name}: {key} is a whole number from 1 to {MAX_SIDE}, not {text!r}")
    if _SHARE.fullmatch(text):
        return float(text)
    raise ValueError(f"{name}: {key} is a number from 0 up and below 1, as in {key}=0.1, not {text!r}")


def parse_paths(name: str, modules: str) -> tuple[str, ...]:
    """The modules behind the @ of a name."""
    if modules == NO_HEADS:
        return ()
    paths = tuple(modules.split(","))
    for path in paths:
        if not _PATH.fullmatch(path):
            raise ValueError(f"{name}: after @ come the modules whose outputs get heads, as in @layer2,layer3")
        if paths.count(path) > 1:
            raise ValueError(f"{name}: the exit {path!r} is named twice; name it once")
    if len(paths) > MAX_EXITS:
        raise ValueError(f"{name}: {len(paths)} exits; at most {MAX_EXITS}")
    return paths
