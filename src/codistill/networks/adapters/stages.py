"""Where a network's stages end, and which of these ends are exits.

A stage is all that a network computes at one resolution. Exits are the ends of the stages before the last one; where
nothing is down-sampled (a ViT), the network is cut into thirds instead. Stages are found in timm's ``feature_info``, or
else in the tree of modules: the last module on the main path at each resolution.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, takewhile

from torch import nn

from codistill.errors import did_you_mean
from codistill.networks.adapters.cutting import can_be_cut
from codistill.networks.adapters.survey import Call, Survey, positions

PAPERS_EXITS = 2
PARTS = PAPERS_EXITS + 1  # of a network that is not down-sampled
SPAN = 4  # a module that shrinks the image so often as not to be a part of one stage is opened


@dataclass(frozen=True)
class Stages:
    """``ends`` are the last modules of all stages, in their order; ``exits`` those where heads hang, C2 first."""

    ends: tuple[Call, ...]
    exits: tuple[Call, ...]

    def after(self, place: Call) -> tuple[Call, ...]:
        """The ends of the stages that follow."""
        return tuple(end for end in self.ends if end.ended > place.ended)


def find(network: nn.Module, survey: Survey, paths: Iterable[str] | None) -> Stages:
    """The network's stages, and its exits at the modules ``paths``, or else where the stages end."""
    ends = _ends(network, survey)
    exits = ends[:-1] if paths is None else [_exit(survey, path) for path in paths]
    nearest_first = tuple(sorted(exits, key=lambda call: call.ended, reverse=True))
    return Stages(tuple(ends) or (*reversed(nearest_first), survey.whole), nearest_first)


def _ends(network: nn.Module, survey: Survey) -> list[Call]:
    """As timm lists them, unless heads cannot be cut out there: it lists places inside of a few networks' blocks."""
    main_path = takewhile(lambda call: not _pools_all(call), _main_path(survey, survey.whole))
    listed, passed = _listed_by_timm(network, survey), _usable(_running_once(main_path, survey))
    found = [ends for ends in (_ends_among(calls, survey) for calls in (listed, passed)) if ends]
    cuttable = [ends for ends in found if all(can_be_cut(network, end.path) for end in ends[:-1][-PAPERS_EXITS:])]
    return (cuttable or found or [_thirds(max(listed, _longest_run(survey), key=len))])[0]


def _pools_all(call: Call) -> bool:
    """Whether nothing but numbers for the whole image is left behind it: a classifier follows, and no stage."""
    return positions(call.output) == 1 and (positions(call.input) or 0) > 1 and not call.has_parameters


def _running_once(calls: Iterable[Call], survey: Survey) -> Iterator[Call]:
    """What runs twice has no one output."""
    return (call for call in calls if len(survey.called(call.path)) == 1)


def _usable(calls: Iterable[Call]) -> list[Call]:
    return [call for call in calls if positions(call.output) and not call.changed_later]


def _ends_among(calls: list[Call], survey: Survey) -> list[Call]:
    levels = [level[-1] for level in _levels(calls)]
    # A last pooling without anything to learn after it is no stage of its own (VGG).
    while len(levels) > 1 and not _learns_between(survey, levels[-2], levels[-1]):
        levels.pop()
    return levels if len(levels) > 1 else []


def _thirds(blocks: list[Call]) -> list[Call]:
    """Where each third of them ends; nothing where there are too few."""
    if len(blocks) < PARTS:
        return []
    return [blocks[round(part * len(blocks) / PARTS) - 1] for part in range(1, PARTS + 1)]


def _listed_by_timm(network: nn.Module, survey: Survey) -> list[Call]:
    listed = getattr(network, "feature_info", None) or ()
    found = [survey.called(feature["module"]) for feature in listed if isinstance(feature, dict)]
    listed_calls = (calls[0] for calls in found if calls)
    return _usable(sorted(_running_once(listed_calls, survey), key=lambda call: call.ended))


def _main_path(survey: Survey, whole: Call) -> list[Call]:
    """The calls that the data pass one after the other; what spans more than a stage is opened."""
    path = []
    for call in (call for call in survey.within(whole.began, whole.ended) if call.caller == whole.path):
        before, behind = positions(call.input), positions(call.output)
        opens = before and behind and before >= behind * SPAN**2
        inside = _main_path(survey, call) if opens else []
        path += inside or [call]
    return path


def _levels(calls: Iterable[Call]) -> list[list[Call]]:
    """Grouped by resolution; a class token more or less is no other resolution."""
    levels: list[list[Call]] = []
    for call in calls:
        here = positions(call.output) or 0
        if levels and 2 * here > (positions(levels[-1][-1].output) or 0):
            levels[-1].append(call)
        else:
            levels.append([call])
    return levels


def _learns_between(survey: Survey, before: Call, until: Call) -> bool:
    return any(call.has_parameters for call in survey.within(before.ended, until.ended))


def _longest_run(survey: Survey) -> list[Call]:
    """The longest row of like blocks that keep the shape of their tokens or feature map."""
    keeping = [call for call in survey.calls if call.input == call.output and positions(call.output)]
    learning = sorted((call for call in keeping if call.has_parameters), key=lambda call: (call.parent, call.ended))
    runs = [list(run) for _, run in groupby(learning, key=lambda call: (call.parent, type(call.module)))]
    return max(runs, key=len, default=[])


def _exit(survey: Survey, path: str) -> Call:
    calls = survey.called(path)
    if not calls:
        known = [call.path for call in survey.calls if call.path and positions(call.output)]
        top = ", ".join(one for one in dict.fromkeys(known) if one.count(".") == 0) or ", ".join(known[:12])
        raise ValueError(f"it has no module {path!r} that runs{did_you_mean(path, known) or ';'} It has {top}, …")
    call = calls[-1]
    if len(calls) > 1:
        raise ValueError(f"its module {path!r} runs {len(calls)} times; name the module around it")
    if call.output is None:
        raise ValueError(f"its module {path!r} gives no single tensor; name one that does")
    if positions(call.output) is None or not path:
        shape = "×".join(map(str, ("batch", *call.output)))
        raise ValueError(f"the output of {path!r}, {shape}, has no spatial or token axis; name an earlier module")
    if call.changed_later:
        raise ValueError(f"what follows {path!r} writes into its output; name the module that does")
    return call
