"""Two ranks on one GPU, where NCCL refuses them: gloo over CUDA tensors, torch's own synchronised batch norm."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Data, Runtime
from support.processes import in_new_process
from support.ranks import together
from support.runs import train
from support.tiny import tiny_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def one_step() -> Recipe:
    """33 images: shares of 17 and 16."""
    return tiny_recipe(
        networks={"a": "wrn-10-1", "b": "resnet-8"},
        data=Data(name="fashion", train_limit=33, test_limit=51, wrong_labels=0.4).model_dump(),
        batch_size=33,
        length={"epochs": 1},
        checkpoints={"every_s": 1000.0},
        runtime=Runtime(
            device="cuda", precision="fp32", kernels="torch", capture=False, deterministic=True
        ).model_dump(),
    )


def train_on_gpu(world: object, recipe: Recipe, out: Path, shards: int) -> None:
    from codistill.distributed.group import ProcessGroup
    from codistill.distributed.layout import LayoutRequest
    from codistill.distributed.trainer import train_rank

    assert isinstance(world, ProcessGroup)
    train_rank(recipe, out, world, request=LayoutRequest(shards=shards))
    world.shutdown()


def tensors(out: Path) -> dict[str, Tensor]:
    return load_file(max((out / "checkpoints").iterdir()) / "tensors.safetensors")


@pytest.mark.parametrize(
    ("shards", "weights", "mesh", "close"),
    [
        (1, "replicated", "2 ranks: a | b", 1e-5),
        (2, "replicated", "2 ranks, 1 × 2: a, b", 5e-3),
        (2, "sharded", "2 ranks, 1 × 2: a, b, sharded weights", 5e-3),
    ],
)
def test_as_in_one_process(shards: int, weights: str, mesh: str, close: float, tmp_path: Path) -> None:
    """Weights in float32, where sums in another order are 1e-3 apart; statistics show what batch norm really saw."""
    recipe = one_step().replace(processes={"weights": weights})
    assert in_new_process(train, recipe, tmp_path / "alone") == 0
    assert together(2, train_on_gpu, recipe, tmp_path / "mesh", shards) == [0, 0]
    assert mesh in json.loads((tmp_path / "mesh" / "result.json").read_text())["path"]
    mine, theirs = tensors(tmp_path / "mesh"), tensors(tmp_path / "alone")
    assert mine.keys() == theirs.keys()
    names = [name for name in mine if not name.endswith("num_batches_tracked")]  # torch's counts, ours does not
    statistics = [name for name in names if "running_" in name]
    assert len(statistics) > 20
    for name in names:
        tolerance = 1e-5 if name in statistics else close
        torch.testing.assert_close(mine[name], theirs[name], rtol=tolerance, atol=tolerance, msg=name)
