"""Chooses an implementation for each operation: a Triton kernel where it is enabled, supported and faster, else torch.

The engine enables the kernels around a forward pass; outside of ``use_kernels`` every layer is torch's. Modules that
need Triton, which comes with torch for CUDA, are imported when they are first used.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from codistill.ops.wgrad_stream import DeferredConv2d, current_streams

Bounds = tuple[float | None, float | None]
"""(min, max) of a clamp activation: ReLU is (0, None), ReLU6 (0, 6)."""


@dataclass(frozen=True)
class Conv3x3:
    """The 3×3 convolutions (stride 1, padding 1, one group) for which an implementation is faster than cuDNN's.

    ``work`` is the number of products per filter tap: pixels × channels before × channels after.
    """

    dtypes: tuple[torch.dtype, ...]
    min_channels: int = 16
    max_channels: int = 2**31
    min_work: int = 1
    max_work: int = 2**62
    channels_multiple_of: int = 16

    def has_channels_of(self, conv: nn.Conv2d) -> bool:
        out_channels, channels = conv.weight.shape[:2]
        return (
            channels % self.channels_multiple_of == out_channels % self.channels_multiple_of == 0
            and self.min_channels <= min(channels, out_channels)
            and max(channels, out_channels) <= self.max_channels
        )

    def contains(self, x_BCHW: Tensor, conv: nn.Conv2d) -> bool:
        return (
            x_BCHW.dtype in self.dtypes
            and self.has_channels_of(conv)
            and self.min_work <= x_BCHW.numel() * conv.out_channels <= self.max_work
        )


# Measured on an H200 in November 2026; benchmarks/NOTES.md has all figures.
CONV_3X3 = {
    # Batches of 64, with the batch statistics of the output: 16 channels of 32×32 take 9.4 µs, cuDNN and a kernel for
    # the statistics 16.4; 64 of 8×8 8.2 and 11.2. With batches of 128 and 64 of 32×32, which are 2^29 products, it
    # loses, 42 to 38.
    "small": Conv3x3((torch.bfloat16, torch.float32), max_channels=64, max_work=2**25),
    # Batches of 128, with both gradients: 1280 channels of 8×8 take 533 µs, with cuDNN 1,070; 320 of 16×16 229 and 333,
    # 160 of 32×32 412 and 442, 512 of 8×8 130 and 177. With 256 of 8×8, which are 2^29 products, it loses, 67 to 60.
    "winograd": Conv3x3((torch.bfloat16,), min_channels=160, min_work=2**30),
}
"""Implementations besides cuDNN's, and where each is the fastest."""


_enabled: ContextVar[frozenset[str]] = ContextVar("enabled_kernels", default=frozenset())
"""Nothing, or "triton", or "triton" and "winograd"."""


@contextmanager
def use_kernels(*, winograd: bool = True) -> Iterator[None]:
    """Enables the Triton kernels inside the block; without ``winograd``, all but the Winograd convolution."""
    token = _enabled.set(frozenset({"triton", "winograd"} if winograd else {"triton"}))
    try:
        yield
    finally:
        _enabled.reset(token)


def is_supported(x_BCHW: Tensor, layer: nn.Module) -> bool:
    """Whether Triton kernels are enabled and support this tensor's device, dtype and layout."""
    return (
        not torch.compiler.is_compiling()  # first: a tracer does not understand the rest
        and "triton" in _enabled.get()
        and layer.training
        and x_BCHW.is_cuda
        and x_BCHW.dtype in (torch.bfloat16, torch.float32)
        and x_BCHW.is_contiguous(memory_format=torch.channels_last)
    )


def can_fuse_norm(x_BCHW: Tensor, norm: nn.BatchNorm2d, growth: int = 0) -> bool:
    """Whether the fused norm supports ``x`` after it grows by ``growth`` channels (32-bit offsets)."""
    channels = x_BCHW.shape[1]
    return (
        is_supported(x_BCHW, norm)
        and channels < x_BCHW.numel()
        and x_BCHW.numel() // channels * (channels + growth) < 2**31
    )


def suits_small_conv(x_BCHW: Tensor, conv: nn.Conv2d) -> bool:
    """Whether the small-convolution kernel supports this convolution and is the fastest."""
    return (
        is_plain_3x3(x_BCHW, conv)
        and CONV_3X3["small"].contains(x_BCHW, conv)
        and not (x_BCHW.dtype is torch.float32 and torch.is_autocast_enabled(x_BCHW.device.type))
    )


def suits_winograd(x_BCHW: Tensor, conv: nn.Conv2d) -> bool:
    """Whether Winograd F(4×4, 3×3) is enabled, supports this convolution and is the fastest; sides must be 4n."""
    out_channels, channels = conv.weight.shape[:2]
    tiles = x_BCHW.numel() // channels // 16
    return (
        is_plain_3x3(x_BCHW, conv)
        and "winograd" in _enabled.get()
        and CONV_3X3["winograd"].contains(x_BCHW, conv)
        and all(side % 4 == 0 for side in x_BCHW.shape[2:])
        and 36 * max(tiles, out_channels) * max(channels, out_channels) < 2**31  # offsets in maps and in the weight
    )


def may_use_winograd(layer: nn.Module) -> bool:
    """Whether it is a convolution that ``suits_winograd`` for some size of images."""
    return isinstance(layer, nn.Conv2d) and is_3x3(layer) and CONV_3X3["winograd"].has_channels_of(layer)


def is_3x3(conv: nn.Conv2d) -> bool:
    """Whether it is 3×3 with stride 1, padding 1 and one group."""
    return (conv.kernel_size, conv.stride, conv.padding, conv.groups) == ((3, 3), (1, 1), (1, 1), 1)


def is_plain_3x3(x_BCHW: Tensor, conv: nn.Conv2d) -> bool:
    """Whether kernels support ``x`` and a trained channels-last 3×3 weight, stride 1, padding 1 and one group."""
    return (
        is_supported(x_BCHW, conv)
        and is_3x3(conv)
        and conv.weight.is_contiguous(memory_format=torch.channels_last)
        and has_trained_weight(x_BCHW, conv)
    )


def has_trained_weight(x_BCHW: Tensor, conv: nn.Conv2d) -> bool:
    return conv.weight.requires_grad and x_BCHW.dtype is conv.weight.dtype


def conv2d(x_BCHW: Tensor, conv: nn.Conv2d) -> Tensor | None:
    """The convolution by a Triton kernel or with a deferred weight gradient; None where torch should compute it."""
    if torch.compiler.is_compiling():
        return None
    out: Tensor
    if suits_small_conv(x_BCHW, conv):
        return small_conv2d(x_BCHW, conv, eps=None)[0]
    if suits_winograd(x_BCHW, conv):
        from codistill.ops.conv_winograd import WinogradConv2d

        out = WinogradConv2d.apply(x_BCHW, conv.weight, current_streams())  # type: ignore[no-untyped-call]
        return out
    if current_streams() is None or not has_trained_weight(x_BCHW, conv):
        return None
    geometry = conv.stride, conv.padding, conv.groups
    out = DeferredConv2d.apply(x_BCHW, conv.weight, *geometry, current_streams())  # type: ignore[no-untyped-call]
    return out


def small_conv2d(x_BCHW: Tensor, conv: nn.Conv2d, *, eps: float | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """The convolution by the small-convolution kernel; with ``eps``, the batch statistics for ``norm_act``; and x.

    Where x is used a second time, use the returned one: the backward kernel then adds the gradients of both uses.
    """
    from codistill.ops.conv_small import SmallConv2d

    out: tuple[Tensor, Tensor | None, Tensor] = SmallConv2d.apply(x_BCHW, conv.weight, eps, current_streams())  # type: ignore[no-untyped-call]
    return out


def norm_act(
    x_BCHW: Tensor,
    norm: nn.BatchNorm2d,
    bounds: Bounds,
    shortcut_BCHW: Tensor | None,
    stats: Tensor | None = None,
    added_BCHW: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """clamp(norm(x) + shortcut), twice, and x: a second use of either takes the second result or the third.

    ``stats`` are the batch statistics of ``x``, where its convolution computed them. With ``added``, x is x + added.
    """
    from codistill.ops.norm import FusedNormAct

    state = norm.running_mean, norm.running_var, norm.momentum or 0.0, norm.eps
    arguments = x_BCHW, stats, shortcut_BCHW, norm.weight, norm.bias, *state, bounds, added_BCHW
    out: tuple[Tensor, Tensor, Tensor] = FusedNormAct.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


def dense_block(x_BCHW: Tensor, layers: Sequence[tuple[nn.BatchNorm2d, nn.Conv2d]]) -> Tensor:
    """x, followed by the output of each layer conv(relu(norm(…))), which reads all channels before its own."""
    from codistill.ops.dense import DenseBlock, RunningStats

    stats = tuple(RunningStats(norm.running_mean, norm.running_var, norm.momentum or 0.0) for norm, _ in layers)  # type: ignore[arg-type]
    learned = [tensor for norm, conv in layers for tensor in (norm.weight, norm.bias, conv.weight)]
    out: Tensor = DenseBlock.apply(x_BCHW, stats, layers[0][0].eps, current_streams(), *learned)  # type: ignore[no-untyped-call]
    return out


def avg_pool2(x_BCHW: Tensor) -> Tensor:
    """2×2 average pooling; height and width must be even."""
    out: Tensor = AvgPool2.apply(x_BCHW)  # type: ignore[no-untyped-call]
    return out


class AvgPool2(torch.autograd.Function):
    """Backward by nearest upsampling; torch's channels-last kernel took 1.2 of a DenseNet step's 14 ms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Tensor:
        return F.interpolate(grad_out / 4, scale_factor=2.0, mode="nearest")
