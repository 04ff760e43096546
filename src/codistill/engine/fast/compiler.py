"""torch.compile as this engine uses it: in sections between exits, whole graphs, and a cache that lasts."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from platformdirs import user_cache_path
from torch import Tensor, nn

from codistill.cohort import Member
from codistill.networks.backbone import Backbone

Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")

RECOMPILE_LIMIT = 256
"""torch.compile's limit of variants of one function; all sections share nn.Sequential's, and torch's own limit is 8."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"

_undo = ExitStack()


def prepare_compiler() -> None:
    """Keep what is compiled, so that the next start finds it: torch's own choice is a temporary folder.

    Undone at the end of the ``runtime.prepared`` block around it.
    """
    os.environ.setdefault(CACHE, str(user_cache_path("codistill") / "compiled"))
    config = torch._dynamo.config
    _undo.callback(setattr, config, "recompile_limit", config.recompile_limit)
    config.recompile_limit = RECOMPILE_LIMIT


def restore_limit() -> None:
    """Restore torch's limit if ``prepare_compiler`` changed it; otherwise do nothing, and import no compiler."""
    _undo.close()


def compile_function(function: Callable[Inputs, Output]) -> Callable[Inputs, Output]:
    """Compile a function or module as one graph; what keeps it from being one is an error, not a slower step."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    run = torch.compile(function, fullgraph=True, dynamic=False)

    def compiled(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Output:
        try:
            return run(*args, **kwargs)
        except TorchDynamoException as error:
            what = getattr(function, "__name__", type(function).__name__)
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"torch.compile refuses {what}: {reason}; set runtime.kernels=torch") from error

    return compiled


class CompiledSection(nn.Module):
    """A part of a network, compiled; shares its parameters."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.run = compile_function(parts[0] if len(parts) == 1 else nn.Sequential(*parts))

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


def compile_network(member: Member) -> Callable[..., Mapping[str, Tensor]]:
    """The same network with its heads, where the sections between its exits are compiled one by one.

    So a head can still overlap with what follows its exit. A network that only runs as a whole is compiled as a whole.
    """
    backbone = member.backbone
    if not backbone.stages:
        whole = compile_function(member)
        return lambda images, fork=nullcontext: whole(images)
    stages: dict[str, nn.Module] = {}
    section: list[nn.Module] = []
    for name, stage in backbone.stages.items():
        section.append(stage)
        if name in member.heads:
            stages[name], section = CompiledSection(*section), []
    classifier = CompiledSection(*section, backbone.classifier)
    heads = {name: CompiledSection(head) for name, head in member.heads.items()}
    return Member(Backbone(stages, classifier, backbone.exits), heads)
