"""Residual networks whose blocks begin with their activation (He et al. 2016): ResNet-164 and wide ResNets."""

from dataclasses import dataclass

from torch import Tensor, nn

from codistill.networks.layers import Conv2d, norm_relu
from codistill.networks.tables import PreActivatedArchitecture, Row, blocks_per_stage, half
from codistill.ops.dispatch import added, used_again


class PreActivationBlock(nn.Module):
    """branch(a) + x, or branch(a) + projection(a) where the shape changes; a = relu(bn(x)) is shared."""

    def __init__(self, branch: nn.Module, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.activation = norm_relu(in_channels)
        self.branch = branch
        changes = in_channels != out_channels or stride != 1
        self.projection = Conv2d(in_channels, out_channels, 1, stride) if changes else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        activated, shortcut = self.activation.with_input(x_BCHW)
        if self.projection is not None:
            shortcut = self.projection(used_again(activated))
        return added(self.branch(activated), shortcut, self.activation[0])


@dataclass(frozen=True)
class PreActivationResNet(PreActivatedArchitecture):
    """Bottleneck blocks; depth 9n+2. The paper prints a block's output channels, four times those in its middle."""

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
        branch = nn.Sequential(
            Conv2d(in_channels, middle, 1),
            norm_relu(middle),
            Conv2d(middle, middle, 3, stride, normalised=True),
            norm_relu(middle),
            Conv2d(middle, row.channels, 1),
        )
        return PreActivationBlock(branch, in_channels, row.channels, stride)

    @property
    def _n(self) -> int:
        return blocks_per_stage("pre-activation ResNet", self.depth, per_block=9, extra=2)


@dataclass(frozen=True)
class WideResNet(PreActivatedArchitecture):
    """Basic blocks (Zagoruyko & Komodakis 2016), with dropout between the two convolutions if asked; depth 6n+4."""

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
        branch = nn.Sequential(
            Conv2d(in_channels, row.channels, 3, stride, normalised=True),
            norm_relu(row.channels),
            *([nn.Dropout(self.dropout)] if self.dropout else []),
            Conv2d(row.channels, row.channels, 3),
        )
        return PreActivationBlock(branch, in_channels, row.channels, stride)

    @property
    def _n(self) -> int:
        return blocks_per_stage("WRN", self.depth, per_block=6, extra=4)
