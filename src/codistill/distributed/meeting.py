"""How the processes of one attempt find each other in a store that earlier attempts have used too.

torchrun keeps one store for all its restarts, and gloo's addresses of the dead are still in it: restarted processes
then wait for nobody (seen in 5 of 10 restarts, torch 2.13). Its count of restarts does not help, since it differs
between hosts. So the leader and the others show each other a fresh number first, and what follows lies below it.
"""

import json
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from codistill.errors import RunError

POLL_S = 0.02
T = TypeVar("T")


def meet(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """A prefix that all who are alive now agree on, and nobody had before."""
    until = time.monotonic() + timeout_s
    return _lead(store, size, until, timeout_s) if rank == 0 else _follow(store, rank, until, timeout_s)


def _lead(store: Store, size: int, until: float, timeout_s: float) -> str:
    """Repeat every number that others show, until each has answered with this one: an old one can do neither."""
    own = secrets.token_hex(8)

    def absent() -> list[int]:
        shown = [_read(store, f"hello/{rank}") for rank in range(1, size)]
        store.set("welcome", json.dumps({"leader": own, "seen": shown}))
        return [rank for rank in range(1, size) if _read(store, f"answer/{rank}") != own]

    while missing := absent():
        if time.monotonic() > until:
            who = ", ".join(f"rank {rank}" for rank in missing)
            raise RunError(f"{who} did not come within {timeout_s:g} s; start all {size} ranks, or fewer")
        time.sleep(POLL_S)
    return own


def _follow(store: Store, rank: int, until: float, timeout_s: float) -> str:
    own = secrets.token_hex(8)
    store.set(f"hello/{rank}", own)

    def welcomed() -> str | None:
        welcome = json.loads(_read(store, "welcome") or "{}")
        return str(welcome["leader"]) if own in welcome.get("seen", ()) else None

    leaders = _until(welcomed, until, f"rank 0 did not come within {timeout_s:g} s; start it at the same address")
    store.set(f"answer/{rank}", leaders)
    return leaders


def _until(found: Callable[[], T | None], until: float, complaint: str) -> T:
    while (value := found()) is None:
        if time.monotonic() > until:
            raise RunError(complaint)
        time.sleep(POLL_S)
    return value


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
