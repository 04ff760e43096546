"""Chooses between Triton kernels and torch for each layer, and where weight gradients are computed.

Both are the engine's choice, which it makes around a forward pass; without one, layers are torch's.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Bounds = tuple[float | None, float | None]
"""(min, max) of a clamp activation: ReLU is (0, None), ReLU6 (0, 6)."""

LAG = 4
"""Maximum number of deferred weight gradients; each keeps two feature maps alive, with Winograd more than three."""

USUAL_EPS = 1e-5
"""The eps for which convolutions compute the statistics of the batch norm that follows."""
SMALL_UNIT, SMALL_CHANNELS, SMALL_WORK = 16, 64, 2**25
"""A 3×3 convolution is small if its channels are multiples of the first and no more than the second, and its products
for a tap no more than the third. Measured on an H200: with 2^24, ours take half the time of the library's and of a
kernel for the moments; with 2^29 they lose."""
WIDE_UNIT, WIDE_CHANNELS, WIDE_WORK = 16, 160, 2**30
"""A 3×3 convolution is wide if its channels, before and after, are multiples of the first and no fewer than the second,
and its products for a tap no fewer than the third. Measured on an H200, batches of 128, with both gradients: with 1280
channels of 8×8 Winograd's method takes 533 µs, the library 1,070; with 320 of 16×16 229 and 333, with 160 of 32×32 412
and 442, with 512 of 8×8 130 and 177. With 256 of 8×8, which are 2^29 products, it loses, 67 to 60."""

Value = TypeVar("Value")

_own_kernels: ContextVar[bool] = ContextVar("own_kernels", default=False)
_apart: ContextVar["Apart | None"] = ContextVar("apart", default=None)


@contextmanager
def _during(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def use_kernels(*, winograd: bool = True) -> AbstractContextManager[None]:
    """Enables the Triton kernels for layers inside the block."""
    return _during(_own_kernels, True)


def weights_apart(apart: "Apart | None") -> AbstractContextManager[None]:
    """Inside the block, convolutions queue their weight gradients on side streams."""
    return _during(_apart, apart)


def fit(x_BCHW: Tensor, norm: nn.BatchNorm2d, growth: int = 0) -> bool:
    """Whether the fused norm supports ``x`` after it grows by ``growth`` channels (32-bit offsets)."""
    channels = x_BCHW.shape[1]
    return (
        wanted(x_BCHW, norm) and channels < x_BCHW.numel() and x_BCHW.numel() // channels * (channels + growth) < 2**31
    )


def wanted(x_BCHW: Tensor, layer: nn.Module) -> bool:
    """Whether Triton kernels are enabled and support this tensor's device, dtype and layout."""
    return (
        not torch.compiler.is_compiling()
        and _own_kernels.get()
        and layer.training
        and x_BCHW.is_cuda
        and x_BCHW.dtype in (torch.bfloat16, torch.float32)
        and x_BCHW.is_contiguous(memory_format=torch.channels_last)
    )


def norm_activate(
    x_BCHW: Tensor, norm: nn.BatchNorm2d, bounds: Bounds, shortcut_BCHW: Tensor | None
) -> tuple[Tensor, Tensor]:
    """clamp(norm(x) + shortcut), and x: a second use of the returned x adds its gradient in the same kernel."""
    from codistill.ops.norm import NormActivate

    moments, eps = getattr(x_BCHW, "moments", (None, norm.eps))
    state = norm.running_mean, norm.running_var, norm.momentum or 0.0, norm.eps, bounds
    out: Tensor
    again: Tensor
    x_again: Tensor
    out, again, x_again = NormActivate.apply(  # type: ignore[no-untyped-call]
        x_BCHW, moments if eps == norm.eps else None, shortcut_BCHW, norm.weight, norm.bias, *state
    )
    out.again = again  # type: ignore[attr-defined]
    return out, x_again


def added(x_BCHW: Tensor, y_BCHW: Tensor, norm: nn.Module) -> Tensor:
    """x + y, with the statistics that the batch norm ``norm`` needs next."""
    if not (isinstance(norm, nn.BatchNorm2d) and fit(x_BCHW, norm) and x_BCHW.dtype is y_BCHW.dtype):
        return x_BCHW + y_BCHW
    from codistill.ops.norm import Sum

    out: Tensor
    out, moments = Sum.apply(x_BCHW, y_BCHW, norm.eps)  # type: ignore[no-untyped-call]
    out.moments = moments, norm.eps  # type: ignore[attr-defined]
    return out


def used_again(x_BCHW: Tensor) -> Tensor:
    """The same feature map for a second use: the op that computed it adds both gradients in its backward kernel."""
    if torch.compiler.is_compiling() or not isinstance(x_BCHW, Tensor):  # to a tracer every attribute exists
        return x_BCHW
    again: Tensor = getattr(x_BCHW, "again", x_BCHW)
    return again


def dense_block(x_BCHW: Tensor, layers: Sequence[tuple[nn.BatchNorm2d, nn.Conv2d]]) -> Tensor:
    """x, followed by the output of each layer conv(relu(norm(…))), which reads all channels before its own."""
    from codistill.ops.dense import DenseBlock, LayerState

    states = tuple(LayerState(norm.running_mean, norm.running_var, norm.momentum or 0.0) for norm, _ in layers)  # type: ignore[arg-type]
    learned = [tensor for norm, conv in layers for tensor in (norm.weight, norm.bias, conv.weight)]
    out: Tensor = DenseBlock.apply(x_BCHW, states, layers[0][0].eps, _apart.get(), *learned)  # type: ignore[no-untyped-call]
    return out


def convolution(x_BCHW: Tensor, conv: nn.Conv2d, *, normalised: bool) -> Tensor | None:
    """The convolution with a Triton kernel or a deferred weight gradient; None where torch should compute it.

    What is ``normalised`` next brings its moments, where they come cheaply.
    """
    if torch.compiler.is_compiling():  # before anything that a tracer does not understand
        return None
    apart = _apart.get()
    if apart is None and not _own_kernels.get():
        return None
    if not conv.weight.requires_grad or x_BCHW.dtype is not conv.weight.dtype:
        return None
    out: Tensor
    if is_small(x_BCHW, conv):
        from codistill.ops.conv_small import SmallConvolution

        eps = USUAL_EPS if normalised else None
        out, moments = SmallConvolution.apply(x_BCHW, conv.weight, eps, apart)  # type: ignore[no-untyped-call]
        if normalised:
            out.moments = moments, eps  # type: ignore[attr-defined]
        return out
    if is_wide(x_BCHW, conv):
        from codistill.ops.conv_winograd import WinogradConvolution

        out = WinogradConvolution.apply(x_BCHW, conv.weight, apart)  # type: ignore[no-untyped-call]
        return out
    if apart is None:
        return None
    shape = conv.stride, conv.padding, conv.groups
    out = Convolution.apply(x_BCHW, conv.weight, *shape, apart)  # type: ignore[no-untyped-call]
    return out


def halved(x_BCHW: Tensor) -> Tensor:
    """2×2 average pooling; height and width must be even."""
    out: Tensor = Halved.apply(x_BCHW)  # type: ignore[no-untyped-call]
    return out


def is_small(x_BCHW: Tensor, conv: nn.Conv2d) -> bool:
    """Whether the small-convolution kernel supports this convolution and is faster than cuDNN's."""
    out_channels, channels = conv.weight.shape[:2]
    return (
        wanted(x_BCHW, conv)
        and is_plain(conv)
        and channels % SMALL_UNIT == out_channels % SMALL_UNIT == 0
        and max(channels, out_channels) <= SMALL_CHANNELS
        and 0 < x_BCHW.numel() * out_channels <= SMALL_WORK  # without images no program would write the sums
        and not (x_BCHW.dtype is torch.float32 and torch.is_autocast_enabled(x_BCHW.device.type))
    )


def is_wide(x_BCHW: Tensor, conv: nn.Conv2d) -> bool:
    """Whether Winograd F(4×4, 3×3) supports this convolution and is faster: bfloat16, many channels, sides of 4n."""
    out_channels, channels = conv.weight.shape[:2]
    squares = x_BCHW.numel() // channels // 16
    return (
        wanted(x_BCHW, conv)
        and is_plain(conv)
        and x_BCHW.dtype is torch.bfloat16
        and channels % WIDE_UNIT == out_channels % WIDE_UNIT == 0
        and min(channels, out_channels) >= WIDE_CHANNELS
        and x_BCHW.numel() * out_channels >= WIDE_WORK
        and all(side % 4 == 0 for side in x_BCHW.shape[2:])
        and 36 * max(squares, out_channels) * max(channels, out_channels) < 2**31  # places of maps and of the weight
    )


def is_plain(conv: nn.Conv2d) -> bool:
    """Whether it is 3×3 with stride 1, padding 1 and one group, and its weight channels-last."""
    shape = conv.kernel_size, conv.stride, conv.padding, conv.groups
    return shape == ((3, 3), (1, 1), (1, 1), 1) and conv.weight.is_contiguous(memory_format=torch.channels_last)


class Halved(torch.autograd.Function):
    """Backward by nearest upsampling; torch's channels-last kernel took 1.2 of a DenseNet step's 14 ms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return F.interpolate(gradient / 4, scale_factor=2.0, mode="nearest")


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        groups: int,
        apart: "Apart",
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rest = stride, padding, groups
        ctx.apart = apart
        return F.conv2d(x, weight, None, stride, padding, 1, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors

        def gradients(*which: bool) -> tuple[Tensor, ...]:
            return convolution_gradients(gradient, x, weight, which, *ctx.rest)

        weight_gradient(ctx.apart, weight, lambda: gradients(False, True, False)[1], (x, gradient))
        inwards = gradients(True, False, False)[0] if ctx.needs_input_grad[0] else None
        return inwards, None, None, None, None, None


def convolution_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, which: Sequence[bool], stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (1, 1), groups: int = 1,
) -> tuple[Tensor, ...]:  # fmt: skip
    """cuDNN's gradients of input, weight and bias; ``which`` selects them."""
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, list(stride), list(padding), [1, 1], False, [0, 0], groups, which
    )
    return found


def weight_gradient(
    apart: "Apart | None", weight: Tensor, compute: Callable[[], Tensor], used: tuple[Tensor, ...]
) -> Tensor | None:
    """The weight gradient, or None if it was queued on the side stream and accumulated into ``weight.grad``.

    It is not returned then: autograd might copy it before it is computed.
    """
    if apart is None:
        return compute()
    with apart.after(*used):
        found = compute()
        weight.grad = found if weight.grad is None else weight.grad + found
    return None


class Apart:
    """Computes weight gradients on side streams; only the optimizer waits for them."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}

    @contextmanager
    def after(self, *used: Tensor) -> Iterator[None]:
        """Runs the block on the side stream, after all work queued so far; later work does not wait for it."""
        here = torch.cuda.current_stream()
        lane = self.lanes.setdefault(here.cuda_stream, Lane())
        lane.stream.wait_stream(here)
        with torch.cuda.stream(lane.stream):
            yield
        # The memory of what was used must not be taken for something else before it was read.
        lane.waiting.append((lane.stream.record_event(), used))
        if len(lane.waiting) > LAG:
            done, _ = lane.waiting.popleft()
            here.wait_event(done)

    def join(self) -> None:
        """Waits for all side streams, and keeps them: a captured step may only wait for streams that it forked."""
        for lane in self.lanes.values():
            torch.cuda.current_stream().wait_stream(lane.stream)
            lane.waiting.clear()


@dataclass
class Lane:
    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)
    waiting: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = field(default_factory=deque)


def has_winograd_shape(module):
    return isinstance(module, nn.Conv2d) and is_plain(module) and min(module.weight.shape[:2]) >= WIDE_CHANNELS
