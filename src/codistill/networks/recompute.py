"""Time for memory: run a part of a network again in the backward pass instead of keeping what it computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

Output = TypeVar("Output")


def recomputed(run: Callable[[Tensor], Output], x: Tensor, module: nn.Module) -> Output:
    """``run(x)`` that keeps only ``x`` until the backward pass; same values, same gradients, same statistics.

    ``module`` is whose statistics ``run`` moves.
    """
    output: Output = checkpoint(
        run, x, use_reentrant=False, context_fn=lambda: (nullcontext(), statistics_untouched(module))
    )
    return output


@contextmanager
def statistics_untouched(module: nn.Module) -> Iterator[None]:
    """The second run must not count the batch twice in the running statistics."""
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]
    were = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, counted) in zip(norms, were, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counted
