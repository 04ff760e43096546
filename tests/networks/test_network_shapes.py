"""Features, logits and strides of every network with every kind of head."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from codistill.networks.families import EXAMPLES, architecture
from codistill.networks.resnet import ImageNetResNet, ZeroPaddedShortcut
from codistill.networks.tables import HEAD_KINDS, GridPool

IMAGENET = ("resnet-18", "resnet-50", "mobilenetv2")

# Feature maps (channels, size) at the exits, from the papers' tables, of 32×32 images or of ImageNet's 224×224.
FEATURES = {
    "resnet-20": {"stage1": (16, 32), "stage2": (32, 16)},
    "resnet-110": {"stage1": (16, 32), "stage2": (32, 16)},
    "resnet-164": {"stage1": (64, 32), "stage2": (128, 16)},
    "wrn-16-2": {"stem": (16, 32), "stage1": (32, 32), "stage2": (64, 16)},
    "wrn-28-4": {"stem": (16, 32), "stage1": (64, 32), "stage2": (128, 16)},
    "wrn-28-10": {"stem": (16, 32), "stage1": (160, 32), "stage2": (320, 16)},
    "wrn-28-10-dropout-0.3": {"stem": (16, 32), "stage1": (160, 32), "stage2": (320, 16)},
    "densenet-40-12": {"stage1": (160, 32), "stage2": (304, 16)},
    "mobilenet": {"stage1": (256, 32), "stage2": (512, 16)},
    "resnet-18": {"stage2": (128, 28), "stage3": (256, 14)},
    "resnet-50": {"stage2": (512, 28), "stage3": (1024, 14)},
    "mobilenetv2": {"stage2": (96, 14), "stage3": (160, 7)},
}


def test_every_known_network_is_looked_at() -> None:
    assert set(FEATURES) == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_features_and_logits_have_the_stated_shapes(name: str) -> None:
    network = architecture(name)
    with torch.device("meta"):
        backbone = network.backbone(num_classes=7)
        heads = [(place, network.head(place.name, kind, 7)) for place in network.exits for kind in HEAD_KINDS]
        assert len(heads) == 3 * len(FEATURES[name])
        for image_size in (32, 224):
            features = backbone.features(torch.empty(2, 3, image_size, image_size))
            assert set(features) == {"final", *FEATURES[name]}
            assert features["final"].shape == (2, 7)
            for place, head in heads:
                size = image_size // place.stride
                assert features[place.name].shape == (2, place.channels, size, size)
                assert head(features[place.name]).shape == (2, 7)
        assert backbone.exits == network.exits


@pytest.mark.parametrize("name", EXAMPLES)
def test_exits_lie_where_the_papers_tables_say(name: str) -> None:
    image_size = 224 if name in IMAGENET else 32
    stated = {place.name: (place.channels, image_size // place.stride) for place in architecture(name).exits}
    assert stated == FEATURES[name]


def chain(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that data pass one after the other; a residual block or a dense layer is one of them."""
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from chain(child)
    else:
        yield module


def strides_until_pooling(path: list[nn.Module], image_size: int) -> list[int]:
    """By how much each module on the way to global pooling shrinks the feature map, measured by running it."""
    x = torch.empty(2, 3, image_size, image_size, device="meta")
    strides = []  # type: ignore[var-annotated]
    for module in path:
        for step in chain(module):
            if isinstance(step, nn.AdaptiveAvgPool2d):
                return strides
            size, x = x.shape[-1], step(x)
            strides.append(size // x.shape[-1])
    raise AssertionError("no pooling on this path")


@pytest.mark.parametrize("name", EXAMPLES)
def test_heads_down_sample_as_often_as_their_backbone(name: str) -> None:
    network = architecture(name)
    halvings, image_size = (5, 224) if name in IMAGENET else (2, 32)
    walked = 0
    with torch.device("meta"):
        backbone = network.backbone(10)
        stages = dict(backbone.stages.items())
        own = strides_until_pooling([*stages.values(), backbone.classifier], image_size)
        assert sorted(own)[-halvings - 1 :] == [1, *[2] * halvings]
        for place in network.exits:
            trunk = list(stages.values())[: list(stages).index(place.name) + 1]
            for kind in ("paper", "narrow"):
                strides = strides_until_pooling([*trunk, network.head(place.name, kind, 10)], image_size)
                assert sorted(strides)[-halvings - 1 :] == [1, *[2] * halvings]
                walked += 1
    assert walked == 2 * len(FEATURES[name])


@pytest.mark.parametrize("name", ["resnet-8", "wrn-10-1", "densenet-10-3", "mobilenet"])
@pytest.mark.parametrize(("in_channels", "num_classes"), [(1, 2), (3, 101)])
def test_any_number_of_channels_and_classes_and_a_batch_of_one(name: str, in_channels: int, num_classes: int) -> None:
    network = architecture(name)
    backbone = network.backbone(num_classes, in_channels).eval()
    features = backbone.features(torch.randn(1, in_channels, 28, 28))
    logits = [
        network.head(place.name, kind, num_classes).eval()(features[place.name])
        for place in network.exits
        for kind in HEAD_KINDS
    ]
    assert all(z.shape == (1, num_classes) and z.isfinite().all() for z in [features["final"], *logits])


def test_a_padded_shortcut_keeps_every_other_pixel_and_adds_empty_channels() -> None:
    x = torch.arange(2 * 4 * 4.0).reshape(1, 2, 4, 4)
    padded = ZeroPaddedShortcut(new_channels=3, stride=2)(x)
    assert padded.tolist() == [[[[0, 2], [8, 10]], [[16, 18], [24, 26]], *[[[0, 0], [0, 0]]] * 3]]


@pytest.mark.parametrize("size", [8, 7, 2])
def test_the_grid_averages_its_cells_at_any_size(size: int) -> None:
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    pooled = GridPool(4)(x)
    for row in range(4):
        for column in range(4):
            top, left = row * size // 4, column * size // 4
            bottom, right = -(-(row + 1) * size // 4), -(-(column + 1) * size // 4)
            cell = x[:, :, top:bottom, left:right].mean(dim=(-1, -2))
            assert torch.allclose(pooled[:, :, row, column], cell)


@pytest.mark.parametrize("name", ["wrn-28-4", "resnet-18"])
def test_wrong_heads_are_refused(name: str) -> None:
    network = architecture(name)
    with pytest.raises(ValueError, match="unknown kind of head 'papers'; did you mean 'paper'"):
        network.head("stage2", "papers", 10)
    with pytest.raises(ValueError, match=r"unknown exit of .* 'stage9'; did you mean 'stage"):
        network.head("stage9", "paper", 10)


def test_architectures_check_their_depth_when_built_without_a_name() -> None:
    with pytest.raises(ValueError, match="depth 34 does not fit; it is 18 or 50"):
        ImageNetResNet(34)
    with pytest.raises(ValueError, match="depth 27 does not fit; it is 6n"):
        type(architecture("wrn-28-4"))(27, 4).backbone(10)  # type: ignore[call-arg]
