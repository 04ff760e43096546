"""Modules on the meta device have shapes and no numbers, so there are none to draw."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWING: frozenset[Callable[..., Any]] = frozenset(
    {
        Tensor.normal_,
        Tensor.uniform_,
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.trunc_normal_,
        nn.init.kaiming_uniform_,
    }
)


class Undrawn(TorchFunctionMode):
    """Initial weights stay as they are. Torch would draw none either, but import its compiler to do so: a second."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if function in _DRAWING:
            return args[0] if args else named["tensor"]
        return function(*args, **named)
