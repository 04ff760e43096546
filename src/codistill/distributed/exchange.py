"""All-gather of predictions along the ``cohort`` axis.

Each rank sends the logits of its own classifiers to the ranks of the other groups that have the same shard of the
batch: one message per classifier, in float32, which holds bfloat16 exactly, through host memory.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from codistill.distributed.group import ProcessGroup


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
