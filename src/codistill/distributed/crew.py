"""The processes of a training, seen from one of them: how they talk, and what is said when somebody is missing.

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
from codistill.distributed.layout import Layout
from codistill.errors import RunError

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
    """Counted while training: what this process sent, and how long it stood still for what the others sent."""

    def __init__(self) -> None:
        self.exchanges = self.bytes_sent = 0
        self.updates = self.gradient_bytes = 0
        self.waited_s = self.gradient_waited_s = 0.0
        self.began_at = time.monotonic()

    @property
    def facts(self) -> dict[str, float]:
        """For the result: seconds that nothing else was done in, and bytes, of gradients those that were added up."""
        return {
            "exchanges": self.exchanges,
            "prediction_bytes_sent": self.bytes_sent,
            "exposed_for_predictions_s": round(self.waited_s, 3),
            "updates_with_sharers": self.updates,
            "gradient_bytes_added_up": self.gradient_bytes,
            "exposed_for_gradients_s": round(self.gradient_waited_s, 3),
            "elapsed_s": round(time.monotonic() - self.began_at, 3),
        }

    @property
    def words(self) -> str:
        elapsed_s = time.monotonic() - self.began_at
        said = (
            f"sent {self.bytes_sent / max(1, self.exchanges) / 1e6:,.3f} MB of predictions in each of "
            f"{self.exchanges:,} exchanges; waiting for the others' took {self.waited_s / elapsed_s:.0%} of the time"
        )
        if not self.updates:
            return said
        return (
            f"{said}; {self.gradient_bytes / self.updates / 1e6:,.3f} MB of gradients were added up in each of "
            f"{self.updates:,} updates, and waiting for them took {self.gradient_waited_s / elapsed_s:.0%}"
        )


class Crew:
    """All processes, of which this is one: how they talk, and what is said when somebody does not answer."""

    def __init__(self, rank: int, size: int, store: Store, timeout_s: float) -> None:
        self.rank, self.size, self.store, self.timeout_s = rank, size, store, timeout_s
        self.layout: Layout | None = None
        """Once it is known who trains what."""
        self.failed = False
        self.traffic = Traffic()
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        with self.talking():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def name(self, rank: int) -> str:
        return self.layout.name(rank) if self.layout else f"rank {rank}"

    def anybody(self, wish: bool) -> bool:
        """Whether somebody wishes it, the same for all."""
        theirs = {rank: torch.zeros(1, dtype=torch.uint8) for rank in self.others}
        self._swap(torch.tensor([wish], dtype=torch.uint8), theirs)
        return wish or any(map(bool, theirs.values()))

    def gather(self, value: object) -> list[Any]:
        """Everybody's value by rank, for everybody; JSON."""
        with self.talking():
            return messages.gather_values(value)

    def send(self, value: object) -> None:
        """From the leader to all others."""
        for rank in self.others:
            with self.talking(rank):
                messages.send_value(value, rank)

    def receive(self) -> Any:
        with self.talking(LEADER):
            return messages.receive_value(LEADER)

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Everybody's tensors at the leader, whose own come first where a name is everybody's; elsewhere nothing.

        Of those who have the same networks only one sends.
        """
        savers = self.layout.savers if self.layout else range(self.size)
        if self.rank not in savers:
            return {}
        if not self.leads:
            with self.talking(LEADER):
                messages.send_tensors(tensors, LEADER)
            return {}
        whole: dict[str, Tensor] = {}
        for rank in savers[1:]:
            with self.talking(rank):
                whole |= messages.receive_tensors(rank)
        return {**whole, **tensors}

    def hand_out(self, wanted: Sequence[str], whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the leader's tensors those that each wants; what nobody wants, or is not there, fits no training here."""
        everybody = self.gather(list(wanted))
        if self.leads and (odd := sorted(whole.keys() ^ {name for names in everybody for name in names})):
            raise ValueError(f"the checkpoint does not fit this recipe: {len(odd)} tensors differ, first {odd[0]!r}")
        if not self.leads:
            with self.talking(LEADER):
                return messages.receive_tensors(LEADER)
        for rank in self.others:
            with self.talking(rank):
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
            with self.talking(rank):
                under_way += [(rank, dist.isend(mine, rank)), (rank, dist.irecv(tensor, rank))]
        for rank, work in under_way:
            with self.talking(rank):
                if work is not None:
                    work.wait()

    @contextmanager
    def talking(self, to: int | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._explained(error, to) from error

    @contextmanager
    def overhearing(self) -> Iterator[None]:
        """Around code of torch's that talks by itself, and may fail for other reasons too."""
        try:
            yield
        except RuntimeError as error:
            if "gloo" not in str(error):
                raise
            raise self._explained(error, None) from error

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
