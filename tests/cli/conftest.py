"""One tiny finished run, and an empty folder to call commands in."""

from pathlib import Path
from typing import Any

import pytest

from support.cli import TINY, Codistill, call


@pytest.fixture
def codistill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Codistill:
    """``codistill("list", "data")`` in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    return call


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ``codistill train`` printed, with ``folder`` the run's folder."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    result = call("train", *TINY, "length.epochs=2", "seed=3", "--out", folder)
    result.folder = folder
    return result
