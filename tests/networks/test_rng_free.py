"""Which networks are known to draw no random numbers."""

import pytest
import torch
from torch import nn

from codistill import Cohort
from codistill.networks.layers import is_rng_free


class Unknown(nn.Module):
    """May draw whatever it likes."""


@pytest.mark.parametrize("module", [nn.Dropout(0.1), nn.RReLU(), Unknown()])
def test_unknown_layers_are_assumed_to_draw(module: nn.Module) -> None:
    assert not is_rng_free(nn.Sequential(nn.ReLU(), module))


@pytest.mark.parametrize("network", ["wrn-16-1", "resnet-8", "resnet-164", "densenet-40-12", "mobilenetv2"])
def test_the_zoo_draws_nothing_without_dropout(network: str) -> None:
    with torch.device("meta"):
        assert is_rng_free(Cohort({"a": network}, num_classes=10))
        assert not is_rng_free(Cohort({"a": network, "b": "wrn-10-1-dropout-0.3"}, num_classes=10))
