"""Surgery on built networks: cut off the part behind a module, and change the widths of layers.

Cutting: torch.fx traces the network's ``forward``, but only into the modules that contain the cut; every other module
stays a single call with its own code, whatever that does. What fx must trace is then a few lines that call one module
after the other.

Refitting: a dry run on the meta device finds the new shapes, layer by layer in the order in which they run. Then the
real layers take them, with values drawn like the old ones. Code that depends on certain widths (attention, SE on a
residual path) fails in the dry run, before anything has changed.
"""

from collections.abc import Callable
from copy import deepcopy
from inspect import signature
from math import gcd, sqrt
from operator import getitem

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from codistill.networks.cost import BATCH

Shape = tuple[int, ...]

CHANNELS = ("in_channels", "out_channels", "groups", "in_features", "out_features")
NORMS = ("num_features", "num_channels", "normalized_shape")


def cut_behind(network: nn.Module, path: str) -> fx.GraphModule:
    """The part from the output of the module ``path`` to the network's logits; it shares the network's modules."""
    _images, *others = signature(network.forward).parameters.values()
    try:
        graph = _PathTracer(path).trace(network, {other.name: other.default for other in others})
    # fx raises nearly anything for Python code that it cannot trace.
    except Exception as error:
        why = " ".join(str(error).split())
        raise ValueError(f"its forward cannot be traced ({why})") from None
    (cut,) = [node for node in graph.nodes if node.op == "call_module" and node.target == path]
    needed = _nodes_behind(graph, cut)
    rest = fx.Graph()
    features = rest.placeholder("features")
    copied: dict[fx.Node, fx.Node] = {cut: features}
    for node in graph.nodes:
        if node in needed:
            copied[node] = (
                rest.call_method("size", (features, 0))
                if _is_batch_size(node)
                else rest.node_copy(node, lambda original: copied[original])
            )
    module = fx.GraphModule(network, rest, class_name="Head")
    _switch_dropout_by_mode(module)
    return module


class _PathTracer(fx.Tracer):
    """Traces only into the modules that contain ``path``; every other module is one call."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self.path.startswith(f"{module_qualified_name}.")


def can_be_cut(network: nn.Module, path: str) -> bool:
    """Whether ``cut_behind`` works at the module ``path``."""
    try:
        cut_behind(network, path)
    except ValueError:
        return False
    return True


def _is_batch_size(node: fx.Node) -> bool:
    """Whether the node is ``x.shape[0]`` or ``x.size(0)``, which is the same for every tensor, also at the cut."""
    if node.target is getitem and node.args[1] == 0 and isinstance(node.args[0], fx.Node):
        return node.args[0].target is getattr and node.args[0].args[1] == "shape"
    return node.op == "call_method" and node.target == "size" and node.args[1:] == (0,)


def _nodes_behind(graph: fx.Graph, cut: fx.Node) -> set[fx.Node]:
    """The nodes between the cut and the output."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    needed: set[fx.Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            raise ValueError("what follows also uses earlier results")
        if node not in needed and node is not cut:
            needed.add(node)
            waiting += [] if _is_batch_size(node) else node.all_input_nodes
    return needed


def _switch_dropout_by_mode(module: fx.GraphModule) -> None:
    """Replaces functional dropout, whose mode tracing has fixed, by modules that follow train and eval."""
    for number, node in enumerate(module.graph.nodes):
        if node.target is F.dropout:
            rate = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
            module.add_submodule(f"dropout_{number}", nn.Dropout(float(rate)))
            node.op, node.target, node.args, node.kwargs = "call_module", f"dropout_{number}", node.args[:1], {}
    module.recompile()


def refit(module: nn.Module, input_shape: Shape, factor: Callable[[str], float]) -> None:
    """Makes every layer of ``module`` fit its input, in place, given an input of this shape.

    The layer at a path outputs ``factor(path)`` times as many channels as before. Raises whatever the module's code
    raises if it does not support that.
    """
    plan = deepcopy(module).to("meta")
    for path, layer in plan.named_modules():
        layer.register_forward_pre_hook(_refit_hook(factor(path)))
    with torch.no_grad():
        plan(torch.empty(BATCH, *input_shape, device="meta"))
    for path, planned in plan.named_modules():
        _take_shapes(module.get_submodule(path), planned)


def _refit_hook(factor: float) -> Callable[[nn.Module, tuple[object, ...]], None]:
    has_run = False

    def before(layer: nn.Module, args: tuple[object, ...]) -> None:
        nonlocal has_run
        if has_run:  # a layer that runs twice
            return
        has_run = True
        arriving = args[0] if args and isinstance(args[0], Tensor) else None
        match layer:
            case nn.Conv2d() if arriving is not None:
                _fit_convolution(layer, arriving.shape[1], factor)
            case nn.Linear() if arriving is not None:
                layer.in_features, layer.out_features = arriving.shape[-1], _scale(layer.out_features, factor)
                _reshape(layer, "weight", (layer.out_features, layer.in_features))
                _reshape(layer, "bias", (layer.out_features,))
            case _BatchNorm() if arriving is not None:
                layer.num_features = arriving.shape[1]
                _reshape_all(layer, (layer.num_features,))
            case nn.GroupNorm() if arriving is not None:
                layer.num_channels = arriving.shape[1]
                _reshape_all(layer, (layer.num_channels,))
            case nn.LayerNorm() if arriving is not None and len(layer.normalized_shape) == 1:
                # In both libraries the names of those that normalise a feature map over its channels end in 2d.
                width = arriving.shape[1 if type(layer).__name__.endswith("2d") else -1]
                layer.normalized_shape = (width,)
                _reshape_all(layer, (width,))
            case _:
                for name, parameter in layer.named_parameters(recurse=False):
                    # One value per channel, such as ConvNeXt's scale of a residual branch.
                    if sum(size > 1 for size in parameter.shape) == 1:
                        shape = tuple(_scale(size, factor) if size > 1 else 1 for size in parameter.shape)
                        _reshape(layer, name, shape)

    return before


def _fit_convolution(layer: nn.Conv2d, arriving: int, factor: float) -> None:
    if layer.groups == layer.in_channels > 1:  # depthwise: as many as arrive
        layer.out_channels = arriving * (layer.out_channels // layer.in_channels)
        layer.in_channels = layer.groups = arriving
    else:
        layer.in_channels, layer.out_channels = arriving, _scale(layer.out_channels, factor)
        layer.groups = gcd(layer.groups, arriving, layer.out_channels)
    _reshape(layer, "weight", (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size))
    _reshape(layer, "bias", (layer.out_channels,))


def _scale(width: int, factor: float) -> int:
    return max(1, round(width * factor))


def _reshape_all(layer: nn.Module, shape: Shape) -> None:
    for name in ("weight", "bias", "running_mean", "running_var"):
        _reshape(layer, name, shape)


def _reshape(layer: nn.Module, name: str, shape: Shape) -> None:
    old = getattr(layer, name, None)
    if isinstance(old, Tensor) and old.shape != shape:
        new = redraw(old, shape)
        setattr(layer, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)


def _take_shapes(layer: nn.Module, planned: nn.Module) -> None:
    for attribute in (*CHANNELS, *NORMS):
        if attribute in vars(planned):
            setattr(layer, attribute, getattr(planned, attribute))
    for name, tensor in (*planned.named_parameters(recurse=False), *planned.named_buffers(recurse=False)):
        _reshape(layer, name, tuple(tensor.shape))


@torch.no_grad()
def redraw(old: Tensor, shape: Shape) -> Tensor:
    """New normal values of another shape, with the old mean and standard deviation, corrected for the fan-in."""
    mean, std = old.mean(), old.std(correction=0)
    fan_in, new_fan_in = (max(1, one.numel() // len(one)) for one in (old, old.new_empty(shape)))
    return mean + std * sqrt(fan_in / new_fan_in) * torch.randn(shape, dtype=old.dtype, device=old.device)
