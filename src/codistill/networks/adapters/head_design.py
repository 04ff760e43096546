"""Auxiliary classifiers by the paper's rule, made of the network's own later stages, its pooling and its classifier.

Behind an exit come all later stages, so that a head down-samples as often as the network itself. If one stage follows,
the head has all of its blocks at twice the width; if more follow, it has half of the blocks of each, rounded up, and at
least two of the last. A part that cannot be made wider keeps its width: a ViT's attention depends on it. Where the
part behind an exit cannot be cut out, or does not run by itself, a generic head takes its place.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import log2

import torch
from torch import Tensor, nn

from codistill.networks.adapters.exits import Call, Stages, Survey, channels, is_channels_last, positions
from codistill.networks.adapters.surgery import Shape, cut_behind, redraw, refit
from codistill.networks.cost import BATCH
from codistill.networks.layers import PLAIN_SEQUENCES, Conv2d, norm_relu
from codistill.networks.tables import apfc, classifier, describe_apfc, half

WIDE, LEAST_IN_LAST_STAGE = 2.0, 2
SIDE_AT_END = 7
"""The feature map's side in front of a generic head's pooling where the network's own is not known."""
LEAST_CONVOLUTIONS, WIDEST = 2, 512

Row = list[Call]  # blocks of one class, one after the other
Kinds = set[type[nn.Module]]


@dataclass(frozen=True)
class Part:
    """What a head takes over: some blocks of a row, or all of a stage without rows of blocks."""

    name: str
    blocks: int = 0
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        kept = self.blocks - len(self.left_out)
        return f"{kept} of {self.blocks} blocks of {self.name}" if self.blocks else self.name


@dataclass(frozen=True)
class LaterStages:
    """The part behind the module ``path``, without some of its blocks, and wider or narrower."""

    path: str
    input: Shape
    parts: tuple[Part, ...]
    scaled: frozenset[str]
    """The modules whose width changes, those of the later stages; what follows them keeps its width."""
    factor: float

    def __str__(self) -> str:
        width = {1.0: "", 2.0: ", twice as wide", 0.5: ", half as wide"}[self.factor]
        return ", ".join(map(str, self.parts)) + width if self.parts else "what follows the last stage"

    def build(self, network: nn.Module) -> nn.Module:
        """The head, cut out of ``network``, which must not be used afterwards."""
        left_out = [path for part in self.parts for path in part.left_out]
        for path in left_out:
            leave_out(network, path)
        head = cut_behind(network, self.path)
        if left_out or self.factor != 1:
            refit(head, self.input, lambda path: self.factor if path in self.scaled else 1.0)
        return head


@dataclass(frozen=True)
class Pooled:
    """The paper's APFC: average pooling to a grid and one linear layer. Tokens are averaged into one."""

    input: Shape
    why: str = ""

    def __str__(self) -> str:
        return describe_apfc() if len(self.input) == 3 else "the average of the tokens and one linear layer"

    def build(self, num_classes: int) -> nn.Module:
        width = channels(self.input)
        if len(self.input) == 2:
            return nn.Sequential(MeanOfTokens(), nn.Linear(width, num_classes))
        return nn.Sequential(*_channels_first(self.input), *apfc(width, num_classes))


@dataclass(frozen=True)
class Generic:
    """Convolutions with batch norm and ReLU that down-sample as the network does; for tokens, norm and linear layer."""

    input: Shape
    widths: tuple[int, ...]
    """Output channels of the convolutions; empty for tokens."""
    strided: int
    """How many of them halve the feature map, the first ones."""
    why: str
    """Why the head is not made of the network's own blocks."""

    @classmethod
    def of(cls, features: Shape, last: Shape | None, why: str, *, narrow: bool = False) -> "Generic":
        """The head for ``features`` in a network whose last stage has the shape ``last``."""
        if len(features) == 2:
            return cls(features, (), 0, why)
        count = positions(features) or 1
        ratio = count / (positions(last) or SIDE_AT_END**2)
        strided = max(0, round(log2(ratio) / 2))
        width, widest = channels(features), max(channels(features), WIDEST)
        widths = [
            min(width * 2 ** min(step, strided), widest) for step in range(1, max(strided, LEAST_CONVOLUTIONS) + 1)
        ]
        return cls(features, tuple(map(half, widths) if narrow else widths), strided, why)

    def __str__(self) -> str:
        rows = " → ".join(map(str, self.widths))
        return f"generic: convolutions {rows}" if self.widths else "generic: norm, mean of the tokens, linear layer"

    def build(self, num_classes: int) -> nn.Module:
        width = channels(self.input)
        if not self.widths:
            return nn.Sequential(nn.LayerNorm(width), MeanOfTokens(), nn.Linear(width, num_classes))
        layers = _channels_first(self.input)
        for place, out_channels in enumerate(self.widths):
            layers += [Conv2d(width, out_channels, 3, 2 if place < self.strided else 1), norm_relu(out_channels)]
            width = out_channels
        return nn.Sequential(*layers, *classifier(width, num_classes))


class ChannelsFirst(nn.Module):
    def forward(self, x_BHWC: Tensor) -> Tensor:
        return x_BHWC.permute(0, 3, 1, 2)


class MeanOfTokens(nn.Module):
    def forward(self, x_BNC: Tensor) -> Tensor:
        return x_BNC.mean(dim=1)


def _channels_first(shape: Shape) -> list[nn.Module]:
    return [ChannelsFirst()] if is_channels_last(shape) else []


HeadDesign = LaterStages | Pooled | Generic
"""A head before it is built; ``str`` says what it is made of."""


def design_head(network: nn.Module, survey: Survey, stages: Stages, exit: Call, kind: str) -> HeadDesign:
    """The design of the head at ``exit``; ``network`` is on the meta device, where designs are tried out."""
    assert exit.output is not None
    if kind == "apfc":
        return Pooled(exit.output)
    width = 0.5 if kind == "narrow" else 1.0
    last = stages.ends[-1].output
    if exit.is_first_of_several:
        why = f"{exit.path} returns several tensors, of which heads take the first"
        return Generic.of(exit.output, last, why, narrow=kind == "narrow")
    by_rule = _design_by_rule(survey, stages, exit, exit.output)
    all_blocks = tuple(replace(part, left_out=()) for part in by_rule.parts)
    for parts, factor in ((by_rule.parts, by_rule.factor), (by_rule.parts, 1.0), (all_blocks, 1.0)):
        scaled = replace(by_rule, parts=parts, factor=factor * width)
        if _works(scaled, network, survey.whole.output):
            return scaled
    try:
        cut_behind(deepcopy(network), exit.path)
        why = "its blocks do not run by themselves"
    except ValueError as error:
        why = str(error)
    if kind == "narrow" and _works(replace(by_rule, parts=all_blocks, factor=1.0), network, survey.whole.output):
        raise ValueError("its blocks support no other width; use heads of kind paper or apfc")
    return Generic.of(exit.output, last, why, narrow=kind == "narrow")


def _design_by_rule(survey: Survey, stages: Stages, exit: Call, features: Shape) -> LaterStages:
    following = stages.after(exit)
    late = len(following) == 1
    kinds = kinds_of_blocks(survey, stages.ends)
    parts: list[Part] = []
    after = exit.ended
    for end in following:
        least = LEAST_IN_LAST_STAGE if end is following[-1] else 1
        rows = list(rows_of_blocks(survey, kinds, after, end.ended))
        parts += [Part(_name(row, survey), len(row), () if late else _left_out(row, least, survey)) for row in rows]
        parts += [] if rows else [Part(end.path)]
        after = end.ended
    inside = frozenset(call.path for call in survey.within(exit.ended, after))
    return LaterStages(exit.path, features, tuple(parts), inside, WIDE if late else 1.0)


def _name(row: list[Call], survey: Survey) -> str:
    """The module that contains these blocks and no others, or else the first and the last block."""
    first, last = row[0], row[-1]
    siblings = {call.path: call for call in survey.calls if call.parent == first.parent}
    like = [call for call in siblings.values() if type(call.module) is type(first.module)]
    if first.parent and len(like) == len(row):
        return first.parent
    return first.path if first is last else f"{first.path} to {last.path}"


def _left_out(row: list[Call], least: int, survey: Survey) -> tuple[str, ...]:
    """The blocks to remove, from the end of the row, so that half of it stays."""
    optional = [call.path for call in reversed(row) if can_be_left_out(call, survey)]
    return tuple(optional[: max(0, len(row) - max(half(len(row)), least))])


def _works(design: LaterStages, network: nn.Module, logits: Shape | None) -> bool:
    try:
        head = design.build(deepcopy(network))
        with torch.no_grad():
            output = head(torch.empty(BATCH, *design.input, device="meta"))
    # Third-party code can fail in any way with a refitted layer; then the next design is tried.
    except Exception:
        return False
    # The batch size is compared too: a view(-1, WIDTH) turns other widths into more images.
    return tuple(output.shape) == (BATCH, *(logits or ()))


def reinitialise(module: nn.Module) -> None:
    """Draws new weights: layers reset themselves, other parameters get the mean and deviation of the old ones."""
    for layer in module.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            reset()
            continue
        for parameter in layer.parameters(recurse=False):
            parameter.data = redraw(parameter, tuple(parameter.shape))


class Skip(nn.Module):
    """Stands for a block that is left out: returns its first argument."""

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        return x


def rows_of_blocks(survey: Survey, kinds: Kinds, after: int, until: int) -> Iterator[Row]:
    """The blocks that run between two moments, grouped by the module that contains them."""
    blocks = [call for call in survey.within(after, until) if type(call.module) in kinds]
    yield from _rows(call for call in blocks if not _is_inside(call, kinds, survey))


def kinds_of_blocks(survey: Survey, ends: Iterable[Call]) -> Kinds:
    """The classes of modules of which a stage has several in a row; only the outermost, not the parts of blocks."""
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
    """Whether the block keeps the shape, or adds to a list of all earlier outputs, as in a DenseNet."""
    if call.input is None:
        return any(isinstance(around.module, nn.ModuleDict) for around in survey.called(call.parent))
    return call.input == call.output


def leave_out(network: nn.Module, path: str) -> None:
    """Removes the block ``path`` from the network."""
    parent, _, name = path.rpartition(".")
    around = network.get_submodule(parent)
    if isinstance(around, nn.ModuleDict):
        del around[name]
    else:
        network.set_submodule(path, Skip())


def _could_be_block(call: Call) -> bool:
    """Whether it has parts and weights; a bare ``Sequential`` is a stage rather than a block of one."""
    has_parts = next(call.module.children(), None) is not None
    has_weights = any(parameter.ndim > 1 for parameter in call.module.parameters())
    return has_parts and has_weights and type(call.module) not in PLAIN_SEQUENCES


def _rows(calls: Iterable[Call]) -> Iterator[Row]:
    in_rows = sorted(calls, key=lambda call: (call.parent, call.began))
    for _, row in groupby(in_rows, key=lambda call: (call.parent, type(call.module))):
        yield list(row)


def _is_inside(call: Call, kinds: Kinds, survey: Survey) -> bool:
    steps = call.path.split(".")
    around = (".".join(steps[:depth]) for depth in range(1, len(steps)))
    return any(type(outer.module) in kinds for path in around for outer in survey.called(path))
