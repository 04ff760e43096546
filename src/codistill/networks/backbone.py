"""The two interfaces of a network: a backbone runs, an architecture builds one and the heads that fit its exits.

Tensor axes: B batch, C channels (or classes, for logits), H height, W width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from codistill.networks.families import default_exits

Output = TypeVar("Output")
Fork = Callable[[], AbstractContextManager[object]]
"""Opens a branch here: what runs inside need not wait for what follows outside."""


def ignore(exit_name: str) -> None:
    pass


@dataclass(frozen=True)
class Exit:
    """Where an auxiliary classifier can be attached: the output of the backbone's stage of the same name.

    ``stage`` is the C-number, counted from the output (the network's own classifier is C1), ``stride`` the distance in
    input pixels between neighbouring positions of the feature map.
    """

    name: str
    stage: int
    channels: int
    stride: int
    path: str = ""
    """The module whose output is the exit, if that is not the stage of the same name."""


class Backbone(nn.Module):
    """An ordinary classifier, cut into named stages so that one pass can also return the features at its exits.

    A network that can only be run as a whole has no stages: all of it is ``classifier``, and a subclass finds the
    features.
    """

    def __init__(self, stages: Mapping[str, nn.Module], classifier: nn.Module, exits: Iterable[Exit]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict(stages)
        self.classifier = classifier
        self.exits = tuple(exits)
        self.recomputes = False
        """Whether the backward pass runs stages again instead of keeping their activations."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.features(images_BCHW)["final"]

    def features(self, images_BCHW: Tensor, on_exit: Callable[[str], None] = ignore) -> dict[str, Tensor]:
        """The features at every exit by its name, and the logits as ``"final"``.

        ``on_exit`` is called with an exit's name as soon as its features are computed.
        """
        exit_names = [exit.name for exit in self.exits]
        features = {}
        x = images_BCHW
        for name, stage in self.stages.items():
            x = self.run(stage, x)
            if name in exit_names:
                features[name] = x
                on_exit(name)
        return {**features, "final": self.classifier(x)}

    def run(self, part: nn.Module, x: Tensor) -> Tensor:
        """Runs a part of the network, or a head on it, with or without keeping its activations."""
        output: Tensor = run_recomputed(part, x, part) if self.recomputes and self.training else part(x)
        return output

    def release(self) -> nn.Module:
        """The network as it ships, without hooks or wrappers; the backbone must not be used afterwards."""
        return self


class Architecture(ABC):
    """How to build a backbone and, for each of its exits, a head. Subclass it to bring a network of your own."""

    @property
    @abstractmethod
    def exits(self) -> tuple[Exit, ...]:
        """Where heads can be attached, the one nearest to the output (C2) first."""

    @property
    def default_exits(self) -> tuple[str, ...]:
        """Where heads are attached by default."""
        return default_exits({exit.name: exit.stage for exit in self.exits})

    @property
    def image_size(self) -> int | None:
        """The side of the images if the network takes only one size, else None."""
        return None

    def fitting_side(self, image_size: tuple[int, int]) -> int | None:
        """The side of images to use instead if the network does not take images of this height and width, else None."""
        return None if self.image_size is None or image_size == (self.image_size,) * 2 else self.image_size

    @abstractmethod
    def backbone(self, num_classes: int, in_channels: int = 3) -> Backbone:
        """A freshly initialised network."""

    @abstractmethod
    def head(self, exit_name: str, kind: str, num_classes: int) -> nn.Module:
        """A freshly initialised auxiliary classifier: the exit's feature map to logits."""

    def describe_head(self, exit_name: str, kind: str) -> str:
        """What a head is made of, for listings."""
        return f"of kind {kind}"


def run_recomputed(run: Callable[[Tensor], Output], x: Tensor, module: nn.Module) -> Output:
    """Returns ``run(x)`` and keeps only ``x`` for the backward pass, which runs it again (activation checkpointing).

    Values, gradients and running statistics are the same. ``module`` is the one whose statistics ``run`` updates.
    """
    output: Output = checkpoint(
        run, x, use_reentrant=False, context_fn=lambda: (nullcontext(), frozen_running_stats(module))
    )
    return output


@contextmanager
def frozen_running_stats(module: nn.Module) -> Iterator[None]:
    """Inside, forward passes leave the running statistics alone: a second run must not count the batch twice."""
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]
    settings = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, counted) in zip(norms, settings, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counted


def wrong_size(network: str, takes: int, given: tuple[int, int]) -> ValueError:
    """The error for images of a size that a network does not take."""
    return ValueError(
        f"{network} takes images of {takes}×{takes}, and not of {given[0]}×{given[1]}; resize them with "
        f"data.image_size={takes} augment.crop={takes}, or give the size in its name, as in "
        "timm:vit_tiny_patch16_224:img_size=32"
    )
