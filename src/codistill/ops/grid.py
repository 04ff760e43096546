"""How kernels are launched: tiles of a feature map, the number of SMs, semaphores for reductions. Needs Triton."""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

TILE, WARPS, STAGES = 4096, 4, 3
"""Elements per tile, warps per program, software-pipelining stages."""
MIN_BLOCK_C, MAX_BLOCK_C = 16, 64
"""Bounds of a tile's channels: wide enough for full memory transactions, narrow enough that every SM gets rows."""
LARGE_MAP = 10_000_000
"""From this many elements on a reduction uses two programs per SM; below, adding the partial sums would dominate."""
UNIT = 16
"""Elements to which row strides are aligned, so that loads and stores are vectorised."""
SEMAPHORES = 1 << 20
"""Enough that none is reused while it is in use."""


@dataclass(frozen=True)
class Tiling:
    """How a feature map [M, C] is cut into tiles of [BLOCK_M, BLOCK_C]."""

    M: int
    C: int
    unit: int
    """The alignment of row strides, which kernels receive in this unit."""
    sms: int

    @classmethod
    def of(cls, x_BCHW: Tensor, *row_strides: int, channels: int | None = None) -> "Tiling":
        """The tiling for ``channels`` of ``x`` (default: all), in maps that may have other row strides."""
        C = x_BCHW.shape[1]
        return cls(x_BCHW.numel() // C, channels or C, math.gcd(UNIT, C, *row_strides), sm_count(x_BCHW.device))

    @property
    def block_c(self) -> int:
        """A power of two that divides the number of channels, if there is one in range."""
        return min(max(self.C & -self.C, MIN_BLOCK_C), MAX_BLOCK_C)

    @property
    def block_m(self) -> int:
        return TILE // self.block_c

    @property
    def columns(self) -> int:
        return int(triton.cdiv(self.C, self.block_c))

    @property
    def programs(self) -> int:
        """The programs of a reduction that share the rows of a column of tiles."""
        programs = self.sms * (2 if self.M * self.C >= LARGE_MAP else 1)
        return min(int(triton.cdiv(self.M, self.block_m)), max(1, programs // self.columns))

    @property
    def tile_grid(self) -> tuple[int]:
        """One program per tile."""
        return (self.columns * triton.cdiv(self.M, self.block_m),)

    @property
    def reduction_grid(self) -> tuple[int, int]:
        return self.columns, self.programs

    @property
    def meta(self) -> dict[str, int]:
        """The launch options of the kernels that use this tiling."""
        return {"UNIT": self.unit, "BLOCK_M": self.block_m, "BLOCK_C": self.block_c, "num_warps": WARPS}


@cache
def sm_count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Semaphores:
    """Counters by which the last program of a reduction knows that it is the last; each launch resets its own."""

    def __init__(self) -> None:
        self.rings: dict[torch.device, Tensor] = {}
        self.taken = 0

    def take(self, device: torch.device, count: int) -> Tensor:
        if device not in self.rings:
            self.rings[device] = torch.zeros(SEMAPHORES, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # other streams must not see it before it is all zeros
        self.taken = 0 if self.taken + count > SEMAPHORES else self.taken
        self.taken += count
        return self.rings[device][self.taken - count : self.taken]


semaphores = Semaphores()


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def empty_map(like: Tensor, batch: int, channels: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty channels-last tensor with the height and width of ``like``."""
    H, W = like.shape[2:]
    return like.new_empty(batch, H, W, channels, dtype=dtype).permute(0, 3, 1, 2)
