"""Small convolutions compute what torch's compute in float64, and run where they are meant to."""

import copy
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

from codistill.networks.layers import BatchNorm2d, Conv2d, FusedSequential, norm_relu
from codistill.networks.resnet import PreActivationBlock, ResidualBlock, basic_branch, padded_shortcut
from codistill.ops.dispatch import use_kernels
from codistill.ops.wgrad_stream import WeightGradientStreams, defer_weight_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest relative length of the difference; bfloat16 rounds to 8 bits."""
SHAPES = [
    *((64, 16, 16, 32, 32), (64, 32, 32, 16, 16), (64, 64, 64, 8, 8)),  # ResNet-110's
    *((120, 16, 16, 32, 32), (31, 32, 32, 32, 31)),  # more tiles than programs
    *((3, 16, 16, 7, 5), (5, 32, 64, 9, 6), (2, 48, 16, 3, 4), (3, 64, 16, 1, 2), (1, 16, 32, 1, 1)),
]
"""Images, channels before and after, height and width."""


@pytest.fixture(autouse=True)
def whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not TF32, which is torch's default for convolutions."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts launches of the small convolution, with statistics or without, and of the kernel for statistics alone."""
    from codistill.ops import conv_small, norm  # need Triton

    counts = {"convolutions": 0, "with statistics": 0, "statistics alone": 0}
    launch_conv3x3, compute_stats = conv_small.launch_conv3x3, norm.compute_stats

    def counted_conv3x3(*args: object, **options: object) -> tuple[Tensor, Tensor | None]:
        found = launch_conv3x3(*args, **options)
        counts["convolutions"] += 1
        counts["with statistics"] += found[1] is not None
        return found

    def counted_stats(*args: object, **options: object) -> Tensor:
        counts["statistics alone"] += 1
        return compute_stats(*args, **options)

    monkeypatch.setattr(conv_small, "launch_conv3x3", counted_conv3x3)
    monkeypatch.setattr(norm, "compute_stats", counted_stats)
    return counts


def images(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 2) -> Tensor:
    """With channels whose means are apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + torch.randn(1, shape[1], 1, 1, generator=generator)
    return x.to(DEVICE, dtype, memory_format=torch.channels_last)


def a_layer(channels: int, out_channels: int, dtype: torch.dtype = torch.float32) -> Conv2d:
    torch.manual_seed(1)
    layer = Conv2d(channels, out_channels, 3)
    return layer.to(DEVICE, dtype, memory_format=torch.channels_last)


def blocks() -> nn.Sequential:
    """A small residual network with 16, 32 and 64 channels."""
    torch.manual_seed(1)
    shapes = (16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)
    parts = [ResidualBlock(basic_branch(*shape), shape[1], padded_shortcut(*shape)) for shape in shapes]
    return nn.Sequential(*parts).to(DEVICE, memory_format=torch.channels_last)


def results(layer: nn.Module, x: Tensor, towards: Tensor) -> list[Tensor]:
    """Output, and gradients of the input and of what is learned."""
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(towards)
    return [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, launches: dict[str, int]) -> None:
    batch, channels, out_channels, *size = shape
    x, towards = images(batch, channels, *size, dtype=dtype), images(batch, out_channels, *size, dtype=dtype, seed=3)
    layer = a_layer(channels, out_channels, dtype)
    with use_kernels():
        found = results(layer, x, towards)
    assert launches == {"convolutions": 2, "with statistics": 0, "statistics alone": 0}
    layer.zero_grad()
    expected = results(copy.deepcopy(layer).double(), x.double(), towards.double())
    assert len(found) == len(expected) == 3
    for value, truth in zip(found, expected, strict=True):
        assert value.dtype is dtype
        assert value.is_contiguous(memory_format=torch.channels_last)
        assert torch.dist(value.double(), truth) <= TOLERANCE[dtype] * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_of_a_second_use_is_added(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, channels, out_channels, *size = shape
    x, beside = (images(batch, channels, *size, dtype=dtype, seed=seed) for seed in (2, 4))
    towards = images(batch, out_channels, *size, dtype=dtype, seed=3)
    layer = a_layer(channels, out_channels, dtype)
    x.requires_grad_()
    with use_kernels():
        out, _, again = layer.with_stats(x, BatchNorm2d(out_channels))
    torch.autograd.backward([out, again], [towards, beside])
    expected = results(copy.deepcopy(layer).double(), x.detach().double(), towards.double())[1] + beside.double()
    assert torch.dist(x.grad.double(), expected) <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_statistics_are_those_of_what_was_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, channels, out_channels, *size = shape
    norm = BatchNorm2d(out_channels, eps=1e-4)
    with use_kernels():
        layer = a_layer(channels, out_channels, dtype)
        out, stats, _ = layer.with_stats(images(batch, channels, *size, dtype=dtype), norm)
    assert stats is not None
    variance, mean = torch.var_mean(out.detach().double(), (0, 2, 3), correction=0)
    for found, expected in zip(stats, (mean, (variance + norm.eps).rsqrt(), variance), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_gradients_in_another_order_and_for_the_weight_alone(launches: dict[str, int]) -> None:
    """As pooling's come, which lie pixel after pixel of a channel, or all in one number; and as a first layer's."""
    x, towards = images(3, 16, 7, 5), images(3, 32, 7, 5, seed=3)
    layer = a_layer(16, 32)
    for gradient in (towards.contiguous(), towards[:1, :1, :1, :1].expand_as(towards)):
        layer.zero_grad()
        with use_kernels():
            layer(x).backward(gradient)
        truth = torch.nn.grad.conv2d_weight(x.double(), layer.weight.shape, gradient.double(), padding=1)
        assert torch.dist(layer.weight.grad.double(), truth) <= 1e-5 * truth.norm()
    assert launches == {"convolutions": 2, "with statistics": 0, "statistics alone": 0}, (
        "none backward: x needs no gradient"
    )


@pytest.mark.parametrize("batch", [64, 120])
def test_a_large_mean_is_no_loss_of_digits(batch: int) -> None:
    layer = a_layer(16, 16)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:, :, 1, 1] = torch.eye(16)
    with use_kernels():
        out, stats, _ = layer.with_stats(images(batch, 16, 32, 32) + 1000, BatchNorm2d(16))
    assert stats is not None
    variance = out.detach().double().var((0, 2, 3), correction=0)
    torch.testing.assert_close(stats[2].double(), variance, rtol=1e-3, atol=0)


@pytest.mark.parametrize("shape", [(64, 16, 32, 32), (64, 32, 16, 16)])
def test_the_same_bits_every_time(shape: tuple[int, ...]) -> None:
    x, towards = images(*shape, dtype=torch.bfloat16), images(*shape, dtype=torch.bfloat16, seed=3)
    found = []
    with use_kernels():
        for _ in range(20):
            layer = a_layer(shape[1], shape[1], torch.bfloat16)
            found.append([*results(layer, x, towards), *layer.with_stats(x, BatchNorm2d(shape[1]))[:2]])
    first, *others = found
    assert len(others) == 19
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_residual_network_is_as_with_torchs_layers(launches: dict[str, int]) -> None:
    x, towards = images(16, 16, 16, 16), images(16, 64, 4, 4, seed=3)
    ours = blocks()
    theirs = copy.deepcopy(ours).double()
    with use_kernels():
        found = results(ours, x, towards)
    expected = results(theirs, x.double(), towards.double())
    # Twelve convolutions, of which two have a stride and leave the statistics to the norm.
    assert launches == {"convolutions": 20, "with statistics": 10, "statistics alone": 2}
    assert len(found) == 2 + 6 * 6
    for value, truth in zip(found, expected, strict=True):
        assert torch.dist(value.double(), truth) <= 1e-3 * truth.norm()
    for value, truth in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(value.double(), truth.double(), rtol=1e-4, atol=1e-5)


def test_deferred_weight_gradients_are_the_same() -> None:
    x, towards = images(16, 16, 16, 16), images(16, 64, 4, 4, seed=3)
    gradients, deferred = [], []

    class Counting(WeightGradientStreams):
        def fork(self, *inputs: Tensor) -> AbstractContextManager[None]:  # type: ignore[override]
            deferred.append(inputs)
            return super().fork(*inputs)

    for streams in (None, Counting()):
        network = blocks()
        with use_kernels(), defer_weight_gradients(streams):
            out = network(x)
        out.backward(towards)
        if streams:
            streams.join()
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert len(deferred) == 12
    assert len(gradients[0]) == 6 * 6
    for together, separate in zip(*gradients, strict=True):
        torch.testing.assert_close(separate, together, rtol=1e-4, atol=1e-5 * together.abs().max().item())


def test_a_convolution_whose_output_is_added_computes_no_statistics(launches: dict[str, int]) -> None:
    """The next norm's input is the sum: its own kernel computes them."""
    branch = FusedSequential(Conv2d(16, 16, 3), norm_relu(16), Conv2d(16, 16, 3))
    block = PreActivationBlock(branch, 16, 16, 1).to(DEVICE, memory_format=torch.channels_last)
    with use_kernels():
        block(images(8, 16, 8, 8))
    assert launches == {"convolutions": 2, "with statistics": 1, "statistics alone": 1}


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((128, 64, 64, 32, 32), {}),
        ((128, 128, 128, 16, 16), {}),
        ((128, 256, 256, 8, 8), {}),
        ((8, 16, 32, 8, 8), {"stride": 2}),
        ((8, 16, 16, 8, 8), {"kernel": 1}),
        ((8, 16, 16, 8, 8), {"groups": 16}),
        ((8, 24, 24, 8, 8), {}),
        ((8, 128, 16, 4, 4), {}),
    ],
)
def test_others_are_left_to_the_library(
    shape: tuple[int, ...], options: dict[str, int], launches: dict[str, int]
) -> None:
    """The first three are WRN-28-4's, where the library is faster."""
    batch, channels, out_channels, *size = shape
    layer = Conv2d(channels, out_channels, **{"kernel": 3, **options})
    layer = layer.to(DEVICE, torch.bfloat16, memory_format=torch.channels_last)
    with use_kernels():
        _, stats, _ = layer.with_stats(images(batch, channels, *size, dtype=torch.bfloat16), BatchNorm2d(out_channels))
    assert launches["convolutions"] == 0
    assert stats is None


def test_ours_are_for_training_and_where_they_are_wanted(
    launches: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = a_layer(16, 16), images(8, 16, 8, 8)
    layer(x)
    with use_kernels():
        layer.eval()(x)
        layer.train()(x.contiguous())
        layer.requires_grad_(False)(x)
        layer.requires_grad_(True)(x[:0])
        with torch.autocast(DEVICE, torch.bfloat16):
            layer(x)
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            layer(x)
        assert launches["convolutions"] == 0
        layer(x)
    assert launches["convolutions"] == 1
