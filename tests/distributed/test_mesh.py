"""Single steps of a mesh, against the same computed by hand in one process, in float64."""

import json
import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from codistill.data.batches import Share
from codistill.engine.peers import ALONE, Peers
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.step import Executor, Programs
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Constant, Sgd
from codistill.runs.weights import tensors_of_network
from support.mesh import mesh_of, take_steps, training_of
from support.ranks import together, written_bytes
from support.tiny import tiniest_recipe

BATCH, RATE, STEPS = 33, 0.05, 3
SHARES = [slice(0, 17), slice(17, 33)]


def plain_recipe(**changes: Any) -> Recipe:
    """Every update is w - RATE · gradient."""
    settings = {
        "networks": {"a": "wrn-10-1", "b": "resnet-8"},
        "batch_size": BATCH,
        "optimizer": Sgd(lr=RATE, weight_decay=0.0, momentum=0.0).model_dump(),
        "schedule": Constant().model_dump(),
        "ema": 0.0,
    }
    return tiniest_recipe(**{**settings, **changes})


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def contiguous(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in module.state_dict().items()}


def batches_of(training: Any) -> list[tuple[Tensor, Tensor]]:
    from codistill.engine.trainer import draw_epoch

    plan = draw_epoch(training, 0)
    return [training.augment(plan.step(index)) for index in range(len(plan))]


@torch.no_grad()
def descend(training: Any, gradients: Mapping[str, Tensor]) -> None:
    for name, parameter in training.cohort.named_parameters():
        parameter -= RATE * gradients[name]


def assert_same_weights(found: Mapping[str, Tensor], cohort: torch.nn.Module) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, cohort.state_dict()[name], rtol=1e-9, atol=1e-11, msg=name)
    assert len(found) > 50


def step_unsynced(world: Any, recipe: Recipe, notes: Path) -> None:
    training = training_of(recipe, mesh_of(world, recipe, "a+b", 2))
    take_steps(training, 1)
    save_file(contiguous(training.cohort), notes / f"{world.rank}.safetensors")


def test_without_synchronised_batch_norm_every_shard_normalises_itself(tmp_path: Path, float64: None) -> None:
    """Gradients are weighted by the shards' sizes, and so are running statistics, which are then equal on all ranks."""
    recipe = plain_recipe(processes={"sync_batchnorm": False})
    assert together(2, step_unsynced, recipe, tmp_path) == [0, 0]

    training = training_of(recipe)
    images, labels = batches_of(training)[0]
    cohorts = [deepcopy(training.cohort) for _ in SHARES]
    for cohort, share in zip(cohorts, SHARES, strict=True):
        loss = training.objective(cohort(images[share]), labels[share]).total
        (loss * len(labels[share]) / BATCH).backward()
    gradients = [{name: parameter.grad for name, parameter in cohort.named_parameters()} for cohort in cohorts]
    descend(training, {name: gradients[0][name] + gradients[1][name] for name in gradients[0]})
    for name, buffer in training.cohort.named_buffers():
        first, second = (cohort.get_buffer(name) for cohort in cohorts)
        buffer.copy_((17 * first + 16 * second) / BATCH)

    for rank in range(2):
        assert_same_weights(load_file(tmp_path / f"{rank}.safetensors"), training.cohort)


def step_with_a_nonfinite_shard(world: Any, recipe: Recipe, notes: Path) -> None:
    """On the second of three steps, a's logits of the second shard are not finite: only rank 1 sees it."""
    from codistill.distributed.mesh import checksum

    mesh = mesh_of(world, recipe, "a,b", 2)
    training = training_of(recipe, mesh)
    forward, taken = Executor.forward, iter(range(STEPS))

    def forward_nonfinite(executor: Executor, images: Tensor, at: Any) -> Mapping[str, Tensor]:
        factor = torch.nan if next(taken) == 1 and world.rank == 1 else 1.0
        return {name: logits * factor for name, logits in forward(executor, images, at).items()}

    Executor.forward = forward_nonfinite  # type: ignore[method-assign, assignment]
    before = written_bytes()
    take_steps(training, STEPS)
    (name,) = training.cohort.members
    parameters = sum(parameter.numel() for parameter in training.cohort.parameters())
    told = {
        "skipped": training.health.skipped(),
        "images": dict(zip(training.tally.terms, training.tally.sums[1].tolist(), strict=False)),
        "digest": checksum(tensors_of_network(name, training.tensors())),
        "written": (written_bytes() - before) / STEPS,
        "gradients": 2 * (2 - 1) / 2 * 8 * parameters,
    }
    (notes / f"{world.rank}.json").write_text(json.dumps(told))


def test_a_network_nonfinite_on_one_shard_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    """And ranks of a group have the same weights afterwards, to the last bit; gradients are most of the traffic."""
    recipe = plain_recipe(processes={"sync_batchnorm": False})
    assert together(4, step_with_a_nonfinite_shard, recipe, tmp_path) == [0] * 4
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [rank["skipped"] for rank in told] == [{"a": 1}, {"a": 1}, {"b": 0}, {"b": 0}]
    for rank in told:  # of 33, 33 and 4: in the second step a taught on no shard
        assert rank["images"]["a/final->b/final"] == 33 + 4
        assert rank["images"]["labels->a/final"] == 33 + 4
        assert rank["images"]["labels->b/final"] == 33 + 33 + 4
    assert told[0]["digest"] == told[1]["digest"]
    assert told[2]["digest"] == told[3]["digest"]
    if Path("/proc/self/io").exists():
        for rank in told:  # and statistics, predictions, flags and sums
            assert rank["gradients"] <= rank["written"] <= 1.2 * rank["gradients"]


def test_every_shard_has_its_own_dropout(float64: None) -> None:
    class Second(Peers):
        share = Share(1, 2)

    recipe = plain_recipe(networks={"a": "wrn-10-1-dropout-0.3", "b": "resnet-8"})
    at, images = TrainingSchedule.of(recipe, 70).context(Position()), torch.randn(4, 1, 28, 28)
    first, again, second = (logits_of(training_of(recipe, peers), images, at) for peers in (ALONE, ALONE, Second()))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert {name: torch.equal(first[name], second[name]) for name in first} == {
        name: name.startswith("b/") for name in first
    }
    assert len(first) == 6


def logits_of(training: Any, images: Tensor, at: Any) -> Mapping[str, Tensor]:
    return Executor(training, Programs(training, training.cohort).short).forward(images, at)


def refuse_everywhere(world: Any, notes: Path) -> None:
    """Every rank has a file of the same name, and only the last one's holds other weights."""
    from codistill.distributed.layout import LayoutRequest
    from codistill.distributed.trainer import train_rank

    recipe, said = plain_recipe(), []
    for request in (LayoutRequest(shards=2), LayoutRequest("a,b"), LayoutRequest(shards=1), LayoutRequest("a+b", 2)):
        with pytest.raises(ValueError) as refused:
            train_rank(recipe, notes / "run", world, request=request)
        said.append(str(refused.value))
    (notes / f"{world.rank}").mkdir()
    os.chdir(notes / f"{world.rank}")
    weights = contiguous(training_of(recipe).cohort.members["a"].backbone)
    last = world.rank == world.size - 1
    save_file({name: x + 1 if last and "running_mean" in name else x for name, x in weights.items()}, "a.safetensors")
    with pytest.raises(ValueError) as refused:
        train_rank(recipe.replace(start={"a": "a.safetensors"}), notes / "run", world)
    (notes / f"{world.rank}.json").write_text(json.dumps([*said, str(refused.value)]))


def test_every_rank_refuses_what_does_not_fit(tmp_path: Path) -> None:
    assert together(3, refuse_everywhere, tmp_path) == [0, 0, 0]
    said, *others = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert others == [said, said]
    expected = [
        "3 processes cannot be divided into groups of 2",
        "split 'a,b' needs 2 processes or a multiple; there are 3",
        "3 processes for 2 networks that learn (a, b), with 1 per network; start at most 2",
        "split 'a+b' with 2 shards needs 2 processes; there are 3",
        "network 'a' does not begin with the same weights on ranks 0 and 2; give every host the same file of start.a",
    ]
    for message, beginning in zip(said, expected, strict=True):
        assert message.startswith(beginning), message
    assert not (tmp_path / "run").exists()
