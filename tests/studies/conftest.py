"""A fixture for tests of the command, without waiting and data."""

import pytest

from codistill.cli import study
from codistill.studies import plan, runner
from support.synthetic import ENVIRONMENT


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often, require no data, and pretend to be the machine of the made-up results."""
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    monkeypatch.setattr(study, "require_data", lambda runs: None)
    monkeypatch.setattr(plan, "describe", lambda: ENVIRONMENT)
