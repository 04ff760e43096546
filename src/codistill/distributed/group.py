"""The process group of a training: collectives over gloo, and errors that name the rank that failed.

Values travel as JSON and tensors as raw bytes, so nothing that is received can execute. Rank 0 is the root: only it
opens the run's folder. A rank that fails leaves its message in the store. The other ranks, which only notice a timeout
or a closed connection, read it there, so every rank can report the cause and none waits longer than the timeout.
"""

import json
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

from codistill.distributed.layout import Layout
from codistill.errors import RunError
from codistill.runs.checkpoint import DTYPES
from codistill.runs.files import to_json

ROOT = 0
REPORTS_S = {"timeout": 5.0, "closed": 1.0}
"""How long to wait for the other ranks' reports: timeouts on two ranks are further apart than closed connections."""
STORE_S = 5.0
"""How long the store may take to answer."""
DTYPE_BY_NAME: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, name) for name in DTYPES}
T = TypeVar("T")


class LostPeerError(RunError):
    """Another rank failed, was killed or cannot be reached; the training can continue from its last checkpoint."""


class PeerTimeoutError(RunError):
    """Another rank did not answer in time; its process may still be running."""


class Traffic:
    """Counters of one rank: bytes sent, and seconds in which it only waited for other ranks."""

    def __init__(self) -> None:
        self.exchanges = self.bytes_sent = 0
        self.updates = self.gradient_bytes = 0
        self.waited_s = self.gradient_waited_s = 0.0
        self.began_at = time.monotonic()

    def to_dict(self) -> dict[str, float]:
        """Returns the counters as ``result.json`` has them; gradient bytes are those reduced, not those sent."""
        return {
            "exchanges": self.exchanges,
            "prediction_bytes_sent": self.bytes_sent,
            "exposed_for_predictions_s": round(self.waited_s, 3),
            "updates_with_sharers": self.updates,
            "gradient_bytes_added_up": self.gradient_bytes,
            "exposed_for_gradients_s": round(self.gradient_waited_s, 3),
            "elapsed_s": round(time.monotonic() - self.began_at, 3),
        }


class ProcessGroup:
    """All ranks of a training, seen from one of them. ``layout`` is set once it is known which rank trains what."""

    def __init__(self, rank: int, size: int, store: Store, timeout_s: float) -> None:
        self.rank, self.size, self.store, self.timeout_s = rank, size, store, timeout_s
        self.layout: Layout | None = None
        self.has_failed = False
        self.traffic = Traffic()
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        with self.translate_errors():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)

    @property
    def is_root(self) -> bool:
        return self.rank == ROOT

    @property
    def other_ranks(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def describe(self, rank: int) -> str:
        """Returns the rank with its networks, for messages."""
        return self.layout.describe(rank) if self.layout else f"rank {rank}"

    def any(self, flag: bool) -> bool:
        """Returns the logical OR of the flag over all ranks.

        Pairwise sends instead of one collective, so that the error can name the rank that does not answer.
        """
        received = {rank: torch.zeros(1, dtype=torch.uint8) for rank in self.other_ranks}
        sent = torch.tensor([flag], dtype=torch.uint8)
        pending: list[tuple[int, dist.Work | None]] = []
        for rank, tensor in received.items():
            with self.translate_errors(rank):
                pending += [(rank, dist.isend(sent, rank)), (rank, dist.irecv(tensor, rank))]
        for rank, work in pending:
            with self.translate_errors(rank):
                if work is not None:
                    work.wait()
        return flag or any(map(bool, received.values()))

    def all_gather(self, value: object) -> list[Any]:
        """Returns every rank's JSON value, by rank."""
        content, ranks = _encode(value), range(self.size)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
        with self.translate_errors():
            dist.all_gather(lengths, torch.tensor([len(content)]))
            padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
            padded[: len(content)] = content
            contents = [torch.empty_like(padded) for _ in ranks]
            dist.all_gather(contents, padded)
        return [_decode(content[: int(length)]) for content, length in zip(contents, lengths, strict=True)]

    def broadcast(self, value: object = None) -> Any:
        """Returns the root's JSON value on every rank."""
        if not self.is_root:
            with self.translate_errors(ROOT):
                return _receive_value(ROOT)
        for rank in self.other_ranks:
            with self.translate_errors(rank):
                _send_value(value, rank)
        return value

    def gather_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns all ranks' tensors at the root, where its own win over others of the same name; elsewhere nothing.

        Ranks that train the same networks have the same tensors, so only one of them sends.
        """
        senders = self.layout.first_ranks if self.layout else range(self.size)
        if self.rank not in senders:
            return {}
        if not self.is_root:
            with self.translate_errors(ROOT):
                _send_tensors(tensors, ROOT)
            return {}
        gathered: dict[str, Tensor] = {}
        for rank in senders[1:]:
            with self.translate_errors(rank):
                gathered |= _receive_tensors(rank)
        return {**gathered, **tensors}

    def scatter_tensors(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns on every rank those of the root's tensors that it names; every tensor must be named by some rank."""
        names_by_rank = self.all_gather(list(names))
        if self.is_root and (odd := sorted(tensors.keys() ^ {name for names in names_by_rank for name in names})):
            raise ValueError(f"the checkpoint does not fit this recipe: {len(odd)} tensors differ, first {odd[0]!r}")
        if not self.is_root:
            with self.translate_errors(ROOT):
                return _receive_tensors(ROOT)
        for rank in self.other_ranks:
            with self.translate_errors(rank):
                _send_tensors({name: tensors[name] for name in names_by_rank[rank]}, rank)
        return {name: tensors[name] for name in names}

    @contextmanager
    def report_failures(self) -> Iterator[None]:
        """Leaves an error of its block in the store for the other ranks, whose next collective will fail."""
        try:
            yield
        except (LostPeerError, PeerTimeoutError):
            raise
        except BaseException as error:
            self.has_failed = True
            message = str(error) or type(error).__name__
            with suppress(RuntimeError):
                answer_within(STORE_S, lambda: self.store.set(f"failed/{self.rank}", message))
            raise

    def shutdown(self) -> None:
        """Waits for all ranks to finish, so that none loses a peer that ended early, and leaves the group."""
        self.any(False)
        dist.destroy_process_group()

    @contextmanager
    def translate_errors(self, peer: int | None = None) -> Iterator[None]:
        """Turns an error of torch.distributed into one that names the missing rank; ``peer`` is the first suspect."""
        try:
            yield
        except RuntimeError as error:
            raise self._translate(error, peer) from error

    @contextmanager
    def translate_gloo_errors(self) -> Iterator[None]:
        """Does the same around code that communicates and computes: other errors than gloo's pass through."""
        try:
            yield
        except RuntimeError as error:
            if "gloo" not in str(error):
                raise
            raise self._translate(error, None) from error

    def _translate(self, error: RuntimeError, suspect: int | None) -> RunError:
        """Torch's own message is kept where no rank has reported a cause: it may name a wrong interface."""
        kind = "timeout" if "timed out" in str(error).lower() or "timeout" in str(error).lower() else "closed"
        failures, losses = dict[int, str](), dict[int, str]()
        with suppress(RuntimeError):
            failures, losses = answer_within(REPORTS_S[kind] + STORE_S, lambda: self._read_reports(kind))
        if failures:
            return LostPeerError("; ".join(f"{self.describe(rank)} failed: {why}" for rank, why in failures.items()))
        missing = [rank for rank in self.other_ranks if rank not in losses]
        if suspect in missing:
            missing = [suspect]
        who = " or ".join(map(self.describe, missing)) or "the connection between the ranks"
        if "timeout" in (kind, *losses.values()):  # the first rank to time out closes its connections to the others
            return PeerTimeoutError(
                f"{who} did not answer for {self.timeout_s:g} s: stopped, cut off or too slow; kill what is left of "
                "the run and repeat the command, with a longer --timeout if it was slow"
            )
        return LostPeerError(f"{who} ended without a message: killed, or its host is down ({_shorten(error)})")

    def _read_reports(self, loss: str) -> tuple[dict[int, str], dict[int, str]]:
        """Reports this rank's loss; returns the other ranks' failures, and how those that did not fail lost a peer."""
        self.store.set(f"lost/{self.rank}", loss)
        deadline = time.monotonic() + REPORTS_S[loss]
        while True:
            failures, losses = self._read_all("failed"), self._read_all("lost")
            if failures or len(losses) == len(self.other_ranks) or time.monotonic() > deadline:
                return failures, losses
            time.sleep(0.05)

    def _read_all(self, topic: str) -> dict[int, str]:
        keys = {rank: f"{topic}/{rank}" for rank in self.other_ranks}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}


def answer_within(seconds: float, query: Callable[[], T]) -> T:
    """Returns the answer of torch's store; raises RuntimeError if it fails or does not come in time.

    Over a cut link, or where another program has the port, the store waits for ever. So a daemon thread waits, which
    does not keep the process alive.
    """
    outcome: list[T | RuntimeError] = [RuntimeError("no answer")]

    def wait() -> None:
        try:
            outcome.append(query())
        except RuntimeError as error:
            outcome.append(error)

    thread = Thread(target=wait, daemon=True)
    thread.start()
    thread.join(seconds)
    answer = outcome[-1]
    if isinstance(answer, RuntimeError):
        raise answer
    return answer


def _shorten(error: Exception) -> str:
    """Returns torch's message without the source location and the general advice."""
    return re.sub(r"^\[[^]]*\] *", "", str(error)).split(". ")[0]


def _send_value(value: object, to: int) -> None:
    content = _encode(value)
    dist.send(torch.tensor([len(content)]), to)
    dist.send(content, to)


def _receive_value(source: int) -> Any:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    content = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(content, source)
    return _decode(content)


def _send_tensors(tensors: Mapping[str, Tensor], to: int) -> None:
    """Sends dtypes and shapes first, then one tensor after the other in the same order."""
    _send_value({name: [str(x.dtype), list(x.shape)] for name, x in tensors.items()}, to)
    for x in tensors.values():
        dist.send(_as_bytes(x.detach().cpu().contiguous()), to)


def _receive_tensors(source: int) -> dict[str, Tensor]:
    kinds = _receive_value(source)
    received = {name: torch.empty(shape, dtype=DTYPE_BY_NAME[dtype]) for name, (dtype, shape) in kinds.items()}
    for tensor in received.values():
        dist.recv(_as_bytes(tensor), source)
    return received


def _as_bytes(contiguous: Tensor) -> Tensor:
    return contiguous.view(-1).view(torch.uint8)


def _encode(value: object) -> Tensor:
    return torch.frombuffer(bytearray(to_json(value, sort_keys=False).encode()), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    return json.loads(bytes(content.tolist()))
