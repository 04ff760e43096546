"""DenseNet for CIFAR without bottlenecks and compression, as in DenseNet-40-12.

Huang et al. 2017, "Densely Connected Convolutional Networks", CVPR.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from codistill.networks.layers import AvgPool2x2, BatchNorm2d, Conv2d, norm_relu
from codistill.networks.tables import PreActivatedArchitecture, Row, blocks_per_stage, half
from codistill.ops import dispatch as kernels


class DenseLayer(nn.Module):
    """concat(x, conv(relu(bn(x)))): adds ``growth`` channels to its input."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(norm_relu(in_channels), Conv2d(in_channels, growth, 3))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return torch.cat([x_BCHW, self.branch(x_BCHW)], dim=1)


class DenseStage(nn.Sequential):
    """Dense layers; each row after the first begins with a transition.

    On a GPU the layers between two transitions run as one operation, which concatenates without copying and pads its
    convolutions itself.
    """

    pads_convolutions = True

    def forward(self, x_BCHW: Tensor) -> Tensor:
        layers: list[nn.Module] = []
        for part in self:
            if isinstance(part, DenseLayer):
                layers.append(part)
            else:
                change, layer = part.children()
                x_BCHW = change(run_dense_layers(layers, x_BCHW))
                layers = [layer]
        return run_dense_layers(layers, x_BCHW)


def run_dense_layers(layers: Sequence[nn.Module], x_BCHW: Tensor) -> Tensor:
    """Runs the layers one after the other, on a GPU as one operation."""
    norms = [norm for layer in layers for norm in layer.modules() if isinstance(norm, BatchNorm2d)]
    convs = [conv for layer in layers for conv in layer.modules() if isinstance(conv, Conv2d)]
    growth = sum(conv.out_channels for conv in convs)
    if len(norms) == len(layers) > 0 and kernels.fit(x_BCHW, norms[0], growth):  # SyncBatchNorm has no kernel
        return kernels.dense_block(x_BCHW, list(zip(norms, convs, strict=True)))
    for layer in layers:
        x_BCHW = layer(x_BCHW)
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
        return blocks_per_stage("DenseNet", self.depth, per_block=3, extra=4)
