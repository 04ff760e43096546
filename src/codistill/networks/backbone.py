"""The two interfaces of a network: a backbone runs, an architecture builds one and the heads that fit its exits.

Tensor axes: B batch, C channels (or classes, for logits), H height, W width.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from codistill.networks.names import default_exits
from codistill.networks.recompute import recomputed


@dataclass(frozen=True)
class Exit:
    """A place where an auxiliary classifier can hang: the output of the backbone's stage of the same name.

    ``stage`` is the C-number, counted from the output (the network's own classifier is C1), ``stride`` how many input
    pixels lie between neighbouring positions of the feature map.
    """

    name: str
    stage: int
    channels: int
    stride: int
    path: str = ""
    """The module whose output it is, where that is not the stage of the same name."""


class Backbone(nn.Module):
    """An ordinary classifier, cut into named stages so that one pass can also return the features at its exits.

    A network that can only be run as a whole has no stages: it is all ``classifier``, and its own kind of backbone
    finds the features.
    """

    def __init__(self, stages: Mapping[str, nn.Module], classifier: nn.Module, exits: Iterable[Exit]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict(stages)
        self.classifier = classifier
        self.exits = tuple(exits)
        self.recomputes = False
        """Whether stages are run again in the backward pass instead of keeping their activations."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.features(images_BCHW)["final"]

    def features(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        """The features at every exit by its name, and the logits as ``"final"``."""
        exit_names = [place.name for place in self.exits]
        features = {}
        x = images_BCHW
        for name, stage in self.stages.items():
            x = self.run(stage, x)
            if name in exit_names:
                features[name] = x
        return {**features, "final": self.classifier(x)}

    def run(self, part: nn.Module, x: Tensor) -> Tensor:
        """A part of the network, or a head on it, in the way that the network is told to."""
        output: Tensor = recomputed(part, x, part) if self.recomputes and self.training else part(x)
        return output

    def release(self) -> nn.Module:
        """The network as it ships, with nothing of ours around it; the backbone is not to be used any more."""
        return self


class Architecture(ABC):
    """How to build a backbone and, for each of its exits, a head. Subclass it to bring a network of your own."""

    @property
    @abstractmethod
    def exits(self) -> tuple[Exit, ...]:
        """Where heads can hang, the one nearest to the output (C2) first."""

    @property
    def default_exits(self) -> tuple[str, ...]:
        """Where heads hang if nobody says otherwise."""
        return default_exits({place.name: place.stage for place in self.exits})

    @property
    def image_size(self) -> int | None:
        """The side of the only images that it takes; None: any."""
        return None

    @abstractmethod
    def backbone(self, num_classes: int, in_channels: int = 3) -> Backbone:
        """A freshly initialised network."""

    @abstractmethod
    def head(self, exit_name: str, kind: str, num_classes: int) -> nn.Module:
        """A freshly initialised auxiliary classifier: the exit's feature map to logits."""

    def head_words(self, exit_name: str, kind: str) -> str:
        """What a head is made of, for people to read."""
        return f"of kind {kind}"


def wrong_size(network: str, takes: int, given: tuple[int, int]) -> ValueError:
    """The error for images that a network does not take."""
    return ValueError(
        f"{network} takes only images of {takes}×{takes}, and these are {given[0]}×{given[1]}; make them so "
        f"with data.image_size={takes} augment.crop={takes}, or say the size in its name, as in "
        "timm:vit_tiny_patch16_224:img_size=32"
    )
