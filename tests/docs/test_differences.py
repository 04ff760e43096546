"""docs/differences.md says of this code what is true of it. What it says of the authors' code was read there."""

import re

import pytest
from torch import nn

from codistill import Cohort, recipes
from codistill.data.cifar import CIFARS
from codistill.networks.families import architecture
from codistill.recipes.schema import learning_rate
from support.site import ROOT

PAGE = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
RECIPE = "cifar100/wrn-28-4-twins"
SWITCHES = re.findall(r"`([a-z_.]+=[^`]+)`", PAGE.partition("## Without a switch")[0])


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_the_recipe_and_nothing_beside_it(switch: str) -> None:
    assert len(SWITCHES) == 5
    (change,) = recipes.difference(recipes.get(RECIPE), recipes.get(RECIPE, [switch]))
    assert change.startswith(f"{switch.partition('=')[0]}: ")


@pytest.mark.parametrize(
    ("changes", "words"), [([], "after 60, 120 and 160 |"), (SWITCHES[1:2], "after 59, 119 and 159 epochs:")]
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
    smaller = {conv.groups: (3 * 9) ** -0.5 / float(conv.weight.std()) for conv in depthwise}
    assert "2 (32 channels) to 18 times (2,048) smaller" in PAGE
    assert (min(smaller), max(smaller)) == (32, 2048)
    assert smaller[32] == pytest.approx(2.3, abs=0.3)
    assert smaller[2048] == pytest.approx(18.5, abs=0.5)


def test_a_uniform_start_is_of_every_network() -> None:
    cohort = Cohort({"a": "wrn-10-1", "b": "mobilenet"}, 10, batchnorm_init="uniform")
    norms = [norm for norm in cohort.members["b"].modules() if isinstance(norm, nn.BatchNorm2d)]
    assert norms
    assert all(0 <= norm.weight.min() <= norm.weight.max() < 1 for norm in norms)


def test_normalisation_constants() -> None:
    mean, std = (
        ", ".join(f"{number:.4f}" for number in numbers)
        for numbers in (CIFARS["cifar100"].mean, CIFARS["cifar100"].std)
    )
    assert f"own: mean {mean}, std {std} |" in PAGE


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
