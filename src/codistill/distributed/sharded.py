"""Sharded weights for large networks: torch's FSDP2 (``fully_shard``) along the ``data`` axis.

Every weight is sharded along its first dimension, and so are its gradient, momentum and moving average. A unit of the
network is all-gathered when it runs and resharded afterwards. Optimizers and checkpoints see the local shards as plain
tensors: torch's fused optimizers, which can skip an update on the device, have no rule for a ``DTensor``.
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

from codistill.distributed.data_parallel import BUCKET_BYTES, DataParallelGroup
from codistill.distributed.group import ProcessGroup
from codistill.networks.backbone import Backbone
from codistill.networks.layers import PLAIN_SEQUENCES
from codistill.runs.weights import copied_name, optimized_parameter

PLACEMENTS = [Shard(0)]
REMEDY = "type processes.weights=replicated"


class ShardedParams:
    """The local shards of the networks' weights. ``mesh`` is the one-dimensional mesh of the data-parallel group."""

    def __init__(self, data_parallel: DataParallelGroup, mesh: DeviceMesh) -> None:
        self.data_parallel, self.mesh = data_parallel, mesh
        self.local_shards: dict[Tensor, Tensor] = {}
        """By weight: always the same tensor object, as optimizers need it."""
        self.shapes: dict[str, torch.Size] = {}
        """Shapes of full weights by their names in a checkpoint."""
        self.optimizer_shapes: dict[str, torch.Size] = {}
        """The same by the names that optimizers use, which differ for networks from other libraries."""

    def shard(self, module: nn.Module, parts: Iterable[nn.Module], name: str) -> None:
        """Shards a module that runs ``parts`` one by one; ``name`` is its prefix in a checkpoint."""
        for path, parameter in module.named_parameters():
            if not parameter.ndim:
                raise ValueError(f"{name}.{path} is a scalar, which cannot be sharded; {REMEDY}")
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # FSDP2 takes no other
        for part in parts:
            for unit in shard_units(part):
                self._shard(unit)
        for path, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                raise ValueError(f"{name}.{path} is in none of the network's stages, heads or classifier; {REMEDY}")
            self.local_shards[parameter] = _to_local(parameter)
            self.optimizer_shapes[f"{name}.{path}"] = parameter.shape
        for path, tensor in module.state_dict().items():
            if isinstance(tensor, DTensor):
                self.shapes[f"{name}.{path}"] = tensor.shape

    def _shard(self, unit: nn.Module) -> None:
        sharded = fully_shard(unit, mesh=self.mesh, reshard_after_forward=True)
        # Sum, do not average: every rank weights its objective by its fraction of the batch.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        world = self.data_parallel.world
        sharded.set_custom_all_gather(AllGather(world))  # type: ignore[arg-type]  # torch does not export the type
        sharded.set_custom_reduce_scatter(ReduceScatter(world))  # type: ignore[arg-type]

    def local(self, tensor: Tensor) -> Tensor:
        """Returns the local shard of a weight, or of a view of one; other tensors as they are."""
        return self.local_shards[tensor] if tensor in self.local_shards else _to_local(tensor)

    @contextmanager
    def reduce(self) -> Iterator[None]:
        """Runs around the last backward pass of an update; afterwards the shards have the reduced gradients."""
        yield
        for parameter, shard in self.local_shards.items():
            if parameter.grad is not None:
                shard.grad, parameter.grad = _to_local(parameter.grad), None
        self.data_parallel.world.traffic.updates += 1

    def full_norms(self, norms_N: Tensor, order: float) -> Tensor:
        """Returns the norms of full gradients from those of the local shards."""
        return self.data_parallel.all_reduce(norms_N.pow(order)).pow(1 / order)

    def unshard(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a training's tensors in full on the group's first rank; the others take part and return nothing.

        All-gathers one tensor at a time.
        """
        full = {}
        for name, tensor in tensors.items():
            shape = self._full_shape(name, tensor)
            found = tensor if shape is None else self._all_gather(tensor, shape)
            if self.data_parallel.rank == 0:
                full[name] = found
        return full

    def reshard(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's shards of full tensors, which every rank of the group has: nothing is sent."""
        return {
            name: tensor
            if self._full_shape(name, tensor) is None
            else _to_local(distribute_tensor(tensor.contiguous(), self.mesh, PLACEMENTS, src_data_rank=None))
            for name, tensor in full.items()
        }

    def _full_shape(self, name: str, tensor: Tensor) -> torch.Size | None:
        """Returns None for a tensor that is not sharded; weights are, and optimizer state that has their shape."""
        name = copied_name(name)  # a copy to roll back to is sharded as its original
        if parameter := optimized_parameter(name):
            return self.optimizer_shapes[parameter] if tensor.ndim else None
        return self.shapes.get(name)

    def _all_gather(self, shard: Tensor, shape: torch.Size) -> Tensor:
        """Gathers into host memory. Only the last shards may have fewer rows, so padding ends up at the end."""
        rows = -(-shape[0] // self.data_parallel.size)
        sent = torch.zeros(rows, *shape[1:], dtype=shard.dtype)
        sent[: len(shard)] = shard
        received = [torch.empty_like(sent) for _ in range(self.data_parallel.size)]
        with self.data_parallel.world.translate_errors():
            dist.all_gather(received, sent, group=self.data_parallel.group)
        return torch.cat(received)[: shape[0]]


def _to_local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


class Collective:
    """Replaces one of FSDP2's collectives: translates errors, counts the time, and goes through host memory.

    Gloo over CUDA tensors killed the process.
    """

    def __init__(self, world: ProcessGroup) -> None:
        self.world = world

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @contextmanager
    def timed(self) -> Iterator[None]:
        began_at = time.perf_counter()
        with self.world.translate_errors():
            yield
        self.world.traffic.gradient_waited_s += time.perf_counter() - began_at


class AllGather(Collective):
    """All-gathers the shards of a unit's weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        full = output_tensor if output_tensor.is_cpu else torch.empty_like(output_tensor, device="cpu")
        with self.timed():
            dist.all_gather(list(full.chunk(group.size())), input_tensor.cpu(), group=group)
        if full is not output_tensor:
            output_tensor.copy_(full)


class ReduceScatter(Collective):
    """Reduce-scatters gradients by an all-to-all and a local sum.

    Gloo's own reduce-scatter is an all-reduce that discards all but one shard: twice the bytes.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        self.world.traffic.gradient_bytes += input_tensor.nbytes
        sent = input_tensor.cpu()
        received = torch.empty_like(sent)
        with self.timed():
            dist.all_to_all_single(received, sent, group=group)
        output_tensor.copy_(received.view(group.size(), -1).sum(0))


def submodules(backbone: Backbone) -> list[nn.Module]:
    """Returns the modules that a backbone calls one by one."""
    return [*backbone.stages.values(), backbone.classifier]


def shard_units(part: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules to gather at once: blocks of a part that is larger than a bucket, inner before outer ones."""
    if not any(True for _ in part.parameters()):
        return
    is_large = sum(parameter.nbytes for parameter in part.parameters()) > BUCKET_BYTES
    if is_large:
        for block in part.children() if type(part) in PLAIN_SEQUENCES else repeated_blocks(part):
            yield from shard_units(block)
    if not is_large or type(part) not in PLAIN_SEQUENCES:  # they have no weights besides their blocks'
        yield part


def repeated_blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Yields what a network from another library repeats in a sequence; nothing for one of codistill's blocks."""
    for child in network.children():
        if isinstance(child, nn.Sequential | nn.ModuleList) and all(list(block.children()) for block in child):
            yield from child
        else:
            yield from repeated_blocks(child)
