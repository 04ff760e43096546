"""Other widths for a module that is already built: every layer is made to fit what arrives, and gives more or less.

A dry run on the meta device finds the shapes, layer by layer in the order in which they run. Then the real layers take
them, with numbers drawn as their old ones were. Code that counts on certain widths (attention, SE on a residual path)
fails in the dry run, and nothing has changed yet.
"""

from collections.abc import Callable
from copy import deepcopy
from math import gcd, sqrt

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from codistill.networks.adapters.survey import BATCH, Shape

CHANNELS = ("in_channels", "out_channels", "groups", "in_features", "out_features")
NORMS = ("num_features", "num_channels", "normalized_shape")


def refit(module: nn.Module, input_shape: Shape, factor: Callable[[str], float]) -> None:
    """Make every layer of ``module`` fit what arrives for an input of this shape, in place.

    The layer at a path gives ``factor(path)`` times as many channels as before. Raises whatever the module raises
    where its code does not go with that.
    """
    planned = deepcopy(module).to("meta")
    for path, layer in planned.named_modules():
        layer.register_forward_pre_hook(_refitting(factor(path)))
    with torch.no_grad():
        planned(torch.empty(BATCH, *input_shape, device="meta"))
    for path, wanted in planned.named_modules():
        _take_shapes(module.get_submodule(path), wanted)


def _refitting(factor: float) -> Callable[[nn.Module, tuple[object, ...]], None]:
    fitted = False

    def before(layer: nn.Module, args: tuple[object, ...]) -> None:
        nonlocal fitted
        if fitted:  # a layer that runs twice
            return
        fitted = True
        arriving = args[0] if args and isinstance(args[0], Tensor) else None
        match layer:
            case nn.Conv2d() if arriving is not None:
                _fit_convolution(layer, arriving.shape[1], factor)
            case nn.Linear() if arriving is not None:
                layer.in_features, layer.out_features = arriving.shape[-1], _scaled(layer.out_features, factor)
                _reshape(layer, "weight", (layer.out_features, layer.in_features))
                _reshape(layer, "bias", (layer.out_features,))
            case _BatchNorm() if arriving is not None:
                layer.num_features = arriving.shape[1]
                _reshape_all(layer, (layer.num_features,))
            case nn.GroupNorm() if arriving is not None:
                layer.num_channels = arriving.shape[1]
                _reshape_all(layer, (layer.num_channels,))
            case nn.LayerNorm() if arriving is not None and len(layer.normalized_shape) == 1:
                # Both libraries call those that normalise a feature map over its channels something with 2d.
                width = arriving.shape[1 if type(layer).__name__.endswith("2d") else -1]
                layer.normalized_shape = (width,)
                _reshape_all(layer, (width,))
            case _:
                for name, parameter in layer.named_parameters(recurse=False):
                    # A number for each channel, such as ConvNeXt's scale of a residual branch.
                    if sum(size > 1 for size in parameter.shape) == 1:
                        shape = tuple(_scaled(size, factor) if size > 1 else 1 for size in parameter.shape)
                        _reshape(layer, name, shape)

    return before


def _fit_convolution(layer: nn.Conv2d, arriving: int, factor: float) -> None:
    if layer.groups == layer.in_channels > 1:  # depthwise: what arrives decides
        layer.out_channels = arriving * (layer.out_channels // layer.in_channels)
        layer.in_channels = layer.groups = arriving
    else:
        layer.in_channels, layer.out_channels = arriving, _scaled(layer.out_channels, factor)
        layer.groups = gcd(layer.groups, arriving, layer.out_channels)
    _reshape(layer, "weight", (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size))
    _reshape(layer, "bias", (layer.out_channels,))


def _scaled(width: int, factor: float) -> int:
    return max(1, round(width * factor))


def _reshape_all(layer: nn.Module, shape: Shape) -> None:
    for name in ("weight", "bias", "running_mean", "running_var"):
        _reshape(layer, name, shape)


def _reshape(layer: nn.Module, name: str, shape: Shape) -> None:
    old = getattr(layer, name, None)
    if isinstance(old, Tensor) and old.shape != shape:
        new = redrawn(old, shape)
        setattr(layer, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)


def _take_shapes(layer: nn.Module, wanted: nn.Module) -> None:
    for attribute in (*CHANNELS, *NORMS):
        if attribute in vars(wanted):
            setattr(layer, attribute, getattr(wanted, attribute))
    for name, tensor in (*wanted.named_parameters(recurse=False), *wanted.named_buffers(recurse=False)):
        _reshape(layer, name, tuple(tensor.shape))


@torch.no_grad()
def redrawn(old: Tensor, shape: Shape) -> Tensor:
    """New numbers of another shape: constant where the old ones are, otherwise as spread as those, for their fan-in."""
    mean, spread = old.mean(), old.std(correction=0)
    fan_in, new_fan_in = (max(1, one.numel() // len(one)) for one in (old, old.new_empty(shape)))
    return mean + spread * sqrt(fan_in / new_fan_in) * torch.randn(shape, dtype=old.dtype, device=old.device)
