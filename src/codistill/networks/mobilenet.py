"""Networks of depthwise and pointwise convolutions: MobileNet in DCM's form for CIFAR, and MobileNetV2.

Howard et al. 2017, "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision Applications".
Sandler et al. 2018, "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from codistill.networks.layers import Conv2d, NormAct, conv_norm_relu
from codistill.networks.tables import Row, TabulatedArchitecture


@dataclass(frozen=True)
class MobileNet(TabulatedArchitecture):
    """Howard et al. 2017, with only two strides of 2 for images of 32×32."""

    stem_channels: ClassVar[int] = 32

    def stem(self, in_channels: int) -> nn.Module:
        return conv_norm_relu(in_channels, 32, 3)

    @property
    def stages(self) -> dict[str, tuple[Row, ...]]:
        return {
            "stage1": (Row(1, 64, stride=1), Row(2, 128, stride=1), Row(2, 256, stride=1)),
            "stage2": (Row(6, 512),),
            "stage3": (Row(2, 1024),),
        }

    @property
    def auxiliary(self) -> dict[str, tuple[Row, ...]]:
        # The paper's table prints C3 with two 512 blocks; its commented source and the authors' code have four.
        return {"stage2": (Row(2, 2048),), "stage1": (Row(4, 512), Row(2, 1024))}

    def block(self, in_channels: int, row: Row, stride: int) -> nn.Module:
        depthwise = conv_norm_relu(in_channels, in_channels, 3, stride, groups=in_channels)
        return nn.Sequential(depthwise, conv_norm_relu(in_channels, row.channels, 1))


class InvertedResidual(nn.Module):
    """Expand by 1×1, filter depthwise, project without activation; add the input if the shapes agree."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.branch = nn.Sequential(
            *([conv_norm_relu6(in_channels, hidden, 1)] if expansion > 1 else []),
            conv_norm_relu6(hidden, hidden, 3, stride, groups=hidden),
            Conv2d(hidden, out_channels, 1),
        )
        self.norm = NormAct(out_channels)
        self.adds_input = stride == 1 and in_channels == out_channels

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out: Tensor = self.norm(self.branch(x_BCHW), x_BCHW if self.adds_input else None)
        return out


def conv_norm_relu6(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    conv = Conv2d(in_channels, out_channels, kernel, stride, groups)
    return nn.Sequential(conv, NormAct(out_channels, nn.ReLU6(inplace=True)))


@dataclass(frozen=True)
class MobileNetV2(TabulatedArchitecture):
    """Sandler et al. 2018, Table 2, for ImageNet: torchvision's parameters in its order, without its dropout."""

    stem_channels: ClassVar[int] = 32
    stem_stride: ClassVar[int] = 2

    def stem(self, in_channels: int) -> nn.Module:
        return conv_norm_relu6(in_channels, 32, 3, stride=2)

    @property
    def stages(self) -> dict[str, tuple[Row, ...]]:
        return {
            "stage1": (Row(1, 16, 1, expansion=1), Row(2, 24, 2, expansion=6), Row(3, 32, 2, expansion=6)),
            "stage2": (Row(4, 64, 2, expansion=6), Row(3, 96, 1, expansion=6)),
            "stage3": (Row(3, 160, 2, expansion=6),),
            "stage4": (Row(1, 320, 1, expansion=6), Row(1, 1280, 1)),
        }

    @property
    def auxiliary(self) -> dict[str, tuple[Row, ...]]:
        return {
            "stage3": (Row(1, 480, 1, expansion=6), Row(1, 1920, 1)),
            "stage2": (Row(3, 160, 2, expansion=6), Row(1, 320, 1, expansion=3), Row(1, 1280, 1)),
        }

    def block(self, in_channels: int, row: Row, stride: int) -> nn.Module:
        if row.expansion is None:
            return conv_norm_relu6(in_channels, row.channels, 1, stride)
        return InvertedResidual(in_channels, row.channels, stride, row.expansion)
