"""Batch normalisation over a whole batch of which every process has a share.

On CUDA torch's own; it refuses to run on the CPU, so there it is ours: plain operations around a sum over the
processes that can be differentiated.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from codistill.distributed.sharing import Sharers
from codistill.networks.layers import BatchNorm2d


class SharedSum(torch.autograd.Function):
    """Everybody's sum. Everybody's objective depends on it, so its gradient is the sum of everybody's too."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, sharers: Sharers) -> Tensor:
        ctx.sharers = sharers
        return sharers.summed(numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.sharers.summed(gradients[0]), None


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
            statistics = self.running_mean, self.running_var
            return F.batch_norm(given, *statistics, self.weight, self.bias, statistics[0] is None, 0.0, self.eps)
        x = given.to(torch.promote_types(given.dtype, torch.float32))
        others = [axis for axis in range(x.ndim) if axis != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        size = x.new_tensor([x.numel() // self.num_features])
        sums = self._summed(torch.cat([x.sum(others), size]))
        sums_C, total = sums[:-1], sums[-1].detach()
        mean_C = sums_C / total
        # Twice over the images: E[x²] - E[x]² would lose what float32 has.
        centred = x - mean_C.view(shape)
        var_C = self._summed(centred.square().sum(others)) / total
        self._move(mean_C.detach(), (var_C * total / (total - 1).clamp_min(1)).detach())
        normed = centred * (var_C + self.eps).rsqrt().view(shape)
        if self.affine:
            normed = normed * self.weight.view(shape) + self.bias.view(shape)
        answer: Tensor = normed.to(given.dtype)
        return answer

    def _summed(self, numbers: Tensor) -> Tensor:
        total: Tensor = SharedSum.apply(numbers, self.sharers)  # type: ignore[no-untyped-call]
        return total

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
