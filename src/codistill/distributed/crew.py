"""The processes of a training, seen from one of them. This is the module that knows ranks.

Rank 0 leads: it alone opens the run's folder. Everybody computes the same objective of everybody's predictions, so
there is nothing to average and nobody whose numbers count more.

Whoever fails leaves a note in the store that all came together by; the others, who only notice that somebody is silent
or gone, find it there. So every process can say what happened, and none waits longer than the timeout.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from codistill.distributed import messages
from codistill.distributed.split import Split
from codistill.engine.files import RunError

LEADER = 0
NOTES_S = {"silent": 5.0, "gone": 1.0}
"""How long to wait for the others' notes: who is stopped by a timeout comes later than who sees a closed connection."""
STORE_S = 5.0
"""How long the store itself may take to answer."""
T = TypeVar("T")


class LostPeerError(RunError):
    """Another process failed, was killed or cannot be reached; the training can go on from its last checkpoint."""


class SilentPeerError(RunError):
    """Another process did not answer in time; it may still be there."""


class Traffic:
    """Counted while training: what this process sent to all others, and how long the step stood still for it."""

    def __init__(self) -> None:
        self.exchanges = self.bytes_sent = 0
        self.seconds = 0.0
        self.began_at = time.monotonic()

    @property
    def words(self) -> str:
        each, share = self.bytes_sent / max(1, self.exchanges), self.seconds / (time.monotonic() - self.began_at)
        return (
            f"sent {each / 1e6:,.3f} MB of predictions in each of {self.exchanges:,} exchanges; "
            f"waiting for the others' took {share:.0%} of the time"
        )


class Crew:
    """All processes; ``Peers`` of the networks here once ``split`` says which those are."""

    recordable = False

    def __init__(self, rank: int, size: int, store: Store, timeout_s: float) -> None:
        self.rank, self.size, self.store, self.timeout_s = rank, size, store, timeout_s
        self.split: Split | None = None
        self.failed = False
        self.traffic = Traffic()
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        with self._talking():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def words(self) -> tuple[str, ...]:
        return (self.split.words,) if self.split else ()

    def name(self, rank: int) -> str:
        return f"rank {rank} ({', '.join(self.split.by_rank[rank])})" if self.split else f"rank {rank}"

    def holds(self, network: str) -> bool:
        assert self.split is not None
        return network in self.split.by_rank[self.rank]

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Everybody sends its own to everybody. In float32, which holds bfloat16 exactly, through the host's memory."""
        assert self.split is not None
        started_at = time.perf_counter()
        by_rank: list[list[str]] = [[] for _ in range(self.size)]
        for name in names:
            by_rank[self.split.rank_of(name.split("/")[0])].append(name)
        mine_MBC = torch.stack([logits[name].detach().float() for name in by_rank[self.rank]]).cpu()
        theirs = {rank: mine_MBC.new_empty(len(by_rank[rank]), *mine_MBC.shape[1:]) for rank in self.others}
        self._swap(mine_MBC, theirs)
        known = dict(logits)
        device = next(iter(logits.values())).device
        for rank, tensor_MBC in theirs.items():
            known |= zip(by_rank[rank], tensor_MBC.to(device).unbind(), strict=True)
        self.traffic.exchanges += 1
        self.traffic.bytes_sent += mine_MBC.nbytes * len(self.others)
        self.traffic.seconds += time.perf_counter() - started_at
        return {name: known[name] for name in names}

    def merged(self, by_network: Mapping[str, int]) -> dict[str, int]:
        return {name: number for theirs in self.gather(dict(by_network)) for name, number in theirs.items()}

    def anybody(self, wish: bool) -> bool:
        """Whether somebody wishes it, the same for all."""
        theirs = {rank: torch.zeros(1, dtype=torch.uint8) for rank in self.others}
        self._swap(torch.tensor([wish], dtype=torch.uint8), theirs)
        return wish or any(map(bool, theirs.values()))

    def gather(self, value: object) -> list[Any]:
        """Everybody's value by rank, for everybody; JSON."""
        with self._talking():
            return messages.gather_values(value)

    def send(self, value: object) -> None:
        """From the leader to all others."""
        for rank in self.others:
            with self._talking(rank):
                messages.send_value(value, rank)

    def receive(self) -> Any:
        with self._talking(LEADER):
            return messages.receive_value(LEADER)

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Everybody's tensors at the leader, whose own come first where a name is everybody's; elsewhere nothing."""
        if not self.leads:
            with self._talking(LEADER):
                messages.send_tensors(tensors, LEADER)
            return {}
        whole: dict[str, Tensor] = {}
        for rank in self.others:
            with self._talking(rank):
                whole |= messages.receive_tensors(rank)
        return {**whole, **tensors}

    def hand_out(self, wanted: Sequence[str], whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the leader's tensors those that each wants; what nobody wants, or is not there, fits no training here."""
        everybody = self.gather(list(wanted))
        if self.leads and (odd := sorted(whole.keys() ^ {name for names in everybody for name in names})):
            raise ValueError(f"the checkpoint does not fit this recipe: {len(odd)} tensors differ, first {odd[0]!r}")
        if not self.leads:
            with self._talking(LEADER):
                return messages.receive_tensors(LEADER)
        for rank in self.others:
            with self._talking(rank):
                messages.send_tensors({name: whole[name] for name in everybody[rank]}, rank)
        return {name: whole[name] for name in wanted}

    def note_failure(self, message: str) -> None:
        """For the others, who will miss this process."""
        self.failed = True
        _within(STORE_S, lambda: self.store.set(f"failed/{self.rank}", message))

    def leave(self) -> None:
        """When all are done: nobody is killed for another's early end, nobody misses another."""
        self.anybody(False)
        dist.destroy_process_group()

    def _swap(self, mine: Tensor, theirs: Mapping[int, Tensor]) -> None:
        """Pair by pair, and not as one collective operation: so it is known who does not answer."""
        under_way: list[tuple[int, dist.Work | None]] = []
        for rank, tensor in theirs.items():
            with self._talking(rank):
                under_way += [(rank, dist.isend(mine, rank)), (rank, dist.irecv(tensor, rank))]
        for rank, work in under_way:
            with self._talking(rank):
                if work is not None:
                    work.wait()

    @contextmanager
    def _talking(self, to: int | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._explained(error, to) from error

    def _explained(self, error: RuntimeError, suspect: int | None) -> RunError:
        """Who is missing, and why if that is known. Torch's own message is kept: it may name a wrong interface."""
        kind = "silent" if "timed out" in str(error).lower() or "timeout" in str(error).lower() else "gone"
        failed, missed_by = _within(NOTES_S[kind] + STORE_S, lambda: self._notes(kind)) or ({}, {})
        if failed:
            return LostPeerError("; ".join(f"{self.name(rank)} failed: {why}" for rank, why in failed.items()))
        missing = [rank for rank in self.others if rank not in missed_by]
        if suspect in missing:
            missing = [suspect]
        who = " or ".join(map(self.name, missing)) or "the connection between the ranks"
        if "silent" in (kind, *missed_by.values()):  # who gives up first is gone for the others
            return SilentPeerError(
                f"{who} did not answer for {self.timeout_s:g} s: stopped, cut off or too slow; end what is left of the "
                "run, then repeat the command, with a longer --timeout if it was slow"
            )
        return LostPeerError(f"{who} ended without a word: killed, or its host is gone ({_gist(error)})")

    def _notes(self, missed: str) -> tuple[dict[int, str], dict[int, str]]:
        """What others said of their failure; and who misses somebody too, because the other is silent or gone."""
        self.store.set(f"misses/{self.rank}", missed)
        until = time.monotonic() + NOTES_S[missed]
        while True:
            failed, missed_by = self._read_all("failed"), self._read_all("misses")
            if failed or len(missed_by) == len(self.others) or time.monotonic() > until:
                return failed, missed_by
            time.sleep(0.05)

    def _read_all(self, what: str) -> dict[int, str]:
        keys = {rank: f"{what}/{rank}" for rank in self.others}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """The store's answer; None if it is gone, or out of reach: over a cut link torch's store waits for ever."""
    answers: list[T] = []

    def asking() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = Thread(target=asking, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _gist(error: Exception) -> str:
    """Torch's message without the place in its source and the general advice."""
    return re.sub(r"^\[[^]]*\] *", "", str(error)).split(". ")[0]
