"""Three tiny runs, made once: a finished one, an interrupted one, and one that ships its moving average."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from codistill.data import embedded
from codistill.data.augmentation import normalise
from codistill.export.export import Exported, export_network
from codistill.export.formats import FORMATS
from codistill.recipes.sections import Length
from support.runs import train
from support.tiny import tiny_recipe

Folders = pytest.TempPathFactory


@pytest.fixture(scope="session")
def finished(tmp_path_factory: Folders) -> Path:
    recipe = tiny_recipe(ema=0.0, length=Length(epochs=1).model_dump())
    return train(recipe, tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: Folders) -> Path:
    """Stopped in its second epoch, after one of its three steps."""
    return train(tiny_recipe(ema=0.0), tmp_path_factory.mktemp("interrupted") / "run", steps=4)


@pytest.fixture(scope="session")
def averaged(tmp_path_factory: Folders) -> Path:
    return train(tiny_recipe(length=Length(epochs=1).model_dump()), tmp_path_factory.mktemp("averaged") / "run")


@pytest.fixture(scope="session")
def exported(finished: Path, tmp_path_factory: Folders) -> dict[str, Exported]:
    """Network a of the finished run in every format."""
    folder = tmp_path_factory.mktemp("exported")
    return {name: export_network(finished, "a", name, folder / name) for name in FORMATS}


@pytest.fixture(scope="session")
def thousand() -> Tensor:
    """1,000 real images, as the networks take them."""
    images = normalise(embedded.read().test.pixels[:1000], torch.tensor(embedded.MEAN), torch.tensor(embedded.STD))
    assert images.shape == (1000, 1, 28, 28)
    return images


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "copied")
