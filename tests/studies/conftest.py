"""What tests of the command itself do without."""

import pytest
from synthetic import ENVIRONMENT

from codistill.cli import study
from codistill.studies import plan, runner


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, ask for no data, and take this machine for that of the made-up results, of a GFLOP/s, unmeasured."""
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    monkeypatch.setattr(study, "require_data", lambda runs: None)
    monkeypatch.setattr(plan, "describe", lambda: ENVIRONMENT)
    monkeypatch.setattr(plan, "measured_flops_per_s", lambda recipe, seen: 1e9)
