"""The engine's ``Peers`` in a process group: a torch ``DeviceMesh`` with the axes ``cohort`` and ``data``.

Along ``cohort``, each rank sends the logits of its own classifiers to the ranks of the other groups that have the same
shard of the batch: one message per classifier, in float32, which holds bfloat16 exactly, through host memory.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from codistill.cohort import Cohort
from codistill.data.batches import Share
from codistill.distributed.data_parallel import (
    DataParallelGroup,
    GradientSync,
    RunningStatistics,
    convert_sync_batchnorm,
)
from codistill.distributed.group import ProcessGroup
from codistill.distributed.layout import Layout
from codistill.distributed.sharded import ShardedParams, submodules
from codistill.engine.optim import MovingAverage
from codistill.engine.peers import Peers
from codistill.networks.backbone import Backbone
from codistill.recipes.schema import Recipe
from codistill.runs.weights import average_key, cohort_key


@dataclass(frozen=True)
class Message:
    """A transfer with another rank that is under way, and the memory that it reads or writes."""

    rank: int
    work: dist.Work | None
    logits: Tensor


class LogitsAllGather:
    """``owners`` maps every classifier to the rank that computes it."""

    def __init__(self, world: ProcessGroup, owners: Mapping[str, int]) -> None:
        self.world, self.owners = world, owners
        self.tags = {name: index for index, name in enumerate(owners)}
        self.others = sorted(set(owners.values()) - {world.rank})

    def __call__(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Returns the logits of all ``names``: this rank's as they are, the others' as constants."""
        like = next(iter(logits.values()))
        dtype = torch.promote_types(like.dtype, torch.float32)
        # First the receives: gloo moves a message only when its receive is posted.
        receives = {name: self._receive(name, like, dtype) for name in names if self.owners[name] != self.world.rank}
        mine = {name: logits[name].detach().to(dtype) for name in names if name in logits}
        sends = [self._send(name, tensor, rank) for name, tensor in _on_host(mine).items() for rank in self.others]
        began_at = time.perf_counter()
        for message in (*receives.values(), *sends):
            with self.world.translate_errors(message.rank):
                if message.work is not None:
                    message.work.wait()
        self.world.traffic.exchanges += 1
        self.world.traffic.waited_s += time.perf_counter() - began_at
        theirs = {name: message.logits.to(like.device, non_blocking=True) for name, message in receives.items()}
        return {name: logits[name] if name in logits else theirs[name] for name in names}

    def _receive(self, name: str, like: Tensor, dtype: torch.dtype) -> Message:
        rank = self.owners[name]
        theirs = torch.empty(like.shape, dtype=dtype, pin_memory=like.is_cuda)
        with self.world.translate_errors(rank):
            return Message(rank, dist.irecv(theirs, rank, tag=self.tags[name]), theirs)

    def _send(self, name: str, mine: Tensor, rank: int) -> Message:
        self.world.traffic.bytes_sent += mine.nbytes
        with self.world.translate_errors(rank):
            return Message(rank, dist.isend(mine, rank, tag=self.tags[name]), mine)


def _on_host(logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies in host memory; waits for the device once."""
    if not any(tensor.is_cuda for tensor in logits.values()):
        return {name: tensor.contiguous() for name, tensor in logits.items()}
    copies = {name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for name, tensor in logits.items()}
    for name, tensor in logits.items():
        copies[name].copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return copies


class MeshPeers(Peers):
    """``Peers`` of one rank: exchanges predictions along ``cohort`` and reduces gradients along ``data``."""

    def __init__(self, world: ProcessGroup, layout: Layout, recipe: Recipe, device_type: str = "cpu") -> None:
        self.world, self.layout, self.recipe = world, layout, recipe
        world.layout = layout
        self.share = Share(layout.shard_of(world.rank), layout.shards)
        owners = {
            f"{name}/{exit_name}": layout.rank_of(name, self.share.index)
            for name in recipe.networks
            for exit_name in ("final", *recipe.graph.exits[name])
        }
        self.all_gather = LogitsAllGather(world, owners)
        self.data_parallel: DataParallelGroup | None = None
        self.sharded: ShardedParams | None = None
        self.gradient_sync: GradientSync | None = None
        self.statistics: RunningStatistics | None = None
        if layout.shards > 1:
            mesh = build_device_mesh(world, layout, device_type)["data"]
            self.data_parallel = DataParallelGroup(world, mesh.get_group())
            self.sharded = ShardedParams(self.data_parallel, mesh) if recipe.processes.weights == "sharded" else None
        self.description = (str(layout), *(["sharded weights"] if self.sharded else []))

    def holds(self, network: str) -> bool:
        return network in self.layout.networks_of(self.world.rank)

    def adopt(self, cohort: Cohort, average: MovingAverage | None) -> None:
        if self.data_parallel is None:
            return
        self._check_equal_weights(cohort)
        if self.recipe.processes.sync_batchnorm:
            convert_sync_batchnorm(cohort, self.data_parallel)
        else:
            learning = [
                member for name, member in cohort.members.items() if name in self.recipe.graph.learning_networks
            ]
            self.statistics = RunningStatistics(torch.nn.ModuleList(learning), self.data_parallel)
        if self.sharded:
            self._shard(self.sharded, cohort, average)
        else:
            self.gradient_sync = GradientSync(cohort, self.data_parallel)

    def _shard(self, sharded: ShardedParams, cohort: Cohort, average: MovingAverage | None) -> None:
        for name, member in cohort.members.items():
            sharded.shard(member, [*submodules(member.backbone), *member.heads.values()], cohort_key(name))
        for name, backbone in average.backbones.items() if average else ():
            assert isinstance(backbone, Backbone)
            sharded.shard(backbone, submodules(backbone), average_key(name))

    def local(self, tensor: Tensor) -> Tensor:
        return self.sharded.local(tensor) if self.sharded else tensor

    def whole_norms(self, norms_N: Tensor, order: float) -> Tensor:
        return self.sharded.full_norms(norms_N, order) if self.sharded else norms_N

    def gather_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns all ranks' tensors, unsharded, at the root; elsewhere nothing."""
        return self.world.gather_tensors(self.sharded.unshard(tensors) if self.sharded else tensors)

    def scatter_tensors(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns on every rank those of the root's tensors that it names, or its shards of them."""
        mine = self.world.scatter_tensors(names, tensors)
        return self.sharded.reshard(mine) if self.sharded else mine

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        return self.all_gather(logits, names)

    def all(self, flags: Tensor) -> Tensor:
        return self.data_parallel.all(flags) if self.data_parallel else flags

    def sum(self, numbers: Tensor) -> Tensor:
        return self.data_parallel.all_reduce(numbers) if self.data_parallel else numbers

    @contextmanager
    def reduce_gradients(self, fraction: float, updates: bool) -> Iterator[None]:
        sync = self.sharded or self.gradient_sync
        with sync.reduce() if sync and updates else nullcontext():
            yield
        if self.statistics:
            self.statistics.average(fraction)

    def _check_equal_weights(self, cohort: Cohort) -> None:
        """Raises where ranks of a group begin with different weights: files of start= may differ between hosts."""
        checksums = self.world.all_gather({name: checksum(x.state_dict()) for name, x in cohort.members.items()})
        for rank in range(self.layout.size):
            first = self.layout.group_ranks(rank)[0]
            for name, found in checksums[rank].items():
                if found != checksums[first][name]:
                    raise ValueError(
                        f"network {name!r} does not begin with the same weights on ranks {first} and {rank}; give "
                        f"every host the same file of start.{name}"
                    )


def build_device_mesh(world: ProcessGroup, layout: Layout, device_type: str) -> DeviceMesh:
    """Returns a mesh of groups that are created here, because torch would create them with its default timeout."""
    ranks = torch.arange(layout.size).view(-1, layout.shards)
    timeout = timedelta(seconds=world.timeout_s)
    mine: list[dist.ProcessGroup] = []
    with world.translate_errors():
        for axis in (ranks.T, ranks):  # cohort: ranks with the same shard; data: ranks with the same networks
            for row in axis.tolist():
                group = dist.new_group(row, timeout=timeout, backend="gloo")
                if world.rank in row:
                    mine.append(group)
        return DeviceMesh.from_group(mine, device_type, mesh=ranks, mesh_dim_names=("cohort", "data"))


def checksum(tensors: Mapping[str, Tensor]) -> str:
    content = sha256()
    for name in sorted(tensors):
        content.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()
