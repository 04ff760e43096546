"""Residual networks: ResNets for CIFAR and ImageNet, pre-activation ResNets, wide ResNets.

He et al. 2016a, "Deep Residual Learning for Image Recognition", CVPR: activation after the addition.
He et al. 2016b, "Identity Mappings in Deep Residual Networks", ECCV: normalisation and activation before a convolution.
Zagoruyko & Komodakis 2016, "Wide Residual Networks", BMVC: fewer, wider pre-activation blocks.

``Row(blocks, channels, stride=2)``: the stride is the first block's. ``stages`` are the backbone's rows; ``auxiliary``
are the rows of the head at the end of each named stage, the last stage first. ``half`` rounds up.

The base classes build stem, stages, global average pooling and linear layer, and heads likewise. With
``PreActivatedArchitecture`` the stem is a 3×3 convolution to 16 channels, and norm and ReLU precede the pooling.
``stem_stride`` is the factor by which the stem shrinks the image.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from codistill.networks.layers import (
    Block,
    Conv2d,
    FusedSequential,
    NormAct,
    Sum,
    Twice,
    as_tensor,
    conv_norm_relu,
    norm_relu,
)
from codistill.networks.tables import PreActivatedArchitecture, Row, TabulatedArchitecture, blocks_per_stage, half


class ResidualBlock(Block):
    """relu(norm(branch(x)) + shortcut(x))"""

    def __init__(self, branch: FusedSequential, out_channels: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.activation = norm_relu(out_channels)
        self.shortcut = shortcut

    def forward(self, x: Tensor | Twice, is_last: bool = True) -> Tensor | Sum | Twice:
        # x has two uses. Behind another block, its norm has an output for each; else the branch's first convolution
        # returns x for the second. stats: of the branch's output, None unless its last convolution computed them.
        branch_BCHW, stats, same_BCHW = self.branch.with_stats(as_tensor(x), self.activation)
        shortcut_BCHW = self.shortcut(x.again if isinstance(x, Twice) else same_BCHW)
        out_BCHW, again_BCHW, _ = self.activation.for_two_uses(branch_BCHW, shortcut_BCHW, stats)
        return self.hand_on(Twice(out_BCHW, again_BCHW), is_last)


class ZeroPaddedShortcut(nn.Module):
    """A shortcut without parameters where the shape changes: every ``stride``-th pixel, zeros in the new channels."""

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
    return nn.Sequential(Conv2d(in_channels, out_channels, 1, stride), NormAct(out_channels))  # without activation


def basic_branch(in_channels: int, out_channels: int, stride: int) -> FusedSequential:
    return FusedSequential(conv_norm_relu(in_channels, out_channels, 3, stride), Conv2d(out_channels, out_channels, 3))


def bottleneck_branch(in_channels: int, out_channels: int, stride: int) -> FusedSequential:
    """1×1, 3×3, 1×1; the stride is on the 3×3 convolution as in torchvision, not on the first 1×1 as in the paper."""
    middle = out_channels // 4
    return FusedSequential(
        conv_norm_relu(in_channels, middle, 1),
        conv_norm_relu(middle, middle, 3, stride),
        Conv2d(middle, out_channels, 1),
    )


@dataclass(frozen=True)
class CifarResNet(TabulatedArchitecture):
    """He et al. 2016a, section 4.2: basic blocks, identity shortcuts padded with zeros (option A); depth 6n+2."""

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
        return blocks_per_stage("CIFAR ResNet", self.depth, per_n=6, extra=2)


@dataclass(frozen=True)
class ImageNetResNet(TabulatedArchitecture):
    """He et al. 2016a, Table 1: ResNet-18 and ResNet-50 with projection shortcuts, layer for layer torchvision's."""

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


class PreActivationBlock(Block):
    """branch(a) + x, or branch(a) + projection(a) where the shape changes; a = relu(norm(x))."""

    def __init__(self, branch: nn.Module, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.activation = norm_relu(in_channels)
        self.branch = branch
        changes = in_channels != out_channels or stride != 1
        self.projection = Conv2d(in_channels, out_channels, 1, stride) if changes else None

    def forward(self, x: Tensor | Sum, is_last: bool = True) -> Tensor | Sum | Twice:
        # a, a and x, one output for each use: on a GPU, the norm's backward kernels add the gradients.
        for_branch, for_projection, shortcut = self.activation.for_two_uses(x)
        if self.projection is not None:
            shortcut = self.projection(for_projection)
        return self.hand_on(Sum(self.branch(for_branch), shortcut), is_last)


@dataclass(frozen=True)
class PreActivationResNet(PreActivatedArchitecture):
    """He et al. 2016b: bottleneck blocks; depth 9n+2. A row's channels are a block's output, four times its middle."""

    depth: int

    @property
    def stages(self) -> dict[str, tuple[Row, ...]]:
        n = self._n
        return {"stage1": (Row(n, 64, stride=1),), "stage2": (Row(n, 128),), "stage3": (Row(n, 256),)}

    @property
    def auxiliary(self) -> dict[str, tuple[Row, ...]]:
        n = self._n
        return {"stage2": (Row(n, 512),), "stage1": (Row(half(n), 128), Row(half(n), 256))}

    def block(self, in_channels: int, row: Row, stride: int) -> nn.Module:
        middle = row.channels // 4
        branch = FusedSequential(
            Conv2d(in_channels, middle, 1),
            norm_relu(middle),
            Conv2d(middle, middle, 3, stride),
            norm_relu(middle),
            Conv2d(middle, row.channels, 1),
        )
        return PreActivationBlock(branch, in_channels, row.channels, stride)

    @property
    def _n(self) -> int:
        return blocks_per_stage("pre-activation ResNet", self.depth, per_n=9, extra=2)


@dataclass(frozen=True)
class WideResNet(PreActivatedArchitecture):
    """Zagoruyko & Komodakis 2016: basic blocks, with optional dropout between the two convolutions; depth 6n+4."""

    depth: int
    width: int
    dropout: float = 0.0

    @property
    def stages(self) -> dict[str, tuple[Row, ...]]:
        n, w = self._n, self.width
        return {"stage1": (Row(n, 16 * w, stride=1),), "stage2": (Row(n, 32 * w),), "stage3": (Row(n, 64 * w),)}

    @property
    def auxiliary(self) -> dict[str, tuple[Row, ...]]:
        n, w = self._n, self.width
        return {
            "stage2": (Row(n, 128 * w),),
            "stage1": (Row(n, 32 * w), Row(half(n), 64 * w)),
            "stem": (Row(n, 16 * w, stride=1), Row(half(n), 32 * w), Row(half(n), 64 * w)),
        }

    def block(self, in_channels: int, row: Row, stride: int) -> nn.Module:
        branch = FusedSequential(
            Conv2d(in_channels, row.channels, 3, stride),
            norm_relu(row.channels),
            *([nn.Dropout(self.dropout)] if self.dropout else []),
            Conv2d(row.channels, row.channels, 3),
        )
        return PreActivationBlock(branch, in_channels, row.channels, stride)

    @property
    def _n(self) -> int:
        return blocks_per_stage("WRN", self.depth, per_n=6, extra=4)
