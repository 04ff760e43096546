"""Fine-tuning: what networks begin from, parts that learn at rates of their own or not at all, heads set apart."""

from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from codistill.data.load import load_for
from codistill.engine.optim import set_learning_rate
from codistill.engine.runtime import prepare
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import Training, prepare_training
from codistill.engine.trainer import choose_step, draw_epoch
from codistill.networks.families import architecture
from codistill.networks.parts import classifier_layers
from codistill.recipes.errors import RecipeError
from codistill.recipes.schema import Recipe
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.result import read_result_content
from codistill.runs.seal import read_sealed
from support.processes import in_new_process
from support.runs import checksums, train, train_and_die
from support.tiny import tiniest_recipe

SGD = {"kind": "sgd", "lr": 0.05, "weight_decay": 5e-4, "nesterov": True}
ADAMW = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.05}


def prepared_training(recipe: Recipe) -> Training:
    return prepare_training(recipe, load_for(recipe), prepare(recipe.runtime))


def after_steps(training: Training, steps: int = 2) -> dict[str, Tensor]:
    """All state after some steps."""
    schedule = TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))
    step, position = choose_step(training), Position()
    for batch in list(training.data.batches(draw_epoch(training, 0), 0))[:steps]:
        context = schedule.context(position)
        set_learning_rate(training.optimizers.values(), training.recipe, context)
        step(batch, context)
        position = Position(0, position.step + 1)
    return {name: tensor.clone() for name, tensor in training.tensors().items()}


def pretrained(folder: Path, name: str = "wrn-10-1-dropout-0.3", classes: int = 7) -> Path:
    torch.manual_seed(5)
    file = folder / f"{name}.pth"
    torch.save({"state_dict": architecture(name).backbone(classes, 1).state_dict()}, file)
    return file


def test_a_run_begins_from_a_file_records_it_and_continues_without_it(
    tmp_path: Path,
) -> None:
    file = pretrained(tmp_path)
    recipe = tiniest_recipe(start={"a": str(file)})
    begun = prepared_training(recipe)
    given, state = torch.load(file, weights_only=True)["state_dict"], begun.cohort.members["a"].backbone.state_dict()
    drawn = prepared_training(tiniest_recipe()).cohort.members["a"].backbone.state_dict()
    new = ["classifier.3.weight", "classifier.3.bias"]
    assert all(tensor.equal((drawn if name in new else given)[name]) for name, tensor in state.items())
    assert begun.average.backbones["a"].state_dict()["stages.stem.weight"].equal(given["stages.stem.weight"])

    whole = train(recipe, tmp_path / "whole")
    log = (whole / "train.log").read_text()
    assert f"network 'a' begins from {file}\n" in log
    assert "network 'b' begins untrained; give it weights too: start.b=FILE" in log
    assert f"its classifier is new: the weights are for 7 classes, the data have 10: {', '.join(new)}\n" in log
    start = read_result_content(whole / "result.json")["environment"]["start"]
    assert start["a"] == {
        "source": str(file),
        "bytes": file.stat().st_size,
        **start["a"],
        "classes": 7,
        "new_classifier": new,
    }
    assert list(start) == ["a"]
    assert len(start["a"]["sha256"]) == 64

    halted = train(recipe, tmp_path / "halted", steps=2)
    file.unlink()
    train(recipe, halted)
    assert checksums(halted) == checksums(whole)
    assert read_sealed(RunFolder(halted).environment, MAX_BYTES)["start"] == start
    with pytest.raises(ValueError, match="there is no file"):
        train(recipe, tmp_path / "another")


def test_a_teacher_of_other_classes_is_refused(tmp_path: Path) -> None:
    recipe = tiniest_recipe(method="kd", start={"a": str(pretrained(tmp_path))}, ema=0.0)
    with pytest.raises(
        ValueError, match=r"network 'a' only teaches, .* a classifier of 7 classes for data of 10; give"
    ):
        prepared_training(recipe)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_a_frozen_backbone_stays_as_it_is(optimizer: dict[str, Any]) -> None:
    recipe = tiniest_recipe(freeze={"a": "backbone"}, optimizer=optimizer)
    training = prepared_training(recipe)
    before = {name: tensor.clone() for name, tensor in training.tensors().items()}
    after = after_steps(training)
    changed = {name for name in before if not before[name].equal(after[name])}
    backbone = {name for name in changed if name.startswith(("cohort/members.a.backbone.", "average/a."))}
    prefixes = "cohort/members.a.backbone.", "average/a."
    assert backbone == {f"{prefix}classifier.3.{one}" for prefix in prefixes for one in ("weight", "bias")}
    assert any(name.startswith("cohort/members.a.heads.") for name in changed)
    optimized = {name for name in before if name.startswith("optimizer/members.a.backbone.")}
    assert {name.rpartition("/")[0] for name in optimized} == {
        f"optimizer/members.a.backbone.classifier.3.{one}" for one in ("weight", "bias")
    }
    assert not training.cohort.members["a"].backbone.stages["stage1"].training
    assert training.cohort.members["a"].heads.training
    assert training.cohort.members["b"].backbone.stages["stage1"].training
    training.set_mode(learning=False)
    training.set_mode(learning=True)
    assert not training.cohort.members["a"].backbone.stages["stage1"].training


def test_all_up_to_an_exit_can_be_frozen() -> None:
    training = prepared_training(tiniest_recipe(freeze={"b": "stage1"}))
    backbone = training.cohort.members["b"].backbone
    learns = {
        name.partition(".")[2].partition(".")[0] for name, one in backbone.named_parameters() if one.requires_grad
    }
    frozen = {name.split(".")[1] for name, one in backbone.named_parameters() if not one.requires_grad}
    assert frozen == {"stem", "stage1"}
    assert {"stage2", "stage3"} <= learns
    assert not learns & frozen


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_rates_by_part_and_depth_are_those_of_optimizers_of_their_own(optimizer: dict[str, Any]) -> None:
    """Beside training each parameter alone, with the network's gradients and a rate written down here."""
    factors = {"lr_factor": {"backbone": 0.1, "heads": 2.0}, "layer_decay": 0.5}
    training = prepared_training(tiniest_recipe(optimizer={**optimizer, **factors}, ema=0.0))
    member = training.cohort.members["a"]
    blocks = ["stages.stage3", "stages.stage2", "stages.stage1", "stages.stem"]  # WRN-10-1: a block a stage

    def expected(name: str) -> float:
        if name.startswith("heads."):
            return 2.0
        if name.startswith("backbone.classifier.3."):
            return 1.0
        depth = next((i for i, block in enumerate(blocks, 1) if name.startswith(f"backbone.{block}.")), 1)
        return 0.1 * 0.5**depth

    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    more = {"momentum": 0.9, "nesterov": True} if optimizer["kind"] == "sgd" else {}
    copies, alone = {}, {}
    for name, parameter in member.named_parameters():
        copies[name] = parameter.detach().clone().requires_grad_()
        rate = optimizer["lr"] * expected(name)
        alone[name] = kinds[optimizer["kind"]](
            [copies[name]],
            lr=rate,
            weight_decay=optimizer["weight_decay"],
            **more,
        )
    for _ in range(2):
        for name, parameter in member.named_parameters():
            torch.manual_seed(len(name))
            parameter.grad = torch.randn_like(parameter)
            copies[name].grad = parameter.grad.clone()
            alone[name].step()
        training.optimizers["a"].step()
    assert len(copies) > 20
    for name, parameter in member.named_parameters():
        torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=1e-5, atol=1e-7, msg=name)


def test_default_factors_leave_one_group() -> None:
    for optimizer in prepared_training(tiniest_recipe()).optimizers.values():
        assert len(optimizer.param_groups) == 1


def gradients(recipe: Recipe) -> dict[str, Tensor]:
    """The gradients of a loss of network a's auxiliary classifiers alone."""
    training = prepared_training(recipe)
    member = training.cohort.members["a"]
    torch.manual_seed(0)
    logits = member(torch.rand(4, 1, 14, 14, generator=torch.Generator().manual_seed(1)))
    sum(tensor.square().sum() for name, tensor in logits.items() if name != "final").backward()
    return {name: one.grad for name, one in member.named_parameters() if one.grad is not None}


def test_heads_send_back_a_part_of_their_gradient_or_none() -> None:
    whole, fifth, none = (gradients(tiniest_recipe(heads={"gradient": part})) for part in (1.0, 0.2, 0.0))
    backbone = {name for name in whole if name.startswith("backbone.")}
    assert len(backbone) > 5
    assert {name for name in whole if name not in none} == backbone
    assert fifth.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(fifth[name], gradient * (0.2 if name in backbone else 1.0), rtol=1e-4, atol=1e-6)
        if name not in backbone:
            assert none[name].equal(gradient)


def test_heads_set_apart_do_not_change_what_they_compute() -> None:
    def logits(gradient: float) -> dict[str, Tensor]:
        member = prepared_training(tiniest_recipe(heads={"gradient": gradient})).cohort.members["b"].eval()
        return member(torch.rand(4, 1, 14, 14, generator=torch.Generator().manual_seed(1)))

    whole = logits(1.0)
    for gradient in (0.0, 0.3):
        assert all(tensor.equal(whole[name]) for name, tensor in logits(gradient).items())


def set_apart(folder: Path) -> Recipe:
    """Everything at once: a file of other classes, a frozen stage, rates by part and depth, heads half apart."""
    return tiniest_recipe(
        start={"a": str(folder / "wrn-10-1-dropout-0.3.pth")},
        freeze={"a": "stage1", "b": "backbone"},
        optimizer={**SGD, "lr_factor": {"backbone": 0.1}, "layer_decay": 0.7},
        heads={"gradient": 0.5},
        on_nonfinite="rollback",
    )


@pytest.mark.promise(
    "exact-resume-of-fine-tuning",
    "A killed fine-tuning continues bit for bit, without the weight file that it began from: with frozen parts, and "
    "rates by part and depth.",
    repeated="killed after 1, 2 and 4 of 6 updates",
)
def test_killed_and_continued_without_its_file(tmp_path: Path) -> None:
    file, recipe = pretrained(tmp_path), set_apart(tmp_path)
    whole = checksums(train(recipe, tmp_path / "whole"))
    for steps in (1, 2, 4):
        assert in_new_process(train_and_die, recipe, tmp_path / str(steps), steps, {}) == -SIGKILL
    file.unlink()
    for steps in (1, 2, 4):
        assert checksums(train(recipe, tmp_path / str(steps))) == whole


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"freeze": {"c": "backbone"}}, "freeze.c: unknown network 'c'"),
        ({"freeze": {"a": "stage9"}}, "freeze.a: unknown part of a 'stage9'.* Allowed: backbone, stage2, stage1, stem"),
        ({"freeze": {"a": "backbone"}, "method": "kd", "start": {"a": "x"}}, "freeze.a: a only teaches"),
        (
            {"freeze": {"a": "backbone"}, "processes": {"weights": "sharded"}},
            "freeze: all weights that are sharded together must learn, or none; type processes.weights=replicated",
        ),
        (
            {"optimizer": {**SGD, "lr_factor": {"neck": 0.1}}},
            "optimizer.lr_factor.neck: .*'neck'.*backbone, heads, class",
        ),
        ({"optimizer": {**SGD, "lr_factor": {"heads": 0}}}, "optimizer.lr_factor.heads: must be greater than 0, not 0"),
        ({"optimizer": {**SGD, "layer_decay": 1.5}}, "optimizer.layer_decay: must be less than or equal to 1, not 1.5"),
        ({"heads": {"gradient": 2}}, "heads.gradient: must be less than or equal to 1, not 2"),
    ],
)
def test_settings_that_do_not_fit_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        tiniest_recipe(**changes)


def test_a_run_ships_what_other_libraries_can_begin_from(tmp_path: Path) -> None:
    """The weight file of a run begins a training for other classes: pretraining and fine-tuning with one tool."""
    run = train(tiniest_recipe(length={"epochs": 1}), tmp_path / "run")
    shipped = load_file(run / "weights" / "b.safetensors")
    six = {**shipped, "classifier.2.weight": torch.zeros(6, 64), "classifier.2.bias": torch.zeros(6)}
    save_file(six, tmp_path / "six.safetensors")
    training = prepared_training(tiniest_recipe(start={"b": str(tmp_path / "six.safetensors")}))
    assert training.starts["b"]["new_classifier"] == ["classifier.2.weight", "classifier.2.bias"]
    (classifier,) = classifier_layers(training.cohort.members["b"].backbone)
    assert classifier.weight.shape == (10, 64)
