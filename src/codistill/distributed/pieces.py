"""Networks of which each sharer keeps a piece: torch's ``fully_shard`` along the ``data`` axis, for large networks.

Every weight is cut along its first axis, and so are its gradient, momentum and average. A part of a network is put
together where it runs, and let go afterwards. Optimizers and checkpoints see the pieces as plain tensors: torch's fused
optimizers, which can be told on the device to skip an update, have no rule for a ``DTensor``.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from codistill.distributed.sharing import BUCKET_BYTES, Sharers
from codistill.networks.backbone import Backbone
from codistill.runs.weights import optimized_parameter

CUT = [Shard(0)]
INSTEAD = "type processes.weights=replicated"


class Pieces:
    """``mesh`` has one axis: the sharers."""

    def __init__(self, sharers: Sharers, mesh: DeviceMesh) -> None:
        self.sharers, self.mesh = sharers, mesh
        self.held_of: dict[Tensor, Tensor] = {}
        """By weight: the piece that is here, always the same object, as an optimizer wants it."""
        self.shapes: dict[str, torch.Size] = {}
        """Of whole weights, by their names in a checkpoint."""
        self.learning_shapes: dict[str, torch.Size] = {}
        """The same by the names that optimizers know them by, which other people's networks do not save under."""

    def cut(self, module: nn.Module, parts: Iterable[nn.Module], name: str) -> None:
        """From here on ``module``, which a checkpoint calls ``name``, holds pieces. It runs ``parts`` one by one."""
        for path, parameter in module.named_parameters():
            if not parameter.ndim:
                raise ValueError(f"{name}.{path} is a single number, of which there are no pieces; {INSTEAD}")
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # torch takes no other
        for part in parts:
            for unit in units(part):
                self._cut(unit)
        for path, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                raise ValueError(f"{name}.{path} is in none of the network's stages, heads or classifier; {INSTEAD}")
            self.held_of[parameter] = _local(parameter)
            self.learning_shapes[f"{name}.{path}"] = parameter.shape
        for path, tensor in module.state_dict().items():
            if isinstance(tensor, DTensor):
                self.shapes[f"{name}.{path}"] = tensor.shape

    def _cut(self, unit: nn.Module) -> None:
        sharded = fully_shard(unit, mesh=self.mesh, reshard_after_forward=True)
        # Added and not averaged: every process weighs its objective by its share of the batch.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_custom_all_gather(Gather(self.sharers))  # type: ignore[arg-type]  # torch exports no such type
        sharded.set_custom_reduce_scatter(Scatter(self.sharers))  # type: ignore[arg-type]

    def held(self, tensor: Tensor) -> Tensor:
        """What is here of it: all, unless it is a weight, or somebody's view of one."""
        return self.held_of[tensor] if tensor in self.held_of else _local(tensor)

    @contextmanager
    def added(self) -> Iterator[None]:
        """The last backward pass of an update runs inside; then the pieces have the gradients that torch added up."""
        yield
        for parameter, piece in self.held_of.items():
            if parameter.grad is not None:
                piece.grad, parameter.grad = _local(parameter.grad), None
        self.sharers.crew.traffic.updates += 1

    def norms(self, norms_N: Tensor, order: float) -> Tensor:
        """Of whole gradients, from those of the pieces."""
        return self.sharers.summed(norms_N.pow(order)).pow(1 / order)

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A training's tensors, whole, for the first sharer; the others only help, with one tensor at a time."""
        whole = {}
        for name, tensor in tensors.items():
            shape = self._whole_shape(name, tensor)
            found = tensor if shape is None else self._joined(tensor, shape)
            if self.sharers.index == 0:
                whole[name] = found
        return whole

    def cut_out(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of whole tensors the pieces that belong here; everybody has them, so nobody sends them."""
        return {
            name: tensor
            if self._whole_shape(name, tensor) is None
            else _local(distribute_tensor(tensor.contiguous(), self.mesh, CUT, src_data_rank=None))
            for name, tensor in whole.items()
        }

    def _whole_shape(self, name: str, tensor: Tensor) -> torch.Size | None:
        """Where there are pieces: of weights, and of what an optimizer keeps for each of their numbers."""
        if parameter := optimized_parameter(name):
            return self.learning_shapes[parameter] if tensor.ndim else None
        return self.shapes.get(name)

    def _joined(self, piece: Tensor, shape: torch.Size) -> Tensor:
        """In the host's memory. All pieces but the last ones have as many rows, so what they lack is at the end."""
        rows = -(-shape[0] // self.sharers.count)
        sent = torch.zeros(rows, *shape[1:], dtype=piece.dtype)
        sent[: len(piece)] = piece
        received = [torch.empty_like(sent) for _ in range(self.sharers.count)]
        with self.sharers.crew.talking():
            dist.all_gather(received, sent, group=self.sharers.group)
        return torch.cat(received)[: shape[0]]


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


class Collective:
    """What ``fully_shard`` calls instead of its own, so that who is missing has a name and waiting is counted.

    It also asks for the memory. What travels lies in the host's: given a GPU's, gloo ended the process.
    """

    def __init__(self, sharers: Sharers) -> None:
        self.crew = sharers.crew

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began_at = time.perf_counter()
        with self.crew.talking():
            yield
        self.crew.traffic.gradient_waited_s += time.perf_counter() - began_at


class Gather(Collective):
    """Of pieces of weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        whole = output_tensor if output_tensor.is_cpu else torch.empty_like(output_tensor, device="cpu")
        with self.waiting():
            dist.all_gather(list(whole.chunk(group.size())), input_tensor.cpu(), group=group)
        if whole is not output_tensor:
            output_tensor.copy_(whole)


class Scatter(Collective):
    """Of gradients: everybody gets everybody's of its piece, and adds them up.

    Gloo's own reduce-scatter is an all-reduce, of which all but a piece is thrown away: twice the bytes.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        self.crew.traffic.gradient_bytes += input_tensor.nbytes
        sent = input_tensor.cpu()
        received = torch.empty_like(sent)
        with self.waiting():
            dist.all_to_all_single(received, sent, group=group)
        output_tensor.copy_(received.view(group.size(), -1).sum(0))


def parts_of(backbone: Backbone) -> list[nn.Module]:
    """What everybody who runs a backbone calls."""
    return [*backbone.stages.values(), backbone.classifier]


def units(part: nn.Module) -> Iterator[nn.Module]:
    """What is put together at once: as small as can be from a bucket's size on; inner ones before those around them."""
    if not any(True for _ in part.parameters()):
        return
    is_large = sum(parameter.nbytes for parameter in part.parameters()) > BUCKET_BYTES
    if is_large:
        for block in part if type(part) is nn.Sequential else blocks_in(part):
            yield from units(block)
    if not is_large or type(part) is not nn.Sequential:  # which runs nothing but its blocks
        yield part


def blocks_in(network: nn.Module) -> Iterator[nn.Module]:
    """Of somebody else's network: what sequences inside it repeat. Of a block of ours, nothing."""
    for child in network.children():
        if isinstance(child, nn.Sequential | nn.ModuleList) and all(map(_is_composite, child)):
            yield from child
        else:
            yield from blocks_in(child)


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
