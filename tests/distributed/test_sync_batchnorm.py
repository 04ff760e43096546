"""``CpuSyncBatchNorm`` against torch's batch norm of the whole batch: output, gradients and statistics, in float64.

The ranks are threads, with an all-reduce through a list.
"""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from codistill.distributed.data_parallel import CpuSyncBatchNorm, convert_sync_batchnorm
from codistill.networks.layers import BatchNorm2d

CHANNELS = 4


class Threads:
    """``DataParallelGroup`` of one thread."""

    def __init__(self, index: int, table: list[Tensor], barrier: Barrier) -> None:
        self.rank, self.size, self.table, self.barrier = index, len(table), table, barrier

    def all_reduce(self, numbers: Tensor) -> Tensor:
        self.table[self.rank] = numbers
        self.barrier.wait()
        total = torch.stack(self.table).sum(0)
        self.barrier.wait()
        return total


def run_shared(norm: Any, images: Tensor, factors: Tensor, sizes: list[int]) -> list[tuple[Any, Tensor, Tensor]]:
    """Returns every rank's layer, output and gradient of its shard."""
    table, barrier = [torch.zeros(())] * len(sizes), Barrier(len(sizes), timeout=30)

    def run(index: int, share: Tensor, factor: Tensor) -> tuple[Any, Tensor, Tensor]:
        layer = CpuSyncBatchNorm(deepcopy(norm), Threads(index, table, barrier))  # type: ignore[arg-type]
        x = share.clone().requires_grad_()
        out = layer(x)
        (out.relu() * factor).sum().backward()
        assert x.grad is not None
        return layer, out.detach(), x.grad

    with ThreadPoolExecutor(len(sizes)) as threads:
        return list(threads.map(run, range(len(sizes)), images.split(sizes), factors.split(sizes)))


@pytest.mark.parametrize("sizes", [[4, 4], [5, 3], [1, 2, 5], [8, 0], [0, 7, 1]])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(8, CHANNELS, 5, 5), (8, CHANNELS)])
def test_as_of_the_whole_batch(sizes: list[int], affine: bool, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    images, factors = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    images = 3 * images + 100  # where E[x²] - E[x]² would lose digits
    norm = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(CHANNELS, affine=affine, dtype=torch.float64)
    if affine:
        nn.init.uniform_(norm.weight, generator=generator)
        nn.init.uniform_(norm.bias, generator=generator)
    shares = run_shared(norm, images, factors, sizes)

    x = images.clone().requires_grad_()
    out = norm(x)
    (out.relu() * factors).sum().backward()
    torch.testing.assert_close(torch.cat([share for _, share, _ in shares]), out.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat([gradient for _, _, gradient in shares]), x.grad, rtol=1e-10, atol=1e-10)
    if affine:
        for name in ("weight", "bias"):
            total = sum(getattr(layer, name).grad for layer, _, _ in shares)
            torch.testing.assert_close(total, getattr(norm, name).grad, rtol=1e-10, atol=1e-10)
    for layer, _, _ in shares:
        torch.testing.assert_close(layer.state_dict(), norm.state_dict(), rtol=1e-12, atol=1e-12)


def test_every_layer_is_replaced_and_keeps_its_tensors() -> None:
    module = nn.Sequential(BatchNorm2d(3), nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5)), nn.GroupNorm(1, 5))
    before = dict(module.named_parameters()) | dict(module.named_buffers())
    x = torch.randn(4, 3, 6, 6)
    module.eval()
    expected = module(x)
    assert convert_sync_batchnorm(module, Threads(0, [torch.zeros(())], Barrier(1))) == 2  # type: ignore[arg-type]
    after = dict(module.named_parameters()) | dict(module.named_buffers())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert torch.equal(module(x), expected)
    module.train()
    module(x)
    counted = [int(x) for name, x in module.state_dict().items() if name.endswith("num_batches_tracked")]
    assert counted == [0, 1]  # ours does not count, torch's does
