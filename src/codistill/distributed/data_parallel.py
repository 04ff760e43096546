"""Data parallelism along the ``data`` axis: ranks with the same networks, one shard of every batch each.

Gradients are summed, not averaged: every rank weights its objective by its fraction of the batch, so shards that differ
by an image count right, and a rank without images counts nothing. Torch's DDP does not fit: it wraps a module whose one
``forward`` it must see, averages over ranks whatever their shards, and broadcasts buffers per network. Here networks
run section by section, several in one backward pass, with an update only now and then. As in DDP, gradients are reduced
in buckets, in one order, while the backward pass still runs.

Batch normalisation sees the whole batch: torch's ``SyncBatchNorm`` on CUDA, and on the CPU, where torch's refuses to
run, ``CpuSyncBatchNorm``. Axes: D ranks, C channels.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from codistill.distributed.group import ProcessGroup
from codistill.networks.layers import BatchNorm2d
from codistill.networks.parts import is_frozen

BUCKET_BYTES = 4 * 2**20


class DataParallelGroup:
    """The ranks that train the same networks; ``rank`` and ``size`` are those within this group."""

    def __init__(self, world: ProcessGroup, group: dist.ProcessGroup) -> None:
        self.world, self.group = world, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, numbers: Tensor) -> Tensor:
        """Returns the sum over the ranks, bit-identical on all of them."""
        total = numbers.clone(memory_format=torch.contiguous_format)
        with self.world.translate_errors():
            dist.all_reduce(total, group=self.group)
        return total

    def all(self, flags: Tensor) -> Tensor:
        """Returns the logical AND over the ranks."""
        counts = self.all_reduce((~flags).int())
        return counts == 0


class Bucket:
    """Gradients that are reduced as one tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self.flat: Tensor | None = None
        self.work: dist.Work | None = None

    def pack(self) -> Tensor:
        """A parameter without a gradient takes no part in the objective on any rank; it counts as zero."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        return self.flat

    def unpack(self) -> None:
        assert self.flat is not None
        parts = torch.split_with_sizes(self.flat, [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view(parameter.shape))
        self.missing, self.flat, self.work = len(self.parameters), None, None  # which would keep the memory


class GradientSync:
    """All-reduces the gradients of a module's parameters, bucket by bucket, during the backward pass."""

    def __init__(self, module: nn.Module, data_parallel: DataParallelGroup) -> None:
        self.data_parallel = data_parallel
        learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # In reverse: the gradients of the last layers are ready first.
        self.buckets = [Bucket(group) for group in _fill_buckets(learning[::-1])]
        self.bytes = sum(parameter.nbytes for parameter in learning)
        self.started = 0
        self.is_armed = False
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                hook = partial(self._on_gradient, bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def reduce(self) -> Iterator[None]:
        """Runs around the last backward pass of an update; afterwards the gradients are those of the whole batch."""
        self.is_armed, self.started = True, 0
        try:
            yield
        finally:
            self.is_armed = False
        self._start_until(len(self.buckets))
        began_at = time.perf_counter()
        for bucket in self.buckets:
            with self.data_parallel.world.translate_errors():
                if bucket.work is not None:
                    bucket.work.wait()
            bucket.unpack()
        traffic = self.data_parallel.world.traffic
        traffic.gradient_waited_s += time.perf_counter() - began_at
        traffic.gradient_bytes += self.bytes
        traffic.updates += 1

    def _on_gradient(self, bucket: Bucket, _: Tensor) -> None:
        if not self.is_armed:
            return
        bucket.missing -= 1
        # In the buckets' order, which is the same on all ranks: collectives are matched by their order.
        complete = self.started
        while complete < len(self.buckets) and self.buckets[complete].missing == 0:
            complete += 1
        self._start_until(complete)

    def _start_until(self, count: int) -> None:
        for bucket in self.buckets[self.started : count]:
            with self.data_parallel.world.translate_errors():
                bucket.work = dist.all_reduce(bucket.pack(), group=self.data_parallel.group, async_op=True)
            self.started += 1


def _fill_buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yields parameters in order, as many as fit into a bucket and have the same dtype."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        is_full = sum(other.nbytes for other in bucket) + parameter.nbytes > BUCKET_BYTES
        if bucket and (is_full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


class RunningStatistics:
    """The running statistics of norms that see only their rank's shard; those of frozen norms do not change."""

    def __init__(self, module: nn.Module, data_parallel: DataParallelGroup) -> None:
        self.data_parallel = data_parallel
        norms = [norm for norm in module.modules() if isinstance(norm, _NormBase) and not is_frozen(norm)]
        buffers = chain.from_iterable(norm.buffers(recurse=False) for norm in norms)
        self.buffers = [buffer for buffer in buffers if buffer.is_floating_point()]

    @torch.no_grad()
    def average(self, fraction: float) -> None:
        """Replaces them on all ranks by their mean, weighted by each rank's fraction of the batch."""
        if not self.buffers:
            return
        mine = torch.cat([buffer.view(-1) for buffer in self.buffers])
        # The variance of no images is NaN, and so is 0 · NaN.
        mine = mine * fraction if fraction else torch.zeros_like(mine)
        sizes = [buffer.numel() for buffer in self.buffers]
        parts = torch.split_with_sizes(self.data_parallel.all_reduce(mine), sizes)
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))


class SyncNormalize(torch.autograd.Function):
    """Normalises by statistics of the whole batch, through which every shard's gradient reaches every other shard.

    Torch's kernels for evaluation do the arithmetic, with one all-reduce in each direction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_C: Tensor,
        bias_C: Tensor,
        moments: "BatchMoments",
        eps: float,
        data_parallel: DataParallelGroup,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_C)
        ctx.moments, ctx.eps, ctx.data_parallel = moments, eps, data_parallel
        return F.batch_norm(x, moments.mean_C, moments.var_C, weight_C, bias_C, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_C = ctx.saved_tensors
        mean_C, var_C, count = ctx.moments.mean_C, ctx.moments.var_C, ctx.moments.count
        grad_x, grad_weight_C, grad_bias_C = torch.zeros_like(x), torch.zeros_like(mean_C), torch.zeros_like(mean_C)
        if x.numel():  # for an empty shard torch's kernel divides by zero, and the process dies
            # As if the statistics were constants; what is missing needs the sums over all shards.
            grad_x, grad_weight_C, grad_bias_C = torch.ops.aten.native_batch_norm_backward(
                gradients[0], x, weight_C, mean_C, var_C, None, None, False, ctx.eps, [True, True, True]
            )
        mean_grads = ctx.data_parallel.all_reduce(torch.stack([grad_weight_C, grad_bias_C])) / count
        mean_grad_weight_C, mean_grad_bias_C = mean_grads
        inverse_std_C = (var_C + ctx.eps).rsqrt()
        slope_C = weight_C * inverse_std_C.square() * mean_grad_weight_C
        offset_C = weight_C * inverse_std_C * mean_grad_bias_C - slope_C * mean_C
        shape = [1, -1, *[1] * (x.ndim - 2)]
        grad_x = grad_x - (x * slope_C.view(shape) + offset_C.view(shape))
        return grad_x, grad_weight_C, grad_bias_C, None, None, None


class BatchMoments:
    """Mean and variance of a batch from those of its shards (Chan et al.): E[x²] − E[x]² would lose digits."""

    def __init__(self, x: Tensor, data_parallel: DataParallelGroup) -> None:
        mine = x.new_zeros(data_parallel.size, 2 * x.shape[1] + 1)
        if x.numel():
            axes = [axis for axis in range(x.ndim) if axis != 1]
            var_C, mean_C = torch.var_mean(x, axes, correction=0)
            mine[data_parallel.rank] = torch.cat([mean_C, var_C, x.new_tensor([x.numel() // x.shape[1]])])
        gathered = data_parallel.all_reduce(mine)
        means_DC, vars_DC, counts_D1 = torch.split_with_sizes(gathered, [x.shape[1], x.shape[1], 1], dim=1)
        self.count = counts_D1.sum()
        self.mean_C = (means_DC * counts_D1).sum(0) / self.count
        self.var_C = ((vars_DC + (means_DC - self.mean_C).square()) * counts_D1).sum(0) / self.count


class CpuSyncBatchNorm(_BatchNorm):
    """Has the very parameters and buffers of the layer that it replaces, and evaluates like it."""

    def __init__(self, norm: _BatchNorm, data_parallel: DataParallelGroup) -> None:
        super().__init__(
            norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta"
        )
        _share_tensors(self, norm)
        self.data_parallel = data_parallel
        self.counts_batches = not isinstance(norm, BatchNorm2d)

    def forward(self, given: Tensor) -> Tensor:
        if not self.training:
            running = self.running_mean, self.running_var
            return F.batch_norm(given, *running, self.weight, self.bias, running[0] is None, 0.0, self.eps)
        x = given.to(torch.promote_types(given.dtype, torch.float32))
        with torch.no_grad():
            moments = BatchMoments(x, self.data_parallel)
        unbiased_var_C = moments.var_C * moments.count / (moments.count - 1).clamp_min(1)
        self._update_running(moments.mean_C, unbiased_var_C)
        weight = self.weight if self.affine else torch.ones_like(moments.mean_C)
        bias = self.bias if self.affine else torch.zeros_like(moments.mean_C)
        normalize: Callable[..., Tensor] = SyncNormalize.apply
        return normalize(x, weight, bias, moments, self.eps, self.data_parallel).to(given.dtype)

    @torch.no_grad()
    def _update_running(self, mean_C: Tensor, var_C: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        if self.counts_batches and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked or 1) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean_C, momentum)
        self.running_var.lerp_(var_C, momentum)


def convert_sync_batchnorm(module: nn.Module, data_parallel: DataParallelGroup) -> int:
    """Replaces every batch norm inside by a synchronised one; returns how many."""
    replaced = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm):
                setattr(parent, name, _convert(child, data_parallel))
                replaced += 1
    return replaced


def _convert(norm: _BatchNorm, data_parallel: DataParallelGroup) -> nn.Module:
    if norm.weight is None or norm.weight.device.type != "cuda":
        return CpuSyncBatchNorm(norm, data_parallel)
    settings = norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats
    return _share_tensors(nn.SyncBatchNorm(*settings, data_parallel.group, device="meta"), norm)


def _share_tensors(new: nn.Module, norm: _BatchNorm) -> nn.Module:
    """Gives ``new`` the same tensor objects, which optimizers refer to."""
    for name, tensor in [*norm.named_parameters(recurse=False), *norm.named_buffers(recurse=False)]:
        setattr(new, name, tensor)
    return new.train(norm.training)
