"""What a recipe asks of the device, and what it is told where the device has something else."""

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from codistill.data.images import Images
from codistill.engine import runtime
from codistill.engine.evaluate import evaluate
from codistill.engine.fast.compiler import prepare_compiler
from codistill.engine.runtime import Machine, prepare, prepared
from codistill.recipes.sections import Runtime


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


H100, A100, T4 = (9, 0), (8, 0), (7, 5)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Resolve settings on a device that may not be here, without touching torch's switches for it."""

    def resolve(device: str, capability: tuple[int, int] | None, *, triton: bool = True, **asked: Any) -> Machine:
        monkeypatch.setattr(runtime, "_device", lambda asked: torch.device(device))
        monkeypatch.setattr(runtime, "cuda_capability", lambda: capability)
        monkeypatch.setattr(runtime, "has_triton", lambda: triton)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA TEST")
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        sharded = asked.pop("sharded", False)
        return prepare(Runtime(**asked), sharded=sharded)

    return resolve


@pytest.mark.parametrize(
    ("device", "capability", "triton", "precision", "kernels", "winograd"),
    [
        ("cuda", H100, True, "bf16", "triton", "auto"),
        ("cuda", A100, True, "bf16", "triton", "auto"),
        ("cuda", H100, False, "bf16", "torch", "off"),
        ("cuda", T4, True, "fp32", "torch", "off"),
        ("cuda", None, True, "fp32", "torch", "off"),  # AMD's
        ("mps", None, True, "fp32", "torch", "off"),
        ("cpu", None, True, "fp32", "torch", "off"),
        ("cpu", H100, True, "fp32", "torch", "off"),  # runtime.device=cpu beside a GPU
    ],
)
def test_what_auto_chooses(
    on: Callable[..., Machine],
    device: str,
    capability: tuple[int, int] | None,
    triton: bool,
    precision: str,
    kernels: str,
    winograd: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    machine = on(device, capability, triton=triton)
    assert (machine.precision, machine.kernels, machine.winograd) == (precision, kernels, winograd)
    said = [message for message in caplog.messages if "chosen for NVIDIA TEST" in message]
    assert len(said) == (precision == "bf16")
    assert all(("runtime.kernels" in message) == (kernels == "triton") for message in said)


def test_what_is_asked_for_is_not_chosen(on: Callable[..., Machine], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for precision in ("fp32", "tf32", "bf16"):
        for kernels in ("torch", "inductor", "triton"):
            machine = on("cuda", H100, precision=precision, kernels=kernels)
            assert (machine.precision, machine.kernels) == (precision, kernels)
    assert on("cuda", T4, kernels="triton").kernels == "triton"
    assert [on("cuda", H100, winograd=word).winograd for word in ("auto", "on", "off")] == ["auto", "on", "off"]
    assert on("cuda", H100, precision="bf16", kernels="triton").words == ["bf16", "Triton kernels"]
    caplog.clear()
    on("cuda", H100, precision="bf16", kernels="torch")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("device", "capability", "triton", "lacking"),
    [
        ("cpu", None, True, "an NVIDIA GPU"),
        ("mps", None, True, "an NVIDIA GPU"),
        ("cuda", None, True, "an NVIDIA GPU"),
        ("cuda", H100, False, "the package triton"),
        ("cpu", None, False, "an NVIDIA GPU.* and the package triton"),
    ],
)
def test_triton_that_cannot_run_is_refused_with_what_to_type(
    on: Callable[..., Machine], device: str, capability: tuple[int, int] | None, triton: bool, lacking: str
) -> None:
    with pytest.raises(ValueError, match=f"runtime.kernels=triton needs {lacking}.*Type runtime.kernels=auto"):
        on(device, capability, triton=triton, kernels="triton")


def test_what_needs_torch_gets_it_from_auto(on: Callable[..., Machine]) -> None:
    assert on("cuda", H100, activation_checkpointing=True).kernels == "torch"
    assert on("cuda", H100, sharded=True).kernels == "torch"


def test_winograd_without_its_kernels_has_no_effect_and_says_so(
    on: Callable[..., Machine], caplog: pytest.LogCaptureFixture
) -> None:
    assert on("cpu", None, winograd="on").winograd == "off"
    assert caplog.messages == ["runtime.winograd=on has no effect here: runtime.kernels=auto is torch"]


def test_the_capability_is_that_of_an_nvidia_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert runtime.cuda_capability() == (9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert runtime.cuda_capability() is None
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.cuda_capability() is None
