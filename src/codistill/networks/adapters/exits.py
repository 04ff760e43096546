"""Where heads can be attached to a network: a survey of its modules, the stages found in it, and their ends as exits.

The survey is one forward pass on the meta device, where nothing is computed: which modules run, when, on what shapes.
A stage is all that a network computes at one resolution. Exits are the ends of the stages before the last one; where
nothing is down-sampled (a ViT), the network is cut into thirds instead. Stages are found in timm's ``feature_info``, or
else in the tree of modules: the last module on the main path at each resolution.
Tensor axes: B batch, C channels, H height, W width, N tokens.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, takewhile
from math import inf, isqrt

import torch
from torch import Tensor, nn

from codistill.errors import did_you_mean
from codistill.networks.adapters.surgery import Shape, can_be_cut
from codistill.networks.cost import BATCH

SETTINGS = (type(None), bool, int, float, str)  # what a module may be given beside its tensor
PAPERS_EXITS = 2
PARTS = PAPERS_EXITS + 1  # into which a network without down-sampling is cut
SPAN = 4  # a module that shrinks the sides of its input by this factor spans several stages: look inside


@dataclass
class Call:
    """One call of a module. ``began`` and ``ended`` count the beginnings and ends of all calls before it."""

    path: str
    module: nn.Module
    caller: str
    """The path of the calling module; a ModuleList is never called, so it is not a caller."""
    began: int
    ended: int = -1
    input: Shape | None = None
    """The shape for one image; None if it is not exactly one tensor. The same holds for the output."""
    output: Shape | None = None
    first_input: Shape | None = None
    """As ``input``, but where that is a tuple, a list or several tensors, the shape of the first one."""
    first_output: Shape | None = None
    changed_later: bool = False
    """Whether a later module writes into its output, which then cannot be an exit."""
    is_first_of_several: bool = False
    """Whether ``output`` is only the first tensor of what the module returns: then nothing can be cut off behind it."""

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def has_parameters(self) -> bool:
        return any(True for _ in self.module.parameters())


@dataclass(frozen=True)
class Survey:
    """The calls of one forward pass, and its image size; ``any_size`` if the network also takes other sizes."""

    calls: tuple[Call, ...]
    """In the order in which they end; the network itself, whose path is empty, is the last."""
    in_channels: int
    image_size: int
    any_size: bool

    @property
    def whole(self) -> Call:
        return self.calls[-1]

    @cached_property
    def by_path(self) -> dict[str, list[Call]]:
        ordered = sorted(self.calls, key=lambda call: call.path)
        return {path: list(calls) for path, calls in groupby(ordered, key=lambda call: call.path)}

    def called(self, path: str) -> list[Call]:
        return self.by_path.get(path, [])

    def of_first_tensors(self) -> "Survey":
        """The same calls, where modules that take or return several tensors are seen as if by the first alone."""
        calls = (
            replace(
                call,
                input=call.first_input,
                output=call.first_output,
                is_first_of_several=call.output is None and call.first_output is not None,
            )
            for call in self.calls
        )
        return replace(self, calls=tuple(calls))

    def within(self, after: int, until: int) -> Iterator[Call]:
        """The calls that begin and end between two moments."""
        return (call for call in self.calls if after < call.began and call.ended <= until)


def survey(network: nn.Module, in_channels: int, sizes: Iterable[int]) -> Survey:
    """Surveys the network with the first of the image ``sizes`` that it takes.

    In training mode, because exits are used in training and some networks return something else then.
    """
    network = deepcopy(network).to("meta").train()
    failures = []
    for size in sizes:
        try:
            calls = _record_calls(network, in_channels, size)
        # Third-party code may raise anything for a size that it does not support.
        except Exception as error:
            failures.append(f"{size}×{size}: {' '.join(str(error).split())}")
            continue
        return Survey(calls, in_channels, size, any_size=takes(network, in_channels, 2 * size, 2 * size))
    raise ValueError(
        f"its forward fails for images of {in_channels} channels, tried without values on the meta device "
        f"({failures[0]})"
    )


def positions(shape: Shape | None) -> int | None:
    """The number of positions of a feature map or of tokens; None for a shape without either."""
    match shape:
        case (first, second, third):
            return first * second if is_channels_last(shape) else second * third
        case (tokens, _):
            return tokens
    return None


def is_channels_last(shape: Shape) -> bool:
    """Whether the shape is [H, W, C], as in some transformers, and not [C, H, W]; images are square."""
    return len(shape) == 3 and shape[0] == shape[1] != shape[2]


def channels(shape: Shape) -> int:
    return shape[0] if len(shape) == 3 and not is_channels_last(shape) else shape[-1]


def stride(image_size: int, shape: Shape) -> int:
    """Input pixels between neighbouring positions; a class token more or less does not matter."""
    return max(1, round(image_size / max(1, isqrt(positions(shape) or 1))))


@dataclass
class _Recorder:
    names: dict[nn.Module, str]
    moment: int = 0
    running: list[Call] = field(default_factory=list)
    done: list[tuple[Call, Tensor | None, int]] = field(default_factory=list)

    def begin(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.moment += 1
        caller = self.running[-1].path if self.running else ""
        call = Call(self.names[module], module, caller, began=self.moment)
        given = [value for value in (*args, *kwargs.values()) if not isinstance(value, SETTINGS)]
        if len(given) == 1 and isinstance(given[0], Tensor):
            call.input = tuple(given[0].shape[1:])
        first = first_tensor(given)
        call.first_input = tuple(first.shape[1:]) if first is not None else None
        self.running.append(call)

    def end(self, module: nn.Module, args: object, output: object) -> None:
        self.moment += 1
        call = self.running.pop()
        call.ended = self.moment
        tensor = first_tensor(output)
        if tensor is not None:
            call.first_output = tuple(tensor.shape[1:])
            call.output = call.first_output if tensor is output else None
        self.done.append((call, tensor, tensor._version if tensor is not None else 0))


def first_tensor(value: object) -> Tensor | None:
    """The tensor itself, or the first in a tuple or list."""
    while isinstance(value, tuple | list) and value:
        value = value[0]
    return value if isinstance(value, Tensor) else None


def _record_calls(network: nn.Module, in_channels: int, size: int) -> tuple[Call, ...]:
    recorder = _Recorder({module: path for path, module in network.named_modules()})
    handles = [
        handle
        for module in recorder.names
        for handle in (
            module.register_forward_pre_hook(recorder.begin, with_kwargs=True),
            module.register_forward_hook(recorder.end),
        )
    ]
    try:
        _run(network, in_channels, size, size)
    finally:
        for handle in handles:
            handle.remove()
    for call, tensor, version in recorder.done:
        call.changed_later = tensor is not None and tensor._version != version
    return tuple(call for call, _, _ in recorder.done)


def takes(network: nn.Module, in_channels: int, height: int, width: int) -> bool:
    """Whether the network, on the meta device, runs with images of this size."""
    try:
        _run(network, in_channels, height, width)
    except Exception:
        return False
    return True


@torch.no_grad()
def _run(network: nn.Module, in_channels: int, height: int, width: int) -> None:
    network(torch.empty(BATCH, in_channels, height, width, device="meta"))


@dataclass(frozen=True)
class Stages:
    """``ends`` are the last modules of all stages in order, ``exits`` those with heads, C2 first."""

    ends: tuple[Call, ...]
    exits: tuple[Call, ...]

    def after(self, exit: Call) -> tuple[Call, ...]:
        """The ends of the stages behind ``exit``."""
        return tuple(end for end in self.ends if end.ended > exit.ended)


def find_stages(network: nn.Module, survey: Survey, paths: Iterable[str] | None) -> Stages:
    """The network's stages, and its exits at the modules ``paths``, or else where the stages end."""
    ends = _stage_ends(network, survey)
    exits = ends[:-1] if paths is None else [_exit(survey, path) for path in paths]
    nearest_first = tuple(sorted(exits, key=lambda call: call.ended, reverse=True))
    return Stages(tuple(ends) or (*reversed(nearest_first), survey.whole), nearest_first)


def _stage_ends(network: nn.Module, survey: Survey) -> list[Call]:
    """As timm lists them, unless heads cannot be cut out there: for a few networks it lists modules inside blocks."""
    listed, passed = _listed_by_timm(network, survey), _passed(survey)
    found = [ends for ends in (_ends_among(calls, survey) for calls in (listed, passed)) if ends]
    cuttable = [ends for ends in found if all(can_be_cut(network, end.path) for end in ends[:-1][-PAPERS_EXITS:])]
    if cuttable and len(cuttable[0]) >= PARTS:
        return cuttable[0]
    first = survey.of_first_tensors()
    if len(stages := _ends_among(_passed(first), first)) >= PARTS:
        return stages
    if cuttable and len(stages := _with_papers_exits(cuttable[0], survey)) >= PARTS:
        return stages
    thirds = _thirds(max(listed, _longest_run((survey if not found else first).calls), key=len))
    if not found:
        return thirds or passed[-PARTS:]
    return max(
        _with_papers_exits((cuttable or found)[0], survey),
        thirds,
        key=lambda ends: ends[-PARTS].ended if ends[2:] else 0,
    )


def _passed(survey: Survey) -> list[Call]:
    """The calls on the main path whose output can be an exit."""
    main_path = takewhile(lambda call: not _pools_all(call), _main_path(survey, survey.whole))
    return _usable(_running_once(main_path, survey))


def _pools_all(call: Call) -> bool:
    """Whether it pools the whole image to one position: the classifier follows, and no further stage."""
    return positions(call.output) == 1 and (positions(call.input) or 0) > 1 and not call.has_parameters


def _running_once(calls: Iterable[Call], survey: Survey) -> Iterator[Call]:
    """Without modules that run several times, which have no single output."""
    return (call for call in calls if len(survey.called(call.path)) == 1)


def _usable(calls: Iterable[Call]) -> list[Call]:
    return [call for call in calls if positions(call.output) and not call.changed_later]


def _ends_among(calls: list[Call], survey: Survey) -> list[Call]:
    levels = [level[-1] for level in _levels(calls)]
    while len(levels) > 1:
        if any(call.has_parameters for call in survey.within(levels[-2].ended, levels[-1].ended)):
            return levels
        levels.pop()  # a last pooling without parameters after it is not a stage of its own (VGG)
    return []


def _with_papers_exits(ends: list[Call], survey: Survey) -> list[Call]:
    """A network of two stages gets its second exit in the middle of the longest run of blocks up to the first one."""
    if len(ends) != PAPERS_EXITS:
        return ends
    run = _longest_run(call for call in survey.calls if call.ended < ends[0].ended)
    return [run[len(run) // 2 - 1], *ends] if len(run) > 1 else ends


def _thirds(blocks: list[Call]) -> list[Call]:
    """The last block of each third; nothing if there are too few blocks."""
    if len(blocks) < PARTS:
        return []
    return [blocks[round(part * len(blocks) / PARTS) - 1] for part in range(1, PARTS + 1)]


def _listed_by_timm(network: nn.Module, survey: Survey) -> list[Call]:
    listed = getattr(network, "feature_info", None) or ()
    found = [survey.called(feature["module"]) for feature in listed if isinstance(feature, dict)]
    listed_calls = (calls[0] for calls in found if calls)
    return _usable(sorted(_running_once(listed_calls, survey), key=lambda call: call.ended))


def _main_path(survey: Survey, whole: Call) -> list[Call]:
    """The calls that the data pass one after the other; a module that spans several stages is replaced by its parts."""
    path = []
    for call in (call for call in survey.within(whole.began, whole.ended) if call.caller == whole.path):
        before, behind = positions(call.input), positions(call.output)
        spans_stages = before and behind and before >= behind * SPAN**2
        inside = _main_path(survey, call) if spans_stages else []
        path += inside or [call]
    return path


def _levels(calls: Iterable[Call]) -> list[list[Call]]:
    """Groups calls by resolution, without what is up-sampled; a class token more or less is the same resolution."""
    levels: list[list[Call]] = []
    for call in calls:
        size, before = positions(call.output) or 0, positions(levels[-1][-1].output) or 0 if levels else inf
        if 2 * size <= before:
            levels.append([call])
        elif size < 2 * before:
            levels[-1].append(call)
    return levels


def _longest_run(calls: Iterable[Call]) -> list[Call]:
    """The longest run of blocks of one class that keep the shape of their tokens or feature map."""
    keeping = [call for call in calls if call.input == call.output and positions(call.output)]
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
        raise ValueError(f"its module {path!r} does not output a single tensor; name one that does")
    if positions(call.output) is None or not path:
        shape = "×".join(map(str, ("batch", *call.output)))
        raise ValueError(f"the output of {path!r}, {shape}, has no spatial or token axis; name an earlier module")
    if call.changed_later:
        raise ValueError(f"what follows {path!r} writes into its output; name the module that does")
    return call
