"""A fixture for tests of the command, without waiting, data and measurements."""

import pytest

from codistill.cli import study
from codistill.studies import plan, runner
from support.synthetic import ENVIRONMENT


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often, require no data, and pretend to be the machine of the made-up results, at 1 GFLOP/s."""
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    monkeypatch.setattr(study, "require_data", lambda runs: None)
    monkeypatch.setattr(plan, "describe", lambda: ENVIRONMENT)
    monkeypatch.setattr(plan, "measured_flops_per_s", lambda recipe, seen: 1e9)
