"""torch.compile as this engine uses it: whole graphs, a lasting cache, and plain words when it refuses."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

import torch
from platformdirs import user_cache_path

Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")

KINDS_OF_BLOCK = 256
"""torch.compile's limit of variants of one block; torch's own limit of 8 guards against accidental recompilation."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"

_undo = ExitStack()


def prepare_compiler() -> None:
    """Keep what is compiled, so that the next start finds it: torch's own choice is a temporary folder.

    Undone at the end of the ``runtime.prepared`` block around it.
    """
    os.environ.setdefault(CACHE, str(user_cache_path("codistill") / "compiled"))
    config = torch._dynamo.config
    _undo.callback(setattr, config, "recompile_limit", config.recompile_limit)
    config.recompile_limit = KINDS_OF_BLOCK


def restore_limit() -> None:
    """Put back torch's limit as it was before ``prepare_compiler``; without that, do nothing, not even import it."""
    _undo.close()


def compiled_whole(function: Callable[Inputs, Output]) -> Callable[Inputs, Output]:
    """A function or module as one graph; whatever keeps it from being one is an error, never a silently slower step."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second: not for who compiles nothing

    run = torch.compile(function, fullgraph=True, dynamic=False)

    def compiled(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Output:
        try:
            return run(*args, **kwargs)
        except TorchDynamoException as error:
            what = getattr(function, "__name__", type(function).__name__)
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"torch.compile refuses {what}: {reason}; set runtime.kernels=torch") from error

    return compiled
