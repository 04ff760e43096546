"""A recipe in full, its costs against an independent count, and the graph."""

import json
from pathlib import Path
from statistics import mean
from typing import Any
from xml.etree import ElementTree

import pytest

from codistill.cli.explore import ENOUGH_EPOCHS
from codistill.data import embedded
from codistill.recipes import get, loads
from codistill.studies.costs import Sizes, sizes
from support import zoo
from support.cli import Codistill

RESULTS = Path(__file__).parents[2] / "results"

# Parameters and forward FLOPs of the backbone and of both heads, 100 classes, 32×32: counted by hand from the paper's
# table, and pinned in the networks' own tests.
WRN_28_10 = {"backbone": (36_536_884, 10_486_772_736), "heads": (127_609_480, 18_979_609_600)}
MOBILENET = {"backbone": (3_309_476, 1_223_303_168), "heads": (8_121_800, 1_355_767_808)}


def shown(codistill: Codistill, *arguments: str) -> Any:
    result = codistill("show", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_costs_are_those_counted_by_hand(codistill: Codistill) -> None:
    seen = shown(codistill, "cifar100/wrn-28-10-mobilenet", "method=dcm")
    for name, expected in {"a": WRN_28_10, "b": MOBILENET}.items():
        for part, (parameters, flops) in expected.items():
            assert seen["networks"][name][part] == {"parameters": parameters, "flops": flops}
    everything = sum(flops for network in (WRN_28_10, MOBILENET) for _, flops in network.values())
    assert seen["training_flops_per_image"] == 3 * everything
    assert seen["edges"] == 18
    assert seen["networks"]["a"]["heads_share"] == pytest.approx(18_979_609_600 / 29_466_382_336)
    assert seen["recipe"]["name"] == "cifar100/wrn-28-10-mobilenet"


# Counted by hand in the networks' own tests: the paper's C2 and C3 of ResNet-50, which torchvision's gets by itself.
RESNET_50_HEADS = {"c2": ("layer3", 58_668_008), "c3": ("layer2", 16_297_960)}


def test_the_plan_says_where_heads_hang_what_they_are_and_what_they_cost(codistill: Codistill) -> None:
    assert zoo.torchvision
    seen = shown(codistill, "imagenet/resnet-18-twins", "networks.b=torchvision:resnet50")["networks"]
    assert list(seen["a"]["plan"]) == ["stage3", "stage2"]
    assert seen["a"]["plan"]["stage3"]["made_of"] == "2 × 1024"
    plan = seen["b"]["plan"]
    assert {name: (head["module"], head["cost"]["parameters"]) for name, head in plan.items()} == RESNET_50_HEADS
    assert plan["c2"]["features"] == [1024, 14, 14]
    assert plan["c2"]["made_of"] == "3 of 3 blocks of layer4, twice as wide"
    assert [head["stage"] for head in plan.values()] == [2, 3]
    for network in seen.values():
        for key in ("parameters", "flops"):
            assert sum(head["cost"][key] for head in network["plan"].values()) == network["heads"][key]


def test_the_plan_changes_with_exits_and_kind(codistill: Codistill) -> None:
    text = codistill("show", "quickstart", "networks.b=timm:resnet10t@layer1", "heads.kind=narrow").stdout
    (line,) = [line for line in text.splitlines() if "│ b/" in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[:5] == [
        "b/c2",
        "C2",
        "layer1",
        "64×4×4",
        "layer2, layer3, layer4, half as wide",
    ]
    assert "│ a/stage2 │ C2 │ stage2" in text


def test_networks_that_cannot_be_had_are_an_error_without_a_traceback(codistill: Codistill) -> None:
    for change, said in (
        ("networks.a=timm:resnet19", "timm has no network 'resnet19'; did you mean 'resnet18'?"),
        ("networks.a=torchvision:resnet18", "torchvision:resnet18 takes images of 3 channels, but the data have 1"),
        ("networks.a=timm:vit_tiny_patch16_224", "takes images of 224×224, and not of "),
        ("networks.a=timm:resnet10t@layer7", "it has no module 'layer7' that runs; did you mean 'layer"),
    ):
        result = codistill("show", "quickstart", change)
        assert (result.exit_code, result.exception and type(result.exception)) == (2, SystemExit), result.stderr
        assert said in result.stderr


def test_only_heads_that_the_method_uses_cost_anything(codistill: Codistill) -> None:
    seen = shown(codistill, "cifar100/wrn-28-10-mobilenet", "method=dml")
    assert [network["heads"]["parameters"] for network in seen["networks"].values()] == [0, 0]
    assert seen["edges"] == 2


def test_a_frozen_teacher_only_goes_forward(codistill: Codistill) -> None:
    seen = shown(codistill, "kd/wrn-28-10-resnet-110", "start.teacher=FILE")
    assert {name: network["learns"] for name, network in seen["networks"].items()} == {
        "teacher": False,
        "student": True,
    }
    assert seen["training_flops_per_image"] == WRN_28_10["backbone"][1] + 3 * 505_786_880


def test_text_has_the_whole_recipe_then_costs_then_the_matrix(codistill: Codistill) -> None:
    text = codistill("show", "quickstart", "method=dml", "seed=5").stdout
    recipe = get("quickstart", ["method=dml", "seed=5"])
    assert loads(text.partition("┏")[0]) == recipe
    assert recipe.graph.matrix() in text.partition("┏")[2]
    assert "│ a  wrn-10-1 │" in text


def test_each_learners_share_and_scale_are_shown(codistill: Codistill) -> None:
    changes = ("transfer.share=0.5", "transfer.initial_share=0.25", "transfer.end=0.5")
    text = codistill("show", "quickstart", "method=dcm", *changes).stdout
    assert [line.split()[-4:] for line in text.splitlines() if line.startswith("b/")] == [["0.25", "→", "0.5", "4"]] * 3
    assert "weights ramped between 0% and 50% of the training" in text
    seen = shown(codistill, "quickstart", "method=dml")
    assert seen["shares"] == {"a/final": 0.5, "b/final": 0.5}
    assert seen["scales"] == {"a/final": 2.0, "b/final": 2.0}


def test_inputs_are_those_of_the_data() -> None:
    data = embedded.read()
    fashion = sizes(get("quickstart", ["data.image_size=null"]))
    assert fashion == Sizes(len(data.train), data.num_classes, (data.channels, *data.image_size))
    for name, classes in {"cifar10": 10, "cifar100": 100}.items():
        seen = sizes(get("quickstart", [f"data.name={name}", "data.image_size=null"]))
        assert seen == Sizes(50_000, classes, (3, 32, 32))


def test_a_folder_that_is_not_there_is_counted_as_imagenet_and_said_so(codistill: Codistill) -> None:
    text = codistill("show", "imagenet/resnet-18-twins").stdout
    assert "For one image of 3×224×224, 1000 classes assumed" in text
    for name in ("cat", "dog", "owl"):
        for split in ("train", "test"):
            Path("photos", split, name).mkdir(parents=True)
            Path("photos", split, name, "1.jpg").touch()
    assert (
        "For one image of 3×224×224, 3 classes;"
        in codistill("show", "imagenet/resnet-18-twins", "data.folder=photos").stdout
    )


def test_drawings(codistill: Codistill) -> None:
    assert codistill("show", "quickstart", "--svg", "graph.svg").stdout == "wrote graph.svg\n"
    assert ElementTree.parse("graph.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert codistill("show", "quickstart", "--mermaid").stdout == get("quickstart").graph.to_mermaid() + "\n"


NOTE = "published runs of DCM gain nothing in 24 epochs"


@pytest.mark.parametrize(
    ("changes", "is_noted"),
    [
        (["method=dcm", "data.wrong_labels=0"], True),
        (["method=dcm", "data.wrong_labels=0", "length.epochs=100"], False),
        (["method=dcm"], False),  # half of quickstart's labels are wrong
        (["method=dml", "data.wrong_labels=0"], False),
        (["method=complete", "data.wrong_labels=0", "transfer.share=0.5"], False),
        (["method=mutual", "data.wrong_labels=0"], False),
        (["method=kd", "data.wrong_labels=0", "weights.lam=3", "start.a=weights.safetensors"], False),
    ],
)
def test_a_note_says_that_a_schedule_is_short_for_the_share(
    codistill: Codistill, changes: list[str], is_noted: bool
) -> None:
    seen = codistill("show", "quickstart", *changes)
    assert seen.exit_code == 0, seen.stderr
    assert (NOTE in " ".join(seen.stdout.split())) is is_noted


def test_the_notes_figures_are_those_of_published_runs() -> None:
    def error(pattern: str, method: str) -> float:
        runs = [json.loads(file.read_text()) for file in RESULTS.glob(f"{pattern}-{method}-seed*.json")]
        errors = [network["last"]["top1_error"] for run in runs for network in run["networks"].values()]
        return mean(errors)

    short, longer = (
        error(pattern, "dcm") - error(pattern, "independent")
        for pattern in ("24-epochs/cifar100-wrn-28-4-twins", "cifar100-wrn-16-2-twins")
    )
    assert short > 0
    assert round(longer) == -2
    (run, *_) = RESULTS.glob("cifar100-wrn-16-2-twins-dcm-seed1-*.json")
    assert json.loads(run.read_text())["recipe"]["length"]["epochs"] == ENOUGH_EPOCHS
