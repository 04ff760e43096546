"""Names of other people's networks: what they mean without the library, and what a wrong one gets."""

import subprocess
import sys

import pytest

from codistill.networks.families import describe_families, parse
from codistill.recipes.schema import Recipe
from support.tiny import tiny_recipe


@pytest.mark.parametrize(
    ("name", "model", "options", "paths", "exits"),
    [
        ("timm:resnet18", "resnet18", {}, None, ["c2", "c3", "c4"]),
        ("torchvision:vit_b_16:image_size=32", "vit_b_16", {"image_size": 32}, None, ["c2", "c3", "c4"]),
        (
            "timm:vit_tiny_patch16_224:img_size=32,patch_size=4,drop_rate=0.1@blocks.3,blocks.7",
            "vit_tiny_patch16_224",
            {"img_size": 32, "patch_size": 4, "drop_rate": 0.1},
            ("blocks.3", "blocks.7"),
            ["c2", "c3"],
        ),
        ("timm:resnet18@layer3", "resnet18", {}, ("layer3",), ["c2"]),
    ],
)
def test_a_name_is_understood_without_its_library(
    name: str, model: str, options: dict[str, float], paths: tuple[str, ...] | None, exits: list[str]
) -> None:
    network = parse(name)
    library = name.partition(":")[0]
    assert network.family.pattern == f"{library}:MODEL"
    assert network.options == {"library": library, "model": model, "options": options, "paths": paths, "tag": ""}
    assert list(network.exits) == exits
    assert list(network.exits.values()) == list(range(2, 2 + len(exits)))


def test_heads_hang_at_the_papers_two_or_at_all_that_the_name_lists() -> None:
    assert parse("timm:resnet18").outline() == {"final": 1, "c2": 2, "c3": 3}
    assert parse("timm:resnet18").outline(("c4",)) == {"final": 1, "c4": 4}
    assert parse("timm:resnet18@act1,layer1,layer2,layer3").outline() == {
        "final": 1,
        "c2": 2,
        "c3": 3,
        "c4": 4,
        "c5": 5,
    }


def test_a_tag_names_pretrained_weights() -> None:
    options = parse("timm:vit_tiny_patch16_224.augreg_in21k:img_size=32@blocks.3").options
    assert (options["model"], options["tag"]) == ("vit_tiny_patch16_224", "augreg_in21k")
    assert (options["options"], options["paths"]) == ({"img_size": 32}, ("blocks.3",))
    assert parse("torchvision:resnet18.IMAGENET1K_V1").options["tag"] == "IMAGENET1K_V1"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("timm:", "write timm:MODEL in small letters"),
        ("timm:ResNet18", "write timm:MODEL in small letters"),
        ("timm:hf-hub", "write timm:MODEL in small letters"),
        ("timm:hf_hub:x/y", "unknown setting in timm:hf_hub:x/y: 'x/y'; Allowed: img_size"),
        ("timm:resnet50.", "after the dot comes the tag of pretrained weights, as in timm:resnet18.a1_in1k"),
        ("torchvision:resnet18.../x", "the tag of pretrained weights, as in torchvision:resnet18.IMAGENET1K_V1"),
        ("timm:resnet50:pretrained=1", "unknown setting in timm:resnet50:pretrained=1: 'pretrained'"),
        ("timm:resnet50:checkpoint_path=x", "'checkpoint_path'"),
        ("timm:vit:img_sise=32", "did you mean 'img_size'?"),
        ("timm:vit:img_size=0", "img_size is a whole number from 1 to 4096, not '0'"),
        ("timm:vit:img_size=5000", "img_size is a whole number from 1 to 4096, not '5000'"),
        ("timm:vit:img_size=32,img_size=64", "img_size is given twice"),
        ("timm:vit:drop_rate=1.5", "drop_rate is a number from 0 up and below 1, as in drop_rate=0.1, not '1.5'"),
        ("timm:resnet18@", "after @ come the modules whose outputs get heads, as in @layer2,layer3"),
        ("timm:resnet18@layer 2", "after @ come the modules"),
        ("timm:resnet18@layer2,layer2", "the exit 'layer2' is named twice"),
        ("timm:resnet18@" + ",".join(f"b{k}" for k in range(9)), "9 exits; at most 8"),
    ],
)
def test_a_wrong_name_is_told_what_to_type(name: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(name)
    assert said in str(error.value)


def test_the_listing_has_both_libraries() -> None:
    assert {"timm:MODEL", "torchvision:MODEL"} < describe_families().keys()


def test_a_recipe_takes_them_by_name() -> None:
    recipe = tiny_recipe(networks={"a": "timm:resnet18", "b": "torchvision:resnet50@layer3"})
    assert list(recipe.graph.exits.items()) == [("a", ("c2", "c3")), ("b", ("c2",))]
    assert len(recipe.graph.transfers) == 2 * 3 * 2
    assert Recipe.check(recipe.model_dump()) == recipe
    with pytest.raises(ValueError, match=r"networks\.a: timm:Resnet18: write timm:MODEL in small letters"):
        tiny_recipe(networks={"a": "timm:Resnet18"})


CHECK = """
import sys
from codistill import recipes
recipe = recipes.get("quickstart", ["networks.a=timm:resnet18:drop_rate=0.1@layer2,layer3", "networks.b=torchvision:x"])
assert recipe.networks["a"] == "timm:resnet18:drop_rate=0.1@layer2,layer3"
assert recipe.graph.exits["b"] == ("c2", "c3")
sys.exit(len({"torch", "timm", "torchvision"} & sys.modules.keys()))
"""


def test_a_recipe_is_read_without_torch_and_without_the_libraries() -> None:
    assert subprocess.run([sys.executable, "-c", CHECK], check=False).returncode == 0
