"""Residual networks with activation after the addition (He et al. 2015): ResNet-110 and the like, ResNet-18 and -50."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from codistill.networks.layers import Conv2d, Normalised, conv_norm_relu, norm_relu
from codistill.networks.tables import Row, TabulatedArchitecture, blocks_per_stage, half
from codistill.ops.dispatch import used_again


class ResidualBlock(nn.Module):
    """relu(norm(branch(x)) + shortcut(x))"""

    def __init__(self, branch: nn.Module, out_channels: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.activation = norm_relu(out_channels)
        self.shortcut = shortcut

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out: Tensor = self.activation(self.branch(x_BCHW), self.shortcut(used_again(x_BCHW)))
        return out


class ZeroPaddedShortcut(nn.Module):
    """The identity without parameters where the shape changes: every ``stride``-th pixel, new channels zero."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels = new_channels
        self.stride = stride

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.pad(x_BCHW[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


def padded_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    return ZeroPaddedShortcut(out_channels - in_channels, stride)


def projected_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(Conv2d(in_channels, out_channels, 1, stride), Normalised(out_channels))


def basic_branch(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    return nn.Sequential(
        conv_norm_relu(in_channels, out_channels, 3, stride),
        Conv2d(out_channels, out_channels, 3, normalised=True),
    )


def bottleneck_branch(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """The stride is on the 3×3 convolution, as in torchvision, not on the first 1×1 as in the first paper."""
    middle = out_channels // 4
    return nn.Sequential(
        conv_norm_relu(in_channels, middle, 1),
        conv_norm_relu(middle, middle, 3, stride),
        Conv2d(middle, out_channels, 1),
    )


@dataclass(frozen=True)
class CifarResNet(TabulatedArchitecture):
    """Basic blocks and identity shortcuts padded with zeros; depth 6n+2."""

    depth: int
    stem_channels: ClassVar[int] = 16

    def stem(self, in_channels: int) -> nn.Module:
        return conv_norm_relu(in_channels, 16, 3)

    @property
    def stages(self) -> dict[str, tuple[Row, ...]]:
        n = self._n
        return {"stage1": (Row(n, 16, stride=1),), "stage2": (Row(n, 32),), "stage3": (Row(n, 64),)}

    @property
    def auxiliary(self) -> dict[str, tuple[Row, ...]]:
        n = self._n
        return {"stage2": (Row(n, 128),), "stage1": (Row(half(n), 32), Row(half(n), 64))}

    def block(self, in_channels: int, row: Row, stride: int) -> nn.Module:
        shape = in_channels, row.channels, stride
        return ResidualBlock(basic_branch(*shape), row.channels, padded_shortcut(*shape))

    @property
    def _n(self) -> int:
        return blocks_per_stage("CIFAR ResNet", self.depth, per_block=6, extra=2)


@dataclass(frozen=True)
class ImageNetResNet(TabulatedArchitecture):
    """ResNet-18 and ResNet-50 with projection shortcuts, layer for layer torchvision's."""

    depth: int
    stem_channels: ClassVar[int] = 64
    stem_stride: ClassVar[int] = 4

    def __post_init__(self) -> None:
        if self.depth not in (18, 50):
            raise ValueError(f"ImageNet ResNet: depth {self.depth} does not fit; it is 18 or 50")

    def stem(self, in_channels: int) -> nn.Module:
        return nn.Sequential(conv_norm_relu(in_channels, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))

    @property
    def stages(self) -> dict[str, tuple[Row, ...]]:
        if self.depth == 18:
            rows = Row(2, 64, stride=1), Row(2, 128), Row(2, 256), Row(2, 512)
        else:
            rows = Row(3, 256, stride=1), Row(4, 512), Row(6, 1024), Row(3, 2048)
        return {f"stage{number}": (row,) for number, row in enumerate(rows, start=1)}

    @property
    def auxiliary(self) -> dict[str, tuple[Row, ...]]:
        if self.depth == 18:
            return {"stage3": (Row(2, 1024),), "stage2": (Row(1, 256), Row(2, 512))}
        return {"stage3": (Row(3, 4096),), "stage2": (Row(3, 1024), Row(2, 2048))}

    def block(self, in_channels: int, row: Row, stride: int) -> nn.Module:
        shape = in_channels, row.channels, stride
        branch = basic_branch(*shape) if self.depth == 18 else bottleneck_branch(*shape)
        return ResidualBlock(branch, row.channels, projected_shortcut(*shape))
