"""Without a GPU too, the Triton kernels compute what torch computes in float64: in Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BESIDE = Path(sys.prefix) / "triton"
"""Where the Makefile installs Triton: torch for CPUs has none, and might take it for that of a GPU."""
FLOAT16 = 3e-3
"""Products of the Winograd convolution are in float16."""
TOLERANCE = {
    **dict.fromkeys(("wrn-10-1", "wrn-16-2", "resnet-8", "resnet-20", "densenet-10-12", "augmentation"), 1e-4),
    "winograd": FLOAT16,
}


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    if not BESIDE.exists() and importlib.util.find_spec("triton") is None:
        pytest.skip(f"no Triton here; type pip install --no-deps --target {BESIDE} triton==3.9.0")
    tests = Path(__file__).parents[1]
    search = os.pathsep.join([str(tests), str(BESIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-m", "support.interpreter"],
        env=os.environ | {"PYTHONPATH": search, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, float] = json.loads(run.stdout)
    assert found.keys() == TOLERANCE.keys()
    return found


@pytest.mark.slow(reason="an interpreter runs every kernel")
@pytest.mark.parametrize("name", TOLERANCE)
def test_in_tritons_interpreter(name: str, errors: dict[str, float]) -> None:
    assert errors[name] <= TOLERANCE[name]
