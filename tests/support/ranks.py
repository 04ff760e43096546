"""Starts ranks quickly: real processes, forked from a server that has imported the engine."""

import faulthandler
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from codistill.distributed.launch import LOOPBACK, local_store
from codistill.recipes.schema import Recipe
from support.tiny import tiny_recipe

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["codistill.distributed.trainer"])

NETWORKS = {"a": "wrn-10-1-dropout-0.3", "b": "resnet-8", "c": "wrn-10-1-dropout-0.2", "d": "densenet-10-4"}
ENDS_WITHIN_S = 300


def recipe_of(networks: int, **changes: Any) -> Recipe:
    """Returns a recipe whose run is saved only at the end, or when it is stopped."""
    first = dict(list(NETWORKS.items())[:networks])
    return tiny_recipe(**{"networks": first, "checkpoints": {"every_s": 1000.0}, **changes})


def _as_rank(function: Any, rank: int, size: int, port: int, timeout_s: float, *arguments: Any) -> None:
    from torch.distributed import TCPStore

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
            _context.Process(target=_as_rank, args=(function, rank, size, port, timeout_s, *arguments))
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
