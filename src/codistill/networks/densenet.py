"""DenseNet for CIFAR without bottlenecks and compression, as in DenseNet-40-12.

Huang et al. 2017, "Densely Connected Convolutional Networks", CVPR.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from codistill.networks.layers import AvgPool2x2, Conv2d, norm_relu, run_dense_block
from codistill.networks.tables import PreActivatedArchitecture, Row, blocks_per_stage, half


class DenseLayer(nn.Module):
    """concat(x, conv(relu(bn(x)))): adds ``growth`` channels to its input."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(norm_relu(in_channels), Conv2d(in_channels, growth, 3))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return torch.cat([x_BCHW, self.branch(x_BCHW)], dim=1)


class DenseStage(nn.Sequential):
    """Dense layers; each row after the first begins with a transition.

    On a GPU the layers between two transitions run as one operation.
    """

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.blocks: list[tuple[nn.Module, list[Any]]] = []
        """Each transition with the dense layers behind it."""
        for part in self:
            if isinstance(part, DenseLayer) and self.blocks:
                self.blocks[-1][1].append(part)
            elif isinstance(part, DenseLayer):
                self.blocks.append((nn.Identity(), [part]))
            else:
                change, layer = part.children()
                self.blocks.append((change, [layer]))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        for change, layers in self.blocks:
            x_BCHW = change(x_BCHW)
            out = run_dense_block([layer.branch for layer in layers], x_BCHW)
            if out is None:
                for layer in layers:
                    x_BCHW = layer(x_BCHW)
            else:
                x_BCHW = out
        return x_BCHW


def transition(channels: int) -> nn.Module:
    """BN, ReLU, 1×1 convolution and 2×2 average pooling; the number of channels stays."""
    return nn.Sequential(norm_relu(channels), Conv2d(channels, channels, 1), AvgPool2x2())


@dataclass(frozen=True)
class DenseNet(PreActivatedArchitecture):
    """Depth 3n+4. A row's channels are its growth rate; the transition before it down-samples.

    A stage begins with its transition, so exits come before the next transition and heads have their own.
    """

    depth: int
    growth: int

    @property
    def stages(self) -> dict[str, tuple[Row, ...]]:
        n, g = self._n, self.growth
        return {"stage1": (Row(n, g, stride=1),), "stage2": (Row(n, g),), "stage3": (Row(n, g),)}

    @property
    def auxiliary(self) -> dict[str, tuple[Row, ...]]:
        n, g = self._n, self.growth
        return {"stage2": (Row(n, 3 * g),), "stage1": (Row(n, g), Row(half(n), g))}

    def block(self, in_channels: int, row: Row, stride: int) -> nn.Module:
        layer = DenseLayer(in_channels, row.channels)
        return layer if stride == 1 else nn.Sequential(transition(in_channels), layer)

    def _blocks(self, channels: int, rows: Iterable[Row]) -> DenseStage:
        return DenseStage(*super()._blocks(channels, rows))

    def block_channels(self, in_channels: int, row: Row) -> int:
        return in_channels + row.channels

    @property
    def _n(self) -> int:
        return blocks_per_stage("DenseNet", self.depth, per_n=3, extra=4)
