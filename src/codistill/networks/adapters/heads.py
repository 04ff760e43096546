"""Auxiliary classifiers by the paper's rule, made of the network's own later stages, its pooling and its classifier.

Behind an exit come all later stages, so that a head down-samples as often as the network itself. Where one stage
follows, the head has all of its blocks at twice the width; where more follow, it has half of the blocks of each,
rounded up, and two at least of the last. What cannot be made wider keeps its width: a ViT's attention counts on it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from codistill.networks.adapters.blocks import can_be_left_out, kinds_of_blocks, leave_out, rows_of_blocks
from codistill.networks.adapters.cutting import behind
from codistill.networks.adapters.stages import Stages
from codistill.networks.adapters.survey import BATCH, Call, Shape, Survey, channels, is_channels_last
from codistill.networks.adapters.widths import redrawn, refit
from codistill.networks.heads import apfc, describe_apfc
from codistill.networks.tables import half

WIDE, LEAST_IN_LAST_STAGE = 2.0, 2


class HeadDesign(ABC):
    """A head before it is built; ``str`` of it says what it is made of."""

    @abstractmethod
    def build(self, network: nn.Module, num_classes: int) -> nn.Module:
        """The head, made of ``network``, which is used up."""


@dataclass(frozen=True)
class Part:
    """What a head takes over: some of a row of blocks, or all of a stage that has no such row."""

    name: str
    blocks: int = 0
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        kept = self.blocks - len(self.left_out)
        return f"{kept} of {self.blocks} blocks of {self.name}" if self.blocks else self.name


@dataclass(frozen=True)
class LaterStages(HeadDesign):
    """What lies behind the module ``path``, with some blocks left out, and wider or narrower."""

    path: str
    input: Shape
    parts: tuple[Part, ...]
    scaled: frozenset[str]
    """The modules of the later stages; what follows them keeps its width."""
    factor: float

    def __str__(self) -> str:
        width = {1.0: "", 2.0: ", twice as wide", 0.5: ", half as wide"}[self.factor]
        return ", ".join(map(str, self.parts)) + width if self.parts else "what follows the last stage"

    def build(self, network: nn.Module, num_classes: int) -> nn.Module:
        left_out = [path for part in self.parts for path in part.left_out]
        for path in left_out:
            leave_out(network, path)
        head = behind(network, self.path)
        if left_out or self.factor != 1:
            refit(head, self.input, lambda path: self.factor if path in self.scaled else 1.0)
        return head

    def with_all_blocks(self) -> "LaterStages":
        return replace(self, parts=tuple(replace(part, left_out=()) for part in self.parts))


@dataclass(frozen=True)
class Pooled(HeadDesign):
    """The paper's APFC: a grid of averages and one linear layer. Tokens are averaged into one."""

    input: Shape

    def __str__(self) -> str:
        return describe_apfc() if len(self.input) == 3 else "the average of the tokens and one linear layer"

    def build(self, network: nn.Module, num_classes: int) -> nn.Module:
        width = channels(self.input)
        if len(self.input) == 2:
            return nn.Sequential(MeanOfTokens(), nn.Linear(width, num_classes))
        first = [ChannelsFirst()] if is_channels_last(self.input) else []
        return nn.Sequential(*first, *apfc(width, num_classes))


class ChannelsFirst(nn.Module):
    def forward(self, x_BHWC: Tensor) -> Tensor:
        return x_BHWC.permute(0, 3, 1, 2)


class MeanOfTokens(nn.Module):
    def forward(self, x_BNC: Tensor) -> Tensor:
        return x_BNC.mean(dim=1)


def design(network: nn.Module, survey: Survey, stages: Stages, place: Call, kind: str) -> HeadDesign:
    """The head for the exit ``place``; ``network`` is on the meta device, where it is tried out."""
    assert place.output is not None
    if kind == "apfc":
        return Pooled(place.output)
    share = 0.5 if kind == "narrow" else 1.0
    for one in _alternatives(_wanted(survey, stages, place, place.output)):
        scaled = replace(one, factor=one.factor * share)
        if _works(scaled, network, survey.whole.output):
            return scaled
    behind(deepcopy(network), place.path)  # says why, if it cannot be cut at all
    raise ValueError("its blocks go with no other width; take heads of kind paper or apfc")


def _wanted(survey: Survey, stages: Stages, place: Call, features: Shape) -> LaterStages:
    following = stages.after(place)
    late = len(following) == 1
    kinds = kinds_of_blocks(survey, stages.ends)
    parts: list[Part] = []
    after = place.ended
    for end in following:
        least = LEAST_IN_LAST_STAGE if end is following[-1] else 1
        rows = list(rows_of_blocks(survey, kinds, after, end.ended))
        parts += [Part(_name(row, survey), len(row), () if late else _left_out(row, least, survey)) for row in rows]
        parts += [] if rows else [Part(end.path)]
        after = end.ended
    inside = frozenset(call.path for call in survey.within(place.ended, after))
    return LaterStages(place.path, features, tuple(parts), inside, WIDE if late else 1.0)


def _name(row: list[Call], survey: Survey) -> str:
    """The module that has these blocks and no others, or else the first and the last of them."""
    first, last = row[0], row[-1]
    siblings = {call.path: call for call in survey.calls if call.parent == first.parent}
    like = [call for call in siblings.values() if type(call.module) is type(first.module)]
    if first.parent and len(like) == len(row):
        return first.parent
    return first.path if first is last else f"{first.path} to {last.path}"


def _left_out(row: list[Call], least: int, survey: Survey) -> tuple[str, ...]:
    """The last ones that can be missing, so that half of the row stays."""
    optional = [call.path for call in reversed(row) if can_be_left_out(call, survey)]
    return tuple(optional[: max(0, len(row) - max(half(len(row)), least))])


def _alternatives(wanted: LaterStages) -> Iterator[LaterStages]:
    yield wanted
    yield replace(wanted, factor=1.0)
    yield replace(wanted.with_all_blocks(), factor=1.0)


def _works(one: LaterStages, network: nn.Module, logits: Shape | None) -> bool:
    try:
        head = one.build(deepcopy(network), num_classes=0)
        with torch.no_grad():
            output = head(torch.empty(BATCH, *one.input, device="meta"))
    # A refitted layer in somebody's code can fail in any way; then the next design is tried.
    except Exception:
        return False
    # The batch is compared too: a view(-1, WIDTH) takes other widths for other images.
    return tuple(output.shape) == (BATCH, *(logits or ()))


def reinitialise(module: nn.Module) -> None:
    """As new: layers as they reset themselves, other parameters drawn as the old ones are spread."""
    for layer in module.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            reset()
            continue
        for parameter in layer.parameters(recurse=False):
            parameter.data = redrawn(parameter, tuple(parameter.shape))
