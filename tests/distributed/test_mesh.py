"""Single steps of a mesh, against the same computed by hand in one process, in float64."""

import json
import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import together
from safetensors.torch import load_file, save_file
from test_crew import written_bytes
from torch import Tensor

from codistill.data.batches import Share
from codistill.engine.fast.sections import as_it_is
from codistill.engine.parts import Functions, PlainWay
from codistill.engine.peers import ALONE, Alone
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.recipes.schema import Constant, Recipe, Sgd
from tiny import tiny_recipe

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
    return tiny_recipe(**{**settings, **changes})


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def training_of(recipe: Recipe, *peers: Any) -> Any:
    from codistill.data.load import load
    from codistill.engine.runtime import prepare
    from codistill.engine.state import prepare_training

    torch.set_default_dtype(torch.float64)
    return prepare_training(recipe, load(recipe.data, seed=recipe.seed), prepare(recipe.runtime), *peers)


def mesh_of(crew: Any, recipe: Recipe, split: str, shards: int) -> Any:
    from codistill.distributed.layout import Layout
    from codistill.distributed.mesh import Mesh
    from codistill.distributed.split import Split

    return Mesh(crew, Layout(Split.parse(split, recipe), shards), recipe)


def take_steps(training: Any, count: int) -> None:
    from codistill.engine.schedule import Position, TrainingSchedule
    from codistill.engine.step import choose_step
    from codistill.engine.trainer import draw_epoch

    step, plan = choose_step(training), draw_epoch(training, 0)
    timetable = TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))
    batches = [plan.step(index) for index in range(count)]
    for index, batch in enumerate(training.peers.following(batches, training.batch)):
        step(batch, timetable.context(Position(0, index)))


def contiguous(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in module.state_dict().items()}


def batches_of(training: Any) -> list[tuple[Tensor, Tensor]]:
    from codistill.engine.trainer import draw_epoch

    plan = draw_epoch(training, 0)
    return [training.batch(plan.step(index)) for index in range(len(plan))]


@torch.no_grad()
def descend(training: Any, gradients: Mapping[str, Tensor]) -> None:
    for name, parameter in training.cohort.named_parameters():
        parameter -= RATE * gradients[name]


def assert_same_weights(found: Mapping[str, Tensor], cohort: torch.nn.Module) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, cohort.state_dict()[name], rtol=1e-9, atol=1e-11, msg=name)
    assert len(found) > 50


def step_unsynced(crew: Any, recipe: Recipe, notes: Path) -> None:
    training = training_of(recipe, mesh_of(crew, recipe, "a+b", 2))
    take_steps(training, 1)
    save_file(contiguous(training.cohort), notes / f"{crew.rank}.safetensors")


def test_without_synchronised_batch_norm_every_share_normalises_itself(tmp_path: Path, float64: None) -> None:
    """Gradients add up by their shares, and so do the running statistics, which then everybody has."""
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


def step_with_old_predictions(crew: Any, recipe: Recipe, notes: Path) -> None:
    training = training_of(recipe, mesh_of(crew, recipe, "a,b", 1))
    take_steps(training, STEPS)
    save_file(contiguous(training.cohort), notes / f"{crew.rank}.safetensors")
    assert training.peers.words[-1] == "predictions one step old"
    assert (crew.traffic.exchanges, crew.traffic.bytes_sent) == (STEPS, 3 * (33 + 33 + 4) * 10 * 8)


def test_predictions_one_step_old(tmp_path: Path, float64: None) -> None:
    """Others teach what they thought of this batch before their last update; the first step has nothing older."""
    recipe = plain_recipe(processes={"predictions": "one_step_old"})
    assert together(2, step_with_old_predictions, recipe, tmp_path) == [0, 0]

    training = training_of(recipe)
    batches = batches_of(training)
    assert [len(labels) for _, labels in batches] == [33, 33, 4]
    old: dict[str, Tensor] | None = None
    for index, (images, labels) in enumerate(batches):
        ahead = None
        if index + 1 < len(batches):
            before = deepcopy(training.cohort)  # whose running statistics do not matter
            ahead = {name: logits.detach() for name, logits in before(batches[index + 1][0]).items()}
        fresh = training.cohort(images)
        sources = old or {name: logits.detach() for name, logits in fresh.items()}
        gradients = {}
        for network, member in training.cohort.members.items():
            known = {name: fresh[name] if name.startswith(f"{network}/") else sources[name] for name in fresh}
            total = training.objective(known, labels).total
            names = [f"members.{network}.{name}" for name, _ in member.named_parameters()]
            gradients |= zip(names, torch.autograd.grad(total, list(member.parameters())), strict=True)
        descend(training, gradients)
        old = ahead

    for rank in range(2):
        assert_same_weights(load_file(tmp_path / f"{rank}.safetensors"), training.cohort)


def step_with_a_sick_share(crew: Any, recipe: Recipe, notes: Path) -> None:
    """On the second of three steps, a's logits of the second share are not finite: only rank 1 sees it happen."""
    from codistill.distributed.mesh import digest

    mesh = mesh_of(crew, recipe, "a,b", 2)
    training = training_of(recipe, mesh)
    run, taken = mesh.run, iter(range(STEPS))

    def run_sick(name: str, network: Any, images: Tensor) -> Mapping[str, Tensor]:
        factor = torch.nan if next(taken) == 1 and crew.rank == 1 else 1.0
        return run(name, lambda x, fork: {name: logits * factor for name, logits in network(x, fork).items()}, images)

    mesh.run = run_sick
    before = written_bytes()
    take_steps(training, STEPS)
    (name,) = training.cohort.members
    parameters = sum(parameter.numel() for parameter in training.cohort.parameters())
    told = {
        "skipped": training.health.skipped(),
        "images": dict(zip(training.tally.terms, training.tally.sums[1].tolist(), strict=False)),
        "digest": digest(training.tensors_of(name)),
        "written": (written_bytes() - before) / STEPS,
        "gradients": 2 * (2 - 1) / 2 * 8 * parameters,
    }
    (notes / f"{crew.rank}.json").write_text(json.dumps(told))


def test_who_is_sick_in_one_share_is_left_out_by_all(tmp_path: Path) -> None:
    """And whoever shares a network has the same weights afterwards, to the last bit; its gradients are what moves."""
    recipe = plain_recipe(processes={"sync_batchnorm": False})
    assert together(4, step_with_a_sick_share, recipe, tmp_path) == [0] * 4
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [rank["skipped"] for rank in told] == [{"a": 1}, {"a": 1}, {"b": 0}, {"b": 0}]
    for rank in told:  # of 33, 33 and 4: in the second step a taught nobody, on no share
        assert rank["images"]["a/final->b/final"] == 33 + 4
        assert rank["images"]["labels->a/final"] == 33 + 4
        assert rank["images"]["labels->b/final"] == 33 + 33 + 4
    assert told[0]["digest"] == told[1]["digest"]
    assert told[2]["digest"] == told[3]["digest"]
    if Path("/proc/self/io").exists():
        for rank in told:  # and statistics, predictions, flags and sums
            assert rank["gradients"] <= rank["written"] <= 1.2 * rank["gradients"]


def test_every_share_has_its_own_dropout(float64: None) -> None:
    class Second(Alone):
        share = Share(1, 2)

    recipe = plain_recipe(networks={"a": "wrn-10-1-dropout-0.3", "b": "resnet-8"})
    turn, images = TrainingSchedule.of(recipe, 70).context(Position()), torch.randn(4, 1, 28, 28)
    first, again, second = (logits_of(training_of(recipe, peers), images, turn) for peers in (ALONE, ALONE, Second()))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert {name: torch.equal(first[name], second[name]) for name in first} == {
        name: name.startswith("b/") for name in first
    }
    assert len(first) == 6


def logits_of(training: Any, images: Tensor, turn: Any) -> Mapping[str, Tensor]:
    return PlainWay(training, Functions.of(training, training.cohort, as_it_is)).forward(images, turn)


def refuse_everywhere(crew: Any, notes: Path) -> None:
    """Every rank has a file of the same name, and only the last one's holds other weights."""
    from codistill.distributed.layout import Wish
    from codistill.distributed.trainer import train_together

    recipe, said = plain_recipe(), []
    for wish in (Wish(shards=2), Wish("a,b"), Wish(shards=1), Wish("a+b", 2)):
        with pytest.raises(ValueError) as refused:
            train_together(recipe, notes / "run", crew, wish=wish)
        said.append(str(refused.value))
    (notes / f"{crew.rank}").mkdir()
    os.chdir(notes / f"{crew.rank}")
    weights = contiguous(training_of(recipe).cohort.members["a"].backbone)
    last = crew.rank == crew.size - 1
    save_file({name: x + 1 if last and "running_mean" in name else x for name, x in weights.items()}, "a.safetensors")
    with pytest.raises(ValueError) as refused:
        train_together(recipe.replace(start={"a": "a.safetensors"}), notes / "run", crew)
    (notes / f"{crew.rank}.json").write_text(json.dumps([*said, str(refused.value)]))


def test_what_does_not_fit_is_said_on_every_rank(tmp_path: Path) -> None:
    assert together(3, refuse_everywhere, tmp_path) == [0, 0, 0]
    said, *others = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert others == [said, said]
    expected = [
        "3 processes do not fit a mesh of groups of 2",
        "split 'a,b' is for 2 processes or a multiple, and there are 3",
        "3 processes for 2 networks that learn (a, b), each trained by 1; start at most 2",
        "split 'a+b' with 2 shards is for 2 processes, and there are 3",
        "network 'a' does not begin with the same weights on ranks 0 and 2; give every host the same file of start.a",
    ]
    for message, beginning in zip(said, expected, strict=True):
        assert message.startswith(beginning), message
    assert not (tmp_path / "run").exists()
