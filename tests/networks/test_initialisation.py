"""Initial weights: ours by He's formula, and the authors' of their two families, layer by layer."""

import math

import pytest
import torch
from torch import Tensor, nn

from codistill import Cohort
from codistill.cohort import AUTHORS
from codistill.networks.families import FAMILIES, IN_AUTHORS_CODE, architecture
from codistill.networks.layers import Conv2d


def layers(cohort: Cohort, name: str, kind: type[nn.Module]) -> list[nn.Module]:
    """Those of the backbone and of the heads."""
    return [layer for layer in cohort.members[name].requires_grad_(False).modules() if isinstance(layer, kind)]


def assert_scale(weight: Tensor, std: float, kurtosis: float) -> None:
    """Within five standard errors. The fourth moment over the squared second is 3 if normal, 1.8 if uniform."""
    n = weight.numel()
    assert float(weight.mean()) == pytest.approx(0, abs=5 * std / math.sqrt(n))
    assert float(weight.square().mean()) / std**2 == pytest.approx(1, abs=5 * math.sqrt((kurtosis - 1) / n))
    if n > 4000:
        assert float(weight.pow(4).mean()) / std**4 == pytest.approx(kurtosis, abs=0.4)


@pytest.mark.parametrize("network", ["mobilenet", "mobilenetv2", "wrn-10-2", "densenet-10-4", "resnet-8"])
def test_convolutions_start_at_their_real_fan(network: str) -> None:
    """He et al. 2015, eq. 14: the variance is 2 over the number of outputs that one input is multiplied into."""
    convs = layers(Cohort({"a": network}, 10), "a", nn.Conv2d)
    assert len(convs) > 8
    for conv in convs:
        assert_scale(conv.weight, math.sqrt(2 / (conv.weight.numel() / conv.in_channels)), 3)  # type: ignore[operator, arg-type]


def test_convolutions_without_groups_start_as_torchs_function_says() -> None:
    """Bit for bit: runs of earlier versions started so."""
    for shape in ((3, 16, 3), (16, 160, 3), (640, 1280, 1), (17, 5, 7)):
        torch.manual_seed(1)
        ours = Conv2d(*shape)
        torch.manual_seed(1)
        expected = nn.init.kaiming_normal_(torch.empty_like(ours.weight), mode="fan_out", nonlinearity="relu")
        assert torch.equal(ours.weight, expected)


def test_the_authors_wrn() -> None:
    """He normal by fan-in for convolutions and linear layers, biases 0, batch norm uniform in [0, 1)."""
    cohort = Cohort({"a": "wrn-16-4"}, 100, init="authors", batchnorm_init="authors")
    weighted = [*layers(cohort, "a", nn.Conv2d), *layers(cohort, "a", nn.Linear)]
    assert len(weighted) > 20
    for layer in weighted:
        fan_in = layer.weight[0].numel()  # type: ignore[index]
        assert_scale(layer.weight, math.sqrt(2 / fan_in), 3)  # type: ignore[arg-type]
        assert layer.bias is None or not layer.bias.any()  # type: ignore[operator]
    norms = layers(cohort, "a", nn.BatchNorm2d)
    drawn = torch.cat([norm.weight for norm in norms])  # type: ignore[misc]
    assert 0 <= drawn.min() < 0.05 < 0.95 < drawn.max() < 1
    assert_scale(drawn - 0.5, math.sqrt(1 / 12), 1.8)
    assert all(len(norm.weight.unique()) > 1 and not norm.bias.any() for norm in norms)  # type: ignore[operator]


def test_the_authors_mobilenet() -> None:
    """Torch's default, uniform in ±1/√fan-in, and batch norm of ones, beside a WRN that has another start."""
    cohort = Cohort({"a": "wrn-10-1", "b": "mobilenet"}, 10, init="authors", batchnorm_init="authors")
    weighted = [*layers(cohort, "b", nn.Conv2d), *layers(cohort, "b", nn.Linear)]
    assert len(weighted) > 30
    for layer in weighted:
        bound = layer.weight[0].numel() ** -0.5  # type: ignore[index]
        assert float(layer.weight.abs().max()) <= bound  # type: ignore[operator]
        assert_scale(layer.weight, bound / math.sqrt(3), 1.8)  # type: ignore[arg-type]
    assert all((norm.weight == 1).all() for norm in layers(cohort, "b", nn.BatchNorm2d))
    assert not any((norm.weight == 1).any() for norm in layers(cohort, "a", nn.BatchNorm2d))


def test_each_switch_leaves_the_other_weights_as_they_are() -> None:
    plain = Cohort({"a": "wrn-10-1", "b": "mobilenet"}, 10).state_dict()
    for switch, changed in {"init": (4, 2), "batchnorm_init": (1, 1)}.items():
        for name, tensor in Cohort({"a": "wrn-10-1", "b": "mobilenet"}, 10, **{switch: "authors"}).state_dict().items():  # type: ignore[arg-type]
            if ".weight" in name and tensor.ndim not in changed:
                assert torch.equal(tensor, plain[name]), name
    uniform = Cohort({"b": "mobilenet"}, 10, batchnorm_init="uniform")
    assert not any((norm.weight == 1).any() for norm in layers(uniform, "b", nn.BatchNorm2d))


def test_other_families_have_no_start_of_the_authors() -> None:
    known = {
        type(architecture(example))
        for family in FAMILIES
        for example in family.examples
        if family.paper in IN_AUTHORS_CODE
    }
    assert known == set(AUTHORS)
    for switch in ("init", "batchnorm_init"):
        with pytest.raises(ValueError, match="the authors' code has no DenseNet"):
            Cohort({"a": "wrn-10-1", "b": "densenet-10-4"}, 10, **{switch: "authors"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown init 'author'; did you mean 'authors'"):
        Cohort({"a": "wrn-10-1"}, 10, init="author")
