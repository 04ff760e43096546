"""What a module costs: its parameters, and the floating-point operations of one forward pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

BATCH = 2  # in training mode batch normalisation refuses a single value per channel

Function = Callable[..., Any]


@dataclass(frozen=True)
class Cost:
    """``flops`` are of one input's forward pass: 2 per multiply-add, in convolutions, linear layers and attention."""

    parameters: int
    flops: int


def cost(module: nn.Module, input_shape: tuple[int, ...]) -> Cost:
    """The cost of a backbone, head or member for one input of this shape: [channels, height, width] for images.

    It runs on the meta device in place of the module's own tensors: nothing is computed, copied or changed.
    """
    tensors = chain(module.named_parameters(), module.named_buffers())
    on_meta = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors}
    inputs = torch.empty(BATCH, *input_shape, device="meta")
    with torch.no_grad():
        try:
            with LayerCounter() as layers:
                functional_call(module, on_meta, inputs)
            flops = layers.flops
        except UnknownFunctionError:
            with FlopCounterMode(display=False) as counter:
                functional_call(module, on_meta, inputs)
            flops = counter.get_total_flops()
    return Cost(sum(parameter.numel() for parameter in module.parameters()), flops // BATCH)


class UnknownFunctionError(ValueError):
    """A module calls what ``LayerCounter`` does not know."""


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _sum(x: Tensor, y: Tensor) -> Tensor:
    if x.shape != y.shape:
        raise UnknownFunctionError("a sum of two shapes")
    return x


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


Pair = int | tuple[int, int]


def _windows(x_BCHW: Tensor, channels: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair = 1) -> Tensor:
    """What comes of a window that moves over an image."""
    kernels, strides, paddings, dilations = (
        (one, one) if isinstance(one, int) else one for one in (kernel, stride, padding, dilation)
    )
    axes = zip(x_BCHW.shape[2:], kernels, strides, paddings, dilations, strict=True)
    sizes = [(size + 2 * pad - dilate * (width - 1) - 1) // step + 1 for size, width, step, pad, dilate in axes]
    return x_BCHW.new_empty(len(x_BCHW), channels, *sizes)


def _convolved(
    x_BCHW: Tensor, weight: Tensor, bias: object, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    height, width = weight.shape[2:]
    return _windows(x_BCHW, len(weight), (height, width), stride, padding, dilation)


def _averaged(x_BCHW: Tensor, kernel: Pair, stride: Pair | None = None, padding: Pair = 0, *rest: object) -> Tensor:
    if any(rest[:1]):
        raise UnknownFunctionError("pooling that rounds up")
    return _windows(x_BCHW, x_BCHW.shape[1], kernel, stride or kernel, padding)


def _averaged_to(x_BCHW: Tensor, size: int) -> Tensor:
    return x_BCHW.new_empty(*x_BCHW.shape[:2], size, size)


def _transformed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


# Their second argument is a weight, of which every output takes one row.
_MULTIPLYING: Mapping[Function, Function] = {F.conv2d: _convolved, F.linear: _transformed}
# All else that our families do.
_FREE: Mapping[Function, Function] = {
    **dict.fromkeys((F.batch_norm, F.relu, F.hardtanh, F.dropout), _same),
    Tensor.add: _sum,
    torch.cat: _joined,
    F.avg_pool2d: _averaged,
    F.adaptive_avg_pool2d: _averaged_to,
    **{one: one for one in (F.max_pool2d, F.pad, Tensor.flatten, Tensor.__getitem__)},
    **{getattr(Tensor, name).__get__: getattr(Tensor, name).__get__ for name in ("shape", "is_cuda")},
}


class LayerCounter(TorchFunctionMode):
    """Counts convolutions and linear layers where there is nothing else of weight; what it does not know, it refuses.

    Torch's counter knows everything, but imports the compiler for it, and most functions on the meta device import
    symbolic algebra: two seconds, where only shapes are asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(
        self, function: Function, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        shaped = _MULTIPLYING.get(function) or _FREE.get(function)
        if shaped is None:
            raise UnknownFunctionError(getattr(function, "__name__", repr(function)))
        try:
            output = shaped(*args, **(kwargs or {}))
            self.flops += 2 * output.numel() * args[1][0].numel() if function in _MULTIPLYING else 0
        except (TypeError, AttributeError, ValueError, IndexError) as error:  # called as our families do not
            raise UnknownFunctionError(str(error)) from error
        return output
