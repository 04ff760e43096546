"""A network with its heads, cut at its exits: sections are compiled one by one and can overlap."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from codistill.cohort import Member
from codistill.engine.fast.compiler import compiled_whole
from codistill.networks.layers import NormAct, has_fused_kernels
from codistill.ops.dispatch import use_kernels

REPEATS = 8
"""Number of equal blocks from which on a section is compiled block by block."""

Section = Callable[[Tensor], Tensor]
Prepare = Callable[[Any], Any]
"""What is done to a module or function before it runs: ``compiled``, or ``as_it_is``."""
Fork = Callable[[], AbstractContextManager[object]]
"""Opens a branch here: what runs inside need not wait for what follows outside."""


Network = Callable[[Tensor, Fork], Mapping[str, Tensor]]
"""Images to logits by exit."""


def arranged(member: Member, prepare: Prepare) -> Network:
    """In sections, unless its backbone has none or runs them its own way."""
    if member.backbone.recomputes or not member.backbone.stages:
        whole = prepare(member)
        return lambda images, fork: whole(images)
    return Sections(member, prepare)


class Sections:
    """Images to the logits of every classifier, as the member itself computes them."""

    def __init__(self, member: Member, prepare: Prepare) -> None:
        self.heads: dict[str, Section] = {name: prepare(head) for name, head in member.heads.items()}
        self.trunk: list[tuple[Section, str]] = [(prepare(part), exit_name) for part, exit_name in _cut(member)]

    def __call__(self, images_BCHW: Tensor, fork: Fork) -> dict[str, Tensor]:
        branches = {}
        x = images_BCHW
        for part, exit_name in self.trunk:
            x = part(x)
            if exit_name in self.heads:
                branches[exit_name] = x, fork()
        logits = {"final": x}
        # In the member's own order, which dropout's random numbers follow.
        for exit_name, head in self.heads.items():
            feature, branch = branches[exit_name]
            with branch:
                logits[exit_name] = head(feature)
        return logits


def _cut(member: Member) -> Iterator[tuple[nn.Module, str]]:
    """The trunk in consecutive parts and the exit where each ends; the last one ends with the logits."""
    stages: list[nn.Module] = []
    for name, stage in member.backbone.stages.items():
        stages.append(stage)
        if name in member.heads:
            yield nn.Sequential(*stages), name
            stages = []
    yield nn.Sequential(*stages, member.backbone.classifier), "final"


def as_it_is(function: Any) -> Any:
    return function


def compiled(function: Any) -> Any:
    """With kernels of our own, which need no compiler, where it is made of our layers and runs on a GPU.

    Else compiled as a whole, or, where it repeats a block many times, block by block: equal blocks are compiled once.

    ResNet-110 starts in 39 seconds that way instead of 131. Pre-activation networks lose a fusion between blocks, so
    where little is repeated the whole is better.
    """
    if isinstance(function, nn.Sequential) and runs_own_kernels(function):
        return with_own_kernels(function)
    blocks = list(_blocks(function))
    if len(blocks) - len({repr(block) for block in blocks}) < REPEATS:
        return compiled_whole(function)
    parts = [compiled_whole(block) for block in blocks]

    def chain(x: Tensor) -> Tensor:
        for part in parts:
            x = part(x)
        return x

    return chain


def runs_own_kernels(section: nn.Sequential) -> bool:
    return has_fused_kernels(section) and next(section.parameters()).is_cuda and find_spec("triton") is not None


def with_own_kernels(section: nn.Module) -> Section:
    def run(x: Tensor) -> Tensor:
        with use_kernels():
            out: Tensor = section(x)
            return out

    return run


def _blocks(module: Any) -> Iterator[Any]:
    """What a sequence of sequences runs, one after the other; a sequence of plain layers is one block."""
    if type(module) is nn.Sequential and any(_is_composite(child) for child in module):
        for child in module:
            yield from _blocks(child)
    else:
        yield module


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and not isinstance(module, NormAct)
