"""The layers that all families share."""

from torch import nn


class Conv2d(nn.Conv2d):
    """A convolution without bias that keeps the size at stride 1 and starts from He's normal distribution."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


def norm_relu(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


def conv_norm_relu(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = Conv2d(in_channels, out_channels, kernel, stride, groups)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True))
