"""The parts of a network that learn at rates of their own, or not at all: backbone, classifier, and blocks by depth."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from codistill.errors import unknown
from codistill.networks.backbone import Backbone
from codistill.networks.families import BACKBONE

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def classifier_layers(backbone: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """The layers that compute the logits: the last linear layer, or the convolution in its place.

    Some networks of timm average the logits of several, such as the distilled DeiT. Their ``get_classifier`` has them.
    """
    layers = [layer for layer in backbone.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    if not layers:
        raise ValueError("the network has no linear layer or convolution, so its classifier is not known")
    network: Any = backbone.classifier if isinstance(backbone, Backbone) else backbone
    if not any(one.__module__.startswith("timm.models.") for one in type(network).__mro__):  # sharding adds a class
        return layers[-1:]
    given = network.get_classifier()
    inside = {*nn.ModuleList(given if isinstance(given, tuple) else [given]).modules(), layers[-1]}
    # What is returned may also contain layers of features.
    return [layer for layer in layers if layer in inside and len(layer.weight) == len(layers[-1].weight)]


def classifier_parameters(backbone: nn.Module) -> set[nn.Parameter]:
    return {parameter for layer in classifier_layers(backbone) for parameter in layer.parameters()}


def freeze(backbone: Backbone, until: str) -> None:
    """Let all of the network but its classifier learn no more, or only what comes ``until`` an exit."""
    named = list(backbone.named_parameters())
    if until == BACKBONE:
        learns = classifier_parameters(backbone)
        frozen = [parameter for _, parameter in named if parameter not in learns]
    else:
        paths = {one.name: f"classifier.{one.path}." if one.path else f"stages.{one.name}." for one in backbone.exits}
        if until not in paths:
            raise unknown("part to freeze", until, [BACKBONE, *paths])
        # Weights are registered in the order in which they are used.
        last = max((index for index, (name, _) in enumerate(named) if name.startswith(paths[until])), default=None)
        if last is None:
            raise ValueError(
                f"freeze: the module at the exit {until} has no weights, so where the frozen part ends is not known; "
                "name a module with weights behind @, in front of it"
            )
        frozen = [parameter for _, parameter in named[: last + 1]]
    for parameter in frozen:
        parameter.requires_grad_(False)


def is_frozen(module: nn.Module) -> bool:
    """Whether the module has weights, and none of them learns."""
    learns = [parameter.requires_grad for parameter in module.parameters()]
    return bool(learns) and not any(learns)


def layer_depths(backbone: Backbone) -> dict[nn.Parameter, int]:
    """The distance of every weight from the output, in blocks: 0 for the classifier, 1 for the last block.

    What comes before the first block is a layer of its own. What comes between two blocks belongs to the next one, what
    follows the last block to that. A network without rows of blocks is divided into its stages, or at its top.
    """
    named = list(backbone.named_parameters())
    paths = list(_blocks(backbone)) or [f"stages.{name}" for name in backbone.stages] or _top(backbone)
    found = [next((i for i, path in enumerate(paths) if name.startswith(f"{path}.")), None) for name, _ in named]
    stem = next((i for i, block in enumerate(found) if block is not None), 0)
    depths, block = {}, len(paths) - 1
    for index, (_, parameter) in reversed(list(enumerate(named))):
        block = block if found[index] is None else found[index]  # type: ignore[assignment]
        depths[parameter] = len(paths) - (block if index >= stem else -1)
    return depths | dict.fromkeys(classifier_parameters(backbone), 0)


def _blocks(module: nn.Module, path: str = "") -> Iterator[str]:
    """The paths of the modules of several layers that follow one another in containers; a stage of several is none."""
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        inside = list(_blocks(child, where))
        is_composite = any(True for _ in child.children()) and any(True for _ in child.parameters())
        is_element = isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS) and is_composite
        yield from [where] if is_element and len(inside) < 2 else inside


def _top(module: nn.Module, path: str = "") -> list[str]:
    """The paths of the first modules with weights that stand beside others."""
    children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    paths = [f"{path}.{name}" if path else name for name in children]
    return _top(next(iter(children.values())), paths[0]) if len(paths) == 1 else paths
