"""What ranks send each other: predictions and no more, and errors that name the missing rank."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from codistill.data.images import ImageData
from codistill.distributed import group
from codistill.recipes.schema import Recipe
from support.ranks import end_oddly, ranks_of, recipe_of, together, wait_for, written_bytes

BATCH, CLASSES, EXCHANGES = 128, 100, 50


def count_bytes(world: Any, recipe: Recipe, split: str, notes: Path) -> None:
    from codistill.distributed.layout import Layout, Split
    from codistill.distributed.mesh import MeshPeers

    mesh = MeshPeers(world, Layout(Split.parse(split, recipe)), recipe)
    names = [f"{name}/{exit}" for name in recipe.networks for exit in ("final", "stage1", "stage2")]
    logits_by_name = {name: torch.full((BATCH, CLASSES), float(index)) for index, name in enumerate(names)}
    mine = {name: logits for name, logits in logits_by_name.items() if mesh.holds(name.split("/")[0])}
    mine = {name: logits.bfloat16().requires_grad_() for name, logits in mine.items()}
    before = written_bytes()
    for _ in range(EXCHANGES):
        known = mesh.exchange(mine, names)
    by_kernel = (written_bytes() - before) / EXCHANGES
    assert list(known) == names
    assert all(torch.equal(known[name].float(), logits_by_name[name]) for name in names)
    assert [name for name in names if known[name].requires_grad] == list(mine)
    sent = {"counted": world.traffic.bytes_sent / EXCHANGES, "by_kernel": by_kernel}
    (notes / f"{world.rank}.json").write_text(json.dumps(sent))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts a process's bytes")
def test_predictions_are_all_that_moves(tmp_path: Path) -> None:
    """(R - 1) · M_r · B · C float32 from each rank r with M_r classifiers; gloo adds a few bytes to each message."""
    assert together(3, count_bytes, recipe_of(4), "a+c,b,d", tmp_path) == [0, 0, 0]
    for rank, classifiers in enumerate([6, 3, 3]):
        sent = json.loads((tmp_path / f"{rank}.json").read_text())
        formula = 2 * classifiers * BATCH * CLASSES * 4
        assert sent["counted"] == formula
        assert formula <= sent["by_kernel"] <= 1.01 * formula + 1000


def relabelled(data: ImageData, recipe: Recipe) -> ImageData:
    """Returns the same images with every label changed, prepared by the recipe."""
    from codistill.engine.checks import prepare_own_images

    labels = (data.train.labels + 1) % data.num_classes
    return prepare_own_images(replace(data, train=data.train.with_labels(labels)), recipe)


def disagree(world: Any, notes: Path) -> None:
    """In each case the last rank is started with something else; all must raise the same, and none may wait."""
    from codistill.data import embedded
    from codistill.distributed import trainer
    from codistill.distributed.layout import LayoutRequest
    from codistill.engine.checks import prepare_own_images

    odd = world.rank == world.size - 1
    recipe, data, said = recipe_of(2, data={"name": "fashion", "train_limit": 64}), embedded.read(), []
    cases: list[tuple[Any, ...]] = [
        (recipe.replace(seed=4, batch_size=16) if odd else recipe, data, LayoutRequest()),
        (recipe, relabelled(data, recipe) if odd else prepare_own_images(data, recipe), LayoutRequest()),
        (recipe, data, LayoutRequest("b,a") if odd else LayoutRequest()),
        (recipe, data, LayoutRequest()),
    ]
    for case in cases:
        if case is cases[-1]:
            trainer.__version__ = "9.9" if odd else trainer.__version__  # type: ignore[attr-defined]
        with pytest.raises(trainer.RankMismatchError) as refused:
            trainer.check_agreement(world, *case)
        said.append(str(refused.value))
    (notes / f"{world.rank}.json").write_text(json.dumps(said))


def test_a_recipe_keeps_the_order_of_its_networks_on_the_way() -> None:
    """Otherwise a rank would take kd's student for the teacher."""
    networks = {"teacher": "wrn-10-1", "student": "resnet-8"}
    assert list(group._decode(group._encode(networks))) == ["teacher", "student"]


def test_ranks_of_different_trainings_all_raise_the_same(tmp_path: Path) -> None:
    assert together(3, disagree, tmp_path) == [0, 0, 0]
    said, *others = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert others == [said, said]
    differences = [
        "seed: 3 → 4",
        "data: other images or labels",
        "layout: split by FLOPs, shards by FLOPs → split b,a",
        "codistill: .* → 9.9",
    ]
    for message, difference in zip(said, differences, strict=True):
        assert message.startswith("rank 2 was started for another training than rank 0:\n  ")
        assert re.search(difference, message), message


@pytest.mark.parametrize(
    ("how", "timeout_s", "told"),
    [
        ("fails", 60, "LostPeerError: rank 2 (c) failed: my disk is full"),
        ("killed", 60, "LostPeerError: rank 2 (c) ended without a message: killed, or its host is down"),
        ("stopped", 8, "PeerTimeoutError: rank 2 (c) did not answer for 8 s: stopped, cut off or too slow"),
    ],
)
def test_a_missing_rank_is_named(how: str, timeout_s: float, told: str, tmp_path: Path) -> None:
    with ranks_of(3, timeout_s, end_oddly, how, recipe_of(3), tmp_path / "run", tmp_path) as processes:
        assert [wait_for(process) for process in processes[:2]] == [3, 3]
        if how == "stopped":
            assert processes[2].exitcode is None
    said = [(tmp_path / f"{rank}").read_text() for rank in (0, 1)]
    assert all(message.startswith(told) for message in said), said
    if how == "fails":
        assert (tmp_path / "2").read_text() == "ValueError: my disk is full"


def test_a_missing_rank_of_a_mesh_is_named(tmp_path: Path) -> None:
    """In a mesh of 2 × 2 every rank names it, also the one that does not communicate with it."""
    with ranks_of(4, 60, end_oddly, "killed", recipe_of(2), tmp_path / "run", tmp_path) as processes:
        assert [wait_for(process) for process in processes[:3]] == [3, 3, 3]
    said = [(tmp_path / f"{rank}").read_text() for rank in range(3)]
    told = "LostPeerError: rank 3 (b, shard 2 of 2) ended without a message: killed, or its host is down"
    assert all(message.startswith(told) for message in said), said
