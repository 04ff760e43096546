"""Networks that learn together, with their heads, as one module.

Tensor axes: B batch, C channels of an image, H height, W width.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from codistill.errors import unknown
from codistill.networks.adapters.architecture import OwnArchitecture
from codistill.networks.backbone import Architecture, Backbone, Fork, wrong_size
from codistill.networks.families import RESERVED, architecture, outline
from codistill.networks.mobilenet import MobileNet
from codistill.networks.resnet import WideResNet
from codistill.networks.tables import HEAD_KINDS
from codistill.randomness import derive
from codistill.transfer.graph import Outline

INITS = ("he", "authors")
BATCHNORM_INITS = ("ones", "uniform", "authors")
"""Initial weights: ours are what layers draw when they are built; the authors' code has others for its two families."""


class Member(nn.Module):
    """A network and the heads at its exits: images in, the logits of each of its classifiers out."""

    def __init__(self, backbone: Backbone, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleDict(heads)
        self.heads_gradient = 1.0
        """The factor on the gradient that heads send into the backbone; 0 cuts it."""

    def forward(self, images_BCHW: Tensor, fork: Fork = nullcontext) -> dict[str, Tensor]:
        """``fork`` opens a branch at each exit in which its head runs, so that it can overlap with what follows."""
        branches: dict[str, AbstractContextManager[object]] = {}

        def open_branch(exit_name: str) -> None:
            if exit_name in self.heads:
                branches[exit_name] = fork()

        features = self.backbone.features(images_BCHW, open_branch)
        logits = {"final": features["final"]}
        for exit_name, head in self.heads.items():
            with branches[exit_name]:
                logits[exit_name] = self.backbone.run(head, self._for_head(features[exit_name]))
        return logits

    def _for_head(self, features: Tensor) -> Tensor:
        """The same values; what flows back through them is multiplied by ``heads_gradient``."""
        if self.heads_gradient == 1:
            return features
        constant = features.detach()
        return torch.lerp(constant, features, self.heads_gradient) if self.heads_gradient else constant


class Cohort(nn.Module):
    """N named networks: ``Cohort({"a": "wrn-28-4", "b": "timm:resnet18", "c": my_module}, num_classes=100)``.

    ``heads`` is their kind, ``exits`` where they are: None for the paper's two of every network, names for all, or
    names by network; for an ``nn.Module``, the paths of its modules. A network's initial weights depend only on the
    seed and on its name in the cohort, so they are the same whatever it learns with, and twins differ. An ``nn.Module``
    is copied with its weights. ``init`` and ``batchnorm_init`` are the recipe keys. ``image_size`` (height, width) is
    only checked: a few networks take only one size.
    """

    members: Mapping[str, Member]
    """An ``nn.ModuleDict``, typed by its values."""

    def __init__(
        self,
        networks: Mapping[str, str | Architecture | nn.Module],
        num_classes: int,
        *,
        in_channels: int = 3,
        image_size: tuple[int, int] | None = None,
        heads: str = "paper",
        exits: Iterable[str] | Mapping[str, Iterable[str] | None] | None = None,
        seed: int = 0,
        init: str = "he",
        batchnorm_init: str = "ones",
    ) -> None:
        super().__init__()
        _check_whole("num_classes", num_classes, least=2)
        _check_whole("in_channels", in_channels, least=1)
        _check_whole("seed", seed, least=0)
        if heads not in HEAD_KINDS:
            raise unknown("kind of head", heads, HEAD_KINDS)
        if init not in INITS:
            raise unknown("init", init, INITS)
        if batchnorm_init not in BATCHNORM_INITS:
            raise unknown("batchnorm_init", batchnorm_init, BATCHNORM_INITS)
        _check_networks(networks)
        exits_of = _exits_by_network(exits, networks)
        architectures: dict[str, Architecture] = {}
        classifiers: dict[str, dict[str, int]] = {}
        for name, given in networks.items():
            network, exit_names = _resolve(name, given, exits_of[name])
            available = {exit.name: exit.stage for exit in network.exits}
            exit_names = network.default_exits if exit_names is None else exit_names
            architectures[name], classifiers[name] = network, outline(f"network {name!r}", available, exit_names)
        _check_sizes(architectures, image_size)
        self.outline = Outline(classifiers)
        self.head_descriptions: dict[str, str] = {}
        """What each head is made of, by the classifier's name."""
        members: dict[str, Member] = {}
        for name, network in architectures.items():
            with _seeded(derive(seed, "init", name)):
                member = Member(network.backbone(num_classes, in_channels), {})
                if not isinstance(network, OwnArchitecture):
                    initialise(member, network, init, batchnorm_init)
            _final, *auxiliary = classifiers[name]
            for exit_name in auxiliary:
                with _seeded(derive(seed, "init", f"{name}/{exit_name}")):
                    member.heads[exit_name] = network.head(exit_name, heads, num_classes)
                    initialise(member.heads[exit_name], network, init, batchnorm_init)
                self.head_descriptions[f"{name}/{exit_name}"] = network.describe_head(exit_name, heads)
            members[name] = member
        self.members = cast(Mapping[str, Member], nn.ModuleDict(members))
        self.to(torch.get_default_device())

    def forward(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        """The logits of every classifier, ``{"a/final": …, "a/stage2": …}``, in the outline's order."""
        return {
            f"{name}/{exit_name}": logits
            for name, member in self.members.items()
            for exit_name, logits in member(images_BCHW).items()
        }

    def strip(self, name: str) -> nn.Module:
        """A copy of the network as it ships, without heads and hooks."""
        if name not in self.members:
            raise unknown("network", name, self.members)
        return deepcopy(self.members[name].backbone).release()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Modules built inside have weights that depend only on ``seed``, not on the device or on earlier draws.

    They are drawn on the CPU from a fork of its RNG, so the caller's RNG state does not change.
    """
    if torch.get_default_device().type == "meta":  # shapes without values: there are no weights to draw
        yield
        return
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU too
        yield


def _resolve(name: str, network: object, exits: Iterable[str] | None) -> tuple[Architecture, Iterable[str] | None]:
    """The architecture, and the exits that get heads (None for the default ones)."""
    match network:
        case Architecture():
            return network, exits
        case str():
            return architecture(network), exits
        case nn.Module() if exits and not isinstance(exits, str):
            # The paths are its exits, and all of them get heads.
            return OwnArchitecture(network, tuple(exits), f"network {name!r}"), None
        case nn.Module():
            return OwnArchitecture(network, label=f"network {name!r}"), exits
    raise ValueError(
        f"network {name!r} is of type {type(network).__name__}; give a name such as 'wrn-28-4', an nn.Module or an "
        f"Architecture"
    )


def _check_sizes(architectures: Mapping[str, Architecture], image_size: tuple[int, int] | None) -> None:
    for name, network in architectures.items():
        if image_size is not None and (side := network.fitting_side(image_size)):
            raise wrong_size(f"network {name!r}", side, image_size)
    sizes = {name: network.image_size for name, network in architectures.items() if network.image_size}
    if len(set(sizes.values())) > 1:
        taken = ", ".join(f"{name!r} only {size}×{size}" for name, size in sizes.items())
        raise ValueError(
            f"the networks take images of different sizes: {taken}; give the same size in their names, as in "
            f"timm:vit_tiny_patch16_224:img_size=32, or use others"
        )


def _exits_by_network(
    exits: Iterable[str] | Mapping[str, Iterable[str] | None] | None, networks: Iterable[str]
) -> Mapping[str, Iterable[str] | None]:
    if exits is None or not isinstance(exits, Mapping):
        return dict.fromkeys(networks, exits)
    for name in exits:
        if name not in networks:
            raise unknown("network in exits", name, networks)
    for name in networks:
        if name not in exits:
            raise ValueError(f"exits have no entry for {name!r}; add {name!r}: None for the default ones, () for none")
    return exits


def _check_whole(what: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} is a whole number from {least} up, not {value!r}")


def _check_networks(networks: Mapping[str, object]) -> None:
    if not isinstance(networks, Mapping):
        raise ValueError(f"networks have names: write {{'a': …, 'b': …}} and not a {type(networks).__name__}")
    if not networks:
        raise ValueError("a cohort without networks; give at least one, as in {'a': 'wrn-28-4'}")
    for name in networks:
        if not isinstance(name, str) or not re.fullmatch("[A-Za-z0-9-][A-Za-z0-9_-]*", name):
            raise ValueError(f"network name {name!r}: use letters, digits, _ and -, not _ first, as in 'a'")
        if name in RESERVED or hasattr(nn.ModuleDict(), name):
            raise ValueError(f"network name {name!r} means something else already; choose another, as in 'a'")
    modules = [network for network in networks.values() if isinstance(network, nn.Module)]
    if len(set(modules)) < len(modules):
        raise ValueError("one module is given as two networks, which would be equal and teach nothing; build two")


def initialise(module: nn.Module, network: Architecture, init: str, batchnorm_init: str) -> None:
    """Draw the weights of a part of ``network`` anew where ``init`` and ``batchnorm_init`` are not the defaults.

    Raises ValueError if they ask for the authors' start of a family that is not in the authors' code.
    """
    draw_layer = AUTHORS.get(type(network))
    if "authors" in (init, batchnorm_init) and draw_layer is None:
        raise ValueError(f"the authors' code has no {type(network).__name__}, so no initial weights for it")
    for layer in module.modules():
        if init == "authors" and draw_layer:
            draw_layer(layer)
        is_uniform = batchnorm_init == "uniform" or (batchnorm_init == "authors" and draw_layer is _by_fan_in)
        if is_uniform and isinstance(layer, _BatchNorm) and layer.affine:
            nn.init.uniform_(layer.weight)


def _by_fan_in(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _as_torch(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d):
        nn.Conv2d.reset_parameters(layer)  # not that of our subclass


AUTHORS: dict[type[Architecture], Callable[[nn.Module], None]] = {WideResNet: _by_fan_in, MobileNet: _as_torch}
"""How their code draws the weights of one layer; ``families.IN_AUTHORS_CODE`` has the same families."""
