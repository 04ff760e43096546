"""A recipe in full, its costs against an independent count, and the graph."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from calling import Codistill

from codistill.cli.show import INPUTS, network_input
from codistill.data import cifar, embedded
from codistill.recipes import get, loads

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


def test_inputs_are_those_of_the_data() -> None:
    data = embedded.read()
    assert set(INPUTS) == {"fashion", *cifar.CIFARS}
    fashion = INPUTS["fashion"]
    assert (fashion.channels, fashion.height, fashion.width) == (data.channels, *data.image_size)
    assert fashion.classes == data.num_classes
    for name, known in cifar.CIFARS.items():
        seen = INPUTS[name]
        assert (seen.channels, seen.height, seen.width, seen.classes) == (*cifar.SHAPE, known.num_classes)


def test_a_folder_that_is_not_there_is_counted_as_imagenet_and_said_so(codistill: Codistill) -> None:
    text = codistill("show", "imagenet/resnet-18-twins").stdout
    assert "For one image of 3×224×224, 1000 classes assumed" in text
    for name in ("cat", "dog", "owl"):
        Path("photos/train", name).mkdir(parents=True)
    seen = network_input(get("imagenet/resnet-18-twins", ["data.folder=photos"]))
    assert (seen.classes, seen.note) == (3, "")


def test_drawings(codistill: Codistill) -> None:
    assert codistill("show", "quickstart", "--svg", "graph.svg").stdout == "wrote graph.svg\n"
    assert ElementTree.parse("graph.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert codistill("show", "quickstart", "--mermaid").stdout == get("quickstart").graph.to_mermaid() + "\n"
