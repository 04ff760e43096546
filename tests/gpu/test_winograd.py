"""Wide convolutions by Winograd's method are torch's: values and gradients against float64, and the same training."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codistill.engine import trainer
from codistill.networks.layers import Conv2d
from codistill.ops.dispatch import CONV_3X3, suits_winograd, use_kernels
from codistill.ops.wgrad_stream import WeightGradientStreams, defer_weight_gradients
from codistill.recipes.sections import Runtime
from support.tiny import tiny_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]

NEAR, MOST = 1.75, 2.2
"""How many times torch's distance from float64, which rounds once, ours may be: for random maps, and for any."""
POINTS = 0, 5 / 8, -5 / 8, 3 / 2, -3 / 2
"""Where the method evaluates polynomials, beside infinity."""
SHAPES = [(128, 320, 640, 8, 8), (16, 640, 320, 16, 16), (5, 176, 160, 4, 12), (1, 160, 336, 4, 4)]
"""Images, channels before and after, height and width."""


@pytest.fixture(autouse=True)
def also_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, "winograd", min_work=1)


def set_limits(monkeypatch: pytest.MonkeyPatch, implementation: str, **limits: int) -> None:
    monkeypatch.setitem(CONV_3X3, implementation, replace(CONV_3X3[implementation], **limits))


def a_convolution(channels: int, out_channels: int) -> Conv2d:
    torch.manual_seed(1)
    return Conv2d(channels, out_channels, 3).to("cuda", torch.bfloat16, memory_format=torch.channels_last)


def a_map(*shape: int, size: float = 1.0) -> Tensor:
    return (size * torch.randn(*shape, device="cuda")).to(torch.bfloat16, memory_format=torch.channels_last)


def results(conv: nn.Conv2d, x: Tensor, towards: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and the weight."""
    x = x.clone().requires_grad_()
    conv.weight.grad = None
    out = conv(x)
    out.backward(towards)
    torch.cuda.synchronize()
    return [out.detach(), x.grad, conv.weight.grad]


def our_results(conv: nn.Conv2d, x: Tensor, towards: Tensor) -> list[Tensor]:
    with use_kernels():
        assert suits_winograd(x, conv)  # else they would be torch's
        return results(conv, x, towards)


def exact_results(conv: nn.Conv2d, x: Tensor, towards: Tensor) -> list[Tensor]:
    exact, weight = x.double().requires_grad_(), conv.weight.detach().double().requires_grad_()
    out = F.conv2d(exact, weight, padding=1)
    out.backward(towards.double())
    return [out.detach(), exact.grad, weight.grad]


def transforms() -> tuple[Tensor, Tensor, Tensor]:
    """Aᵀ, G and Bᵀ of the Toom-Cook construction: y = Aᵀ(Gg ⊙ Bᵀd) is the correlation of 6 numbers d with 3 taps g."""
    outputs, taps, inputs = np.zeros((4, 6)), np.zeros((6, 3)), np.zeros((6, 6))
    for k, point in enumerate(POINTS):
        others = [other for other in POINTS if other != point]
        outputs[:, k] = point ** np.arange(4)
        taps[k] = point ** np.arange(3) / np.prod([point - other for other in others])
        inputs[k, :5] = np.poly(others)[::-1]
    outputs[3, 5] = taps[5, 2] = 1
    inputs[5] = np.poly(POINTS)[::-1]
    a, g, b = (torch.from_numpy(matrix).cuda() for matrix in (outputs, taps, inputs))
    return a, g, b


def rounded_results(conv: nn.Conv2d, x: Tensor, towards: Tensor) -> list[Tensor]:
    """The method in float64, rounded to float16 where operands and products are stored, and to bfloat16 at the end."""
    a, g, b = transforms()
    images, channels, height, width = x.shape
    squares = images, height // 4, width // 4

    def half(y: Tensor, scale: float = 1.0) -> Tensor:
        return (y * scale).half().double() / scale

    patches = F.pad(x.double(), (1, 1, 1, 1)).unfold(2, 6, 4).unfold(3, 6, 4)
    inputs = half(torch.einsum("ij,nchwjk,lk->ilnhwc", b, patches, b).reshape(36, -1, channels))
    taps = half(torch.einsum("ij,ocjk,lk->iloc", g, conv.weight.detach().double(), g).flatten(0, 1), 16.0)
    products = half(inputs @ taps.mT, 16.0).reshape(6, 6, *squares, -1)
    out = torch.einsum("ij,jlnhwo,kl->nohiwk", a, products, a).reshape(images, -1, height, width)

    pieces = towards.double().reshape(images, -1, squares[1], 4, squares[2], 4)
    gradients = torch.einsum("ji,nohjwk,kl->ilnhwo", a, pieces, a).reshape(36, len(inputs[0]), -1)
    gradients = half(gradients, 1 / 64)  # scaled well inside the range, as randn and its relatives would be
    sums = gradients.mT @ inputs
    sums = sums if len(inputs[0]) > 1024 else half(sums, 1 / 64)
    of_taps = torch.einsum("ji,jloc,lk->ocik", g, sums.unflatten(0, (6, 6)), g)
    of_patches = half(gradients @ taps, 1 / 64 * 16).reshape(6, 6, *squares, channels)
    of_patches = torch.einsum("ji,jlnhwc,lk->nchwik", b, of_patches, b)
    columns = of_patches.permute(0, 1, 4, 5, 2, 3).reshape(images, channels * 36, -1)
    inwards = F.fold(columns, (height + 2, width + 2), 6, stride=4)[:, :, 1:-1, 1:-1]
    return [result.bfloat16().double() for result in (out, inwards, of_taps)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deferred", [False, True])
def test_nearly_as_near_as_torchs(shape: tuple[int, ...], deferred: bool) -> None:
    images, channels, out_channels, *sides = shape
    conv, x = a_convolution(channels, out_channels), a_map(images, channels, *sides).relu()
    towards = a_map(images, out_channels, *sides)
    streams = WeightGradientStreams() if deferred else None
    with defer_weight_gradients(streams):
        ours = our_results(conv, x, towards)
    if streams:
        streams.join()
        torch.cuda.synchronize()
    torchs, truth = results(conv, x, towards), exact_results(conv, x, towards)
    for our, their, true in zip(ours, torchs, truth, strict=True):
        assert our.is_contiguous(memory_format=torch.channels_last)
        assert torch.dist(our.double(), true) <= NEAR * torch.dist(their.double(), true)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounding_is_the_only_difference(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With products in float32 it is the convolution to float32's digits."""
    from codistill.ops import conv_winograd as winograd  # needs Triton

    monkeypatch.setattr(winograd, "DTYPE", torch.float32)
    images, channels, out_channels, *sides = shape
    conv = a_convolution(channels, out_channels).float()
    x, towards = a_map(images, channels, *sides).float(), a_map(images, out_channels, *sides).float()
    leaf = x.clone().requires_grad_()
    out = winograd.WinogradConv2d.apply(leaf, conv.weight, None)
    out.backward(towards)
    ours = [out.detach(), leaf.grad, conv.weight.grad]
    for our, true in zip(ours, exact_results(conv, x, towards), strict=True):
        assert torch.dist(our.double(), true) <= 1e-5 * true.norm()


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e3, 1e30])
def test_gradients_of_any_size(size: float) -> None:
    conv, x, towards = a_convolution(320, 320), a_map(8, 320, 8, 8), a_map(8, 320, 8, 8, size=size)
    ours, torchs, truth = (found(conv, x, towards) for found in (our_results, results, exact_results))
    for our, their, true in zip(ours, torchs, truth, strict=True):
        assert torch.dist(our.double(), true) <= NEAR * torch.dist(their.double(), true)


@pytest.mark.parametrize("shape", [*SHAPES, (128, 160, 160, 32, 32)], ids=str)
@pytest.mark.parametrize("kind", ["random", "constant"])
def test_it_rounds_where_it_says_and_nowhere_else(shape: tuple[int, ...], kind: str) -> None:
    """As far from the exact results as the method is in float64 with three roundings to float16 and one to bfloat16.

    The input's gradient is the further off the smoother the output's is: this says how far, for these maps.
    """
    images, channels, out_channels, *sides = shape
    conv, x = a_convolution(channels, out_channels), a_map(images, channels, *sides).relu()
    constants = a_map(images, out_channels, 1, 1).expand(-1, -1, *sides).contiguous(memory_format=torch.channels_last)
    towards = a_map(images, out_channels, *sides) if kind == "random" else constants
    ours, model, truth = (found(conv, x, towards) for found in (our_results, rounded_results, exact_results))
    for our, rounded, true in zip(ours, model, truth, strict=True):
        expected = torch.dist(rounded, true)
        assert 0.9 * expected <= torch.dist(our.double(), true) <= 1.1 * expected
        assert expected <= MOST * torch.dist(true.bfloat16().double(), true)


@pytest.mark.parametrize("images", [128, 256])
@pytest.mark.parametrize("value", [1.0, 1.984375])
def test_sums_over_many_squares_stay_in_range(images: int, value: float) -> None:
    """With a gradient that is the same everywhere nothing cancels; 1.984375 is scaled the least of all bfloat16s."""
    conv, x = a_convolution(160, 160), a_map(images, 160, 32, 32).relu()
    towards = torch.full_like(x, value)
    ours, torchs, truth = (found(conv, x, towards)[2] for found in (our_results, results, exact_results))
    assert torch.dist(ours.double(), truth) <= NEAR * torch.dist(torchs.double(), truth)


def test_images_with_small_gradients_keep_their_digits() -> None:
    """Late in a training most images have hardly any gradient left beside the few that are wrong."""
    sizes = 10.0 ** -torch.arange(8.0, device="cuda")
    conv, x, towards = a_convolution(320, 320), a_map(8, 320, 8, 8), a_map(8, 320, 8, 8)
    towards *= sizes[:, None, None, None]
    ours, torchs, truth = (found(conv, x, towards) for found in (our_results, results, exact_results))
    assert torch.dist(ours[2].double(), truth[2]) <= NEAR * torch.dist(torchs[2].double(), truth[2])
    for our, their, true in zip(ours[1], torchs[1], truth[1], strict=True):
        assert torch.dist(our.double(), true) <= NEAR * torch.dist(their.double(), true)


def test_an_image_that_is_not_finite_leaves_the_others_gradients_right() -> None:
    conv, x, towards = a_convolution(320, 320), a_map(8, 320, 8, 8), a_map(8, 320, 8, 8)
    whole = our_results(conv, x, towards)[1]
    towards[3, 5, 2, 1] = float("inf")
    found = our_results(conv, x, towards)[1]
    others = [0, 1, 2, 4, 5, 6, 7]
    assert not found[3].isfinite().all()
    assert torch.equal(found[others], whole[others])


def test_small_weights_keep_their_digits() -> None:
    conv, x, towards = a_convolution(320, 320), a_map(8, 320, 8, 8), a_map(8, 320, 8, 8)
    with torch.no_grad():
        conv.weight *= 3e-5 / conv.weight.std()
    ours, torchs, truth = (found(conv, x, towards) for found in (our_results, results, exact_results))
    for our, their, true in zip(ours, torchs, truth, strict=True):
        assert torch.dist(our.double(), true) <= NEAR * torch.dist(their.double(), true)


def test_products_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch allows its library to add up parts of a float16 product in float16; afterwards it may again."""
    matmul, bmm, allowed = torch.backends.cuda.matmul, torch.bmm, []

    def watched(*args: Tensor, **options: torch.dtype) -> Tensor:
        allowed.append(matmul.allow_fp16_reduced_precision_reduction)
        return bmm(*args, **options)

    monkeypatch.setattr(torch, "bmm", watched)
    assert matmul.allow_fp16_reduced_precision_reduction  # torch's default
    our_results(a_convolution(320, 320), a_map(8, 320, 8, 8), a_map(8, 320, 8, 8))
    assert allowed == [False, False, False]
    assert matmul.allow_fp16_reduced_precision_reduction


def test_no_gradient_is_none_and_a_sick_one_stays_sick() -> None:
    conv, x, nothing = a_convolution(320, 320), a_map(8, 320, 8, 8), a_map(8, 320, 8, 8, size=0.0)
    assert not any(gradient.any() for gradient in our_results(conv, x, nothing)[1:])
    for wrong in (float("nan"), float("inf")):
        sick = nothing.clone()
        sick[3, 5, 2, 1] = wrong
        assert not any(gradient.isfinite().all() for gradient in our_results(conv, x, sick)[1:])


@pytest.mark.parametrize("lies", ["channels first", "expanded"])
def test_gradients_however_they_lie(lies: str) -> None:
    conv, x = a_convolution(160, 176), a_map(2, 160, 8, 8)
    towards = a_map(2, 176, 8, 8).contiguous() if lies == "channels first" else a_map(1, 1, 1, 1).expand(2, 176, 8, 8)
    as_usual = towards.clone(memory_format=torch.channels_last)
    assert towards.stride() != as_usual.stride()
    assert all(map(torch.equal, our_results(conv, x, towards), our_results(conv, x, as_usual)))


def test_gradients_add_up() -> None:
    conv, x, towards = a_convolution(160, 176), a_map(2, 160, 8, 8), a_map(2, 176, 8, 8)
    *_, once = our_results(conv, x, towards)
    conv.weight.grad, streams = None, WeightGradientStreams()
    with use_kernels(), defer_weight_gradients(streams):
        for _ in range(2):
            conv(x).backward(towards)
    streams.join()
    torch.testing.assert_close(conv.weight.grad, 2 * once)


def test_autocast_does_not_change_it() -> None:
    conv, x, towards = a_convolution(320, 320), a_map(8, 320, 8, 8), a_map(8, 320, 8, 8)
    alone = our_results(conv, x, towards)
    with torch.autocast("cuda", torch.bfloat16):
        inside = our_results(conv, x, towards)
    assert all(map(torch.equal, alone, inside))


def test_the_same_bits_every_time() -> None:
    conv, x, towards = a_convolution(640, 640), a_map(128, 640, 8, 8), a_map(128, 640, 8, 8)
    first, *others = (our_results(conv, x, towards) for _ in range(5))
    assert len(others) == 4
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_without_the_inputs_gradient() -> None:
    conv, x, towards = a_convolution(320, 320), a_map(8, 320, 8, 8), a_map(8, 320, 8, 8)
    *_, whole = our_results(conv, x, towards)
    conv.weight.grad = None
    with use_kernels():
        conv(x).backward(towards)
    assert torch.equal(conv.weight.grad, whole)


def test_others_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = a_convolution(320, 320), a_map(8, 320, 8, 8)
    strided = Conv2d(320, 320, 3, stride=2).to("cuda", torch.bfloat16, memory_format=torch.channels_last)
    with use_kernels():
        assert suits_winograd(x, conv)
        assert not suits_winograd(a_map(8, 144, 8, 8), a_convolution(144, 320))
        assert not suits_winograd(x, a_convolution(320, 328))
        assert not suits_winograd(x, strided)
        assert not suits_winograd(a_map(8, 320, 14, 14), conv)
        assert not suits_winograd(a_map(0, 320, 8, 8), conv)
        assert not suits_winograd(x.float(), a_convolution(320, 320).float())
        assert not suits_winograd(x, a_convolution(320, 320).eval())
        assert not suits_winograd(x.contiguous(), conv)
        assert not suits_winograd(x, Conv2d(320, 320, 3).to("cuda", torch.bfloat16))
        set_limits(monkeypatch, "winograd", min_work=8 * 8 * 8 * 320 * 320 + 1)
        assert not suits_winograd(x, conv)
        set_limits(monkeypatch, "winograd", min_work=8 * 8 * 8 * 320 * 320)
        assert suits_winograd(x, conv)
    assert not suits_winograd(x, conv)
    with use_kernels(winograd=False):
        assert not suits_winograd(x, conv)


def test_a_training_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded, with all convolutions that fit wide ones: not a bit differs from the training that never stopped."""
    from codistill.ops import conv_winograd as winograd

    launched = []
    launch = winograd.launch

    def launch_and_note(kernel: object, transformed: Tensor, **arguments: object) -> None:
        launched.append(kernel)
        launch(kernel, transformed, **arguments)

    monkeypatch.setattr(winograd, "launch", launch_and_note)
    set_limits(monkeypatch, "winograd", min_channels=16)
    set_limits(monkeypatch, "small", max_channels=0)
    runtime = Runtime(device="cuda", precision="bf16", kernels="triton", winograd="on", deterministic=True)
    recipe = tiny_recipe(runtime=runtime.model_dump())

    def run(name: str, stop_at: int) -> Path:
        asked = iter(range(1, 100))
        for _ in trainer.train(recipe, tmp_path / name, stop=lambda: next(asked) == stop_at):
            pass
        return tmp_path / name

    def checksums(out: Path) -> list[str]:
        files = [*sorted((out / "weights").iterdir()), out / "journal.jsonl"]
        return [sha256(file.read_bytes()).hexdigest() for file in files]

    whole = checksums(run("whole", stop_at=99))
    run("halves", stop_at=5)
    assert checksums(run("halves", stop_at=99)) == whole
    assert winograd.grad_input_transform in launched
