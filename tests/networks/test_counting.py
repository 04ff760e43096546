"""Counting operations: by shapes alone where that is enough, by torch's own counter elsewhere."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from codistill.cohort import Cohort
from codistill.networks.counting import Cost, LayerCounter, UnknownFunctionError, cost
from codistill.networks.heads import HEAD_KINDS


def test_counting_changes_nothing_and_equals_a_count_with_hooks() -> None:
    network = Cohort({"a": "mobilenet"}, 10).members["a"].train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    counted = cost(network, (3, 28, 28))
    after = network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)

    macs = 0

    def count(layer: nn.Module, _: object, output: Tensor) -> None:
        nonlocal macs
        positions = output[0, 0].numel() if output.ndim == 4 else 1
        macs += layer.weight.numel() * positions  # type: ignore[operator, union-attr]

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    network.eval()(torch.zeros(1, 3, 28, 28))
    assert counted == Cost(sum(p.numel() for p in network.parameters()), 2 * macs)


FAMILIES = ("resnet-20", "wrn-10-1", "wrn-10-2-dropout-0.3", "densenet-40-12", "resnet-18", "resnet-50", "mobilenet")


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("name", [*FAMILIES, "mobilenetv2"])
def test_the_quick_count_is_torchs_own(name: str, kind: str) -> None:
    with torch.device("meta"):
        network = Cohort({"a": name}, 10, heads=kind).members["a"]
    images = torch.empty(2, 3, 64, 64, device="meta")
    with torch.no_grad(), LayerCounter() as quick:
        network(images)
    with torch.no_grad(), FlopCounterMode(display=False) as exact:
        network(images)
    assert quick.flops == exact.get_total_flops() > 0


class Attention(nn.Module):
    """Works on [tokens, features]; its products are no layers."""

    def forward(self, x_BTF: Tensor) -> Tensor:
        return (x_BTF @ x_BTF.transpose(1, 2)).softmax(dim=-1) @ x_BTF


def test_what_the_quick_count_does_not_know_is_counted_all_the_same() -> None:
    tokens = torch.empty(1, 4, 3, device="meta")
    with pytest.raises(UnknownFunctionError, match="transpose"), LayerCounter():
        Attention()(tokens)
    assert cost(Attention(), (4, 3)).flops == 2 * (4 * 4 * 3) * 2


class Strange(nn.Module):
    """Calls what our families call, in other ways."""

    def __init__(self, call: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.zeros(4, 3, 3, 3)), call

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.conv2d(self.call(x_BCHW, self.weight), self.weight, None, (1, 1), (1, 1), (1, 1), 1)


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (lambda x, _: x.add(1.0), 0),
        (lambda x, _: x[:, :, :1].add(x), 0),
        (lambda x, _: F.adaptive_avg_pool2d(x, (8, 8)), 0),
        (lambda x, _: F.avg_pool2d(x, 1, ceil_mode=True), 0),
        (lambda x, weight: F.conv2d(x, weight, padding="same")[:, :3], 2 * 4 * 8 * 8 * 27),
        (lambda x, weight: F.conv2d(input=x, weight=weight, padding=1)[:, :3], 2 * 4 * 8 * 8 * 27),
    ],
)
def test_calls_of_another_kind_are_left_to_torch(call: Callable[[Tensor, Tensor], Tensor], flops: int) -> None:
    assert cost(Strange(call), (3, 8, 8)) == Cost(108, flops + 2 * 4 * 8 * 8 * 27)
