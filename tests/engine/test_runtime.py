"""What a recipe asks of the device, and what it is told where the device has something else."""

import logging

import pytest
import torch
from torch import Tensor

from codistill.data.images import Images
from codistill.engine.evaluate import evaluate
from codistill.engine.runtime import prepared
from codistill.recipes.schema import Runtime


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("codistill"), "propagate", True)


def test_tf32_on_a_cpu_is_fp32_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with prepared(Runtime(device="cpu", precision="tf32")) as machine:
        assert machine.precision == "fp32"
        assert torch.get_float32_matmul_precision() == "highest"
    assert caplog.messages == ["runtime.precision=tf32 is for NVIDIA's GPUs: on cpu it is fp32"]


@pytest.mark.parametrize(
    ("processor", "warnings"),
    [
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, 0),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, 0),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, 1),
        ({"architecture": "aarch64"}, 0),
    ],
)
def test_bfloat16_that_is_emulated_is_said(
    processor: dict[str, object],
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor, raising=False)
    with prepared(Runtime(device="cpu", precision="bf16")) as machine:
        assert machine.precision == "bf16"
    assert sum("emulates" in message for message in caplog.messages) == len(caplog.messages) == warnings


def test_evaluations_do_not_try_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take seconds at every start, and could give other bits at every one."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    tried = []

    def classify(pixels: Tensor) -> dict[str, Tensor]:
        tried.append(torch.backends.cudnn.benchmark)
        return {"a/final": torch.zeros(len(pixels), 10)}

    evaluate(classify, Images(torch.zeros(5, 1, 2, 2, dtype=torch.uint8), torch.arange(5)), batch_size=2)
    assert tried == [False, False, False]
    assert torch.backends.cudnn.benchmark is True
