"""Parameters and FLOPs of every backbone and head, against counts made independently of this code."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from codistill.networks.build import architecture
from codistill.networks.cost import Cost, cost

# An independent count for 100 classes and 32×32: parameters, and FLOPs in 1e9. The exact FLOPs stand beside it.
# It had 0.278 for DenseNet's C3, which is 0.2775 rounded a second time: see the count by hand below.
CIFAR = {
    "resnet-110": {
        "final": (1_733_812, 0.506, 505_786_880),
        "stage1": (816_356, 0.165, 165_163_520),
        "stage2": (5_219_940, 0.665, 665_347_072),
    },
    "resnet-164": {
        "final": (1_726_388, 0.495, 495_339_520),
        "stage1": (850_276, 0.173, 173_066_240),
        "stage2": (5_109_092, 0.650, 650_219_520),
    },
    "densenet-40-12": {
        "final": (1_060_132, 0.530, 529_706_496),
        "stage1": (676_156, 0.277, 277_487_040),
        "stage2": (2_132_020, 0.297, 297_291_520),
    },
    "wrn-28-4": {
        "final": (5_872_180, 1.691, 1_691_240_448),
        "stage1": (3_241_188, 0.839, 838_912_000),
        "stage2": (17_230_180, 2.198, 2_197_917_696),
    },
    "wrn-28-10": {
        "final": (36_536_884, 10.487, 10_486_772_736),
        "stem": (18_096_772, 6.711, 6_711_014_400),
        "stage1": (20_145_060, 5.243, 5_243_008_000),
        "stage2": (107_464_420, 13.737, 13_736_601_600),
    },
    "mobilenet": {
        "final": (3_309_476, 1.223, 1_223_303_168),
        "stage1": (2_637_668, 0.681, 681_320_448),
        "stage2": (5_484_132, 0.674, 674_447_360),
    },
}
WITH_BOTH = {
    ("resnet-110", "paper"): (7_770_108, 1.336),
    ("resnet-164", "paper"): (7_685_756, 1.319),
    ("densenet-40-12", "paper"): (3_868_308, 1.104),
    ("wrn-28-4", "paper"): (26_343_548, 4.728),
    ("wrn-28-10", "paper"): (164_146_364, 29.466),
    ("mobilenet", "paper"): (11_431_276, 2.579),
    ("wrn-28-10", "narrow"): (69_647_804, 15.428),
    ("densenet-40-12", "narrow"): (2_319_732, 0.832),
}


@cache
def head_cost(name: str, exit_name: str, kind: str, num_classes: int, image_size: int) -> Cost:
    network = architecture(name)
    (place,) = (place for place in network.exits if place.name == exit_name)
    with torch.device("meta"):
        head = network.head(exit_name, kind, num_classes)
    size = image_size // place.stride
    return cost(head, (place.channels, size, size))


@cache
def backbone_cost(name: str, num_classes: int, image_size: int) -> Cost:
    with torch.device("meta"):
        backbone = architecture(name).backbone(num_classes)
    return cost(backbone, (3, image_size, image_size))


@pytest.mark.parametrize(("name", "exit_name"), [(name, exit_name) for name, row in CIFAR.items() for exit_name in row])
def test_cifar_networks_and_heads_have_the_papers_size(name: str, exit_name: str) -> None:
    parameters, gflops, flops = CIFAR[name][exit_name]
    counted = backbone_cost(name, 100, 32) if exit_name == "final" else head_cost(name, exit_name, "paper", 100, 32)
    assert counted == Cost(parameters, flops)
    assert round(counted.flops / 1e9, 3) == gflops


@pytest.mark.parametrize(("name", "kind"), list(WITH_BOTH))
def test_members_with_both_heads_have_the_papers_size(name: str, kind: str) -> None:
    heads = [head_cost(name, exit_name, kind, 100, 32) for exit_name in ("stage1", "stage2")]
    parts = [backbone_cost(name, 100, 32), *heads]
    parameters, gflops = WITH_BOTH[name, kind]
    assert sum(part.parameters for part in parts) == parameters
    assert round(sum(part.flops for part in parts) / 1e9, 3) == gflops


def test_densenets_c3_by_hand() -> None:
    transitions = 160 * 160 * 32**2 + 304 * 304 * 16**2
    first_row = sum(9 * 12 * (160 + 12 * layer) * 16**2 for layer in range(12))
    second_row = sum(9 * 12 * (304 + 12 * layer) * 8**2 for layer in range(6))
    linear = 376 * 100
    macs = transitions + first_row + second_row + linear
    assert head_cost("densenet-40-12", "stage1", "paper", 100, 32).flops == 2 * macs == 277_487_040


# Torchvision's published counts: parameters at 1000 classes, 1e9 multiply-adds at 224×224.
@pytest.mark.parametrize(
    ("name", "parameters", "gmacs"),
    [
        ("resnet-18", 11_689_512, 1.814),
        ("resnet-50", 25_557_032, 4.089),
        ("mobilenetv2", 3_504_872, 0.301),
    ],
)
def test_imagenet_backbones_have_torchvisions_size(name: str, parameters: int, gmacs: float) -> None:
    counted = backbone_cost(name, 1000, 224)
    assert counted.parameters == parameters
    assert round(counted.flops / 2e9, 3) == gmacs


class ByHand:
    """Counts layers as one would with pencil and paper; ``size`` is that of the feature map, which strides shrink."""

    def __init__(self, size: int) -> None:
        self.size, self.parameters, self.macs = size, 0, 0

    def conv(self, c_in: int, c_out: int, kernel: int = 1, groups: int = 1) -> "ByHand":
        weights = c_in // groups * c_out * kernel**2
        self.parameters += weights + 2 * c_out
        self.macs += weights * self.size**2
        return self

    def basic(self, c_in: int, c_out: int, stride: int = 1) -> "ByHand":
        self.size //= stride
        self.conv(c_in, c_out, 3).conv(c_out, c_out, 3)
        return self.conv(c_in, c_out) if c_in != c_out else self

    def bottleneck(self, c_in: int, middle: int, stride: int = 1) -> "ByHand":
        self.conv(c_in, middle)
        self.size //= stride
        self.conv(middle, middle, 3).conv(middle, 4 * middle)
        return self.conv(c_in, 4 * middle) if c_in != 4 * middle else self

    def inverted(self, c_in: int, c_out: int, factor: int, stride: int = 1) -> "ByHand":
        self.conv(c_in, c_in * factor)
        self.size //= stride
        return self.conv(c_in * factor, c_in * factor, 3, groups=c_in * factor).conv(c_in * factor, c_out)

    def linear(self, c_in: int, classes: int) -> Cost:
        weights = c_in * classes
        return Cost(self.parameters + weights + classes, 2 * (self.macs + weights))


IMAGENET_HEADS = {
    ("resnet-18", "stage2", "paper"): (
        ByHand(28).basic(128, 256, 2).basic(256, 512, 2).basic(512, 512).linear(512, 1000),
        9_825_768,
    ),
    ("resnet-18", "stage3", "paper"): (
        ByHand(14).basic(256, 1024, 2).basic(1024, 1024).linear(1024, 1000),
        31_968_232,
    ),
    ("resnet-18", "stage3", "narrow"): (ByHand(14).basic(256, 512, 2).basic(512, 512).linear(512, 1000), 8_906_728),
    ("resnet-50", "stage2", "paper"): (
        ByHand(28)
        .bottleneck(512, 256, 2)
        .bottleneck(1024, 256)
        .bottleneck(1024, 256)
        .bottleneck(1024, 512, 2)
        .bottleneck(2048, 512)
        .linear(2048, 1000),
        16_297_960,
    ),
    ("resnet-50", "stage3", "paper"): (
        ByHand(14).bottleneck(1024, 1024, 2).bottleneck(4096, 1024).bottleneck(4096, 1024).linear(4096, 1000),
        58_668_008,
    ),
    ("mobilenetv2", "stage2", "paper"): (
        ByHand(14)
        .inverted(96, 160, 6, 2)
        .inverted(160, 160, 6)
        .inverted(160, 160, 6)
        .inverted(160, 320, 3)
        .conv(320, 1280)
        .linear(1280, 1000),
        2_725_704,
    ),
    ("mobilenetv2", "stage3", "paper"): (
        ByHand(7).inverted(160, 480, 6).conv(480, 1920).linear(1920, 1000),
        3_474_280,
    ),
    ("mobilenetv2", "stage3", "narrow"): (
        ByHand(7).inverted(160, 240, 6).conv(240, 960).linear(960, 1000),
        1_590_280,
    ),
}


@pytest.mark.parametrize(("name", "exit_name", "kind"), list(IMAGENET_HEADS))
def test_imagenet_heads_have_the_size_counted_by_hand(name: str, exit_name: str, kind: str) -> None:
    by_hand, parameters = IMAGENET_HEADS[name, exit_name, kind]
    assert by_hand.parameters == parameters
    assert head_cost(name, exit_name, kind, 1000, 224) == by_hand


@pytest.mark.parametrize("name", [*CIFAR, "resnet-18", "resnet-50", "mobilenetv2"])
def test_apfc_heads_are_one_linear_layer_on_a_4x4_grid(name: str) -> None:
    for place in architecture(name).exits:
        weights = place.channels * 16 * 100
        assert head_cost(name, place.name, "apfc", 100, 224) == Cost(weights + 100, 2 * weights)


# Blocks and output channels (a DenseNet's growth) per row, by the rule for other depths.
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("resnet-20", {"stage2": [(3, 128)], "stage1": [(2, 32), (2, 64)]}),
        ("resnet-173", {"stage2": [(19, 512)], "stage1": [(10, 128), (10, 256)]}),
        ("wrn-22-2", {"stage2": [(3, 256)], "stage1": [(3, 64), (2, 128)], "stem": [(3, 32), (2, 64), (2, 128)]}),
        ("densenet-25-6", {"stage2": [(7, 18)], "stage1": [(7, 6), (4, 6)]}),
    ],
)
def test_heads_of_other_depths_follow_the_rule(name: str, rows: dict[str, list[tuple[int, int]]]) -> None:
    table = architecture(name).auxiliary  # type: ignore[attr-defined]
    assert {exit_name: [(row.blocks, row.channels) for row in table[exit_name]] for exit_name in table} == rows


def conv_norm(out: int, fan_in: int, kernel: int) -> Iterator[tuple[int, ...]]:
    yield from [(out, fan_in, kernel, kernel), (out,), (out,)]


def torchvision_resnet(depth: int) -> Iterator[tuple[int, ...]]:
    """The parameters' shapes in torchvision's order: a block's convolutions with their norms, then its downsample."""
    yield from conv_norm(64, 3, 7)
    channels = 64
    for blocks, width in zip({18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth], (64, 128, 256, 512), strict=True):
        out = width if depth == 18 else 4 * width
        for _ in range(blocks):
            kernels = [(width, 3), (width, 3)] if depth == 18 else [(width, 1), (width, 3), (out, 1)]
            fan_in = channels
            for conv_out, kernel in kernels:
                yield from conv_norm(conv_out, fan_in, kernel)
                fan_in = conv_out
            if channels != out:
                yield from conv_norm(out, channels, 1)
            channels = out
    yield from [(1000, channels), (1000,)]


def torchvision_mobilenet_v2() -> Iterator[tuple[int, ...]]:
    yield from conv_norm(32, 3, 3)
    channels = 32
    table = [(1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)]
    for factor, out, blocks in table:
        for _ in range(blocks):
            hidden = channels * factor
            if factor != 1:
                yield from conv_norm(hidden, channels, 1)
            yield from conv_norm(hidden, 1, 3)
            yield from conv_norm(out, hidden, 1)
            channels = out
    yield from conv_norm(1280, channels, 1)
    yield from [(1000, 1280), (1000,)]


@pytest.mark.parametrize(
    ("name", "expected", "count"),
    [
        ("resnet-18", torchvision_resnet(18), 62),
        ("resnet-50", torchvision_resnet(50), 161),
        ("mobilenetv2", torchvision_mobilenet_v2(), 158),
    ],
)
def test_imagenet_parameters_come_in_torchvisions_order(
    name: str, expected: Iterator[tuple[int, ...]], count: int
) -> None:
    with torch.device("meta"):
        backbone = architecture(name).backbone(1000)
    shapes = [tuple(parameter.shape) for parameter in backbone.parameters()]
    assert shapes == list(expected)
    assert len(shapes) == count
