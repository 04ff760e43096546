"""Somebody else's network as a backbone: its own code runs, and its exits are listened to on the way."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from codistill.networks.backbone import Backbone, Exit, run_recomputed, wrong_size


class Tap:
    """A forward hook that keeps its module's output while it is open.

    An object, not a function: a copy of the network has taps of its own. torch.compile follows hooks, and what they
    keep, into one graph.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.kept: Tensor | None = None

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> None:
        if self.is_open:
            self.kept = output

    def drain(self) -> Tensor:
        """What was kept, which the tap then forgets: it would keep a whole step's memory alive."""
        kept, self.kept, self.is_open = self.kept, None, False
        assert kept is not None
        return kept


class ForeignBackbone(Backbone):
    """Weight files have the network's own keys, as if this were not around it."""

    def __init__(self, network: nn.Module, exits: Iterable[Exit], image_size: int | None) -> None:
        super().__init__({}, network, exits)
        self.image_size = image_size
        """The side of the only images it takes; None: any."""
        self.taps = {place.name: Tap() for place in self.exits}
        self.handles = [
            network.get_submodule(place.path).register_forward_hook(self.taps[place.name]) for place in self.exits
        ]
        self.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def forward(self, images_BCHW: Tensor) -> Tensor:
        self._check_size(images_BCHW)
        logits: Tensor = self.classifier(images_BCHW)
        return logits

    def features(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        self._check_size(images_BCHW)
        if self.recomputes and self.training:
            return run_recomputed(self._tapped, images_BCHW, self.classifier)
        return self._tapped(images_BCHW)

    def release(self) -> nn.Module:
        for handle in self.handles:
            handle.remove()
        return self.classifier

    def _tapped(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        for tap in self.taps.values():
            tap.is_open = True
        logits = self.classifier(images_BCHW)
        return {**{name: tap.drain() for name, tap in self.taps.items()}, "final": logits}

    def _check_size(self, images_BCHW: Tensor) -> None:
        height, width = images_BCHW.shape[-2:]
        if self.image_size is not None and not height == width == self.image_size:
            raise wrong_size("the network", self.image_size, (height, width))


PREFIX = "classifier."


def _drop_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    _rename(state, prefix + PREFIX, prefix)


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    _rename(state, prefix, prefix + PREFIX)


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    """In two steps, since a new key may be another's old one."""
    renamed = {new + key.removeprefix(old): state.pop(key) for key in list(state) if key.startswith(old)}
    state.update(renamed)
