"""One pass through a network on the meta device, where nothing is computed: which modules run, when, on what shapes.

Tensor axes: B batch, C channels, H height, W width, N tokens.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import isqrt

import torch
from torch import Tensor, nn

SETTINGS = (type(None), bool, int, float, str)  # what a module may be given beside its tensor
BATCH = 2  # in training mode batch normalisation refuses a single value per channel

Shape = tuple[int, ...]


@dataclass
class Call:
    """A module that ran. ``began`` and ``ended`` count the beginnings and ends of all calls before it."""

    path: str
    module: nn.Module
    caller: str
    """The path of the module that called it; a list of modules is not called and calls nothing."""
    began: int
    ended: int = -1
    input: Shape | None = None
    """Of one image; None where it is given or gives anything but one tensor."""
    output: Shape | None = None
    changed_later: bool = False
    """Whether what follows writes into its output, so that nobody else can use it."""

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def has_parameters(self) -> bool:
        return any(True for _ in self.module.parameters())


@dataclass(frozen=True)
class Survey:
    """What was seen, and for images of which size: ``any_size`` where it is not the only one that the network takes."""

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

    def within(self, after: int, until: int) -> Iterator[Call]:
        """The calls that begin and end between two moments."""
        return (call for call in self.calls if after < call.began and call.ended <= until)


def survey(network: nn.Module, in_channels: int, sizes: Iterable[int]) -> Survey:
    """The first of the image ``sizes`` that the network takes is the one it is surveyed with.

    In training mode: some networks return something else then, and it is in training that exits matter.
    """
    network = deepcopy(network).to("meta").train()
    failures = []
    for size in sizes:
        try:
            calls = _recorded(network, in_channels, size)
        # Whatever a stranger's forward raises where the size does not suit it.
        except Exception as error:
            failures.append(f"{size}×{size}: {' '.join(str(error).split())}")
            continue
        return Survey(calls, in_channels, size, any_size=_takes(network, in_channels, 2 * size))
    raise ValueError(
        f"its forward fails for images of {in_channels} channels, tried without values on the meta device "
        f"({failures[0]})"
    )


def positions(shape: Shape | None) -> int | None:
    """How many places a feature map (or a row of tokens) has; None for what has neither."""
    match shape:
        case (first, second, third):
            return first * second if is_channels_last(shape) else second * third
        case (tokens, _):
            return tokens
    return None


def is_channels_last(shape: Shape) -> bool:
    """[H, W, C], as some transformers have it, and not [C, H, W]; images are square."""
    return len(shape) == 3 and shape[0] == shape[1] != shape[2]


def channels(shape: Shape) -> int:
    return shape[0] if len(shape) == 3 and not is_channels_last(shape) else shape[-1]


def stride(image_size: int, shape: Shape) -> int:
    """How many pixels lie between neighbouring positions; a class token more or less does not matter."""
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
        self.running.append(call)

    def end(self, module: nn.Module, args: object, output: object) -> None:
        self.moment += 1
        call = self.running.pop()
        call.ended = self.moment
        tensor = output if isinstance(output, Tensor) else None
        if tensor is not None:
            call.output = tuple(tensor.shape[1:])
        self.done.append((call, tensor, tensor._version if tensor is not None else 0))


def _recorded(network: nn.Module, in_channels: int, size: int) -> tuple[Call, ...]:
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
        _run(network, in_channels, size)
    finally:
        for handle in handles:
            handle.remove()
    for call, tensor, version in recorder.done:
        call.changed_later = tensor is not None and tensor._version != version
    return tuple(call for call, _, _ in recorder.done)


def _takes(network: nn.Module, in_channels: int, size: int) -> bool:
    try:
        _run(network, in_channels, size)
    except Exception:
        return False
    return True


@torch.no_grad()
def _run(network: nn.Module, in_channels: int, size: int) -> None:
    network(torch.empty(BATCH, in_channels, size, size, device="meta"))
