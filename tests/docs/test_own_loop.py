"""docs/own-loop.md: the plain loop is run by tests/test_readme.py, the frameworks' here where they are installed."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from codistill import Cohort
from support.site import ROOT

BLOCKS = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / "own-loop.md").read_text(), re.MULTILINE | re.DOTALL)
LIGHTNING, ACCELERATE = BLOCKS


def defined(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "documentation"}
    exec(compile(block, "own-loop.md", "exec"), names)
    return names


@pytest.fixture
def loader() -> DataLoader[Any]:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(8, 3, 32, 32), torch.randint(10, (8,))), batch_size=4)


def check_learned(network: nn.Module) -> None:
    """It is the plain network ``a``, and its weights are no longer those that it began with."""
    began = Cohort({"a": "wrn-10-1", "b": "resnet-20"}, num_classes=10).strip("a")
    assert list(network.state_dict()) == list(began.state_dict())
    ended = dict(network.named_parameters())
    assert len(ended) > 20
    assert [name for name, weight in began.named_parameters() if torch.equal(weight, ended[name])] == []


@pytest.mark.filterwarnings("default")
def test_lightning(loader: DataLoader[Any], tmp_path: Path) -> None:
    if find_spec("lightning") is None:
        pytest.skip("no Lightning here; type pip install lightning")
    from support import zoo  # noqa: F401  Lightning imports torchvision where there is one

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    network = defined(LIGHTNING)["fit"](
        loader, max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, enable_checkpointing=False, **quiet
    )
    check_learned(network)


@pytest.mark.filterwarnings("default")
def test_accelerate(loader: DataLoader[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="no Accelerate here; type pip install accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    check_learned(defined(ACCELERATE)["fit"](loader, epochs=1))
