"""Device, precision, kernels, threads and determinism of a training: what the recipe asks for, resolved here."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from codistill.engine.fast.compiler import CACHE, restore_limit
from codistill.log import log
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Runtime

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
AMPERE = (8, 0)
"""Compute capability of the first NVIDIA GPUs with bfloat16 in hardware."""
KERNELS = {"torch": "torch kernels", "inductor": "torch.compile", "triton": "Triton kernels"}


@dataclass(frozen=True)
class Machine:
    """The device, precision and kernels that a run computes with; nothing here is ``auto`` but ``winograd``."""

    device: torch.device
    precision: str
    """``fp32``, ``tf32`` or ``bf16``."""
    kernels: str
    """``torch``, ``inductor`` or ``triton``."""
    winograd: str
    """``auto``, ``on`` or ``off``; always ``off`` without the Triton kernels."""

    @property
    def words(self) -> list[str]:
        """Precision and kernels for the log, as in ``["bf16", "Triton kernels"]``."""
        return [self.precision, KERNELS[self.kernels]]

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which networks run; weights, objective and optimizer stay in float32."""
        if self.precision != "bf16":
            return nullcontext()
        # A cached cast would outlive the captured graph that made it, so the cache is off.
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False)

    @property
    def memory_format(self) -> torch.memory_format:
        # Channels last is faster on a CPU too: 0.26 instead of 0.34 s for a step of quickstart with DCM on one core.
        return torch.contiguous_format if self.device.type == "mps" else torch.channels_last

    def captures(self, recipe: Recipe) -> bool:
        """Whether the step is captured as one CUDA graph; see ``capture_obstacles``."""
        return self.device.type == "cuda" and recipe.runtime.capture and not capture_obstacles(recipe)


def capture_obstacles(recipe: Recipe) -> list[str]:
    """The settings of a recipe with which its step cannot be captured."""
    accumulates = [f"accumulate={recipe.accumulate}"] if recipe.accumulate > 1 else []
    return accumulates + (["runtime.activation_checkpointing=true"] if recipe.runtime.activation_checkpointing else [])


def prepare(runtime: Runtime, *, sharded: bool = False) -> Machine:
    """Set torch's global switches as the recipe asks, and return the resolved device, precision and kernels.

    ``sharded``: weights are split over processes, for which ``kernels=auto`` is torch.
    """
    device = _device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    if runtime.deterministic:
        os.environ.setdefault(WORKSPACE, ":4096:8")
    _set_deterministic(runtime.deterministic)
    torch.backends.cudnn.benchmark = device.type == "cuda" and not runtime.deterministic
    torch.backends.cudnn.benchmark_limit = 0  # try every algorithm, not the ten that are guessed to be best
    precision = _precision(runtime.precision, device.type)
    # Torch's default is TF32 for convolutions, and the calling program may have enabled it elsewhere; fp32 means fp32.
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    kernels = _kernels(runtime, device.type, sharded=sharded)
    machine = Machine(device, precision, kernels, runtime.winograd if kernels == "triton" else "off")
    _log_choice(runtime, machine)
    return machine


@contextmanager
def prepared(runtime: Runtime, *, sharded: bool = False) -> Iterator[Machine]:
    """``prepare`` as a context manager that restores torch's settings, random states and environment variables.

    If CUDA was not initialised before the block, its random state is restored only if the block computes there.
    """
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    determinism = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, benchmark_limit, tf32 = cudnn.benchmark, cudnn.benchmark_limit, cudnn.allow_tf32
    matmul_precision = torch.get_float32_matmul_precision()
    random_state = torch.get_rng_state()
    variables = {name: os.environ.get(name) for name in (WORKSPACE, CACHE)}
    cuda_states: list[torch.Tensor] | None = None
    try:
        machine = prepare(runtime, sharded=sharded)
        if machine.device.type == "cuda" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            cuda_states = torch.cuda.get_rng_state_all()
        yield machine
    finally:
        torch.set_num_threads(threads)
        _set_deterministic(*determinism)
        cudnn.benchmark, cudnn.benchmark_limit, cudnn.allow_tf32 = benchmark, benchmark_limit, tf32
        torch.set_float32_matmul_precision(matmul_precision)
        torch.set_rng_state(random_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
        restore_limit()
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def without_trials() -> Iterator[None]:
    """Let cuDNN choose algorithms by its heuristics inside the block instead of timing all: for code that runs rarely.

    For shapes first seen inside the block it does not time any later.
    """
    cudnn = torch.backends.cudnn
    benchmark, cudnn.benchmark = cudnn.benchmark, False
    try:
        yield
    finally:
        cudnn.benchmark = benchmark


def cuda_capability() -> tuple[int, int] | None:
    """The compute capability of the NVIDIA GPU in use; None without one, and on AMD's, which torch calls cuda too."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


def has_triton() -> bool:
    return find_spec("triton") is not None


def is_since_ampere(device_type: str) -> bool:
    """Whether the device is an NVIDIA GPU with bfloat16 in hardware."""
    capability = cuda_capability() if device_type == "cuda" else None
    return capability is not None and capability >= AMPERE


def _kernels(runtime: Runtime, device_type: str, *, sharded: bool) -> str:
    """The effective kernels on this device; raises ValueError if it cannot run the Triton kernels asked for."""
    if runtime.kernels == "auto":
        only_torch = sharded or runtime.activation_checkpointing
        return "triton" if is_since_ampere(device_type) and has_triton() and not only_torch else "torch"
    if runtime.kernels == "triton":
        lacking = (
            [] if device_type == "cuda" and cuda_capability() else [f"an NVIDIA GPU, and this runs on {device_type}"]
        )
        lacking += [] if has_triton() else ["the package triton, which is not installed"]
        if lacking:
            raise ValueError(f"runtime.kernels=triton needs {' and '.join(lacking)}. Type runtime.kernels=auto")
    return runtime.kernels


def _log_choice(runtime: Runtime, machine: Machine) -> None:
    """Log what ``auto`` chose where that is not plain torch in float32."""
    chosen = {"runtime.precision": runtime.precision == "auto" and machine.precision != "fp32"}
    chosen["runtime.kernels"] = runtime.kernels == "auto" and machine.kernels != "torch"
    if any(chosen.values()):
        keys = [key for key, is_chosen in chosen.items() if is_chosen]
        words = " and ".join(word for word, is_chosen in zip(machine.words, chosen.values(), strict=True) if is_chosen)
        name = torch.cuda.get_device_name()
        log.info("%s: chosen for %s; set %s to change it", words, name, " and ".join(keys))
    if runtime.winograd == "on" and machine.kernels != "triton":
        log.warning("runtime.winograd=on has no effect here: runtime.kernels=auto is %s", machine.kernels)


def _precision(asked: str, device_type: str) -> str:
    """The effective precision on this device; warns when it is emulated or unavailable."""
    if asked == "auto":
        return "bf16" if is_since_ampere(device_type) else "fp32"
    if asked == "tf32" and device_type != "cuda":
        log.warning("runtime.precision=tf32 is for NVIDIA's GPUs: on %s it is fp32", device_type)
        return "fp32"
    has: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every torch
    emulates = has.get("architecture") == "x86_64" and not (has.get("avx512_bf16") or has.get("amx_bf16"))
    if asked == "bf16" and device_type == "cpu" and emulates:
        log.warning("this processor has no bfloat16 and emulates it: runtime.precision=fp32 is faster here")
    return asked


def _set_deterministic(wanted: bool, warn_only: bool = False) -> None:
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (wanted, warn_only):  # the call itself imports the compiler: seconds
        torch.use_deterministic_algorithms(wanted, warn_only=warn_only)


def _device(asked: str) -> torch.device:
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if asked == "auto":
        return torch.device(next(kind for kind, there in present.items() if there))
    if not present[asked]:
        have = ", ".join(kind for kind, there in present.items() if there)
        raise ValueError(f"runtime.device={asked}: this machine has none; it has {have}. Type runtime.device=auto")
    return torch.device(asked)
