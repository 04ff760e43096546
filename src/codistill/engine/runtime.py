"""Where and how a training is computed: device, precision, threads, determinism."""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from codistill.recipes.schema import Runtime


@dataclass(frozen=True)
class Machine:
    """The device a run uses and the way it computes there."""

    device: torch.device
    bf16: bool

    def autocast(self) -> AbstractContextManager[object]:
        """What networks run under; weights, objective and optimizer stay in float32."""
        if not self.bf16:
            return nullcontext()
        # A cached cast would outlive the captured graph that made it, so the cache is off.
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False)

    @property
    def memory_format(self) -> torch.memory_format:
        # Faster on a CPU too: 0.26 instead of 0.34 s for a step of quickstart with DCM on one core.
        return torch.contiguous_format if self.device.type == "mps" else torch.channels_last


def prepare(runtime: Runtime) -> Machine:
    """Set torch's global switches as the recipe asks, and say where to compute."""
    device = _device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    if runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(runtime.deterministic)
    torch.backends.cudnn.benchmark = device.type == "cuda" and not runtime.deterministic
    return Machine(device, bf16=runtime.precision == "bf16")


def _device(asked: str) -> torch.device:
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if asked == "auto":
        return torch.device(next(kind for kind, there in present.items() if there))
    if not present[asked]:
        have = ", ".join(kind for kind, there in present.items() if there)
        raise ValueError(f"runtime.device={asked}: this machine has none; it has {have}. Type runtime.device=auto")
    return torch.device(asked)
