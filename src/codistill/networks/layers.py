"""The layers that all families share: torch's, or in training on a GPU the kernels that ops/dispatch.py chooses."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codistill.ops import dispatch

TENSOR_CORE_CHANNELS = 8
"""cuDNN's half-precision convolutions use tensor cores for channels in multiples of this."""


class Conv2d(nn.Conv2d):
    """A convolution without bias that keeps the size at stride 1, with He's normal initialisation by fan-out."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)

    def reset_parameters(self) -> None:
        # Of one group: kaiming_normal_ would count the channels of all, and start depthwise weights near 0.
        fan_out = self.out_channels // self.groups * math.prod(self.kernel_size)
        nn.init.normal_(self.weight, std=math.sqrt(2) / math.sqrt(fan_out))

    @property
    def fits_tensor_cores(self) -> bool:
        """Whether it needs no padding for tensor cores: it is grouped, or its channels are multiples of eight."""
        return (
            self.groups > 1 or self.in_channels % TENSOR_CORE_CHANNELS == self.out_channels % TENSOR_CORE_CHANNELS == 0
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if self.fits_tensor_cores or not (self.weight.is_cuda and self.weight.dtype is torch.bfloat16):
            out = dispatch.conv2d(x_BCHW, self)
            return super().forward(x_BCHW) if out is None else out
        return padded_convolution(x_BCHW, self.weight, self.stride, self.padding)

    def with_stats(self, x_BCHW: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor | None, Tensor]:
        """The output; the batch statistics of it that ``norm`` needs, None if no kernel computes them; and x."""
        if isinstance(norm, BatchNorm2d) and dispatch.suits_small_conv(x_BCHW, self):
            return dispatch.small_conv2d(x_BCHW, self, eps=norm.eps)
        return self(x_BCHW), None, x_BCHW


class AvgPool2x2(nn.AvgPool2d):
    """Average pooling over 2×2 pixels."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if dispatch.is_supported(x_BCHW, self) and all(side % 2 == 0 for side in x_BCHW.shape[2:]):
            return dispatch.avg_pool2(x_BCHW)
        return super().forward(x_BCHW)


def padded_convolution(
    x_BCHW: Tensor, weight: Tensor, stride: tuple[int, ...], padding: str | tuple[int, ...]
) -> Tensor:
    """A convolution whose channels are padded with zeros to a multiple of eight; the extra outputs are cut off.

    cuDNN would pad with kernels of its own, which take a quarter of a DenseNet's time; a compiler fuses this padding
    with its neighbours.
    """
    out_channels, in_channels = weight.shape[:2]
    more_in, more_out = -in_channels % TENSOR_CORE_CHANNELS, -out_channels % TENSOR_CORE_CHANNELS
    # Padded in channels-last order: then the gradient has that order too and is not copied.
    wide_weight = F.pad(weight.permute(0, 2, 3, 1), (0, more_in, 0, 0, 0, 0, 0, more_out)).permute(0, 3, 1, 2)
    wide = F.conv2d(F.pad(x_BCHW, (0, 0, 0, 0, 0, more_in)), wide_weight, None, stride, padding)
    return wide[:, :out_channels]


class BatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation as in torch, except that ``num_batches_tracked`` stays 0.

    Only ``momentum=None`` needs the count, and is not supported; counting takes one more kernel per layer and step.
    """

    def forward(self, x_BCHW: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x_BCHW, *statistics, self.weight, self.bias, self.training, self.momentum or 0.0, self.eps)


class NormAct(nn.Sequential):
    """activation(norm(x) + shortcut), both optional; on a GPU in one kernel."""

    def __init__(self, channels: int, activation: nn.ReLU | nn.ReLU6 | None = None) -> None:
        super().__init__(BatchNorm2d(channels), *([activation] if activation else []))
        self.bounds: dispatch.Bounds = BOUNDS[type(activation)]

    def forward(self, x: "Tensor | Sum", shortcut_BCHW: Tensor | None = None, stats: Tensor | None = None) -> Tensor:
        return self.for_two_uses(x, shortcut_BCHW, stats)[0]

    def for_two_uses(
        self, x: "Tensor | Sum", shortcut_BCHW: Tensor | None = None, stats: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What ``forward`` returns, twice, and x as a tensor: one output for each use.

        On a GPU, kernels that run anyway add the gradients of all three.
        """
        norm, *activation = self
        x_BCHW, y_BCHW = x if isinstance(x, Sum) else (x, None)
        has_one_dtype = y_BCHW is None or y_BCHW.dtype is x_BCHW.dtype
        # A SyncBatchNorm has no kernel.
        if isinstance(norm, BatchNorm2d) and has_one_dtype and dispatch.can_fuse_norm(x_BCHW, norm):
            return dispatch.norm_act(x_BCHW, norm, self.bounds, shortcut_BCHW, stats, y_BCHW)
        x_BCHW = as_tensor(x)
        out: Tensor = norm(x_BCHW)
        if shortcut_BCHW is not None:
            out = out + shortcut_BCHW
        for layer in activation:
            out = layer(out)
        return out, out, x_BCHW


BOUNDS: dict[type, dispatch.Bounds] = {type(None): (None, None), nn.ReLU: (0.0, None), nn.ReLU6: (0.0, 6.0)}
"""(min, max) of the clamp that an activation is."""


class FusedSequential(nn.Sequential):
    """Layers one after the other; on a GPU a small convolution also computes the batch statistics for its norm."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.with_stats(x_BCHW, None)[0]

    def with_stats(self, x_BCHW: Tensor, next_layer: nn.Module | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """The output; the batch statistics of it that ``next_layer`` needs, None if no kernel computes them; and x.

        Where x is used a second time, use the returned one: on a GPU, one kernel adds the gradients of both uses.
        """
        out, stats, inputs = x_BCHW, None, []
        for layer, following in zip(self, [*self, next_layer][1:], strict=True):
            if isinstance(layer, FusedSequential):
                out, stats, x_BCHW = layer.with_stats(out, following)
            elif isinstance(layer, Conv2d) and isinstance(following, NormAct):
                out, stats, x_BCHW = layer.with_stats(out, following[0])
            else:
                x_BCHW = out
                out = layer(out, stats=stats) if isinstance(layer, NormAct) else layer(out)
                stats = None
            inputs.append(x_BCHW)
        return out, stats, inputs[0]


class Sum(NamedTuple):
    """x + y, not added yet: the norm that comes next adds them, on a GPU in the kernel that computes its statistics."""

    x: Tensor
    y: Tensor


class Twice(NamedTuple):
    """A feature map as two outputs of one norm, one for each use: on a GPU, its kernel adds the gradients of both."""

    x: Tensor
    again: Tensor


def as_tensor(x: Tensor | Sum | Twice) -> Tensor:
    """The feature map, as a layer takes it that knows neither."""
    if isinstance(x, Sum):
        return x.x + x.y
    return x.x if isinstance(x, Twice) else x


class Block(nn.Module):
    """A block of a ``BlockSequential``, which takes what the block before it returned."""

    def hand_on(self, out: Sum | Twice, is_last: bool) -> Tensor | Sum | Twice:
        """What to return: ``out`` where another block's kernels take it, else a tensor."""
        return out if not is_last and dispatch.is_supported(out.x, self) else as_tensor(out)


class BlockSequential(nn.Sequential):
    """Layers one after the other, of which a block may hand a ``Sum`` or ``Twice`` to the next."""

    def forward(self, x: Tensor | Sum | Twice, is_last: bool = True) -> Tensor | Sum | Twice:
        for index, layer in enumerate(self, start=1):
            if isinstance(layer, Block | BlockSequential):
                x = layer(x, is_last=is_last and index == len(self))
            else:
                x = layer(x if isinstance(layer, NormAct) else as_tensor(x))
        return x


PLAIN_SEQUENCES = nn.Sequential, BlockSequential
"""They only call their parts one after the other; other subclasses of Sequential can be blocks themselves."""


def run_dense_block(branches: Sequence[Iterable[Any]], x_BCHW: Tensor) -> Tensor | None:
    """``x``, followed by the output of each branch conv(relu(bn(…))), which reads all channels before its own.

    One operation runs all branches: it concatenates without copying and pads its convolutions itself. None where the
    kernels do not support it.
    """
    layers = [(norm_act[0], conv) for norm_act, conv in branches]
    growth = sum(conv.out_channels for _, conv in layers)
    has_kernel = all(isinstance(norm, BatchNorm2d) for norm, _ in layers)  # a SyncBatchNorm has none
    if has_kernel and dispatch.can_fuse_norm(x_BCHW, layers[0][0], growth):
        return dispatch.dense_block(x_BCHW, layers)
    return None


def norm_relu(channels: int) -> NormAct:
    return NormAct(channels, nn.ReLU(inplace=True))


def conv_norm_relu(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return FusedSequential(Conv2d(in_channels, out_channels, kernel, stride, groups), norm_relu(out_channels))
