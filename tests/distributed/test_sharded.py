"""Sharded weights: the same training as with replicated ones, in a fraction of the memory."""

import gc
import json
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from codistill.cohort import Cohort
from codistill.distributed.sharded import ShardedParams, shard_units, submodules
from codistill.recipes import RecipeError
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Evaluation
from codistill.runs.weights import tensors_of_network
from support.mesh import (
    assert_close,
    assert_same_story,
    mesh_of,
    shared_recipe,
    take_steps,
    tensors,
    train_alone,
    train_meshed,
    trained_alone,
    training_of,
)
from support.processes import in_new_process
from support.ranks import end_oddly, ranks_of, recipe_of, together, wait_for, written_bytes
from support.runs import checksums
from support.tiny import tiny_recipe

FOREIGN = {"a": "timm:resnet10t", "b": "timm:vit_tiny_patch16_224:img_size=14,patch_size=7"}
VARIANTS = ("dcm", "adamw, clipped", "mixup, accumulated")


def sharded_recipe(variant: str = "dcm", **changes: Any) -> Recipe:
    """Evaluated in batches of 25, which of 51 images are two for the first share of two and one for the second."""
    evaluation = Evaluation(all_every_epochs=2, batch_size=25).model_dump()
    return shared_recipe(variant, **{"processes": {"weights": "sharded"}, "evaluation": evaluation, **changes})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return trained_alone({variant: sharded_recipe(variant) for variant in VARIANTS}, tmp_path_factory)


@pytest.mark.parametrize(
    ("variant", "ranks", "shards", "mesh"),
    [
        ("dcm", 4, 2, "4 ranks, 2 × 2: a | b, sharded weights"),
        ("dcm", 3, 3, "3 ranks, 1 × 3: a, b, sharded weights"),
        ("mixup, accumulated", 2, 2, "2 ranks, 1 × 2: a, b, sharded weights"),
        ("adamw, clipped", 2, 2, "2 ranks, 1 × 2: a, b, sharded weights"),
    ],
)
def test_as_in_one_process(
    variant: str, ranks: int, shards: int, mesh: str, alone: Mapping[str, Path], tmp_path: Path
) -> None:
    """Weights, momentum and averages, within 1e-8 in float64, with shares of unequal size and an empty one."""
    out = tmp_path / "run"
    assert together(ranks, train_meshed, sharded_recipe(variant), out, shards) == [0] * ranks
    assert_close(out, alone[variant])
    assert_same_story(out, alone[variant])
    result = json.loads((out / "result.json").read_text())
    assert mesh in result["path"]
    for facts in result["processes"]["traffic_by_rank"]:
        assert facts["updates_with_sharers"] == 2 * (2 if variant == "mixup, accumulated" else 3)
        assert facts["gradient_bytes_added_up"] > 0
        assert facts["exposed_for_gradients_s"] > 0


def test_continued_under_any_layout(alone: Mapping[str, Path], tmp_path: Path) -> None:
    """One step sharded, two in one process, one along the cohort, the last two sharded in a mesh."""
    recipe, out = sharded_recipe(), tmp_path / "run"
    assert together(2, train_meshed, recipe, out, 2, 1) == [0, 0]
    assert in_new_process(train_alone, recipe, out, 2) == 0
    assert together(2, train_meshed, recipe, out, 1, 1) == [0, 0]
    assert together(4, train_meshed, recipe, out, 2) == [0] * 4
    assert_close(out, alone["dcm"])
    assert_same_story(out, alone["dcm"])


def test_stopped_and_continued_as_if_never_stopped(tmp_path: Path) -> None:
    """Bit for bit in the same layout, with dropout too; stopped after the fourth of six steps."""
    recipe = sharded_recipe(networks={"a": "wrn-10-1-dropout-0.3", "b": "resnet-8"})
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert together(2, train_meshed, recipe, whole, 2) == [0, 0]
    assert together(2, train_meshed, recipe, broken, 2, 4) == [0, 0]
    assert not (broken / "result.json").exists()
    assert together(2, train_meshed, recipe, broken, 2) == [0, 0]
    assert checksums(broken) == checksums(whole)
    assert all(torch.equal(tensor, tensors(whole)[name]) for name, tensor in tensors(broken).items())


def nonfinite_logits(mesh: Any, training: Any) -> None:
    """On the second step, a's logits of the second shard are not finite: only that rank sees it."""
    taken = iter(range(1, 100))

    def spoil(member: Any, images: Any, logits: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        factor = torch.nan if (next(taken), mesh.share.index) == (2, 1) else 1.0
        return {exit_name: tensor * factor for exit_name, tensor in logits.items()}

    training.cohort.members["a"].register_forward_hook(spoil)


def nonfinite_gradient(mesh: Any, training: Any) -> None:
    """On the second step one number of a's gradient is infinite, in a shard that only the second rank holds."""
    reduce_gradients, taken = mesh.reduce_gradients, iter(range(1, 100))

    @contextmanager
    def reduce_nonfinite(*about: Any) -> Any:
        with reduce_gradients(*about):
            yield
        if next(taken) == 2 and (mesh.sharded is None or mesh.share.index == 1):
            (weight,) = (
                mesh.local(p)
                for name, p in training.cohort.named_parameters()
                if name.endswith("a.backbone.stages.stem.weight")
            )
            weight.grad.view(-1)[-1] = torch.inf

    mesh.reduce_gradients = reduce_nonfinite


def finely_sharded(mesh: Any, training: Any) -> None:
    """Shards every block by itself, as in large networks."""


def train_some(world: Any, recipe: Recipe, split: str, harm: Any, notes: Path) -> None:
    from codistill.distributed import sharded

    if any(name.startswith("timm:") for name in recipe.networks.values()):
        from support import zoo  # noqa: F401
    if harm is finely_sharded:
        sharded.BUCKET_BYTES = 0  # type: ignore[attr-defined]
    mesh = mesh_of(world, recipe, split, 2)
    training = training_of(recipe, mesh)
    if harm:
        harm(mesh, training)
    take_steps(training, 3)
    by_rank = world.all_gather(training.health.skipped())
    skipped = {name: count for counts in by_rank for name, count in counts.items()}
    whole = mesh.gather_tensors(training.tensors())
    if world.is_root:
        save_file(
            {name: x.contiguous() for name, x in whole.items()}, notes / f"{recipe.processes.weights}.safetensors"
        )
        (notes / f"{recipe.processes.weights}.json").write_text(json.dumps(skipped))


@pytest.mark.parametrize(
    ("split", "changes", "harm", "skipped"),
    [
        ("a+b", {"networks": {"a": "densenet-10-4", "b": "wrn-16-1"}}, finely_sharded, {"a": 0, "b": 0}),
        ("a+b", {"networks": FOREIGN}, finely_sharded, {"a": 0, "b": 0}),
        ("a+b", {"processes": {"sync_batchnorm": False}}, None, {"a": 0, "b": 0}),
        ("a+b", {"runtime": {"activation_checkpointing": True, "device": "cpu", "threads": 1}}, None, {"a": 0, "b": 0}),
        ("a+b", {}, nonfinite_logits, {"a": 1, "b": 0}),
        ("a+b", {"processes": {"sync_batchnorm": False}}, nonfinite_gradient, {"a": 1, "b": 0}),
    ],
)
def test_as_with_replicated_weights(
    split: str, changes: dict[str, Any], harm: Any, skipped: dict[str, int], tmp_path: Path
) -> None:
    """Three steps of the same mesh."""
    assert_equal_steps(split, changes, harm, skipped, tmp_path)


def assert_equal_steps(split: str, changes: dict[str, Any], harm: Any, skipped: dict[str, int], tmp_path: Path) -> None:
    ranks = 2 * len(split.split(","))
    for weights in ("replicated", "sharded"):
        settings = {**changes, "processes": {**changes.get("processes", {}), "weights": weights}}
        assert together(ranks, train_some, shared_recipe(**settings), split, harm, tmp_path) == [0] * ranks
        assert json.loads((tmp_path / f"{weights}.json").read_text()) == skipped
    expected, found = (load_file(tmp_path / f"{weights}.safetensors") for weights in ("replicated", "sharded"))
    assert found.keys() == expected.keys()
    assert len(found) > 100
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-8, atol=1e-8, msg=name)


def test_a_teacher_is_sharded_too(tmp_path: Path) -> None:
    teacher = Cohort({"a": "wrn-10-1"}, num_classes=10, in_channels=1).members["a"].backbone
    save_file({name: x.contiguous() for name, x in teacher.state_dict().items()}, tmp_path / "a.safetensors")
    changes = {"method": "kd", "start": {"a": str(tmp_path / "a.safetensors")}}
    assert_equal_steps("a+b", changes, None, {"a": 0, "b": 0}, tmp_path)


def corrupt_a_shard(world: Any, notes: Path) -> None:
    from codistill.engine.recovery import Recovery

    recipe = sharded_recipe()
    training = training_of(recipe, mesh_of(world, recipe, "a+b", 2))
    recovery = Recovery(training)
    before = {name: tensor.clone() for name, tensor in training.tensors().items()}
    take_steps(training, 1)
    moved = {name: tensor.clone() for name, tensor in tensors_of_network("b", training.tensors()).items()}
    if world.rank == 1:
        training.tensors()["cohort/members.a.backbone.stages.stem.weight"].view(-1)[0] = torch.nan
    recovery.end_epoch()
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in tensors_of_network("a", training.tensors()).items()
    )
    assert all(torch.equal(tensor, moved[name]) for name, tensor in tensors_of_network("b", training.tensors()).items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in moved.items())
    (notes / f"{world.rank}").touch()


def test_all_shards_roll_back_where_one_is_not_finite(tmp_path: Path) -> None:
    assert together(2, corrupt_a_shard, tmp_path) == [0, 0]
    assert len(list(tmp_path.iterdir())) == 2


def count_bytes(world: Any, recipe: Recipe, shards: int, notes: Path) -> None:
    """After a step: what a training's state takes here, and all floating-point memory that is alive."""
    training = training_of(recipe, mesh_of(world, recipe, "a", shards))
    take_steps(training, 1)
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive if x.is_floating_point()}
    kinds = {"weights": "cohort/", "momentum": "optimizer/", "average": "average/"}
    held = {
        kind: sum(
            x.nbytes for name, x in training.tensors().items() if name.startswith(prefix) and "running" not in name
        )
        for kind, prefix in kinds.items()
    }
    (notes / f"{recipe.processes.weights}-{world.rank}.json").write_text(
        json.dumps({**held, "alive": sum(storages.values())})
    )


def test_a_rank_holds_its_shard_of_weights_momentum_and_average(tmp_path: Path) -> None:
    """Each of three ranks holds a third of 2.7 million numbers each, and no full tensor stays alive."""
    for weights in ("replicated", "sharded"):
        recipe = tiny_recipe(
            networks={"a": "wrn-16-4"}, method="independent", batch_size=3, processes={"weights": weights}
        )
        assert together(3, count_bytes, recipe, 3, tmp_path) == [0, 0, 0]
    held = {file.stem: json.loads(file.read_text()) for file in tmp_path.iterdir()}
    assert len(held) == 6
    whole = {kind: held["replicated-0"][kind] for kind in ("weights", "momentum", "average")}
    assert min(whole.values()) > 8 * 2_700_000
    for rank in range(3):
        for kind, total in {**whole, "alive": sum(whole.values())}.items():
            assert 0.32 < held[f"sharded-{rank}"][kind] / total < 0.35, (rank, kind)


def count_traffic(world: Any, notes: Path) -> None:
    recipe = tiny_recipe(
        networks={"a": "wrn-10-1"},
        method="independent",
        data={"name": "fashion", "train_limit": 12, "test_limit": 10, "image_size": 14},
        batch_size=4,
        processes={"weights": "sharded", "sync_batchnorm": False},
    )
    training = training_of(recipe, mesh_of(world, recipe, "a", world.size))
    before = written_bytes()
    take_steps(training, 3)
    weights = sum(parameter.numel() for parameter in training.cohort.parameters())
    (notes / f"{world.rank}.json").write_text(json.dumps([written_bytes() - before, 8 * weights]))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts a process's bytes")
@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_move_twice_and_gradients_once(ranks: int, tmp_path: Path) -> None:
    """3 · (D - 1)/D of the weights' bytes from each of D, in every step; padding and small sums come on top."""
    assert together(ranks, count_traffic, tmp_path) == [0] * ranks
    for rank in range(ranks):
        written, weights = json.loads((tmp_path / f"{rank}.json").read_text())
        formula = 3 * 3 * (ranks - 1) / ranks * weights
        assert formula <= written <= 1.1 * formula


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    recipe = recipe_of(2, processes={"weights": "sharded"})
    with ranks_of(4, 60, end_oddly, "killed", recipe, tmp_path / "run", tmp_path) as processes:
        assert [wait_for(process) for process in processes[:3]] == [3, 3, 3]
    said = [(tmp_path / f"{rank}").read_text() for rank in range(3)]
    told = "LostPeerError: rank 3 (b, shard 2 of 2) ended without a message: killed, or its host is down"
    assert all(message.startswith(told) for message in said), said


@pytest.mark.parametrize(("network", "most"), [("wrn-28-10", 30e6), ("wrn-10-1", 4.2e6)])
def test_a_network_is_gathered_block_by_block(network: str, most: float) -> None:
    """Every weight belongs to one unit; of WRN-28-10's 146 MB, a block has up to 30."""
    with torch.device("meta"):
        (member,) = Cohort({"a": network}, num_classes=10).members.values()
    found = [unit for part in submodules(member.backbone) for unit in shard_units(part)]
    weights = [id(weight) for unit in found for weight in unit.parameters()]
    assert len(found) > 4
    assert len(weights) == len(set(weights))
    assert set(weights) == {id(weight) for weight in member.backbone.parameters()}
    assert max(sum(weight.nbytes for weight in unit.parameters()) for unit in found) < most


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            torch.zeros(()),
            "cohort/members.a.own is a scalar, which cannot be sharded; type processes.weights",
        ),
        (
            torch.zeros(3),
            "cohort/members.a.own is in none of the network's stages, heads or classifier; type processes",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(own: Tensor, message: str) -> None:
    network = torch.nn.Module()
    network.own = torch.nn.Parameter(own)
    with pytest.raises(ValueError, match=message):
        ShardedParams(None, None).shard(network, [], "cohort/members.a")  # type: ignore[arg-type]


def test_compiled_networks_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"processes.weights: sharded .*type runtime.kernels=torch"):
        sharded_recipe(runtime={"device": "cpu", "kernels": "inductor"})
