"""The layers that all families share."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TENSOR_CORE_CHANNELS = 8
"""Half-precision convolutions of NVIDIA's library take channels in multiples of this."""


class Conv2d(nn.Conv2d):
    """A convolution without bias that keeps the size at stride 1 and starts from He's normal distribution."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        fits = self.in_channels % TENSOR_CORE_CHANNELS == self.out_channels % TENSOR_CORE_CHANNELS == 0
        if fits or self.groups > 1 or not (self.weight.is_cuda and self.weight.dtype is torch.bfloat16):
            return super().forward(x_BCHW)
        return padded_convolution(x_BCHW, self.weight, self.stride, self.padding)


def padded_convolution(
    x_BCHW: Tensor, weight: Tensor, stride: tuple[int, ...], padding: str | tuple[int, ...]
) -> Tensor:
    """The same convolution with channels of zeros up to a multiple of eight, which are cut off again.

    The library would pad by kernels of its own, a quarter of a DenseNet's time; a compiler fuses this with what is
    around it.
    """
    out_channels, in_channels = weight.shape[:2]
    more_in, more_out = -in_channels % TENSOR_CORE_CHANNELS, -out_channels % TENSOR_CORE_CHANNELS
    # Channels last while it is padded: then its gradient is too, and need not be copied into that order.
    wide_weight = F.pad(weight.permute(0, 2, 3, 1), (0, more_in, 0, 0, 0, 0, 0, more_out)).permute(0, 3, 1, 2)
    wide = F.conv2d(F.pad(x_BCHW, (0, 0, 0, 0, 0, more_in)), wide_weight, None, stride, padding)
    return wide[:, :out_channels]


class BatchNorm2d(nn.BatchNorm2d):
    """Torch's, but ``num_batches_tracked`` stays 0.

    Only ``momentum=None`` reads the count, and counting is one more kernel for each of these layers at every step.
    """

    def forward(self, x_BCHW: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x_BCHW, *statistics, self.weight, self.bias, self.training, self.momentum or 0.0, self.eps)


def norm_relu(channels: int) -> nn.Sequential:
    return nn.Sequential(BatchNorm2d(channels), nn.ReLU(inplace=True))


def conv_norm_relu(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = Conv2d(in_channels, out_channels, kernel, stride, groups)
    return nn.Sequential(conv, BatchNorm2d(out_channels), nn.ReLU(inplace=True))
