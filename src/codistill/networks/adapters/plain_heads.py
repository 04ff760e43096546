"""Heads that are made of none of a network's own blocks: pooled ones, and generic ones where its blocks do not fit."""

from dataclasses import dataclass
from math import log2

from torch import Tensor, nn

from codistill.networks.adapters.exits import channels, is_channels_last, positions
from codistill.networks.adapters.surgery import Shape
from codistill.networks.layers import Conv2d, norm_relu
from codistill.networks.tables import apfc, classifier, describe_apfc, half

SIDE_AT_END = 7
"""The feature map's side in front of a generic head's pooling where the network's own is not known."""
LEAST_CONVOLUTIONS, WIDEST = 2, 512


@dataclass(frozen=True)
class Pooled:
    """The paper's APFC: average pooling to a grid and one linear layer. Tokens are averaged into one."""

    input: Shape
    why: str = ""

    def __str__(self) -> str:
        return describe_apfc() if len(self.input) == 3 else "the average of the tokens and one linear layer"

    def build(self, num_classes: int) -> nn.Module:
        width = channels(self.input)
        if len(self.input) == 2:
            return nn.Sequential(MeanOfTokens(), nn.Linear(width, num_classes))
        return nn.Sequential(*_channels_first(self.input), *apfc(width, num_classes))


@dataclass(frozen=True)
class Generic:
    """Convolutions with batch norm and ReLU that down-sample as the network does; for tokens, norm and linear layer."""

    input: Shape
    widths: tuple[int, ...]
    """Output channels of the convolutions; empty for tokens."""
    strided: int
    """How many of them halve the feature map, the first ones."""
    why: str
    """Why the head is not made of the network's own blocks."""

    @classmethod
    def of(cls, features: Shape, last: Shape | None, why: str, *, narrow: bool = False) -> "Generic":
        """The head for ``features`` in a network whose last stage has the shape ``last``."""
        if len(features) == 2:
            return cls(features, (), 0, why)
        count = positions(features) or 1
        ratio = count / (positions(last) or SIDE_AT_END**2)
        strided = max(0, round(log2(ratio) / 2))
        width, widest = channels(features), max(channels(features), WIDEST)
        widths = [
            min(width * 2 ** min(step, strided), widest) for step in range(1, max(strided, LEAST_CONVOLUTIONS) + 1)
        ]
        return cls(features, tuple(map(half, widths) if narrow else widths), strided, why)

    def __str__(self) -> str:
        rows = " → ".join(map(str, self.widths))
        return f"generic: convolutions {rows}" if self.widths else "generic: norm, mean of the tokens, linear layer"

    def build(self, num_classes: int) -> nn.Module:
        width = channels(self.input)
        if not self.widths:
            return nn.Sequential(nn.LayerNorm(width), MeanOfTokens(), nn.Linear(width, num_classes))
        layers = _channels_first(self.input)
        for place, out_channels in enumerate(self.widths):
            layers += [Conv2d(width, out_channels, 3, 2 if place < self.strided else 1), norm_relu(out_channels)]
            width = out_channels
        return nn.Sequential(*layers, *classifier(width, num_classes))


class ChannelsFirst(nn.Module):
    def forward(self, x_BHWC: Tensor) -> Tensor:
        return x_BHWC.permute(0, 3, 1, 2)


class MeanOfTokens(nn.Module):
    def forward(self, x_BNC: Tensor) -> Tensor:
        return x_BNC.mean(dim=1)


def _channels_first(shape: Shape) -> list[nn.Module]:
    return [ChannelsFirst()] if is_channels_last(shape) else []
