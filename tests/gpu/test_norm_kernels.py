"""The fused norm computes what torch computes in float64: values, gradients, running statistics."""

import copy

import pytest
import torch
from torch import Tensor, nn

from codistill.networks.families import architecture
from codistill.networks.layers import Conv2d, NormAct, Sum
from codistill.networks.resnet import PreActivationBlock
from codistill.ops.dispatch import use_kernels
from codistill.ops.wgrad_stream import WeightGradientStreams, defer_weight_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative length of the difference; bfloat16 rounds to 8 bits."""
CORNERS, NEAR = (0.0, 6.0), 0.03
"""There an activation's gradient jumps, so two that stand on different sides of one differ by all or nothing."""


def images(*shape: int, dtype: torch.dtype, seed: int, means: float = 0.0) -> Tensor:
    """``means`` is how far those of the channels are apart, beside deviations of 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + means * torch.randn(1, shape[1], 1, 1, generator=generator)
    return x.to("cuda", dtype, memory_format=torch.channels_last)


def a_layer(channels: int, activation: nn.ReLU | nn.ReLU6 | None) -> NormAct:
    torch.manual_seed(1)
    layer = NormAct(channels, activation).cuda()
    with torch.no_grad():
        layer[0].weight.normal_(1.0)
        layer[0].bias.normal_()
    return layer


def results(layer: NormAct, x: Tensor, shortcut: Tensor | None, towards: Tensor) -> list[Tensor]:
    """The output, the gradients and the running statistics."""
    x, shortcut = x.clone().requires_grad_(), None if shortcut is None else shortcut.clone().requires_grad_()
    out = layer(x, shortcut)
    out.backward(towards)
    norm = layer[0]
    found = [out.detach(), x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]
    return found if shortcut is None else [*found, shortcut.grad]


def away_from_corners(layer: NormAct, x: Tensor, shortcut: Tensor | None) -> Tensor:
    """1 where rounding does not decide what the activation lets through, 0 where it might."""
    with torch.no_grad():
        value = nn.functional.batch_norm(x.double(), None, None, layer[0].weight, layer[0].bias, training=True)
    value = value if shortcut is None else value + shortcut.double()
    return torch.stack([(value - corner).abs() > NEAR for corner in CORNERS]).all(dim=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("activation", "has_shortcut"),
    [(nn.ReLU(), False), (nn.ReLU(), True), (None, False), (None, True), (nn.ReLU6(), False)],
)
@pytest.mark.parametrize(
    "shape", [(64, 16, 32, 32), (128, 160, 32, 32), (5, 24, 7, 7), (16, 1280, 8, 8), (4, 12, 2, 2)]
)
def test_values_gradients_and_statistics(
    shape: tuple[int, ...], has_shortcut: bool, activation: nn.ReLU | nn.ReLU6 | None, dtype: torch.dtype
) -> None:
    x, towards = images(*shape, dtype=dtype, seed=2, means=5.0), images(*shape, dtype=dtype, seed=3)
    shortcut = images(*shape, dtype=dtype, seed=4) if has_shortcut else None
    ours, theirs = a_layer(shape[1], activation), a_layer(shape[1], activation).double()
    towards = towards * away_from_corners(theirs, x, shortcut)
    with use_kernels():
        found = results(ours, x, shortcut, towards)
    expected = results(theirs, x.double(), None if shortcut is None else shortcut.double(), towards.double())
    for value, truth in zip(found, expected, strict=True):
        assert torch.dist(value.double(), truth) <= TOLERANCE[dtype] * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 16, 32, 32), (5, 24, 7, 7), (16, 1280, 8, 8), (4, 12, 2, 2)])
@pytest.mark.parametrize("used", ["out", "again", "both", "x", "out and x", "all"])
def test_the_gradients_of_second_uses_are_added(used: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, *gradients = (images(*shape, dtype=dtype, seed=seed) for seed in (2, 3, 4, 5))
    layer = a_layer(shape[1], None)
    x.requires_grad_()
    with use_kernels():
        out = layer.for_two_uses(x)
    which = {"out": [0], "again": [1], "both": [0, 1], "x": [2], "out and x": [0, 2], "all": [0, 1, 2]}[used]
    torch.autograd.backward([out[index] for index in which], [gradients[index] for index in which])
    truth = x.detach().double().requires_grad_()
    value = a_layer(shape[1], None).double()(truth)
    torch.autograd.backward([value, value, truth * 1][:3], [g.double() * (i in which) for i, g in enumerate(gradients)])
    assert torch.dist(x.grad.double(), truth.grad) <= TOLERANCE[dtype] * truth.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(64, 16, 32, 32), (128, 160, 32, 32), (5, 24, 7, 7), (16, 1280, 8, 8), (4, 12, 2, 2)]
)
def test_a_sum_is_normalised_as_if_it_had_been_added_before(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y, *towards = (images(*shape, dtype=dtype, seed=seed, means=5.0) for seed in (2, 3, 4, 5))
    layer = a_layer(shape[1], None)
    found = []
    for together in (False, True):
        inputs = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        one = copy.deepcopy(layer)
        with use_kernels():
            out, _, added = one.for_two_uses(Sum(*inputs) if together else inputs[0] + inputs[1])
        torch.autograd.backward([out, added], towards)
        found.append([out, added, *(tensor.grad for tensor in inputs), *(p.grad for p in one.parameters())])
        found[-1] += one.buffers()
    assert torch.equal(found[1][1], x + y)
    for separate, fused in zip(*found, strict=True):
        # Not bit for bit: the statistics are shifted by means of first rows, here of sums that are not rounded yet.
        assert torch.dist(separate.double(), fused.double()) <= TOLERANCE[dtype] * separate.double().norm()


@pytest.mark.parametrize("network", ["wrn-16-2", "resnet-20"])
def test_blocks_in_a_sequence_compute_what_they_compute_one_by_one(network: str) -> None:
    torch.manual_seed(0)
    head = architecture(network).head("stage1", "paper", 10).to("cuda", memory_format=torch.channels_last)
    alone = copy.deepcopy(head)
    blocks, classifier = alone.children()
    channels = next(parameter for parameter in head.parameters() if parameter.ndim == 4).shape[1]
    x = images(16, channels, 16, 16, dtype=torch.float32, seed=5)
    found = []
    for run in (head, nn.Sequential(*blocks.children(), *classifier.children())):
        inputs = x.clone().requires_grad_()
        with use_kernels():
            out = run(inputs)
        out.square().mean().backward()
        found.append([out, inputs.grad, *(parameter.grad for parameter in run.parameters()), *run.buffers()])
    assert len(found[0]) == len(found[1]) > 40
    for together, separate in zip(*found, strict=True):
        torch.testing.assert_close(together, separate, rtol=1e-3, atol=1e-5)


def test_a_first_pixel_that_holds_nearly_all_of_the_variance() -> None:
    x = 1e-3 * images(128, 32, 32, 32, dtype=torch.float32, seed=2)
    x[0, :, 0, 0] = 1.0
    layer = a_layer(32, None)
    with use_kernels():
        layer(x)
    variance, mean = torch.var_mean(x.double(), (0, 2, 3))
    torch.testing.assert_close(layer[0].running_var.double(), 0.9 + 0.1 * variance, rtol=1e-7, atol=0)
    torch.testing.assert_close(layer[0].running_mean.double(), 0.1 * mean, rtol=1e-4, atol=1e-8)


def test_the_same_bits_every_time() -> None:
    x, towards = (
        images(128, 160, 32, 32, dtype=torch.bfloat16, seed=2),
        images(128, 160, 32, 32, dtype=torch.bfloat16, seed=3),
    )
    with use_kernels():
        first, *others = (results(a_layer(160, nn.ReLU()), x, None, towards) for _ in range(20))
    assert len(others) == 19
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = images(4, 16, 8, 8, dtype=torch.bfloat16, seed=2)
    x[1, 3, 2, 2] = bad
    with use_kernels():
        out = a_layer(16, nn.ReLU())(x)
    assert out[:, 3].isnan().any()
    assert out[:, :3].isfinite().all()
    assert out[:, 4:].isfinite().all()


def test_deferred_weight_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    branch = nn.Sequential(Conv2d(16, 32, 3, 2), NormAct(32, nn.ReLU()), Conv2d(32, 32, 3))
    block = PreActivationBlock(branch, 16, 32, 2).to("cuda", memory_format=torch.channels_last)
    blocks = nn.Sequential(*(copy.deepcopy(block) for _ in range(1)), *[
        PreActivationBlock(nn.Sequential(Conv2d(32, 32, 3), NormAct(32, nn.ReLU()), Conv2d(32, 32, 3)), 32, 32, 1)
        for _ in range(12)
    ]).to("cuda", memory_format=torch.channels_last)  # fmt: skip
    x = images(32, 16, 16, 16, dtype=torch.float32, seed=5)
    gradients = []
    for streams in (None, WeightGradientStreams()):
        blocks.zero_grad()
        with use_kernels(), defer_weight_gradients(streams):
            out = blocks(x)
        out.square().mean().backward()
        if streams:
            streams.join()
        gradients.append([parameter.grad.clone() for parameter in blocks.parameters()])
    assert len(gradients[0]) == 13 * 6 + 1
    for together, separate in zip(*gradients, strict=True):
        torch.testing.assert_close(separate, together, rtol=1e-4, atol=1e-6 * together.abs().max().item())
