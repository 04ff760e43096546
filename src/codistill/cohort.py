"""Networks that learn together, with the heads they carry meanwhile, as one module.

Tensor axes: B batch, C channels of an image, H height, W width.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from codistill.networks.adapters.architecture import OwnArchitecture
from codistill.networks.backbone import Architecture, Backbone, wrong_size
from codistill.networks.build import architecture
from codistill.networks.heads import HEAD_KINDS
from codistill.networks.names import RESERVED, outline
from codistill.randomness import derive
from codistill.transfer.graph import Outline
from codistill.wording import unknown

BATCHNORM_INITS = ("ones", "uniform")


class Member(nn.Module):
    """A network and the heads at its exits: images to the logits of every one of its classifiers."""

    def __init__(self, backbone: Backbone, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleDict(heads)

    def forward(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        features = self.backbone.features(images_BCHW)
        run = self.backbone.run
        return {"final": features["final"], **{name: run(head, features[name]) for name, head in self.heads.items()}}


class Cohort(nn.Module):
    """N named networks: ``Cohort({"a": "wrn-28-4", "b": "timm:resnet18", "c": my_module}, num_classes=100)``.

    ``heads`` is their kind, ``exits`` where they hang: None for the paper's two of every network, names for all alike,
    or names by network; for a module of one's own, the paths of its modules. A network's initial weights depend on the
    seed and on its name in the cohort alone, so they are the same whatever it learns with, and twins differ. A module
    of one's own is copied with the weights that it has. ``image_size`` (height, width) is only checked: a few networks
    take images of one size alone.
    """

    members: Mapping[str, Member]
    """A module dictionary, typed by what it holds."""

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
        batchnorm_init: str = "ones",
    ) -> None:
        super().__init__()
        _check_whole("num_classes", num_classes, least=2)
        _check_whole("in_channels", in_channels, least=1)
        _check_whole("seed", seed, least=0)
        if heads not in HEAD_KINDS:
            raise unknown("kind of head", heads, HEAD_KINDS)
        if batchnorm_init not in BATCHNORM_INITS:
            raise unknown("batchnorm_init", batchnorm_init, BATCHNORM_INITS)
        _check_names(networks)
        _check_distinct(networks)
        wanted = _exits_by_network(exits, networks)
        architectures: dict[str, Architecture] = {}
        classifiers: dict[str, dict[str, int]] = {}
        for name, given in networks.items():
            architectures[name], exit_names = _understood(name, given, wanted[name])
            classifiers[name] = _classifiers(name, architectures[name], exit_names)
        _check_sizes(architectures, image_size)
        self.outline = Outline(classifiers)
        self.head_words: dict[str, str] = {}
        """What every head is made of, by the classifier's name."""
        members: dict[str, Member] = {}
        for name, network in architectures.items():
            with _draws_from(derive(seed, "init", name)):
                member = Member(network.backbone(num_classes, in_channels), {})
                _initialise_batchnorm(member, batchnorm_init)
            _final, *auxiliary = classifiers[name]
            for exit_name in auxiliary:
                with _draws_from(derive(seed, "init", f"{name}/{exit_name}")):
                    member.heads[exit_name] = network.head(exit_name, heads, num_classes)
                    _initialise_batchnorm(member.heads[exit_name], batchnorm_init)
                self.head_words[f"{name}/{exit_name}"] = network.head_words(exit_name, heads)
            members[name] = member
        self.members = cast(Mapping[str, Member], nn.ModuleDict(members))
        self.to(torch.get_default_device())

    def forward(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        """Every classifier's logits, ``{"a/final": …, "a/stage2": …}``, in the outline's order."""
        return {
            f"{name}/{exit_name}": logits
            for name, member in self.members.items()
            for exit_name, logits in member(images_BCHW).items()
        }

    def strip(self, name: str) -> nn.Module:
        """A copy of the network alone, as it ships: nothing that was added for learning is in it."""
        if name not in self.members:
            raise unknown("network", name, self.members)
        return deepcopy(self.members[name].backbone).release()


@contextmanager
def _draws_from(seed: int) -> Iterator[None]:
    """Modules built inside have weights that depend on ``seed`` alone, not on the device nor on earlier draws.

    So they are drawn on the CPU, from a fork of its random numbers: the caller's own go on as if nothing happened.
    """
    if torch.get_default_device().type == "meta":  # shapes without values: there are no weights to draw
        yield
        return
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU too
        yield


def _initialise_batchnorm(module: nn.Module, how: str) -> None:
    """``"ones"`` is how batch normalisation comes; ``"uniform"`` draws its weights from [0, 1)."""
    if how == "uniform":
        for norm in module.modules():
            if isinstance(norm, _BatchNorm) and norm.affine:
                nn.init.uniform_(norm.weight)


def _classifiers(name: str, network: Architecture, wanted: Iterable[str] | None) -> dict[str, int]:
    available = {place.name: place.stage for place in network.exits}
    return outline(f"network {name!r}", available, network.default_exits if wanted is None else wanted)


def _understood(name: str, network: object, exits: Iterable[str] | None) -> tuple[Architecture, Iterable[str] | None]:
    """The architecture, and at which of its exits heads are wanted."""
    match network:
        case Architecture():
            return network, exits
        case str():
            return architecture(network), exits
        case nn.Module() if exits and not isinstance(exits, str):
            return OwnArchitecture(network, tuple(exits), f"network {name!r}"), None  # exits there, so heads at all
        case nn.Module():
            return OwnArchitecture(network, label=f"network {name!r}"), exits
    raise ValueError(
        f"network {name!r} is of type {type(network).__name__}; give a name such as 'wrn-28-4', an nn.Module or an "
        f"Architecture"
    )


def _check_distinct(networks: Mapping[str, object]) -> None:
    modules = [network for network in networks.values() if isinstance(network, nn.Module)]
    if len(set(modules)) < len(modules):
        raise ValueError("one module is given as two networks, which would be equal and teach nothing; build two")


def _check_sizes(architectures: Mapping[str, Architecture], image_size: tuple[int, int] | None) -> None:
    sizes = {name: network.image_size for name, network in architectures.items() if network.image_size}
    for name, size in sizes.items():
        if image_size is not None and image_size != (size, size):
            raise wrong_size(f"network {name!r}", size, image_size)
    if len(set(sizes.values())) > 1:
        taken = ", ".join(f"{name!r} only {size}×{size}" for name, size in sizes.items())
        raise ValueError(
            f"the networks take images of different sizes: {taken}; say the same size in their names, as in "
            f"timm:vit_tiny_patch16_224:img_size=32, or take others"
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
            raise ValueError(f"exits name no network {name!r}; add {name!r}: None for the usual ones, () for none")
    return exits


def _check_whole(what: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} is a whole number from {least} up, not {value!r}")


def _check_names(networks: Mapping[str, object]) -> None:
    if not isinstance(networks, Mapping):
        raise ValueError(f"networks have names: write {{'a': …, 'b': …}} and not a {type(networks).__name__}")
    if not networks:
        raise ValueError("a cohort without networks; give at least one, as in {'a': 'wrn-28-4'}")
    for name in networks:
        if not isinstance(name, str) or not re.fullmatch("[A-Za-z0-9-][A-Za-z0-9_-]*", name):
            raise ValueError(f"network name {name!r}: use letters, digits, _ and -, not _ first, as in 'a'")
        if name in RESERVED:
            raise ValueError(f"network name {name!r} means something else already; choose another, as in 'a'")
