"""New processes for tests, quickly: forked from a server that has imported the engine and done nothing else."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from multiprocessing.sharedctypes import Synchronized
from typing import Any

context = multiprocessing.get_context("forkserver")
# A process has one such server, so this lists what any child needs; optimizers import torch._dynamo when first used.
context.set_forkserver_preload(["codistill.distributed.trainer", "torch._dynamo", "pytest", "support.mesh"])


def started_process(function: Callable[..., object], *arguments: Any) -> ForkServerProcess:
    """A process of its own that runs a function of an importable module."""
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def shared_count() -> "Synchronized[int]":
    """A number that a process started here may change."""
    return context.Value("q", 0)


def in_new_process(function: Callable[..., object], *arguments: Any) -> int:
    """Run a function of an importable module to its end in a process of its own; its exit code."""
    process = started_process(function, *arguments)
    process.join(timeout=300)
    assert process.exitcode is not None, f"{function.__name__} did not end within 300 s"
    return process.exitcode
