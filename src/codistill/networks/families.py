"""The families of networks, one row each, and what a network's name means. Imports no torch.

A new family is one file with its architecture and one row of ``FAMILIES``.
"""

import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from codistill.errors import did_you_mean, install_hint, unknown
from codistill.networks.adapters.naming import is_library_name, parse_library_name
from codistill.networks.adapters.own import OWN, find_given, is_own_name, parse_own_name

if TYPE_CHECKING:
    from codistill.networks.backbone import Architecture

# Upper bounds on what a name may ask for, beyond what papers train: even without memory, each layer takes time.
DEEPEST = {"resnet": 1202, "wrn": 202, "densenet": 400}
LIMITS = {"width": 64, "growth": 256}

# Exits by their C-number, counted from the output: C1 is the network's own classifier, "final".
CIFAR_EXITS = {"stage2": 2, "stage1": 3}
IMAGENET_EXITS = {"stage3": 2, "stage2": 3}


@dataclass(frozen=True)
class Family:
    """One row: how names are written, and which architecture they stand for.

    Families may share a pattern; then the depth decides between them.
    """

    pattern: str
    """``wrn-DEPTH-WIDTH``: words in capitals stand for the options, in their order."""
    help: str
    architecture: str
    """``module:Class`` of the ``Architecture``, which takes the options by name."""
    exits: Mapping[str, int]
    """C-numbers by exit; those of other libraries' networks depend on the name."""
    paper: str = ""
    """How the paper writes the first word of the pattern."""
    options: tuple[str, ...] = ()
    depths: Sequence[int] = ()
    """The depths that fit, in ascending order."""
    examples: tuple[str, ...] = ()
    """The networks that the paper uses, and small ones for tests."""

    def load(self) -> "type[Architecture]":
        """Imports and returns the architecture; this is where torch is imported."""
        module, _, name = self.architecture.partition(":")
        family: type[Architecture] = getattr(import_module(module), name)
        return family

    def option_texts(self, name: str) -> dict[str, str] | None:
        """The options in ``name`` as text, or None if the name is not written like the pattern."""
        match = re.fullmatch(re.sub("[A-Z]+", "([^-]*)", self.pattern), name)
        return dict(zip(self.options, match.groups(), strict=True)) if match else None


FAMILIES = (
    Family(
        "resnet-DEPTH",
        "CIFAR ResNet of basic blocks, depth 6n+2 below 164 (8, 14, … 110)",
        "codistill.networks.resnet:CifarResNet",
        CIFAR_EXITS,
        paper="ResNet",
        options=("depth",),
        depths=[depth for depth in range(8, 164, 6) if depth != 50],  # ResNet-50 is the name of ImageNet's network
        examples=("resnet-20", "resnet-110"),
    ),
    Family(
        "resnet-DEPTH",
        "of pre-activation bottlenecks, 9n+2 from 164 on (164, … 1001)",
        "codistill.networks.resnet:PreActivationResNet",
        CIFAR_EXITS,
        paper="ResNet",
        options=("depth",),
        depths=range(164, DEEPEST["resnet"] + 1, 9),
        examples=("resnet-164",),
    ),
    Family(
        "resnet-DEPTH",
        "resnet-18 and resnet-50 are ImageNet's",
        "codistill.networks.resnet:ImageNetResNet",
        IMAGENET_EXITS,
        paper="ResNet",
        options=("depth",),
        depths=(18, 50),
        examples=("resnet-18", "resnet-50"),
    ),
    Family(
        "wrn-DEPTH-WIDTH",
        "wide ResNet for CIFAR, depth 6n+4 (10, 16, … 28, 40)",
        "codistill.networks.resnet:WideResNet",
        {**CIFAR_EXITS, "stem": 4},
        paper="WRN",
        options=("depth", "width"),
        depths=range(10, DEEPEST["wrn"] + 1, 6),
        examples=("wrn-16-2", "wrn-28-4", "wrn-28-10"),
    ),
    Family(
        "wrn-DEPTH-WIDTH-dropout-P",
        "wide ResNet, depth 6n+4, with dropout inside every block; the paper's WRN-28-10(+) has 0.3",
        "codistill.networks.resnet:WideResNet",
        {**CIFAR_EXITS, "stem": 4},
        paper="WRN",
        options=("depth", "width", "dropout"),
        depths=range(10, DEEPEST["wrn"] + 1, 6),
        examples=("wrn-28-10-dropout-0.3",),
    ),
    Family(
        "densenet-DEPTH-GROWTH",
        "DenseNet for CIFAR, without bottlenecks, depth 3n+4 (10, 40, 100)",
        "codistill.networks.densenet:DenseNet",
        CIFAR_EXITS,
        paper="DenseNet",
        options=("depth", "growth"),
        depths=range(7, DEEPEST["densenet"] + 1, 3),
        examples=("densenet-40-12",),
    ),
    Family(
        "mobilenet",
        "MobileNet in the paper's CIFAR form",
        "codistill.networks.mobilenet:MobileNet",
        CIFAR_EXITS,
        paper="MobileNet",
        examples=("mobilenet",),
    ),
    Family(
        "mobilenetv2",
        "MobileNetV2 for ImageNet",
        "codistill.networks.mobilenet:MobileNetV2",
        IMAGENET_EXITS,
        paper="MobileNetV2",
        examples=("mobilenetv2",),
    ),
    Family(
        "timm:MODEL",
        f"any classifier of timm ({install_hint('zoo')}), as in timm:resnet18, timm:vit_tiny_patch16_224:img_size=32, "
        "timm:resnet18@layer2,layer3",
        "codistill.networks.adapters.architecture:LibraryArchitecture",
        {},
    ),
    Family(
        "torchvision:MODEL",
        "any classifier of torchvision, as in torchvision:resnet50",
        "codistill.networks.adapters.architecture:LibraryArchitecture",
        {},
    ),
    Family(
        OWN,
        "a module of your own, from Python: train(recipe, out, networks={'c': module})",
        "codistill.networks.adapters.architecture:OwnArchitecture",
        {},
    ),
)

IN_AUTHORS_CODE = ("WRN", "MobileNet")
"""The families of the authors' scripts, as the paper writes them: of others they have no initial weights."""

EXAMPLES = tuple(example for family in FAMILIES for example in family.examples)

BACKBONE = "backbone"
"""What ``freeze.a=backbone`` freezes: all of a network but its classifier."""

RESERVED = ("labels",)
"""Names that a network in a cohort cannot have, besides the attributes of torch's ModuleDict: labels are a source."""


@dataclass(frozen=True)
class NetworkName:
    """A parsed name: its family, the options for the family's architecture, and the exits by C-number."""

    name: str
    family: Family
    options: Mapping[str, object]
    exits: Mapping[str, int]

    @property
    def default_exits(self) -> tuple[str, ...]:
        """The paper's two, or all that the name itself lists."""
        return tuple(self.exits) if self.options.get("paths") else default_exits(self.exits)

    def outline(self, exits: Iterable[str] | None = None) -> dict[str, int]:
        """C-numbers of the classifiers at ``exits`` (None: the default ones), the network's own first."""
        return outline(self.name, self.exits, self.default_exits if exits is None else exits)


def architecture(name: str) -> "Architecture":
    """The architecture that ``name`` stands for: ``architecture("wrn-28-4").backbone(num_classes=100)``."""
    if is_own_name(name):
        return find_given(name)
    network = parse(name)
    options: dict[str, Any] = dict(network.options)
    return network.family.load()(**options)


def parse(name: str) -> NetworkName:
    """Parses ``name``, or raises an error that says what is wrong with it and what to type instead."""
    if is_library_name(name):
        parsed = parse_library_name(name)
        family = next(family for family in FAMILIES if family.pattern.startswith(f"{parsed.library}:"))
        return NetworkName(name, family, vars(parsed), parsed.exits)
    if is_own_name(name):
        own = parse_own_name(name)
        return NetworkName(name, next(family for family in FAMILIES if family.pattern == OWN), vars(own), own.exits)
    matches = [(family, texts) for family in FAMILIES if (texts := family.option_texts(name)) is not None]
    if not matches:
        patterns = ", ".join(describe_families())
        hint = did_you_mean(name, EXAMPLES) or ";"
        raise ValueError(f"unknown network {name!r}{hint} Allowed: {patterns}, as in {', '.join(EXAMPLES)}")
    for family, texts in matches:
        options = {option: _value(name, option, text) for option, text in texts.items()}
        if "depth" not in options or options["depth"] in family.depths:
            return NetworkName(name, family, options, family.exits)
    raise _wrong_depth(name, options["depth"], [family for family, _ in matches])


def title(name: str) -> str:
    """The network as the paper writes it: WRN-28-10, with dropout WRN-28-10(+); names of other libraries unchanged."""
    word, dash, options = name.removesuffix("-dropout-0.3").partition("-")
    spelling = next((family.paper for family in FAMILIES if family.pattern.partition("-")[0] == word), "")
    if not spelling:
        return name
    return f"{spelling}{dash}{options}" + ("(+)" if name.endswith("-dropout-0.3") else "")


def describe_families() -> dict[str, str]:
    """How names are written, with a line on what each pattern means."""
    patterns = dict.fromkeys(family.pattern for family in FAMILIES)
    return {pattern: _help(family for family in FAMILIES if family.pattern == pattern) for pattern in patterns}


def default_exits(exits: Mapping[str, int]) -> tuple[str, ...]:
    """The paper's two auxiliary classifiers: C2 and C3."""
    return tuple(name for name, stage in exits.items() if stage <= 3)


def outline(network: str, available: Mapping[str, int], exits: Iterable[str]) -> dict[str, int]:
    """C-numbers of a network's classifiers when it has heads at these ``exits``, the network's own first."""
    if isinstance(exits, str):
        raise ValueError(f"{network}: exits are several names, so write ({exits!r},) and not {exits!r}")
    names = tuple(exits)
    for name in names:
        if name not in available:
            error = unknown(f"exit of {network}", name, available)
            # Only the exits of other libraries' networks are named by their C-number.
            is_foreign = "c2" in available or re.fullmatch("c[0-9]+", name)
            hint = "; modules are named behind @, as in timm:resnet18@layer2, or @final for no heads"
            hint = hint if is_foreign else ""
            raise ValueError(f"{error}{hint}")
        if names.count(name) > 1:
            raise ValueError(f"{network}: exit {name!r} is named twice; name it once")
    return {"final": 1, **{name: stage for name, stage in available.items() if name in names}}


def _help(families: Iterable[Family]) -> str:
    return "; ".join(family.help for family in families)


def _value(name: str, option: str, text: str) -> float:
    if option == "dropout":
        if re.fullmatch(r"0\.[0-9]{1,4}", text) and float(text) > 0:
            return float(text)
        raise ValueError(f"{name}: dropout is written as in wrn-28-10-dropout-0.3, between 0 and 1, or left out")
    limit = DEEPEST[name.partition("-")[0]] if option == "depth" else LIMITS[option]
    if re.fullmatch("[1-9][0-9]{0,5}", text) and int(text) <= limit:
        return int(text)
    raise ValueError(f"{name}: {option} is a whole number from 1 to {limit}, not {text!r}; write e.g. wrn-28-10")


def _wrong_depth(name: str, depth: float, families: Sequence[Family]) -> ValueError:
    fitting = sorted(fit for family in families for fit in family.depths)
    index = bisect(fitting, depth)
    nearest = ", ".join(map(str, fitting[max(index - 1, 0) : index + 1]))
    return ValueError(
        f"{name}: depth {depth} does not fit {families[0].pattern} ({_help(families)}); the nearest that fit: {nearest}"
    )
