"""Batch normalisation over a whole batch of which every process has a share.

On CUDA torch's own; it refuses to run on the CPU, so there it is ours: torch's kernels for evaluation with the whole
batch's statistics, and one sum over the processes in each direction. Axes: D processes, C channels.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from codistill.distributed.sharing import Sharers
from codistill.networks.layers import BatchNorm2d


class NormalisedTogether(torch.autograd.Function):
    """By statistics of the whole batch, through which every share's gradient reaches every other share."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_C: Tensor, bias_C: Tensor, statistics: "BatchMoments", eps: float, sharers: Sharers
    ) -> Tensor:
        ctx.save_for_backward(x, weight_C)
        ctx.statistics, ctx.eps, ctx.sharers = statistics, eps, sharers
        return F.batch_norm(x, statistics.mean_C, statistics.var_C, weight_C, bias_C, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_C = ctx.saved_tensors
        mean_C, var_C, images = ctx.statistics.mean_C, ctx.statistics.var_C, ctx.statistics.count
        as_constants, by_weight_C, by_bias_C = torch.zeros_like(x), torch.zeros_like(mean_C), torch.zeros_like(mean_C)
        if x.numel():  # on no images torch's kernel divides by their number, and the process dies
            # As if the statistics were constants: with the sums over this share that the rest needs of everybody.
            as_constants, by_weight_C, by_bias_C = torch.ops.aten.native_batch_norm_backward(
                gradients[0], x, weight_C, mean_C, var_C, None, None, False, ctx.eps, [True, True, True]
            )
        of_all_weight_C, of_all_bias_C = ctx.sharers.summed(torch.stack([by_weight_C, by_bias_C])) / images
        inverse_std_C = (var_C + ctx.eps).rsqrt()
        slope_C = weight_C * inverse_std_C.square() * of_all_weight_C
        offset_C = weight_C * inverse_std_C * of_all_bias_C - slope_C * mean_C
        shape = _per_channel(x)
        return as_constants - (x * slope_C.view(shape) + offset_C.view(shape)), by_weight_C, by_bias_C, None, None, None


class BatchMoments:
    """Mean and variance of a batch from those of its shares (Chan et al.), which lose no digits as squares would."""

    def __init__(self, x: Tensor, sharers: Sharers) -> None:
        mine = x.new_zeros(sharers.count, 2 * x.shape[1] + 1)
        if x.numel():
            axes = [axis for axis in range(x.ndim) if axis != 1]
            var_C, mean_C = torch.var_mean(x, axes, correction=0)
            mine[sharers.index] = torch.cat([mean_C, var_C, x.new_tensor([x.numel() // x.shape[1]])])
        means_DC, vars_DC, counts_D1 = torch.split_with_sizes(sharers.summed(mine), [x.shape[1], x.shape[1], 1], dim=1)
        self.count = counts_D1.sum()
        self.mean_C = (means_DC * counts_D1).sum(0) / self.count
        self.var_C = ((vars_DC + (means_DC - self.mean_C).square()) * counts_D1).sum(0) / self.count

    def unbiased(self) -> Tensor:
        return self.var_C * self.count / (self.count - 1).clamp_min(1)


def _per_channel(x: Tensor) -> list[int]:
    return [1, -1, *[1] * (x.ndim - 2)]


class SharedBatchNorm(_BatchNorm):
    """Has the parameters and statistics of the layer that it stands for; evaluates like it."""

    def __init__(self, norm: _BatchNorm, sharers: Sharers) -> None:
        super().__init__(
            norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta"
        )
        _take_over(self, norm)
        self.sharers = sharers
        self.counts = not isinstance(norm, BatchNorm2d)

    def forward(self, given: Tensor) -> Tensor:
        if not self.training:
            running = self.running_mean, self.running_var
            return F.batch_norm(given, *running, self.weight, self.bias, running[0] is None, 0.0, self.eps)
        x = given.to(torch.promote_types(given.dtype, torch.float32))
        with torch.no_grad():
            statistics = BatchMoments(x, self.sharers)
        self._move(statistics.mean_C, statistics.unbiased())
        weight = self.weight if self.affine else torch.ones_like(statistics.mean_C)
        bias = self.bias if self.affine else torch.zeros_like(statistics.mean_C)
        normalise: Callable[..., Tensor] = NormalisedTogether.apply
        return normalise(x, weight, bias, statistics, self.eps, self.sharers).to(given.dtype)

    @torch.no_grad()
    def _move(self, mean_C: Tensor, var_C: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        if self.counts and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked or 1) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean_C, momentum)
        self.running_var.lerp_(var_C, momentum)


def share_batch_norms(module: nn.Module, sharers: Sharers) -> int:
    """Replace every batch normalisation inside; how many."""
    replaced = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm):
                setattr(parent, name, _shared(child, sharers))
                replaced += 1
    return replaced


def _shared(norm: _BatchNorm, sharers: Sharers) -> nn.Module:
    if norm.weight is None or norm.weight.device.type != "cuda":
        return SharedBatchNorm(norm, sharers)
    synced = nn.SyncBatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, sharers.group, device="meta"
    )
    return _take_over(synced, norm)


def _take_over(new: nn.Module, norm: _BatchNorm) -> nn.Module:
    """The very tensors, which optimizers and others hold too."""
    for name, tensor in [*norm.named_parameters(recurse=False), *norm.named_buffers(recurse=False)]:
        setattr(new, name, tensor)
    return new.train(norm.training)
