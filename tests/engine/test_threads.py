"""Networks on threads of their own learn what they learn one after the other, to the bit."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from codistill import Cohort
from codistill.engine.folder import RunFolder
from codistill.engine.trainer import train
from codistill.networks.steady import is_steady
from tiny import tiny_recipe

STEADY_PAIR = {"a": "wrn-10-1", "b": "resnet-8"}
WORDS = "networks on threads of their own"


def weights_and_path(out: Path, threads: int, **changes: object) -> tuple[dict[str, bytes], str]:
    recipe = tiny_recipe(runtime={"device": "cpu", "threads": threads}, **changes)
    for _ in train(recipe, out):
        pass
    weights = {file.name: file.read_bytes() for file in (out / "weights").iterdir()}
    return weights, RunFolder(out).read_result()["path"]


@pytest.mark.parametrize(
    "changes",
    [
        {"networks": STEADY_PAIR},
        {"networks": {**STEADY_PAIR, "c": "mobilenet"}, "length": {"epochs": 1}},
        {"networks": STEADY_PAIR, "accumulate": 2},
        {"networks": STEADY_PAIR, "method": "independent"},
    ],
    ids=["dcm", "three networks on two threads", "two batches an update", "independent"],
)
def test_the_same_bits_as_one_after_the_other(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one core for each and one for the objective: how many share a layer decides its last bits."""
    alone, one_path = weights_and_path(tmp_path / "one", threads=1, **changes)
    pool = ThreadPoolExecutor(2, "network", torch.set_num_threads, (1,))
    monkeypatch.setattr("codistill.engine.step.network_threads", lambda training: pool)
    beside, two_path = weights_and_path(tmp_path / "two", threads=1, **changes)
    assert WORDS not in one_path
    assert WORDS in two_path
    assert len(alone) == len(changes["networks"])  # type: ignore[arg-type]
    assert alone == beside


def test_two_cores_for_two_networks_and_torchs_threads_as_they_were(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    _, path = weights_and_path(tmp_path / "run", threads=2, networks=STEADY_PAIR, length={"epochs": 1})
    assert WORDS in path
    assert torch.get_num_threads() == before


def test_who_draws_random_numbers_waits_for_his_turn(tmp_path: Path) -> None:
    _, path = weights_and_path(tmp_path / "run", threads=2, length={"epochs": 1})  # with dropout
    assert WORDS not in path


class Unknown(nn.Module):
    """May draw whatever it likes."""


@pytest.mark.parametrize("module", [nn.Dropout(0.1), nn.RReLU(), Unknown()])
def test_only_what_is_known_to_be_steady_is(module: nn.Module) -> None:
    assert not is_steady(nn.Sequential(nn.ReLU(), module))


@pytest.mark.parametrize(
    "network", ["wrn-16-1", "resnet-8", "resnet-164", "densenet-40-12", "mobilenet", "mobilenetv2"]
)
def test_our_networks_are_steady(network: str) -> None:
    with torch.device("meta"):
        assert is_steady(Cohort({"a": network}, num_classes=10))
