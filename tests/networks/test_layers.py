"""The layers that all families share: what they compute, and where they use Triton kernels."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from codistill.networks import layers
from codistill.networks.densenet import DenseLayer, DenseStage, transition
from codistill.networks.families import architecture
from codistill.networks.layers import AvgPool2x2, Block, Conv2d, NormAct, Sum, Twice, as_tensor
from codistill.ops import dispatch
from codistill.ops.dispatch import avg_pool2, can_fuse_norm, suits_small_conv, suits_winograd, use_kernels

ACTIVATIONS = {"none": None, "relu": nn.ReLU(inplace=True), "relu6": nn.ReLU6(inplace=True)}
BY_HAND = {"none": lambda x: x, "relu": lambda x: x.clamp(min=0), "relu6": lambda x: x.clamp(0, 6)}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_shortcut", [False, True])
def test_norm_act_is_norm_then_shortcut_then_activation(activation: str, has_shortcut: bool) -> None:
    torch.manual_seed(0)
    layer = NormAct(4, ACTIVATIONS[activation]).double()
    x, shortcut = 9 * torch.randn(2, 8, 4, 5, 5, dtype=torch.float64)
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
    expected = (x - mean) / (variance + 1e-5).sqrt() + (shortcut if has_shortcut else 0)
    out = layer(x.clone(), shortcut if has_shortcut else None)
    torch.testing.assert_close(out, BY_HAND[activation](expected))


def test_a_dense_stage_is_its_layers_one_after_the_other() -> None:
    parts = DenseLayer(8, 4), nn.Sequential(transition(12), DenseLayer(12, 4)), DenseLayer(16, 6)
    x = torch.randn(2, 8, 6, 6)
    expected = x
    for part in parts:
        expected = part(expected)
    assert torch.equal(DenseStage(*parts)(x), expected)
    assert torch.equal(copy.deepcopy(DenseStage(*parts))(x), expected)
    assert expected.shape == (2, 22, 3, 3)


@pytest.mark.parametrize(("network", "in_a_norm"), [("resnet-20", 19), ("resnet-164", 108), ("wrn-16-2", 6)])
def test_statistics_reach_the_norm_behind_a_convolution(
    network: str, in_a_norm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm takes the statistics of its own input; a convolution whose output is added computes none."""
    given: list[bool] = []
    for_two_uses = NormAct.for_two_uses

    def with_stats(conv: Conv2d, x: torch.Tensor, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out = conv(x)
        return out, out.detach().clone(), x  # the copy stands for its statistics

    def checked(
        layer: NormAct, x: torch.Tensor | Sum, shortcut: torch.Tensor | None = None, stats: torch.Tensor | None = None
    ) -> object:
        assert stats is None or (isinstance(x, torch.Tensor) and torch.equal(x, stats))
        given.append(stats is not None)
        return for_two_uses(layer, x, shortcut)

    monkeypatch.setattr(Conv2d, "with_stats", with_stats)
    monkeypatch.setattr(NormAct, "for_two_uses", checked)
    with torch.no_grad():
        architecture(network).backbone(10)(torch.randn(2, 3, 8, 8))
    assert sum(given) == in_a_norm


@pytest.fixture
def handing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks hand on what they do on a GPU."""

    def hand_on(block: Block, out: Sum | Twice, is_last: bool) -> torch.Tensor | Sum | Twice:
        return as_tensor(out) if is_last else out

    monkeypatch.setattr(Block, "hand_on", hand_on)


@pytest.mark.usefixtures("handing_on")
@pytest.mark.parametrize(("network", "sums"), [("resnet-164", 54 - 3), ("wrn-16-2", 6 - 3)])
def test_sums_are_left_to_the_norm_that_comes_next(network: str, sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last of each of the three stages, whose output is a tensor; in a head, all."""
    given: list[bool] = []
    for_two_uses = NormAct.for_two_uses

    def counted(layer: NormAct, x: torch.Tensor | Sum, *rest: torch.Tensor | None) -> object:
        given.append(isinstance(x, Sum))
        return for_two_uses(layer, x, *rest)

    design = architecture(network)
    backbone, head = design.backbone(10), design.head("stage2", "paper", 10)
    monkeypatch.setattr(NormAct, "for_two_uses", counted)
    with torch.no_grad():
        features = backbone.features(torch.randn(2, 3, 8, 8))
        assert all(isinstance(x, torch.Tensor) for x in features.values())
        assert sum(given) == sums
        given.clear()
        assert isinstance(head(features["stage2"]), torch.Tensor)
        assert sum(given) == sums // 3 + 1


def test_without_kernels_every_block_returns_a_tensor() -> None:
    found: list[object] = []
    network = architecture("wrn-16-2").backbone(10)
    for block in (module for module in network.modules() if isinstance(module, Block)):
        block.register_forward_hook(lambda _, inputs, output: found.extend([*inputs, output]))
    network(torch.randn(2, 3, 8, 8))
    assert len(found) == 2 * 6
    assert all(isinstance(x, torch.Tensor) for x in found)


@pytest.mark.usefixtures("handing_on")
@pytest.mark.parametrize("network", ["wrn-16-2", "resnet-164", "resnet-20", "resnet-18"])
def test_blocks_in_a_sequence_compute_what_they_compute_one_by_one(network: str) -> None:
    torch.manual_seed(0)
    design = architecture(network)
    head = design.head(design.exits[-1].name, "paper", 10)
    blocks, classifier = copy.deepcopy(head).children()
    x = torch.randn(4, design.exits[-1].channels, 8, 8)
    found = []
    for run in (head, nn.Sequential(*blocks.children(), *classifier.children())):
        inputs = x.clone().requires_grad_()
        out = run(inputs)
        out.square().mean().backward()
        found.append([out, inputs.grad, *(parameter.grad for parameter in run.parameters()), *run.buffers()])
    for together, separate in zip(*found, strict=True):
        assert torch.equal(together, separate)


def test_no_other_file_of_the_networks_imports_kernels() -> None:
    files = list(Path(layers.__file__).parent.rglob("*.py"))
    assert len(files) > 10
    assert [file.name for file in files if "codistill.ops" in file.read_text()] == ["layers.py"]


def test_on_a_cpu_no_kernel_runs() -> None:
    layer, x = NormAct(16, nn.ReLU()), torch.randn(2, 16, 4, 4).to(memory_format=torch.channels_last)
    with use_kernels():
        assert not can_fuse_norm(x, layer[0])  # type: ignore[arg-type]
        expected = F.relu(F.batch_norm(x, None, None, training=True))
        torch.testing.assert_close(layer(x), expected)


def test_avg_pool2_spreads_its_gradient_as_torch_does() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    y = x.detach().clone().requires_grad_()
    towards = torch.randn(2, 3, 3, 2, dtype=torch.float64)
    out, expected = avg_pool2(x), F.avg_pool2d(y, 2)
    out.backward(towards)
    expected.backward(towards)
    assert torch.equal(out, expected)
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("size", "has_kernel"), [((6, 4), True), ((5, 4), False), ((6, 3), False)])
def test_odd_sides_are_pooled_by_torch(
    size: tuple[int, int], has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops the last line; a gradient copied to four pixels would have too few."""
    monkeypatch.setattr("codistill.ops.dispatch.is_supported", lambda *_: True)  # as on a GPU
    x = torch.randn(2, 3, *size, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, expected = AvgPool2x2()(x), F.avg_pool2d(y, 2)
    assert (out.grad_fn.name() == "AvgPool2Backward") is has_kernel
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
def test_small_convolutions_have_a_kernel(
    images: int, channels: int, options: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codistill.ops.dispatch.is_supported", lambda *_: True)  # as on a GPU
    with torch.device("meta"):
        layer = Conv2d(channels, channels, **{"kernel": 3, **options})
        layer.to(torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
        assert suits_small_conv(torch.empty(images, channels, 32, 32, dtype=torch.bfloat16), layer) is expected


@pytest.mark.parametrize(
    ("images", "channels", "fits"),
    [(186_413, 320, True), (186_414, 320, False), (2, 7712, True), (2, 7728, False)],
    ids=["maps", "maps too large", "a weight", "a weight too large"],
)
def test_winograd_offsets_have_32_bits(images: int, channels: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 36 numbers for every 4×4 pixels of a channel, and 36 for every 3×3 filter."""
    monkeypatch.setattr(dispatch, "is_supported", lambda x, layer: True)  # as on a GPU
    as_on_a_gpu = {"device": "meta", "dtype": torch.bfloat16, "memory_format": torch.channels_last}
    x = torch.empty(images, channels, 4, 4, **as_on_a_gpu)  # type: ignore[call-overload]
    with torch.device("meta"):
        conv = Conv2d(channels, channels, 3).to(torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
    with use_kernels():
        assert suits_winograd(x, conv) is fits
    with use_kernels(winograd=False):
        assert not suits_winograd(x, conv)
