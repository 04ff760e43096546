"""New processes for tests, quickly: forked from a server that has imported the engine and done nothing else."""

import multiprocessing
from collections.abc import Callable
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["codistill.engine.trainer"])


def in_new_process(function: Callable[..., None], *arguments: Any) -> int:
    """Run a function of an importable module to its end in a process of its own; its exit code."""
    process = _context.Process(target=function, args=arguments)
    process.start()
    process.join(timeout=120)
    assert process.exitcode is not None, f"{function.__name__} did not end within 120 s"
    return process.exitcode
