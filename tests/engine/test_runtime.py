"""What a recipe asks of the device, and what it is told where the device has something else."""

import logging
import os

import pytest
import torch
from torch import Tensor

from codistill.data.images import Images
from codistill.engine.evaluate import evaluate
from codistill.engine.fast.compiler import prepare_compiler
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


def test_the_environment_and_the_compilers_limit_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR")
    limit = torch._dynamo.config.recompile_limit  # before the variables: importing the compiler sets one of them
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        with prepared(Runtime(device="cpu", deterministic=True)):
            prepare_compiler()
            prepare_compiler()  # by every training's step
            assert all(name in os.environ for name in names)
            assert torch._dynamo.config.recompile_limit > limit
        assert not [name for name in names if name in os.environ]
        assert torch._dynamo.config.recompile_limit == limit


def test_variables_that_the_user_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "here")
    with prepared(Runtime(device="cpu", deterministic=True)):
        prepare_compiler()
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["TORCHINDUCTOR_CACHE_DIR"]) == (":16:8", "here")


def test_determinism_that_only_warns_is_put_back() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with prepared(Runtime(device="cpu", deterministic=True)):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_random_states_of_gpus_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only the CPU computes: torch.manual_seed, which keys dropout, reseeds every GPU."""
    states = [torch.tensor([1]), torch.tensor([2])]
    put_back: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put_back.append)
    with prepared(Runtime(device="cpu")):
        pass
    assert put_back == [states]


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
