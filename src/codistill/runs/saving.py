"""Checkpoints written beside the training: a step waits for the copy of its state, not for the disk."""

import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from codistill.runs.checkpoint import Snapshot, Store, snapshot


class Saver:
    """One save at a time: the next waits for the last, and hears of it if that one failed.

    The writing thread has a copy of its own, so nothing that trains on can reach what is being written. The next save
    to the same store leaves it as it is, for whoever rolls back to it; the one after that uses its memory again.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._under_way: Future[Path] | None = None
        self._copies: defaultdict[Path, list[Snapshot]] = defaultdict(list)
        """The last two of each store."""
        self.saves = 0
        self.longest_hold_s = 0.0
        """How long a save kept the training from going on, at most: waiting for the device, and copying."""

    @property
    def is_busy(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    def save(self, store: Store, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any]) -> Snapshot:
        """What is being written; ``wait`` returns when it is on the disk."""
        self.wait()
        started_at = time.perf_counter()
        copies = self._copies[store.folder]
        taken = snapshot(tensors, over=copies.pop(0) if len(copies) == 2 else None)
        copies.append(taken)
        self.longest_hold_s = max(self.longest_hold_s, time.perf_counter() - started_at)
        self.saves += 1
        self._under_way = self._thread.submit(store.write, step, taken, state)
        return taken

    def wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Let what is under way come to its end; its error, if any, is for whoever calls ``wait``."""
        self._thread.shutdown()
