"""A module and a graph of the user's own in ``train``, with everything that a built-in network has."""

import json
from pathlib import Path
from signal import SIGKILL

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from codistill import Outline, Ramp, Transfer, TransferGraph, build_report, evaluate_finished, export_network, recipes
from codistill.engine.trainer import Progress, train
from codistill.recipes.schema import Recipe
from codistill.runs.folder import RunFolder
from support.cli import call
from support.own_network import OwnNet, TwoOutputs, block
from support.processes import in_new_process
from support.runs import train_and_die
from support.tiny import tiniest_recipe

SHIPPED = "a", "b"


def recipe(**changes: object) -> Recipe:
    return tiniest_recipe(**{"networks": {"a": "wrn-10-1", "b": "own"}, **changes})


def top_down(outline: Outline) -> TransferGraph:
    classifiers = outline.classifiers
    edges = [(i, j) for i in classifiers for j in classifiers if i.network != j.network and i.stage < j.stage]
    return TransferGraph(outline, dict.fromkeys(classifiers, 1.0), edges)


def own() -> OwnNet:
    torch.manual_seed(5)
    return OwnNet()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    assert len(list(train(recipe(), folder, networks={"b": own()}, graph=top_down))) == 2
    return folder


def same_files(one: Path, other: Path) -> None:
    for name in SHIPPED:
        first, second = (load_file(folder / "weights" / f"{name}.safetensors") for folder in (one, other))
        assert first.keys() == second.keys()
        assert all(tensor.equal(second[key]) for key, tensor in first.items())
    assert (one / "journal.jsonl").read_bytes() == (other / "journal.jsonl").read_bytes()
    assert (one / "recipe.yaml").read_bytes() == (other / "recipe.yaml").read_bytes()


def test_a_stopped_run_continues_bit_for_bit(run: Path, tmp_path: Path) -> None:
    folder, asked = tmp_path / "run", 0

    def after_two_steps() -> bool:
        nonlocal asked
        asked += 1
        return asked == 2

    assert not list(train(recipe(), folder, networks={"b": own()}, graph=top_down, stop=after_two_steps))
    module = OwnNet()  # with other weights: those of the run are in the checkpoint
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    stored = recipes.load(folder / "recipe.yaml")
    assert len(list(train(stored, folder, networks={"b": module}))) == 2
    same_files(run, folder)
    assert all(tensor.equal(before[key]) for key, tensor in module.state_dict().items())


@pytest.mark.promise(
    "exact-resume-of-own-networks",
    "A run with a module of one's own that is killed in the middle of an epoch continues bit for bit.",
    repeated="killed after 2 and 4 of 6 updates",
)
def test_a_killed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    networks = {"b": OwnNet}  # a function of the seed: a process of its own builds the same
    assert len(list(train(recipe(), tmp_path / "whole", networks=networks))) == 2
    for steps in (2, 4):  # in the middle of either epoch
        folder = tmp_path / str(steps)
        assert in_new_process(train_and_die, recipe(), folder, steps, {"networks": networks}) == -SIGKILL
        state = json.loads((max((folder / "checkpoints").iterdir()) / "state.json").read_text())
        assert state["position"] == {"epoch": steps // 3, "step": steps % 3}
        assert list(train(RunFolder(folder).stored_recipe(), folder, networks={"b": OwnNet()}))
        same_files(tmp_path / "whole", folder)


def test_the_recipe_has_the_whole_graph_and_the_name_of_the_module(run: Path) -> None:
    stored = RunFolder(run).stored_recipe()
    assert stored.method == "custom"
    assert stored.graph == top_down(stored.outline)
    assert len(stored.graph.transfers) > 2
    assert stored.networks["b"].startswith("own:support.own_network.OwnNet:")
    assert stored.networks["b"].endswith("@block2,block1")
    result = json.loads((run / "result.json").read_text())
    assert result["recipe"]["networks"] == stored.networks
    assert load_file(run / "weights" / "b.safetensors").keys() == OwnNet().state_dict().keys()


def test_it_begins_with_the_weights_of_the_module_and_a_function_with_those_of_the_seed(tmp_path: Path) -> None:
    def first_weights(network: object, seed: int) -> torch.Tensor:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        slow = recipe(seed=seed, ema=0.0, optimizer={"kind": "sgd", "lr": 1e-30, "weight_decay": 0.0})
        assert list(train(slow, folder, networks={"b": network}))  # type: ignore[dict-item]
        return load_file(folder / "weights" / "b.safetensors")["head.weight"]

    module = own()
    assert first_weights(module, 1).equal(module.head.weight)
    drawn = [first_weights(OwnNet, seed) for seed in (1, 1, 2)]
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])


def test_it_is_evaluated_exported_and_reported_with_the_module(run: Path, tmp_path: Path) -> None:
    given = {"b": OwnNet()}
    evaluation = evaluate_finished(run, networks=given)
    assert not evaluation.differences
    assert evaluation.metrics.keys() == set(SHIPPED)
    exported = export_network(run, "b", "safetensors", tmp_path / "export", networks=given)
    assert exported.proof.largest_difference == 0
    assert exported.proof.heads_kept
    alone = OwnNet()
    alone.load_state_dict(load_file(exported.model))
    images = torch.randn(3, 1, 14, 14)
    assert alone.eval()(images).equal(exported.shipped.network(images))
    assert "module of your own" in build_report(run).html()
    assert "module of your own" not in build_report(run, networks=given).html()


def test_a_network_beside_it_is_exported_without_the_module(run: Path, tmp_path: Path) -> None:
    done = call("export", run, "--network", "a", "--out", tmp_path / "export")
    assert done.exit_code == 0, done.stderr
    assert "with its trained heads" in done.stdout


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        (["train", "RUN/recipe.yaml", "--out", "RUN"], "train(recipe, out, networks={'b': module})"),
        (["evaluate", "RUN"], "evaluate_finished('RUN', networks={'b': module})"),
        (["export", "RUN", "--network", "b", "--out", "x"], "export_network('RUN', 'b', 'onnx', 'DIR', networks={'b'"),
    ],
)
def test_a_command_says_what_to_type_in_python(run: Path, command: list[str], typed: str) -> None:
    done = call(*(part.replace("RUN", str(run)) for part in command))
    assert done.exit_code == 2
    assert "is a module of your own, which no file contains; pass it from Python: " in done.stderr
    assert typed.replace("RUN", str(run)) in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_is_shown_and_reported_by_commands(run: Path, tmp_path: Path) -> None:
    shown = call("show", run / "recipe.yaml")
    assert "Without b, modules of your own" in shown.stdout
    assert RunFolder(run).stored_recipe().graph.matrix() in shown.stdout
    assert call("report", run, "-o", tmp_path / "page.html").exit_code == 0
    assert call("compare", run).exit_code == 0


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (OwnNet(classes=7), "network 'b' outputs 7 classes, but the data have 10"),
        (TwoOutputs(), "network 'b': in training mode it does not return one row of logits per image"),
        (nn.Conv2d(1, 10, 3), "network 'b': in training mode it does not return one row of logits per image"),
        (nn.Conv2d(3, 10, 14), "network 'b'"),
        ("resnet-8", "networks: 'b' is of type str; pass an nn.Module"),
    ],
    ids=["classes", "two outputs", "map", "channels", "name"],
)
def test_a_module_that_does_not_fit_is_refused_in_one_line(network: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        next(train(recipe(), tmp_path / "run", networks={"b": network}))  # type: ignore[dict-item]
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_another_module_or_none_is_refused(run: Path) -> None:
    stored, other = RunFolder(run).stored_recipe(), nn.Sequential(nn.Flatten(), nn.Linear(196, 10))
    with pytest.raises(
        ValueError, match=r"networks.b: the module passed is own:torch\S+, and the run began with own:supp"
    ):
        next(train(stored, run, networks={"b": other}))
    wider = OwnNet()
    wider.block1, wider.block2 = block(1, 5), block(5, 8)
    with pytest.raises(
        ValueError, match=r"networks.b: the module passed is own:support\S+OwnNet:\w+, and the run began"
    ):
        next(train(stored, run, networks={"b": wider}))
    module, twins = OwnNet(), stored.replace(networks={"a": "own", "b": "own"}, method="dcm", edges={})
    with pytest.raises(ValueError, match=r"^networks: one module is given twice, .* build two$"):
        next(train(twins, run, networks={"a": module, "b": module}))
    with pytest.raises(ValueError, match=r"^unknown network 'c'; Allowed: a, b$"):
        next(train(stored, run, networks={"c": OwnNet()}))
    with pytest.raises(ValueError, match=r"networks.b=own:\S+ is a module of your own, .* train\(…, networks={'b'"):
        next(train(stored.replace(networks={"a": "wrn-10-1", "b": "wrn-10-1"}, method="dcm", edges={}), run))


def test_a_run_is_not_continued_without_its_graph(run: Path) -> None:
    with pytest.raises(ValueError, match=r"another graph, custom and not dcm; continue it with \S+yaml, or with"):
        next(train(recipe(), run, networks={"b": OwnNet()}))


def test_a_frozen_module_teaches_with_the_weights_it_has(tmp_path: Path) -> None:
    module = own()
    described = recipe(method="kd", teachers=["b"])
    list(train(described, tmp_path / "run", networks={"b": module}))
    shipped = load_file(tmp_path / "run" / "weights" / "b.safetensors")
    assert all(tensor.equal(module.state_dict()[key]) for key, tensor in shipped.items())


def test_what_is_frozen_in_a_module_stays_as_it_is(tmp_path: Path) -> None:
    """Weights and running statistics, as those that the recipe freezes."""
    module = own()
    module.block1.requires_grad_(False)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    list(train(recipe(), tmp_path / "run", networks={"b": module}))
    after = load_file(tmp_path / "run" / "weights" / "b.safetensors")
    kept = {key for key, tensor in after.items() if tensor.equal(before[key])}
    assert kept == {key for key in before if key.startswith("block1.")}


@pytest.mark.parametrize("changes", [{}, {"method": "dml"}, {"freeze": {"b": "backbone"}}])
def test_a_module_that_is_frozen_but_is_to_learn_is_refused_in_one_line(
    changes: dict[str, object], tmp_path: Path
) -> None:
    module = own().requires_grad_(False)
    with pytest.raises(ValueError, match=r"^network 'b' is to learn, and all .* frozen .*; type .* teachers=\[b\]$"):
        list(train(recipe(**changes), tmp_path / "run", networks={"b": module}))
    assert not (tmp_path / "run").exists()


def test_images_of_half_the_side_need_a_module_that_takes_them(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(28 * 28, 10))
    data = {**recipe().data.model_dump(), "image_size": 28}
    halved = recipe(method="dml", data=data, augment={"half_until": 0.5})
    with pytest.raises(ValueError, match=r"^augment.half_until halves .* networks.b=own\S+ takes only 28×28; type aug"):
        list(train(halved, tmp_path / "run", networks={"b": network}))


def test_freezing_up_to_a_module_without_weights_is_refused_in_one_line(tmp_path: Path) -> None:
    network = nn.Sequential(
        block(1, 4), nn.MaxPool2d(2), block(4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    frozen = recipe(networks={"a": "wrn-10-1", "b": "own@1"}, freeze={"b": "c2"})
    with pytest.raises(ValueError, match="freeze: the module at the exit c2 has no weights"):
        list(train(frozen, tmp_path / "run", networks={"b": network}))


def test_a_graph_with_a_ramp_survives_the_file() -> None:
    base = tiniest_recipe()
    early = TransferGraph(base.outline, {"a/final": 1.0, "b/final": 1.0})
    edges = [Transfer("a/final", "b/final", 0.25), Transfer("b/stage2", "a/final", 2.0)]
    graph = TransferGraph(base.outline, {"b/final": 1.0}, edges, 3.0, True, Ramp(early, 0.25, 0.5))
    written = recipes.dumps(base.with_graph(graph))
    assert recipes.loads(written).graph == graph
    assert recipes.loads(written).graph.at(0.3) == graph.at(0.3)


def test_a_graph_of_other_classifiers_is_refused_in_one_line() -> None:
    graph = top_down(Outline({"a": {"final": 1}, "x": {"final": 1, "stage2": 2}}))
    with pytest.raises(ValueError, match=r"^unknown classifier 'x/final'; .* Allowed: a/final, a/stage2"):
        tiniest_recipe().with_graph(graph)
    with pytest.raises(ValueError, match=r"^a method returns a TransferGraph, and this one a list$"):
        tiniest_recipe().with_graph(lambda outline: [outline])  # type: ignore[arg-type, return-value]


def test_predictions_give_the_errors_of_the_progress_and_change_nothing(tmp_path: Path) -> None:
    def errors(progress: Progress, split: str) -> dict[str, float]:
        logits, labels = progress.predict(split)
        assert len(labels) == (50 if split == "test" else 70)
        return {name: 100 * float((z.argmax(dim=1) != labels).double().mean()) for name, z in logits.items()}

    described = tiniest_recipe()
    for progress in train(described, tmp_path / "asked"):
        measured = errors(progress, "test")
        assert measured == {name: pytest.approx(progress.metrics[name].top1_error) for name in ("a/final", "b/final")}
        assert errors(progress, "train").keys() == measured.keys()
        with pytest.raises(ValueError, match=r"unknown split 'tset'; did you mean 'test'"):
            progress.predict("tset")
    assert len(list(train(described, tmp_path / "plain"))) == 2
    same_files(tmp_path / "asked", tmp_path / "plain")
