"""Real processes that train together, quickly: forked from a server that has imported the engine."""

import multiprocessing
import os
import socket
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from codistill.recipes.schema import Recipe
from tiny import tiny_recipe

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["codistill.distributed.trainer"])

NETWORKS = {"a": "wrn-10-1-dropout-0.3", "b": "resnet-8", "c": "wrn-10-1-dropout-0.2", "d": "densenet-10-4"}


def recipe_of(networks: int, **changes: Any) -> Recipe:
    """Saved only at the end, or when it is stopped."""
    first = dict(list(NETWORKS.items())[:networks])
    return tiny_recipe(**{"networks": first, "checkpoints": {"every_s": 1000.0}, **changes})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_rank(function: Any, rank: int, size: int, port: int, *arguments: Any) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    from codistill.distributed.crew import Crew

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60))
    crew = Crew(rank, size, store, timeout_s=60)
    function(crew, *arguments)
    crew.leave()


def together(size: int, function: Any, *arguments: Any) -> list[int]:
    """``function(crew, *arguments)`` in as many processes; their exit codes."""
    port = free_port()
    processes = [
        _context.Process(target=as_rank, args=(function, rank, size, port, *arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        assert process.exitcode is not None, "a rank did not end within 120 s"
    return [process.exitcode or 0 for process in processes]


def checksums(out: Path) -> Mapping[str, str]:
    """Of what a run is for."""
    files = [*sorted((out / "weights").iterdir()), out / "journal.jsonl"]
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
