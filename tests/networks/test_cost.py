"""Counting parameters and operations; tests of the published networks are in test_network_counts.py."""

import torch
from torch import Tensor, nn

from codistill.cohort import Cohort
from codistill.networks.cost import Cost, cost


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
        macs += layer.weight.numel() * positions  # type: ignore[operator]

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    network.eval()(torch.zeros(1, 3, 28, 28))
    assert counted == Cost(sum(p.numel() for p in network.parameters()), 2 * macs)


class Attention(nn.Module):
    """Works on [tokens, features]; its products are not in layers."""

    def forward(self, x_BTF: Tensor) -> Tensor:
        return (x_BTF @ x_BTF.transpose(1, 2)).softmax(dim=-1) @ x_BTF


def test_products_outside_of_layers_are_counted() -> None:
    assert cost(Attention(), (4, 3)).flops == 2 * (4 * 4 * 3) * 2
