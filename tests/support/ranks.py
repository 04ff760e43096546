"""Starts ranks quickly: real processes, forked from a server that has imported the engine."""

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from codistill.distributed.launch import LOOPBACK, local_store
from codistill.recipes.schema import Recipe
from support.processes import context
from support.tiny import tiniest_recipe

NETWORKS = {"a": "wrn-10-1-dropout-0.3", "b": "resnet-8", "c": "wrn-10-1-dropout-0.2", "d": "densenet-10-4"}
ENDS_WITHIN_S = 300
# Two networks, four steps an epoch, saved after every one.
LAUNCHED = [
    "quickstart",
    "networks={a: wrn-10-1-dropout-0.3, b: resnet-8}",
    "data.image_size=14",
    "data.train_limit=100",
    "data.test_limit=50",
    "batch_size=25",
    "evaluation.every_epochs=1",
    "length.epochs=6",
    "checkpoints.every_s=0",
    "runtime.device=cpu",
    "runtime.threads=1",
]
"""Arguments of `codistill train` for a run that is launched in several processes."""


def recipe_of(networks: int, **changes: Any) -> Recipe:
    """Returns a recipe whose run is saved only at the end, or when it is stopped."""
    first = dict(list(NETWORKS.items())[:networks])
    return tiniest_recipe(**{"networks": first, "checkpoints": {"every_s": 1000.0}, **changes})


def _as_rank(function: Any, rank: int, size: int, port: int, timeout_s: float, *arguments: Any) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from codistill.distributed.group import ProcessGroup

    faulthandler.enable()  # a process that dies of a signal prints its stack
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = ProcessGroup(rank, size, TCPStore(LOOPBACK, port), timeout_s)
    function(world, *arguments)


@contextmanager
def ranks_of(size: int, timeout_s: float, function: Any, *arguments: Any) -> Iterator[list[BaseProcess]]:
    """``function(world, *arguments)`` in ``size`` processes, which do not outlive the block."""
    with local_store() as port:
        processes: list[BaseProcess] = [
            context.Process(target=_as_rank, args=(function, rank, size, port, timeout_s, *arguments))
            for rank in range(size)
        ]
        try:
            for process in processes:
                process.start()
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.join()


def wait_for(process: BaseProcess) -> int:
    process.join(timeout=ENDS_WITHIN_S)
    assert process.exitcode is not None, f"{process.name} did not end within {ENDS_WITHIN_S} s"
    return process.exitcode


def together(size: int, function: Any, *arguments: Any) -> list[int]:
    """Runs the same to the end; returns the exit codes."""
    with ranks_of(size, ENDS_WITHIN_S, function, *arguments) as processes:
        return [wait_for(process) for process in processes]


def written_bytes() -> int:
    """Returns the bytes this process has written so far, sockets included, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def end_oddly(world: Any, how: str, recipe: Recipe, out: Path, notes: Path) -> None:
    """The last rank fails, is killed or stopped after its second step; the others write down their error."""
    from codistill.distributed.trainer import train_rank

    taken = 0

    def heartbeat(*_: object) -> None:
        nonlocal taken
        taken += 1
        if world.rank == world.size - 1 and taken == 2:
            if how == "fails":
                raise ValueError("my disk is full")
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    try:
        train_rank(recipe, out, world, heartbeat=heartbeat)
    except ValueError as error:
        (notes / f"{world.rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(3)
