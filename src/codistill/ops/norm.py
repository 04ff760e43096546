"""Batch norm, addition of a shortcut and activation, fused.

Torch launches six kernels for each and a compiler three or four; where networks are deep and narrow, the number of
launches is the time of a step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codistill.ops._norm_triton import batch_stats, norm_act_bwd_dbdw, norm_act_bwd_dx, norm_act_fwd
from codistill.ops.grid import STAGES, Tiling, channels_last, semaphores


def compute_stats(x: Tensor, eps: float) -> Tensor:
    """Mean, 1 / std and variance per channel of ``x``: [3, C]."""
    stats = x.new_empty(3, x.shape[1], dtype=torch.float32)
    append_channels(x, x.shape[1], None, stats, 0, eps)
    return stats


def append_channels(
    x: Tensor, C: int, features: Tensor | None, stats: Tensor, first: int, eps: float, added: Tensor | None = None
) -> None:
    """Writes the statistics of ``C`` channels of ``x`` to channel ``first`` of ``stats`` on, [3, total channels].

    Copies the channels to the same place in ``features``, if that is given. With ``added``, both are of x + added.
    """
    total = stats.shape[1]
    tiling = Tiling.of(x, total, channels=C)
    batch_stats[tiling.reduction_grid](
        x_ptr=x, x_stride=x.shape[1] // tiling.unit, added_ptr=added,
        out_ptr=None if features is None else flatten(features)[first:], out_stride=total // tiling.unit,
        partial_ptr=stats.new_empty(tiling.programs, 2, C),
        semaphore_ptr=semaphores.take(x.device, tiling.columns), stats_ptr=stats.view(-1)[first:], stats_stride=total,
        M=tiling.M, C=C, eps=eps, STAGES=STAGES, **tiling.meta,
    )  # fmt: skip


def flatten(x: Tensor) -> Tensor:
    """A channels-last tensor as one contiguous vector."""
    return x.permute(0, 2, 3, 1).reshape(-1)


def add_with_stats(x: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y and its batch statistics, [3, C], by one kernel."""
    out, stats = torch.empty_like(x), x.new_empty(3, x.shape[1], dtype=torch.float32)
    append_channels(x, x.shape[1], out, stats, 0, eps, added=channels_last(y))
    return out, stats


class FusedNormAct(torch.autograd.Function):
    """(out, out, x) with out = clamp(batch_norm(x) + shortcut).

    A second use of out or x takes the second or third result: kernels that run anyway then add the gradients of both
    uses. ``stats`` are the batch statistics of x, where its convolution computed them. With ``added``, x is x + added.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stats: Tensor | None, shortcut: Tensor | None, weight: Tensor, bias: Tensor,
        running_mean: Tensor, running_var: Tensor, momentum: float, eps: float,
        bounds: tuple[float | None, float | None], added: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        tiling = Tiling.of(x)
        C, row_stride = tiling.C, tiling.C // tiling.unit
        if added is not None:
            x, stats = add_with_stats(x, added, eps)
        elif stats is None:
            stats = compute_stats(x, eps)
        if shortcut is not None:
            shortcut = channels_last(shortcut)
        out = torch.empty_like(x)
        norm_act_fwd[tiling.tile_grid](
            x_ptr=x, x_stride=row_stride, shortcut_ptr=shortcut, stats_ptr=stats, stats_stride=C, w_ptr=weight,
            b_ptr=bias, running_mean_ptr=running_mean, running_var_ptr=running_var, momentum=momentum, out_ptr=out,
            out_stride=row_stride, M=tiling.M, C=C, LOW=bounds[0], HIGH=bounds[1], **tiling.meta,
        )  # fmt: skip
        ctx.save_for_backward(x, out if shortcut is not None else None, stats, weight, bias)
        ctx.bounds, ctx.has_added = bounds, added is not None
        ctx.set_materialize_grads(False)  # second uses are rare: no kernel should fill their gradients with zeros
        return out, out.detach(), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, out, stats, weight, bias = ctx.saved_tensors
        tiling = Tiling.of(x)
        C, row_stride = tiling.C, tiling.C // tiling.unit
        dy, dy_add, dx_add = (None if one is None else channels_last(one) for one in gradients)
        if dy is None:  # only the second use, or neither, has a gradient
            dy, dy_add = torch.zeros_like(x) if dy_add is None else dy_add, None
        passed = None if out is None and dy_add is None else torch.empty_like(x)
        dbdw, (low, high) = stats.new_empty(2, C), ctx.bounds
        norm_act_bwd_dbdw[tiling.reduction_grid](
            dy_ptr=dy, dy_add_ptr=dy_add, dy_stride=row_stride, x_ptr=x, x_stride=row_stride, out_ptr=out,
            stats_ptr=stats, stats_stride=C, w_ptr=weight, b_ptr=bias,
            partial_ptr=stats.new_empty(tiling.programs, 2, C),
            semaphore_ptr=semaphores.take(x.device, tiling.columns), dbdw_ptr=dbdw, passed_ptr=passed, M=tiling.M,
            C=C, LOW=low, HIGH=high, STAGES=STAGES, **tiling.meta,
        )  # fmt: skip
        if passed is not None:
            dy, low, high = passed, None, None
        dx = torch.empty_like(x)
        norm_act_bwd_dx[tiling.tile_grid](
            dy_ptr=dy, dy_stride=row_stride, x_ptr=x, x_stride=row_stride, dx_add_ptr=dx_add, stats_ptr=stats,
            stats_stride=C, w_ptr=weight, b_ptr=bias, dbdw_ptr=dbdw, dx_ptr=dx, M=tiling.M, C=C, LOW=low, HIGH=high,
            **tiling.meta,
        )  # fmt: skip
        dshortcut = None if out is None else passed
        dadded = dx if ctx.has_added else None
        return dx, None, dshortcut, dbdw[1], dbdw[0], None, None, None, None, None, dadded
