"""The part of a network behind one of its modules, as a module of its own.

torch.fx follows the network's ``forward``, but only into the modules that lie around the place of the cut: every other
one stays a single step with its own code, whatever that does. What must be followed is then a few lines that call one
module after the other.
"""

from inspect import signature
from operator import getitem

from torch import fx, nn
from torch.nn import functional as F


def behind(network: nn.Module, path: str) -> fx.GraphModule:
    """From the output of the module ``path`` to the network's own output; the modules are the network's, not copies."""
    _images, *others = signature(network.forward).parameters.values()
    try:
        graph = _Opening(path).trace(network, {other.name: other.default for other in others})
    # fx raises nearly anything where it cannot follow Python code.
    except Exception as error:
        why = " ".join(str(error).split())
        raise ValueError(f"its forward cannot be followed ({why}); take heads of kind apfc") from None
    (cut,) = [node for node in graph.nodes if node.op == "call_module" and node.target == path]
    needed = _needed(graph, cut)
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


class _Opening(fx.Tracer):
    """Follows only the modules around ``path``; everything else is one step."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self.path.startswith(f"{module_qualified_name}.")


def can_be_cut(network: nn.Module, path: str) -> bool:
    try:
        behind(network, path)
    except ValueError:
        return False
    return True


def _is_batch_size(node: fx.Node) -> bool:
    """``x.shape[0]`` or ``x.size(0)``: the same of whatever is computed, so also of what arrives at the cut."""
    if node.target is getitem and node.args[1] == 0 and isinstance(node.args[0], fx.Node):
        return node.args[0].target is getattr and node.args[0].args[1] == "shape"
    return node.op == "call_method" and node.target == "size" and node.args[1:] == (0,)


def _needed(graph: fx.Graph, cut: fx.Node) -> set[fx.Node]:
    """What the output is computed from, up to the cut and not beyond."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    needed: set[fx.Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            raise ValueError(
                "what follows also uses what was computed before it; name another module, or take heads of kind apfc"
            )
        if node not in needed and node is not cut:
            needed.add(node)
            waiting += [] if _is_batch_size(node) else node.all_input_nodes
    return needed


def _switch_dropout_by_mode(module: fx.GraphModule) -> None:
    """As a function, dropout would go on as it was when it was followed, in training and in evaluation alike."""
    for number, node in enumerate(module.graph.nodes):
        if node.target is F.dropout:
            rate = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
            module.add_submodule(f"dropout_{number}", nn.Dropout(float(rate)))
            node.op, node.target, node.args, node.kwargs = "call_module", f"dropout_{number}", node.args[:1], {}
    module.recompile()
