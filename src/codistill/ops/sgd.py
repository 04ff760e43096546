"""SGD for float32 master weights with bfloat16 copies: one kernel for all of them.

It reads bfloat16 gradients and writes both kinds of weights: 20 bytes a weight, where casting gradients, torch's fused
SGD and casting weights move 32. For WRN-28-10 twins that is 2 % of a step and 1.3 GiB; for small networks, one launch
instead of thirty.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, BLOCK = 8192, 1024
"""Weights per program, and per iteration of it."""

COLUMNS = ("weight", "momentum", "copy", "gradient", "count", "rate", "factor")
"""The kernel's table has a row per chunk: addresses, the number of weights, and the addresses of the learning rate and
of the factor of the gradient; where that is 0, nothing is read or written."""

ALIGNMENT = 16


@triton.jit
def sgd_kernel(
    table_ptr, decay_ptr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates float32 weights and momenta from bfloat16 gradients, and writes the weights' bfloat16 copies.

    Grid: (chunks,). table: int64 [chunks, len(COLUMNS)]; decay: float32 [chunks]. ALIGNED: all addresses are multiples
    of 16 bytes.
    """
    row_ptr = table_ptr + tl.program_id(0) * 7  # len(COLUMNS)
    w_ptr = tl.load(row_ptr).to(tl.pointer_type(tl.float32))
    momentum_ptr = tl.load(row_ptr + 1).to(tl.pointer_type(tl.float32))
    copy_ptr = tl.load(row_ptr + 2).to(tl.pointer_type(tl.bfloat16))
    grad_ptr = tl.load(row_ptr + 3).to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:
        w_ptr, momentum_ptr = tl.multiple_of(w_ptr, 16), tl.multiple_of(momentum_ptr, 16)
        copy_ptr, grad_ptr = tl.multiple_of(copy_ptr, 16), tl.multiple_of(grad_ptr, 16)
    count = tl.load(row_ptr + 4)
    rate = tl.load(tl.load(row_ptr + 5).to(tl.pointer_type(tl.float32)))
    factor = tl.load(tl.load(row_ptr + 6).to(tl.pointer_type(tl.float32)))
    decay = tl.load(decay_ptr + tl.program_id(0))
    if factor != 0.0:
        for start in range(0, CHUNK, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            ptrs = w_ptr + offs, momentum_ptr + offs, copy_ptr + offs, grad_ptr + offs
            if count == CHUNK:  # without a mask, memory is read and written 16 bytes at a time
                update_block(ptrs, None, None, factor, decay, rate, MOMENTUM, NESTEROV)
            else:
                update_block(ptrs, offs < count, 0.0, factor, decay, rate, MOMENTUM, NESTEROV)


@triton.jit
def update_block(ptrs, mask, other, factor, decay, rate, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr):
    w_ptrs, momentum_ptrs, copy_ptrs, grad_ptrs = ptrs
    w = tl.load(w_ptrs, mask=mask, other=other)
    grad = tl.load(grad_ptrs, mask=mask, other=other).to(tl.float32) * factor + decay * w
    momentum = MOMENTUM * tl.load(momentum_ptrs, mask=mask, other=other) + grad
    if NESTEROV:
        grad += MOMENTUM * momentum
    else:
        grad = momentum
    w -= rate * grad
    tl.store(momentum_ptrs, momentum, mask=mask)
    tl.store(w_ptrs, w, mask=mask)
    tl.store(copy_ptrs, w.to(tl.bfloat16), mask=mask)


class FusedSgd:
    """The update of those of ``weights`` that an optimizer (SGD with momentum) has, from their copies' gradients.

    ``optimizers`` and ``factors`` are by network. Gradients have other addresses in every captured graph, so each
    capture has an instance of its own, and ``recorded`` writes the addresses to the kernel's table afterwards: during a
    capture nothing can be copied to the device.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        copies: Sequence[Tensor],
        optimizers: Mapping[str, torch.optim.Optimizer],
        factors: Mapping[str, Tensor],
    ) -> None:
        home = {
            weight: (name, optimizer, group)
            for name, optimizer in optimizers.items()
            for group in optimizer.param_groups
            for weight in group["params"]
        }
        learning = [(weight, copy) for weight, copy in zip(weights, copies, strict=True) if weight in home]
        self.copies = [copy for _, copy in learning]
        chunks = []
        for weight, copy in learning:
            name, optimizer, group = home[weight]
            momentum = optimizer.state[weight]["momentum_buffer"]
            check_layout(copy, weight, momentum)
            chunks.append(_chunks(weight, momentum, copy, group["lr"], factors[name]))
        self.chunks_each = torch.tensor([len(rows) for rows in chunks])
        self.rows = torch.cat(chunks)
        decay_each = torch.tensor([float(home[weight][2]["weight_decay"]) for weight, _ in learning])
        self.table = torch.empty_like(self.rows, device=weights[0].device)
        self.decays = decay_each.repeat_interleave(self.chunks_each).to(self.table.device)
        common = next(iter(optimizers.values())).defaults
        self.momentum, self.nesterov = common["momentum"], common["nesterov"]
        self.addresses: list[int] = []

    def update(self) -> None:
        gradients = [gradient_of(copy) for copy in self.copies]
        for copy, gradient in zip(self.copies, gradients, strict=True):
            check_layout(copy, gradient)
        self.addresses = [gradient.data_ptr() for gradient in gradients]
        if not torch.cuda.is_current_stream_capturing():
            self.recorded()
        aligned = all(address % ALIGNMENT == 0 for address in self.addresses)
        sgd_kernel[(len(self.rows),)](
            table_ptr=self.table, decay_ptr=self.decays, MOMENTUM=self.momentum, NESTEROV=self.nesterov,
            ALIGNED=aligned, CHUNK=CHUNK, BLOCK=BLOCK,
        )  # fmt: skip
        for copy in self.copies:
            copy.grad = None

    def recorded(self) -> None:
        """Write the addresses of the last update's gradients, the same in every replay, to the kernel's table."""
        table = self.rows.clone()
        table[:, COLUMNS.index("gradient")] += torch.tensor(self.addresses).repeat_interleave(self.chunks_each)
        self.table.copy_(table)


def gradient_of(copy: Tensor) -> Tensor:
    if copy.grad is None:
        raise ValueError(
            f"a weight of shape {list(copy.shape)} has no part in the logits, so the step cannot be captured with its "
            "own SGD; type runtime.capture=false"
        )
    return copy.grad


def check_layout(copy: Tensor, *others: Tensor) -> None:
    """Raises ValueError unless all have the same order in memory, which the kernel reads without strides."""
    order = memory_order(copy)
    for other in others:
        if memory_order(other) != order or other.numel() != copy.numel():
            raise ValueError(
                f"a weight of shape {list(copy.shape)} has strides {copy.stride()}, and its gradient, momentum or "
                f"float32 weight {other.stride()}: a captured step would mix them up; type runtime.capture=false"
            )


def memory_order(tensor: Tensor) -> list[int]:
    """Strides of the axes that have more than one element: those of others have no meaning."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _chunks(weight: Tensor, momentum: Tensor, copy: Tensor, rate: Tensor, factor: Tensor) -> Tensor:
    """The table's rows for one weight; in the gradient's column how far into it a chunk begins."""
    starts = torch.arange(0, weight.numel(), CHUNK)
    columns = {
        "weight": weight.data_ptr() + starts * weight.itemsize,
        "momentum": momentum.data_ptr() + starts * momentum.itemsize,
        "copy": copy.data_ptr() + starts * copy.itemsize,
        "gradient": starts * copy.itemsize,
        "count": (weight.numel() - starts).clamp_max(CHUNK),
        "rate": torch.full_like(starts, rate.data_ptr()),
        "factor": torch.full_like(starts, factor.data_ptr()),
    }
    return torch.stack([columns[name] for name in COLUMNS], dim=1)
