"""Joins this process to the others that a launcher, torchrun or ``codistill train --nproc``, has started.

torchrun keeps one store for all its restarts, in which the gloo addresses of dead processes remain: restarted processes
then wait for processes that no longer exist (5 of 10 restarts, torch 2.13). Its restart counter does not help, since it
differs between hosts. So rank 0 and the other ranks first exchange fresh tokens, and use a prefix of the store that no
earlier attempt has used.
"""

import ipaddress
import json
import os
import secrets
import time
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from codistill.distributed.group import ROOT, ProcessGroup, answer_within
from codistill.errors import RunError
from codistill.log import log

POLL_S = 0.02


def join(timeout_s: float) -> ProcessGroup:
    """Joins the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
    rank, size = _read_number("RANK"), _read_number("WORLD_SIZE")
    address, port = os.environ["MASTER_ADDR"], _read_number("MASTER_PORT")
    if not 0 <= rank < size:
        raise ValueError(f"RANK={rank} of WORLD_SIZE={size}: ranks are numbered 0 … {size - 1}")
    if rank == ROOT and not is_loopback(address):
        log.warning(
            "the ranks meet at %s, where every host that reaches the port can join, without authentication or "
            "encryption: use a trusted network",
            address,
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        # Torch's own time limit is for the connection, not for the first answer.
        found = answer_within(timeout_s, lambda: next(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    except RuntimeError as error:
        reason = (
            "its port is in use; choose another MASTER_PORT"
            if "EADDRINUSE" in str(error)
            else f"nothing answers there within {timeout_s:g} s; start rank 0 with the same MASTER_ADDR and "
            "MASTER_PORT, or choose another port if another program has taken this one"
        )
        raise ValueError(f"rank {rank} cannot meet the other ranks at {address}:{port}: {reason}") from error
    store = found[0]
    return ProcessGroup(rank, size, PrefixStore(agree_on_prefix(store, rank, size, timeout_s), store), timeout_s)


def is_loopback(address: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def _read_number(variable: str) -> int:
    value = os.environ[variable]
    if not value.isdecimal():
        raise ValueError(f"{variable}={value!r} is not a number; start the ranks with torchrun or --nproc")
    return int(value)


def agree_on_prefix(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """Returns a prefix that is the same on all living ranks and that no earlier attempt has used."""
    deadline = time.monotonic() + timeout_s
    return _lead(store, size, deadline, timeout_s) if rank == ROOT else _follow(store, rank, deadline, timeout_s)


def _lead(store: Store, size: int, deadline: float, timeout_s: float) -> str:
    """Echoes the other ranks' tokens until each has acknowledged this rank's own, which a dead rank cannot do."""
    own = secrets.token_hex(8)

    def find_absent() -> list[int]:
        tokens = [_read(store, f"hello/{rank}") for rank in range(1, size)]
        store.set("welcome", json.dumps({"root": own, "seen": tokens}))
        return [rank for rank in range(1, size) if _read(store, f"answer/{rank}") != own]

    while absent := find_absent():
        if time.monotonic() > deadline:
            who = ", ".join(f"rank {rank}" for rank in absent)
            raise RunError(f"{who} did not join within {timeout_s:g} s; start all {size} ranks, or fewer")
        time.sleep(POLL_S)
    return own


def _follow(store: Store, rank: int, deadline: float, timeout_s: float) -> str:
    own = secrets.token_hex(8)
    store.set(f"hello/{rank}", own)
    while own not in (welcome := json.loads(_read(store, "welcome") or "{}")).get("seen", ()):
        if time.monotonic() > deadline:
            raise RunError(f"rank 0 did not join within {timeout_s:g} s; start it at the same address")
        time.sleep(POLL_S)
    store.set(f"answer/{rank}", welcome["root"])
    return str(welcome["root"])


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
