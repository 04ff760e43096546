"""What a network's name means. Imports no torch: recipes and listings read names without building anything."""

import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from codistill.errors import did_you_mean, install_hint, unknown
from codistill.networks.adapters.naming import is_foreign, parse_foreign

KNOWN = (
    "resnet-20",
    "resnet-110",
    "resnet-164",
    "wrn-16-2",
    "wrn-28-4",
    "wrn-28-10",
    "wrn-28-10-dropout-0.3",
    "densenet-40-12",
    "mobilenet",
    "resnet-18",
    "resnet-50",
    "mobilenetv2",
)

# What a network in a cohort cannot be called: torch's dictionary of modules has these names, and labels are a source.
# fmt: off
RESERVED = frozenset({
    "labels", "T_destination", "add_module", "apply", "bfloat16", "buffers", "call_super_init", "children",
    "clear", "compile", "cpu", "cuda", "double", "dump_patches", "eval", "extra_repr", "float", "forward",
    "get_buffer", "get_extra_state", "get_parameter", "get_submodule", "half", "ipu", "items", "keys",
    "load_state_dict", "modules", "mtia", "named_buffers", "named_children", "named_modules", "named_parameters",
    "parameters", "pop", "register_backward_hook", "register_buffer", "register_forward_hook",
    "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_load_state_dict_post_hook", "register_load_state_dict_pre_hook", "register_module",
    "register_parameter", "register_state_dict_post_hook", "register_state_dict_pre_hook", "requires_grad_",
    "set_extra_state", "set_submodule", "share_memory", "state_dict", "to", "to_empty", "train", "training",
    "type", "update", "values", "xpu", "zero_grad",
})
# fmt: on

# Bounds on what a name may ask for, so that a recipe from a stranger cannot ask for a billion blocks.
MAX_DEPTH, MAX_WIDTH, MAX_GROWTH = 2000, 64, 256

# Depth 50 would fit 6n+2 too; the network everybody calls ResNet-50 is ImageNet's, so that is the one it is.
_BASIC_DEPTHS = [depth for depth in range(8, 164, 6) if depth != 50]
_BOTTLENECK_DEPTHS = range(164, MAX_DEPTH + 1, 9)
_RESNET_RULE = (
    "a CIFAR ResNet has depth 6n+2 below 164 and 9n+2 from 164 on (resnet-18 and resnet-50 are ImageNet's networks)"
)
_WRN_DEPTHS = range(10, MAX_DEPTH + 1, 6)
_DENSENET_DEPTHS = range(7, MAX_DEPTH + 1, 3)

# Exits by their C-number, counted from the output: C1 is the network's own classifier, "final".
_CIFAR_EXITS = {"stage2": 2, "stage1": 3}
_WRN_EXITS = {**_CIFAR_EXITS, "stem": 4}
_IMAGENET_EXITS = {"stage3": 2, "stage2": 3}


@dataclass(frozen=True)
class NetworkName:
    """A name that was understood: its family, the family's options, and the exits by C-number."""

    name: str
    family: str
    options: Mapping[str, object]
    exits: Mapping[str, int]

    @property
    def default_exits(self) -> tuple[str, ...]:
        """The paper's two, or all that the name itself lists."""
        return tuple(self.exits) if self.options.get("paths") else default_exits(self.exits)

    def outline(self, exits: Iterable[str] | None = None) -> dict[str, int]:
        """C-numbers of the classifiers at ``exits`` (None: the default ones), the network's own first."""
        return outline(self.name, self.exits, self.default_exits if exits is None else exits)


def parse(name: str) -> NetworkName:
    """Understand ``name``, or say what is wrong with it and what to type instead."""
    if is_foreign(name):
        foreign = parse_foreign(name)
        return NetworkName(name, "foreign", vars(foreign), foreign.exits)
    match name.split("-"):
        case ["resnet", "18" | "50" as depth_text]:
            return NetworkName(name, "imagenet_resnet", {"depth": int(depth_text)}, _IMAGENET_EXITS)
        case ["resnet", depth_text]:
            depth = _depth(name, depth_text, [*_BASIC_DEPTHS, *_BOTTLENECK_DEPTHS], _RESNET_RULE)
            family = "cifar_resnet" if depth in _BASIC_DEPTHS else "preactivation_resnet"
            return NetworkName(name, family, {"depth": depth}, _CIFAR_EXITS)
        case ["wrn", depth_text, width_text, *dropout_text]:
            options: dict[str, object] = {
                "depth": _depth(name, depth_text, _WRN_DEPTHS, "a WRN has depth 6n+4"),
                "width": _integer(name, "width", width_text, MAX_WIDTH),
                "dropout": _dropout(name, dropout_text),
            }
            return NetworkName(name, "wide_resnet", options, _WRN_EXITS)
        case ["densenet", depth_text, growth_text]:
            options = {
                "depth": _depth(name, depth_text, _DENSENET_DEPTHS, "a DenseNet has depth 3n+4"),
                "growth": _integer(name, "growth", growth_text, MAX_GROWTH),
            }
            return NetworkName(name, "densenet", options, _CIFAR_EXITS)
        case ["mobilenet"]:
            return NetworkName(name, "mobilenet", {}, _CIFAR_EXITS)
        case ["mobilenetv2"]:
            return NetworkName(name, "mobilenet_v2", {}, _IMAGENET_EXITS)
    hint = did_you_mean(name, KNOWN) or ";"
    raise ValueError(f"unknown network {name!r}{hint} Allowed: {', '.join(families())}, as in {', '.join(KNOWN)}")


def families() -> dict[str, str]:
    """How names are written, with a line on what each pattern means."""
    return {
        "resnet-DEPTH": "CIFAR ResNet: 6n+2 basic (8, 14, … 110), 9n+2 pre-activation bottleneck (164, … 1001); "
        "18 and 50 are ImageNet's",
        "wrn-DEPTH-WIDTH": "wide ResNet for CIFAR, depth 6n+4 (10, 16, … 28, 40)",
        "wrn-DEPTH-WIDTH-dropout-P": "the same with dropout inside every block; the paper's WRN-28-10(+) has 0.3",
        "densenet-DEPTH-GROWTH": "DenseNet for CIFAR, without bottlenecks, depth 3n+4 (10, 40, 100)",
        "mobilenet": "MobileNet in the paper's CIFAR form",
        "mobilenetv2": "MobileNetV2 for ImageNet",
        "timm:MODEL": f"any classifier of timm ({install_hint('zoo')}), as in timm:resnet18, "
        "timm:vit_tiny_patch16_224:img_size=32, timm:resnet18@layer2,layer3",
        "torchvision:MODEL": "any classifier of torchvision, as in torchvision:resnet50",
    }


def default_exits(exits: Mapping[str, int]) -> tuple[str, ...]:
    """The paper's two auxiliary classifiers: C2 and C3."""
    return tuple(name for name, stage in exits.items() if stage <= 3)


def outline(network: str, available: Mapping[str, int], wanted: Iterable[str]) -> dict[str, int]:
    """C-numbers of a network's classifiers when it has heads at the ``wanted`` exits."""
    if isinstance(wanted, str):
        raise ValueError(f"{network}: exits are several names, so write ({wanted!r},) and not {wanted!r}")
    names = tuple(wanted)
    for name in names:
        if name not in available:
            raise _unknown_exit(network, name, available)
        if names.count(name) > 1:
            raise ValueError(f"{network}: exit {name!r} is named twice; name it once")
    return {"final": 1, **{name: stage for name, stage in available.items() if name in names}}


def _unknown_exit(network: str, name: str, available: Iterable[str]) -> ValueError:
    error = unknown(f"exit of {network}", name, available)
    if "c2" in available:  # only exits of other people's networks are called by their C-number
        return ValueError(f"{error}; modules are named behind @, as in timm:resnet18@layer2")
    return error


def _depth(name: str, text: str, fitting: Sequence[int], rule: str) -> int:
    depth = _integer(name, "depth", text, MAX_DEPTH)
    if depth in fitting:
        return depth
    place = bisect(fitting, depth)
    nearest = ", ".join(str(fit) for fit in fitting[max(place - 1, 0) : place + 1])
    raise ValueError(f"{name}: depth {depth} does not fit; {rule}; the nearest that fit: {nearest}")


def _integer(name: str, what: str, text: str, most: int) -> int:
    if re.fullmatch("[1-9][0-9]{0,5}", text) and int(text) <= most:
        return int(text)
    raise ValueError(f"{name}: {what} is a whole number from 1 to {most}, not {text!r}; write e.g. wrn-28-10")


def _dropout(name: str, parts: Sequence[str]) -> float:
    match parts:
        case []:
            return 0.0
        case ["dropout", text] if re.fullmatch(r"0\.[0-9]{1,4}", text) and float(text) > 0:
            return float(text)
    raise ValueError(f"{name}: dropout is written as in wrn-28-10-dropout-0.3, between 0 and 1, or left out")
