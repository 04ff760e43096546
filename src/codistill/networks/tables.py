"""Architectures as tables: rows of blocks as papers print them, from which backbones and heads are built.

A head goes from a feature map to logits, as the classifier at the end of a network does.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from codistill.errors import unknown
from codistill.networks.backbone import Architecture, Backbone, Exit
from codistill.networks.layers import BlockSequential, Conv2d, norm_relu

HEAD_KINDS = ("paper", "narrow", "apfc")
"""The paper's design of the network's own blocks; the same at half the width; pooling and one linear layer."""

APFC_GRID = 4


@dataclass(frozen=True)
class Row:
    """A row of a table: blocks, their output channels (a DenseNet's growth rate), and the stride of the first block."""

    blocks: int
    channels: int
    stride: int = 2
    expansion: int | None = None
    """MobileNetV2's factor t; None is its plain 1×1 convolution. The other families do not use it."""


class TabulatedArchitecture(Architecture):
    """The base of all families: stages and heads are rows; the families differ in their blocks."""

    stem_channels: ClassVar[int]
    stem_stride: ClassVar[int] = 1
    preactivated: ClassVar[bool] = False
    """Whether blocks normalise and activate their input, so that the last output still needs both."""

    @abstractmethod
    def stem(self, in_channels: int) -> nn.Module:
        """The first convolution."""

    @property
    @abstractmethod
    def stages(self) -> Mapping[str, tuple[Row, ...]]:
        """The rows after the stem, by stage."""

    @property
    @abstractmethod
    def auxiliary(self) -> Mapping[str, tuple[Row, ...]]:
        """The paper's auxiliary classifiers by exit: C2 first, then C3, ..."""

    @abstractmethod
    def block(self, in_channels: int, row: Row, stride: int) -> nn.Module:
        """One building block of a row."""

    def block_channels(self, in_channels: int, row: Row) -> int:
        """The output channels of a block of this row."""
        return row.channels

    @property
    def exits(self) -> tuple[Exit, ...]:
        channels, stride = self.stem_channels, self.stem_stride
        shapes = {"stem": (channels, stride)}
        for name, rows in self.stages.items():
            channels = self._channels_after(channels, rows)
            for row in rows:
                stride *= row.stride
            shapes[name] = (channels, stride)
        return tuple(Exit(name, number, *shapes[name]) for number, name in enumerate(self.auxiliary, start=2))

    def backbone(self, num_classes: int, in_channels: int = 3) -> Backbone:
        modules = {"stem": self.stem(in_channels)}
        channels = self.stem_channels
        for name, rows in self.stages.items():
            modules[name] = self._blocks(channels, rows)
            channels = self._channels_after(channels, rows)
        return Backbone(modules, self._classifier(channels, num_classes), self.exits)

    def head(self, exit_name: str, kind: str, num_classes: int) -> nn.Module:
        if exit_name not in self.auxiliary:
            raise unknown(f"exit of {self}", exit_name, self.auxiliary)
        if kind not in HEAD_KINDS:
            raise unknown("kind of head", kind, HEAD_KINDS)
        (channels,) = (exit.channels for exit in self.exits if exit.name == exit_name)
        if kind == "apfc":
            return apfc(channels, num_classes)
        rows = self._head_rows(exit_name, kind)
        return BlockSequential(
            self._blocks(channels, rows), self._classifier(self._channels_after(channels, rows), num_classes)
        )

    def describe_head(self, exit_name: str, kind: str) -> str:
        if kind == "apfc":
            return describe_apfc()
        return ", ".join(f"{row.blocks} × {row.channels}" for row in self._head_rows(exit_name, kind))

    def _head_rows(self, exit_name: str, kind: str) -> tuple[Row, ...]:
        rows = self.auxiliary[exit_name]
        return tuple(replace(row, channels=half(row.channels)) for row in rows) if kind == "narrow" else rows

    def _blocks(self, channels: int, rows: Iterable[Row]) -> nn.Sequential:
        blocks = []
        for row in rows:
            for index in range(row.blocks):
                blocks.append(self.block(channels, row, row.stride if index == 0 else 1))
                channels = self.block_channels(channels, row)
        return BlockSequential(*blocks)

    def _channels_after(self, channels: int, rows: Iterable[Row]) -> int:
        for row in rows:
            for _ in range(row.blocks):
                channels = self.block_channels(channels, row)
        return channels

    def _classifier(self, channels: int, num_classes: int) -> nn.Module:
        return classifier(channels, num_classes, preactivated=self.preactivated)


class PreActivatedArchitecture(TabulatedArchitecture):
    """The families for CIFAR whose blocks activate their input: the stem is a bare convolution."""

    stem_channels: ClassVar[int] = 16
    preactivated: ClassVar[bool] = True

    def stem(self, in_channels: int) -> nn.Module:
        return Conv2d(in_channels, self.stem_channels, 3)


def half(count: int) -> int:
    """Half of ``count``, rounded up: the paper halves only even numbers, other sizes need a rule."""
    return (count + 1) // 2


def blocks_per_stage(family: str, depth: int, per_n: int, extra: int) -> int:
    """The number n of blocks per stage, where depth = ``per_n`` × n + ``extra``."""
    blocks, rest = divmod(depth - extra, per_n)
    if blocks < 1 or rest:
        raise ValueError(f"{family}: depth {depth} does not fit; it is {per_n}n+{extra}, as in {per_n + extra}")
    return blocks


def classifier(channels: int, num_classes: int, *, preactivated: bool = False) -> nn.Sequential:
    """Global average pooling and one linear layer; BN and ReLU first if the blocks are pre-activated."""
    activation = [norm_relu(channels)] if preactivated else []
    return BlockSequential(*activation, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def apfc(channels: int, num_classes: int) -> nn.Sequential:
    """Average-pool to 4×4, then one linear layer."""
    return nn.Sequential(GridPool(APFC_GRID), nn.Flatten(), nn.Linear(channels * APFC_GRID**2, num_classes))


def describe_apfc() -> str:
    """What an APFC head is made of, for listings."""
    return f"averages over a {APFC_GRID}×{APFC_GRID} grid and one linear layer"


class GridPool(nn.Module):
    """Average pooling to a square grid of ``cells`` × ``cells``, for feature maps of any size."""

    def __init__(self, cells: int) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, x_BCHW: Tensor) -> Tensor:
        height, width = x_BCHW.shape[-2:]
        if height % self.cells == 0 and width % self.cells == 0:
            # The same values; adaptive pooling has no deterministic backward pass on CUDA.
            return F.avg_pool2d(x_BCHW, (height // self.cells, width // self.cells))
        return F.adaptive_avg_pool2d(x_BCHW, self.cells)
