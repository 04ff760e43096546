"""Predictions on their way between the groups of a cohort: each leaves when it is ready, and is waited for at the end.

Everybody sends its own classifiers to everybody else with the same share of the batch, classifier by classifier, in
float32, which holds bfloat16 exactly, through the host's memory.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from codistill.distributed.crew import Crew


@dataclass
class Round:
    """One batch's predictions: what waits for its device, what was sent, what is expected; each with its rank."""

    leaving: list[tuple[str, Tensor, torch.cuda.Event | None]] = field(default_factory=list)
    sent: dict[str, list[tuple[int, dist.Work | None, Tensor]]] = field(default_factory=dict)
    expected: dict[str, tuple[int, dist.Work | None, Tensor]] = field(default_factory=dict)


class Exchange:
    """``whereabouts`` says of every classifier which rank sends it; ``first_tag`` keeps two exchanges apart."""

    def __init__(self, crew: Crew, whereabouts: Mapping[str, int], first_tag: int = 0) -> None:
        self.crew, self.whereabouts = crew, whereabouts
        self.tags = {name: first_tag + index for index, name in enumerate(whereabouts)}
        self.partners = sorted(set(whereabouts.values()) - {crew.rank})
        self.round = Round()

    def offer(self, name: str, logits: Tensor) -> None:
        """Send what nobody will change any more. From a GPU it leaves when it is computed, and nobody waits for that:

        it is looked after where this process has nothing left to do but to wait.
        """
        if not self.round.expected:  # else nothing moves: a message leaves when it is expected
            self.expect(list(self.whereabouts), logits)
        mine = logits.detach().to(_travels_as(logits))
        if not mine.is_cuda:
            self._send(name, mine.contiguous())
            return
        on_host = torch.empty(mine.shape, dtype=mine.dtype, pin_memory=True)
        on_host.copy_(mine, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self.round.leaving.append((name, on_host, copied))

    def complete(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Send what was not offered yet, and wait for the others' of ``names``; what was offered is among them."""
        like = next(iter(logits.values()))
        if not self.round.expected:
            self.expect(names, like)
        for name in names:
            if name in logits and not self._is_offered(name):
                self.offer(name, logits[name])
        for name, on_host, copied in self.round.leaving:
            if copied is not None:
                copied.synchronize()
            self._send(name, on_host)
        began_at = time.perf_counter()
        theirs = {name: self._arrived(name, like.device) for name in self.round.expected}
        self._wait_until_sent()
        traffic = self.crew.traffic
        traffic.exchanges += 1
        traffic.waited_s += time.perf_counter() - began_at
        self.round = Round()
        return {name: logits[name] if name in logits else theirs[name] for name in names}

    def _is_offered(self, name: str) -> bool:
        return name in self.round.sent or any(name == leaving for leaving, _, _ in self.round.leaving)

    def _send(self, name: str, mine: Tensor) -> None:
        self.round.sent[name] = []
        for rank in self.partners:
            with self.crew.talking(rank):
                self.round.sent[name].append((rank, dist.isend(mine, rank, tag=self.tags[name]), mine))
            self.crew.traffic.bytes_sent += mine.nbytes

    def expect(self, names: Sequence[str], like: Tensor) -> None:
        for name in names:
            rank = self.whereabouts[name]
            if rank != self.crew.rank:
                theirs = torch.empty(like.shape, dtype=_travels_as(like), pin_memory=like.is_cuda)
                with self.crew.talking(rank):
                    self.round.expected[name] = rank, dist.irecv(theirs, rank, tag=self.tags[name]), theirs

    def _arrived(self, name: str, device: torch.device) -> Tensor:
        rank, work, tensor = self.round.expected[name]
        with self.crew.talking(rank):
            if work is not None:
                work.wait()
        return tensor.to(device, non_blocking=True)

    def _wait_until_sent(self) -> None:
        for rank, work, _ in (sending for sendings in self.round.sent.values() for sending in sendings):
            with self.crew.talking(rank):
                if work is not None:
                    work.wait()


def _travels_as(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)
