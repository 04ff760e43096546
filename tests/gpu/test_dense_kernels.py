"""Dense layers that share one feature map compute what torch computes from concatenated ones, in float64."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from codistill.networks.densenet import DenseNet, DenseStage
from codistill.networks.tables import Row
from codistill.ops.dispatch import use_kernels
from codistill.ops.wgrad_stream import WeightGradientStreams, defer_weight_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 1e-3
"""Relative, in float32: one gradient of many thousands may stand on the other side of ReLU's corner."""


@pytest.fixture(autouse=True)
def whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not TF32, which is torch's default for convolutions."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(params=["the library's convolutions", "our convolutions"])
def convolutions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from codistill.ops import dense as dense_kernels  # needs Triton

    monkeypatch.setattr(dense_kernels, "NARROW_CHANNELS", 16 if request.param == "our convolutions" else 0)


def a_stage() -> DenseStage:
    """Two dense blocks with a transition between, channels that need padding and channels that need none."""
    torch.manual_seed(1)
    stage = DenseNet(depth=13, growth=12)._blocks(16, [Row(3, 12, stride=1), Row(2, 16)])
    for norm in stage.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight, 1.0)
            nn.init.normal_(norm.bias)
    return stage.to("cuda", memory_format=torch.channels_last)


def results(stage: DenseStage, x: Tensor, towards: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = stage(x)
    out.backward(towards)
    gradients = {name: weight.grad for name, weight in stage.named_parameters()}
    running = {name: value for name, value in stage.named_buffers() if "running" in name}
    assert len(gradients) == 3 * 5 + 3
    assert len(running) == 2 * 5 + 2
    return {"out": out.detach(), "x": x.grad, **gradients, **running}


def distance(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest relative one."""
    assert found.keys() == truth.keys()
    return max(float(torch.dist(found[name].double(), truth[name]) / truth[name].norm()) for name in truth)


def data(side: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 16, side, side, generator=generator) * 1.5 + 2
    towards = torch.randn(8, 16 + 3 * 12 + 2 * 16, side // 2, side // 2, generator=generator)
    return tuple(one.to("cuda", memory_format=torch.channels_last) for one in (x, towards))  # type: ignore[return-value]


@pytest.mark.usefixtures("convolutions")
@pytest.mark.parametrize("side", [32, 6])
@pytest.mark.parametrize("deferred", [False, True])
def test_in_float32(side: int, deferred: bool) -> None:
    x, towards = data(side)
    stage = a_stage()
    truth = results(copy.deepcopy(stage).double(), x.double(), towards.double())
    streams = WeightGradientStreams() if deferred else None
    with use_kernels(), defer_weight_gradients(streams):
        found = results(stage, x, towards)
    if streams:
        streams.join()
    torch.cuda.synchronize()
    assert distance(found, truth) < TOLERANCE


@pytest.mark.usefixtures("convolutions")
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_bfloat16_is_as_near_as_torchs(weights: torch.dtype) -> None:
    """With weights that a recorded step has, and with a plain step's, which autocast lowers."""
    x, towards = (one.bfloat16() for one in data(32))
    low = a_stage()
    for conv in low.modules():
        if isinstance(conv, nn.Conv2d):
            conv.to(weights)
    truth = results(copy.deepcopy(low).double(), x.double(), towards.double())
    far = {}
    for name, kernels in {"ours": use_kernels(), "torch's": nullcontext()}.items():
        with kernels, torch.autocast("cuda", torch.bfloat16):
            far[name] = distance(results(copy.deepcopy(low), x, towards), truth)
    assert far["ours"] < 1.5 * far["torch's"]


@pytest.mark.usefixtures("convolutions")
def test_the_same_bits_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # its gradients of weights are not otherwise
    x, towards = data(32)
    with use_kernels():
        first, *others = (results(a_stage(), x, towards) for _ in range(5))
    assert len(others) == 4
    assert not [name for other in others for name in first if not torch.equal(first[name], other[name])]
