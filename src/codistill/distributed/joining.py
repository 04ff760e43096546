"""From what a launcher (torchrun's, or ours) says in the environment to this process's place in the crew.

Imports torch only when a process joins: whether one was launched is asked by every `codistill train`.
"""

import ipaddress
import os
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codistill.distributed.crew import Crew

PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER = "CODISTILL_LAUNCHER"
"""The process that `codistill train --nproc` is; whoever it started ends when it has."""


def was_launched() -> bool:
    """Whether this process is one of several that somebody started."""
    return all(name in os.environ for name in PLACE) and os.environ["WORLD_SIZE"] != "1"


def is_orphaned() -> bool:
    """Whether our launcher died without a word: nobody would see this process's end."""
    launcher = os.environ.get(LAUNCHER)
    return launcher is not None and launcher != str(os.getppid())


def join(timeout_s: float) -> "Crew":
    import torch
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from codistill.distributed.crew import Crew
    from codistill.distributed.meeting import meet
    from codistill.log import log

    rank, size = _number("RANK"), _number("WORLD_SIZE")
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    if not 0 <= rank < size:
        raise ValueError(f"RANK={rank} of WORLD_SIZE={size}: ranks are numbered 0 … {size - 1}")
    if rank == 0 and not is_loopback(address):
        log.warning(
            "the processes meet at %s, where everybody who reaches the port can join, unasked and unencrypted: "
            "use a network that you trust",
            address,
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except RuntimeError as error:
        reason = "its port is in use; choose another" if "EADDRINUSE" in str(error) else "nobody answers there"
        raise ValueError(f"rank {rank} cannot meet the others at {address}:{port}: {reason}") from error
    return Crew(rank, size, PrefixStore(meet(store, rank, size, timeout_s), store), timeout_s)


def is_loopback(address: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def _number(variable: str) -> int:
    value = os.environ[variable]
    if not value.isdecimal():
        raise ValueError(f"{variable}={value!r} is not a number; start the ranks with torchrun or --nproc")
    return int(value)
