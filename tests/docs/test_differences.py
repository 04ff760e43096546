"""docs/differences.md says of this code what is true of it. What it says of the authors' code was read there."""

import re

import pytest
from torch import nn

from codistill import Cohort, recipes
from codistill.data.cifar import AUTHORS_MEAN, AUTHORS_STD, CIFARS
from codistill.networks.families import architecture
from codistill.recipes.schema import learning_rate
from support.site import ROOT

PAGE = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
RECIPE = "cifar100/wrn-28-4-twins"
ROWS = re.findall(r"^\| .* \|$", PAGE.partition("## In training")[2].partition("##")[0], re.MULTILINE)[2:]
SWITCHES = [found[1] for row in ROWS if (found := re.match(r"`([a-z_.]+=[^`]+)`", row.rsplit(" | ", 1)[1]))]


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_the_recipe_and_nothing_beside_it(switch: str) -> None:
    (change,) = recipes.difference(recipes.get(RECIPE), recipes.get(RECIPE, [switch]))
    assert change.startswith(f"{switch.partition('=')[0]}: ")


def test_the_authors_recipes_are_all_switches_and_nothing_else() -> None:
    assert len(ROWS) == len(SWITCHES) + 2, "init=authors is for three rows"
    assert len(SWITCHES) == 8
    authors = [name for name in recipes.NAMES if name.endswith("-authors")]
    assert all(f"`{name}`" in PAGE for name in authors)
    assert len(authors) == 3
    for name in authors:
        switched = recipes.get(name.removesuffix("-authors"), [*SWITCHES, f"name={name}"])
        assert recipes.difference(switched, recipes.get(name)) == []


@pytest.mark.parametrize(
    ("recipe", "changes", "named"),
    [
        ("cifar100/densenet-40-12-twins", ["init=authors"], "init: .*not densenet-40-12$"),
        ("cifar100/wrn-28-10-resnet-110", ["batchnorm_init=authors"], "batchnorm_init: .*not resnet-110$"),
        ("imagenet/mobilenetv2-twins", ["data.folder=x", "init=authors"], "init: .*not mobilenetv2$"),
        ("quickstart", ["data.normalisation=authors"], r"data\.normalisation: .*not fashion$"),
        (RECIPE, ["data.normalisation=authors", "data.image_size=16"], r"data\.normalisation: .*not image_size=16$"),
        (RECIPE, ["augment.padding=reflect", "augment.pad=0"], r"augment\.padding: .*augment\.padding=zero$"),
    ],
)
def test_switches_that_contradict_the_rest_are_refused_by_name(recipe: str, changes: list[str], named: str) -> None:
    with pytest.raises(recipes.RecipeError, match=named):
        recipes.get(recipe, changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([], "after 60, 120 and 160 |"),
        ([switch for switch in SWITCHES if "milestones" in switch], "after 59, 119 and 159 epochs:"),
    ],
)
def test_when_the_learning_rate_drops(changes: list[str], words: str) -> None:
    recipe, batches = recipes.get(RECIPE, changes), 391
    total = recipe.length.epochs * batches
    rates = [learning_rate(recipe, epoch * batches / total) for epoch in range(recipe.length.epochs)]
    drops = [str(epoch) for epoch in range(1, len(rates)) if rates[epoch] < rates[epoch - 1]]
    assert "after {}, {} and {}".format(*drops) in words
    assert words in PAGE


def test_initial_weights() -> None:
    """Beside He's standard deviation by fan-in, √(2 / fan-in), and that of torch's default, 1 / √(3 · fan-in)."""
    cohort = Cohort({"a": "wrn-28-4", "b": "mobilenet"}, 100)
    wrn, mobilenet = (cohort.members[name].requires_grad_(False) for name in "ab")
    stem = next(part for part in wrn.modules() if isinstance(part, nn.Conv2d))
    assert f"deviation of {(2 / (16 * 9)) ** 0.5:.3f}, theirs with {(2 / (3 * 9)) ** 0.5:.3f}" in PAGE
    assert float(stem.weight.std()) == pytest.approx((2 / (16 * 9)) ** 0.5, rel=0.1)
    for linear in (part for part in wrn.modules() if isinstance(part, nn.Linear)):
        assert float(linear.weight.std()) / (2 / linear.in_features) ** 0.5 == pytest.approx(0.41, abs=0.01)
        assert 0 < linear.bias.abs().max() < linear.in_features**-0.5
    depthwise = [part for part in mobilenet.modules() if isinstance(part, nn.Conv2d) and part.groups > 1]
    assert {conv.groups for conv in depthwise} >= {32, 2048}
    assert f"deviation of {(2 / 9) ** 0.5:.3f}, theirs with {(3 * 9) ** -0.5:.3f}" in PAGE
    for conv in depthwise:
        assert float(conv.weight.std()) == pytest.approx((2 / 9) ** 0.5, rel=0.15)


def test_normalisation_constants() -> None:
    mean, std = (
        ", ".join(f"{number:.4f}" for number in numbers)
        for numbers in (CIFARS["cifar100"].mean, CIFARS["cifar100"].std)
    )
    assert f"own: mean {mean}, std {std} |" in PAGE
    theirs = (", ".join(f"{number:.4f}" for number in numbers) for numbers in (AUTHORS_MEAN, AUTHORS_STD))
    assert "too: mean {}, std {} |".format(*theirs) in PAGE


def test_halved_rows_are_rounded_up() -> None:
    rows = {depth: architecture(f"wrn-{depth}-1").describe_head("stage1", "paper") for depth in (10, 22, 28, 34)}
    assert rows == {10: "1 × 32, 1 × 64", 22: "3 × 32, 2 × 64", 28: "4 × 32, 2 × 64", 34: "5 × 32, 3 × 64"}


def test_how_architectures_are_read() -> None:
    def kinds(name: str) -> set[str]:
        return {type(part).__name__ for part in architecture(name).backbone(10).modules()}

    assert "PreActivationBlock" in kinds("resnet-164")
    assert {"ResidualBlock", "ZeroPaddedShortcut"} <= kinds("resnet-110")
    assert "Dropout" not in kinds("mobilenetv2")
    assert not any(
        isinstance(part, nn.BatchNorm2d) for part in architecture("wrn-16-1").head("stage2", "apfc", 10).modules()
    )
    (exit_before,) = [place for place in architecture("densenet-40-12").exits if place.name == "stage1"]
    assert exit_before.channels == 16 + 12 * 12
    assert exit_before.stride == 1, "before the transition"
    for name in ("resnet-164", "densenet-40-12", "wrn-16-1"):
        last = list(architecture(name).head("stage2", "paper", 10).modules())[-5:]
        assert [type(part).__name__ for part in last[:3]] == ["BatchNorm2d", "ReLU", "AdaptiveAvgPool2d"]
    for name, halves in (("densenet-40-12", ("12 × 36", "12 × 18")), ("resnet-164", ("18 × 512", "18 × 256"))):
        assert tuple(architecture(name).describe_head("stage2", kind) for kind in ("paper", "narrow")) == halves
