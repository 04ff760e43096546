"""How much memory a network takes to classify one image, computed before anything of that size exists."""

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    import onnx

IMAGE_BYTES = 64 * 2**20
"""The most that one image may take by these counts; torch and onnxruntime need up to about three times as much."""
BATCH_BYTES = 32 * 2**20
SHAPE_BYTES = 4096
"""Tensors up to this size may be shapes, which shape inference reads."""
FLOAT = 1  # onnx.TensorProto.FLOAT


class LargestOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest size in bytes of an operation's inputs and outputs together, without weights."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0
        self.weights = {tensor.untyped_storage()._cdata for tensor in network.state_dict().values()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        found = {
            leaf.untyped_storage()._cdata: leaf for leaf in tree_leaves((args, output)) if isinstance(leaf, Tensor)
        }
        self.bytes = max(self.bytes, sum(one.nbytes for key, one in found.items() if key not in self.weights))
        return output


@torch.no_grad()
def image_bytes(network: nn.Module, shape: tuple[int, int, int]) -> int:
    """Return the most that an operation on one image of this shape reads and writes; ``network`` is on meta."""
    state = network.state_dict()
    computed = sum(tensor.nbytes for name, tensor in network.named_buffers() if name not in state)
    with LargestOperation(network) as largest:
        network(torch.empty(1, *shape, device="meta"))
    return int(computed + largest.bytes)


def onnx_image_bytes(model: "onnx.ModelProto", shape: tuple[int, int, int]) -> int:
    """Return the peak memory of one image's tensors in the order of the graph; raises for what has no known size.

    Sizes that a graph computes while it runs (Range, or shapes made from values) are not known and count as nothing.
    """
    import onnx

    graph = model.graph
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    if model.functions or any(attribute.HasField("g") or attribute.graphs for attribute in attributes):
        raise ValueError("it has loops, branches or functions, whose memory cannot be bounded")
    tensors = [*graph.initializer, *(attribute.t for attribute in attributes if attribute.HasField("t"))]
    if graph.sparse_initializer or any(a.HasField("sparse_tensor") or a.sparse_tensors for a in attributes):
        raise ValueError("it has sparse tensors, which would be expanded")
    if any(tensor.external_data or tensor.data_location for tensor in tensors):
        raise ValueError("it has weights in other files")
    if sum(prod(tensor.dims) for tensor in tensors) > 2 * model.ByteSize():  # two, as an element may have four bits
        raise ValueError("its weights claim more than the file has")
    _set_input(graph, shape)
    del graph.value_info[:]  # they are claims of the file
    for tensor in tensors:
        if tensor.ByteSize() > SHAPE_BYTES:  # or shape inference would copy all weights, more than once
            tensor.ClearField("raw_data")
    known = onnx.shape_inference.infer_shapes(model, data_prop=False).graph
    sizes = {value.name: _value_bytes(value) for value in (*known.value_info, *known.output)}
    uses = Counter(name for node in graph.node for name in node.input)
    live = peak = 0
    for node in graph.node:
        live += sum(sizes.get(name, 0) for name in node.output)
        peak = max(peak, live)
        uses.subtract(node.input)
        live -= sum(sizes.get(name, 0) for name in {*node.input, *node.output} if uses[name] == 0)
    return peak + 4 * prod(shape)


def _set_input(graph: "onnx.GraphProto", shape: tuple[int, int, int]) -> None:
    """Give the input the shape of one image; raises if the graph's input is of another shape, or not the only one."""
    inputs = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    axes = inputs.get("images", ())
    if (
        len(inputs) != 1
        or len(axes) != 4
        or any(a.dim_value not in (0, n) for a, n in zip(axes[1:], shape, strict=True))
    ):
        raise ValueError(f"its input is not images of {'×'.join(map(str, shape))} alone")
    for axis, size in zip(axes, (1, *shape), strict=True):
        axis.dim_value = size


def _value_bytes(value: "onnx.ValueInfoProto") -> int:
    """Return the size of a tensor, 0 if it is not known."""
    tensor = value.type.tensor_type
    element_bytes = 4 if tensor.elem_type == FLOAT else 8
    return int(element_bytes * prod(max(axis.dim_value, 0) for axis in tensor.shape.dim))
