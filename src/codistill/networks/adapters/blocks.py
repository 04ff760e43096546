"""Rows of like blocks, of which a head takes only some."""

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

from torch import Tensor, nn

from codistill.networks.adapters.survey import Call, Survey

Row = list[Call]
Kinds = set[type[nn.Module]]


class Skip(nn.Module):
    """In the place of a block that is left out: gives what it is given."""

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        return x


def rows_of_blocks(survey: Survey, kinds: Kinds, after: int, until: int) -> Iterator[Row]:
    """The blocks that run between two moments, by the module that has them; one is a row too."""
    blocks = [call for call in survey.within(after, until) if type(call.module) in kinds]
    yield from _rows(call for call in blocks if not _is_inside(call, kinds, survey))


def kinds_of_blocks(survey: Survey, ends: Iterable[Call]) -> Kinds:
    """What stands side by side in one stage, the outermost first: the parts of a block may stand side by side too."""
    moments = [0, *(end.ended for end in ends)]
    rows = [
        row
        for after, until in pairwise(moments)
        for row in _rows(filter(_could_be_block, survey.within(after, until)))
        if len(row) > 1
    ]
    kinds: Kinds = set()
    for row in sorted(rows, key=lambda row: row[0].path.count(".")):
        if not _is_inside(row[0], kinds, survey):
            kinds.add(type(row[0].module))
    return kinds


def can_be_left_out(call: Call, survey: Survey) -> bool:
    """A block that keeps the shape; or one that is given everything so far and adds to it, as in a DenseNet."""
    if call.input is None:
        return any(isinstance(around.module, nn.ModuleDict) for around in survey.called(call.parent))
    return call.input == call.output


def leave_out(network: nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    around = network.get_submodule(parent)
    if isinstance(around, nn.ModuleDict):
        del around[name]
    else:
        network.set_submodule(path, Skip())


def _could_be_block(call: Call) -> bool:
    """It has parts, and weights among them; a bare sequence of modules is a stage rather than a block of one."""
    has_parts = next(call.module.children(), None) is not None
    has_weights = any(parameter.ndim > 1 for parameter in call.module.parameters())
    return has_parts and has_weights and type(call.module) is not nn.Sequential


def _rows(calls: Iterable[Call]) -> Iterator[Row]:
    in_rows = sorted(calls, key=lambda call: (call.parent, call.began))
    for _, row in groupby(in_rows, key=lambda call: (call.parent, type(call.module))):
        yield list(row)


def _is_inside(call: Call, kinds: Kinds, survey: Survey) -> bool:
    steps = call.path.split(".")
    around = (".".join(steps[:depth]) for depth in range(1, len(steps)))
    return any(type(outer.module) in kinds for path in around for outer in survey.called(path))
