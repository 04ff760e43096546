"""Heads that a network gets by itself: compared with the paper's, counted by hand, and begun anew."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from codistill.cohort import Cohort
from codistill.networks.adapters.architecture import OwnArchitecture
from codistill.networks.adapters.surgery import redraw, refit
from codistill.networks.cost import Cost, cost
from codistill.networks.families import architecture
from support import zoo


def counted(name: str, exit_name: str, kind: str = "paper", classes: int = 1000, size: int = 224) -> Cost:
    network = architecture(name)
    with torch.device("meta"):
        features = network.backbone(classes).features(torch.empty(2, 3, size, size))[exit_name]
        return cost(network.head(exit_name, kind, classes), tuple(features.shape[1:]))


# The paper's heads for ImageNet's ResNets: torchvision's networks get the same ones without a table.
@pytest.mark.parametrize(
    ("automatic", "paper", "exit_name", "papers_exit"),
    [
        ("torchvision:resnet18", "resnet-18", "c2", "stage3"),
        ("torchvision:resnet18", "resnet-18", "c3", "stage2"),
        ("timm:resnet18", "resnet-18", "c2", "stage3"),
        ("timm:resnet18", "resnet-18", "c3", "stage2"),
        ("torchvision:resnet50", "resnet-50", "c2", "stage3"),
        ("torchvision:resnet50", "resnet-50", "c3", "stage2"),
    ],
)
def test_resnets_get_the_papers_heads(automatic: str, paper: str, exit_name: str, papers_exit: str) -> None:
    assert zoo.timm
    assert counted(automatic, exit_name) == counted(paper, papers_exit)
    assert counted(automatic, exit_name, "narrow") == counted(paper, papers_exit, "narrow")


# Parameters and FLOPs (2 per multiply-add) at 32×32 with 100 classes: the paper's, and what the rule gives by itself.
# C2 is the paper's to the last weight. The paper's C3 of a WRN keeps all blocks of conv3_x; the rule halves them.
WRN = {
    ("wrn-28-4", "stage2"): ((17_230_180, 2_197_917_696), (17_230_180, 2_197_917_696)),
    ("wrn-28-4", "stage1"): ((3_241_188, 838_912_000), (2_650_340, 536_922_112)),
    ("wrn-28-10", "stage2"): ((107_464_420, 13_736_601_600), (107_464_420, 13_736_601_600)),
    ("wrn-28-10", "stage1"): ((20_145_060, 5_243_008_000), (16_456_100, 3_355_571_200)),
}


@pytest.mark.parametrize(("name", "exit_name"), WRN)
def test_wide_resnets_get_the_papers_c2_and_a_smaller_c3(name: str, exit_name: str) -> None:
    paper, automatic = (Cost(*numbers) for numbers in WRN[name, exit_name])
    assert counted(name, exit_name, classes=100, size=32) == paper
    with torch.device("meta"):
        module = architecture(name).backbone(100)
        own = OwnArchitecture(module)
        place = own.exits[{"stage2": 0, "stage1": 1}[exit_name]]
        assert place.path == f"stages.{exit_name}"
        features = module.features(torch.empty(2, 3, 32, 32))[exit_name]
        assert cost(own.head(place.name, "paper", 100), tuple(features.shape[1:])) == automatic
    blocks_a_stage, channels = 4, {"wrn-28-4": 128, "wrn-28-10": 320}[name]
    if exit_name == "stage1":
        # Two blocks fewer of conv3_x, each two 3×3 convolutions and two norms, at 16×16.
        weights = 2 * 9 * channels**2
        fewer = blocks_a_stage // 2
        assert paper.parameters - automatic.parameters == fewer * (weights + 4 * channels)
        assert paper.flops - automatic.flops == fewer * 2 * weights * 16**2


def test_the_documented_table_has_the_numbers_that_were_counted() -> None:
    text = (Path(__file__).parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")
    rows = [
        (row[0], int(row[1].replace(",", "")), float(row[2]))
        for row in re.findall(r"\| (WRN.*?) \| ([\d,]+) \| ([\d.]+) \|", text)
    ]
    expected = [
        (f"{name.upper()} C3, {which}", parameters, round(flops / 1e9, 3))
        for (name, exit_name), counts in WRN.items()
        if exit_name == "stage1"
        for which, (parameters, flops) in zip(("paper", "by the rule"), counts, strict=True)
    ]
    assert rows == expected
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm:convnext_atto", ["2 of 2 blocks of stages.3.blocks, twice as wide"]),
        ("timm:convnext_atto", [None, "3 of 6 blocks of stages.2.blocks, 2 of 2 blocks of stages.3.blocks"]),
        ("timm:densenet121", ["16 of 16 blocks of features.denseblock4, twice as wide"]),
        (
            "timm:densenet121",
            [None, "12 of 24 blocks of features.denseblock3, 8 of 16 blocks of features.denseblock4"],
        ),
        # 17 is wider than 16, so it cannot be missing; 15 and 16 can.
        (
            "torchvision:mobilenet_v2",
            [None, "4 of 7 blocks of features.7 to features.13, 2 of 4 blocks of features.14 to features.17"],
        ),
        # Attention counts on its width.
        ("timm:vit_tiny_patch16_224", ["4 of 4 blocks of blocks.8 to blocks.11"]),
        (
            "timm:vit_tiny_patch16_224",
            [None, "2 of 4 blocks of blocks.4 to blocks.7, 2 of 4 blocks of blocks.8 to blocks.11"],
        ),
        # A stage with one block has nothing to leave out, and nothing inside of that block is taken for blocks.
        ("timm:regnetx_002@s1", ["1 of 1 blocks of s2, 2 of 4 blocks of s3, 4 of 7 blocks of s4"]),
        ("timm:vgg11", ["features.19, twice as wide"]),
        ("timm:resnet18@layer3.0", ["1 of 1 blocks of layer3.1, 2 of 2 blocks of layer4"]),
        ("timm:resnet18@layer4", ["what follows the last stage"]),
    ],
)  # fmt: skip
def test_what_heads_are_made_of(name: str, words: list[str | None]) -> None:
    network = architecture(name)
    for exit_name, said in zip(("c2", "c3"), words, strict=False):
        assert said is None or network.describe_head(exit_name, "paper") == said


def test_apfc_is_one_linear_layer_on_a_grid_or_on_the_mean_of_the_tokens() -> None:
    for name, widths in (
        ("timm:resnet18", {"c2": 256 * 16, "c3": 128 * 16}),
        ("timm:swin_tiny_patch4_window7_224", {"c2": 384 * 16, "c3": 192 * 16}),
        ("timm:vit_tiny_patch16_224", {"c2": 192, "c3": 192}),
    ):
        for exit_name, width in widths.items():
            assert counted(name, exit_name, "apfc") == Cost(1000 * width + 1000, 2 * 1000 * width)
    assert architecture("timm:resnet18").describe_head("c2", "apfc") == "averages over a 4×4 grid and one linear layer"


def test_what_cannot_be_narrowed_is_refused_with_what_can_be_had() -> None:
    with pytest.raises(ValueError, match=r"no head of kind narrow at c3: its blocks support no other width; use heads"):
        architecture("timm:vit_tiny_patch16_224").head("c3", "narrow", 10)
    with pytest.raises(ValueError, match=r"unknown exit of timm:resnet18 'c9'; Allowed: c2, c3, c4, c5"):
        architecture("timm:resnet18").head("c9", "paper", 10)
    with pytest.raises(ValueError, match="unknown kind of head 'papers'"):
        architecture("timm:resnet18").head("c2", "papers", 10)


def test_new_numbers_are_spread_as_the_old_ones_for_their_fan_in() -> None:
    torch.manual_seed(0)
    old = torch.randn(64, 32, 3, 3) * 0.5 + 0.1
    new = redraw(old, (128, 128, 3, 3))
    assert new.shape == (128, 128, 3, 3)
    assert float(new.mean()) == pytest.approx(0.1, abs=0.01)
    assert float(new.std()) == pytest.approx(0.5 / 2, rel=0.02)  # four times the fan-in, half the spread
    assert redraw(torch.zeros(4), (8,)).eq(0).all()
    assert redraw(torch.full((4,), 1e-6), (8,)).eq(1e-6).all()


def test_layers_are_refitted_to_what_arrives() -> None:
    """Widths by hand: 6 arrive, the first layer is doubled, the depthwise one follows, the last keeps its width."""
    layers = nn.Sequential(
        nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 5)
    )
    refit(layers, (6, 3, 3), lambda path: 2.0 if path == "0" else 1.0)
    assert {name: tuple(weight.shape) for name, weight in layers.state_dict().items() if weight.ndim} == {
        "0.weight": (16, 6, 1, 1),
        "0.bias": (16,),
        **{f"1.{name}": (16,) for name in ("weight", "bias", "running_mean", "running_var")},
        "2.weight": (16, 1, 3, 3),
        "2.bias": (16,),
        "4.weight": (5, 16),
        "4.bias": (5,),
    }
    assert layers(torch.randn(2, 6, 3, 3)).shape == (2, 5)


def test_a_failing_refit_changes_nothing() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.conv(x)

    block = Adds()
    before = {name: weight.clone() for name, weight in block.state_dict().items()}
    with pytest.raises(RuntimeError):
        refit(block, (4, 3, 3), lambda path: 2.0)
    assert all(weight.equal(before[name]) for name, weight in block.state_dict().items())


def test_heads_begin_anew_and_from_their_seed_alone() -> None:
    cohort = Cohort({"a": "timm:resnet10t"}, 5, seed=3)
    again = Cohort({"b": "wrn-10-1", "a": "timm:resnet10t"}, 5, seed=3, exits={"a": ("c3",), "b": ()})
    head, other = cohort.members["a"].heads["c3"].state_dict(), again.members["a"].heads["c3"].state_dict()
    assert head.keys() == other.keys()
    assert all(weight.equal(other[name]) for name, weight in head.items())
    backbone = cohort.members["a"].backbone.state_dict()
    drawn = [name for name, weight in head.items() if weight.ndim > 1]
    assert len(drawn) > 5
    assert set(head) < set(backbone)
    assert not any(head[name].equal(backbone[name]) for name in drawn)
    for name in drawn:
        assert float(head[name].std()) == pytest.approx(float(backbone[name].std()), rel=0.1)


def test_building_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    Cohort({"a": "torchvision:regnet_y_400mf"}, 5)
    assert torch.equal(torch.rand(4), expected)
