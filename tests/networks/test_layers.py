"""The layers that all families share: what they compute, and which networks need no compiler on a GPU."""

from typing import Any

import pytest
import torch
from codistill.engine.fast.sections import runs_own_kernels
from torch import nn
from torch.nn import functional as F

from codistill import Cohort
from codistill.networks.densenet import DenseLayer, DenseStage, transition
from codistill.networks.layers import AvgPool2x2, Conv2d, NormAct, conv_norm_relu, has_fused_kernels
from codistill.ops import dispatch as kernels
from codistill.ops.dispatch import fit, halved, is_small, own_kernels
from support import zoo

ACTIVATIONS = {"none": None, "relu": nn.ReLU(inplace=True), "relu6": nn.ReLU6(inplace=True)}
BY_HAND = {"none": lambda x: x, "relu": lambda x: x.clamp(min=0), "relu6": lambda x: x.clamp(0, 6)}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_shortcut", [False, True])
def test_normalised_is_norm_then_shortcut_then_activation(activation: str, has_shortcut: bool) -> None:
    torch.manual_seed(0)
    layer = NormAct(4, ACTIVATIONS[activation]).double()
    x, shortcut = 9 * torch.randn(2, 8, 4, 5, 5, dtype=torch.float64)
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
    expected = (x - mean) / (variance + 1e-5).sqrt() + (shortcut if has_shortcut else 0)
    out, again = layer.with_input(x.clone(), shortcut if has_shortcut else None)
    torch.testing.assert_close(out, BY_HAND[activation](expected))
    assert torch.equal(again, x)


@pytest.mark.parametrize(
    "network",
    ["wrn-28-10", "wrn-28-4", "resnet-110", "resnet-164", "mobilenet", "mobilenetv2", "resnet-50", "densenet-40-12"],
)
def test_our_networks_need_no_compiler(network: str) -> None:
    with torch.device("meta"):
        cohort = Cohort({"a": network}, num_classes=10)
    assert has_fused_kernels(cohort.members["a"])


def test_channels_that_need_padding_are_left_to_a_compiler_but_in_a_dense_stage() -> None:
    """It fuses the padding; a dense stage has kernels that do."""
    assert has_fused_kernels(conv_norm_relu(16, 32, 3))
    assert not has_fused_kernels(conv_norm_relu(12, 28, 3))
    assert has_fused_kernels(DenseStage(DenseLayer(28, 12)))
    assert not has_fused_kernels(nn.Sequential(DenseStage(DenseLayer(28, 12)), conv_norm_relu(12, 28, 3)))


def test_a_dense_stage_is_its_layers_one_after_the_other() -> None:
    layers = DenseLayer(8, 4), nn.Sequential(transition(12), DenseLayer(12, 4)), DenseLayer(16, 6)
    x = torch.randn(2, 8, 6, 6)
    expected = x
    for layer in layers:
        expected = layer(expected)
    assert torch.equal(DenseStage(*layers)(x), expected)
    assert expected.shape == (2, 22, 3, 3)


@pytest.mark.parametrize("network", ["resnet-20", "resnet-164", "wrn-16-2", "resnet-18"])
def test_a_convolution_knows_whether_a_normalisation_comes_next(network: str) -> None:
    """Moments that nobody wants are time for nothing; those that are missing take a kernel of their own."""
    cohort = Cohort({"a": network}, 10)
    last: list[tuple[Conv2d, torch.Tensor]] = []
    normalised: set[Conv2d] = set()

    def remember(conv: nn.Module, _: object, out: torch.Tensor) -> None:
        if isinstance(conv, Conv2d):
            last.append((conv, out))

    def note(norm: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if isinstance(norm, NormAct):
            normalised.update(conv for conv, out in last if out is arguments[0])

    for module in cohort.modules():
        module.register_forward_hook(remember)
        module.register_forward_pre_hook(note)
    with torch.no_grad():
        cohort(torch.zeros(2, 3, 32, 32))
    convs = [conv for conv, _ in last if conv.kernel_size == (3, 3)]
    assert len(convs) > 10
    assert [conv.normalised for conv in convs] == [conv in normalised for conv in convs]


def test_others_layers_are_left_to_a_compiler() -> None:
    assert not has_fused_kernels(zoo.timm.create_model("resnet18"))
    assert not has_fused_kernels(nn.Linear(3, 4))


def test_on_a_cpu_nothing_runs_our_kernels() -> None:
    layer, x = NormAct(16, nn.ReLU()), torch.randn(2, 16, 4, 4).to(memory_format=torch.channels_last)
    assert has_fused_kernels(layer)
    assert not runs_own_kernels(nn.Sequential(layer))
    with own_kernels():
        assert not fit(x, layer[0])  # type: ignore[arg-type]
        expected = F.relu(F.batch_norm(x, None, None, training=True))
        torch.testing.assert_close(layer(x), expected)


def test_halving_spreads_its_gradient_as_average_pooling_does() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    y = x.detach().clone().requires_grad_()
    towards = torch.randn(2, 3, 3, 2, dtype=torch.float64)
    out, expected = halved(x), F.avg_pool2d(y, 2)
    out.backward(towards)
    expected.backward(towards)
    assert torch.equal(out, expected)
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("size", "is_ours"), [((6, 4), True), ((5, 4), False), ((6, 3), False)])
def test_halving_leaves_odd_lines_to_torch(
    size: tuple[int, int], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which drops them; where a gradient is copied to four, it would have too few."""
    monkeypatch.setattr("codistill.ops.dispatch.wanted", lambda *_: True)  # as on a GPU
    x = torch.randn(2, 3, *size, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, expected = AvgPool2x2()(x), F.avg_pool2d(y, 2)
    assert ("Halved" in out.grad_fn.name()) is is_ours
    out.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("images", "channels", "options", "expected"),
    [
        (64, 16, {}, True),
        (0, 16, {}, False),  # the share of a short batch that a process may have
        (64, 24, {}, False),
        (64, 80, {}, False),
        (4096, 16, {}, False),
        (64, 16, {"stride": 2}, False),
        (64, 16, {"kernel": 1}, False),
        (64, 16, {"groups": 16}, False),
    ],
)
def test_small_convolutions_are_ours(
    images: int, channels: int, options: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codistill.ops.dispatch.wanted", lambda *_: True)  # as on a GPU
    with torch.device("meta"):
        layer = Conv2d(channels, channels, **{"kernel": 3, **options}).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        assert is_small(torch.empty(images, channels, 32, 32, dtype=torch.bfloat16), layer) is expected


@pytest.mark.parametrize(
    ("images", "channels", "fits"),
    [(186_413, 320, True), (186_414, 320, False), (2, 7712, True), (2, 7728, False)],
    ids=["maps", "maps too large", "a weight", "a weight too large"],
)
def test_wide_convolutions_count_their_places_in_32_bits(
    images: int, channels: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 36 to every 4×4 pixels of a channel, and 36 to every 3×3 taps."""
    monkeypatch.setattr(kernels, "wanted", lambda x, layer: True)  # as on a GPU
    as_on_a_gpu = {"device": "meta", "dtype": torch.bfloat16, "memory_format": torch.channels_last}
    x = torch.empty(images, channels, 4, 4, **as_on_a_gpu)  # type: ignore[call-overload]
    with torch.device("meta"):
        conv = Conv2d(channels, channels, 3)
    assert kernels.is_wide(x, conv.to(memory_format=torch.channels_last)) is fits  # type: ignore[call-overload]
