"""The parts of a network: its blocks by depth as timm groups them, its classifier, what is frozen."""

from typing import Any, cast

import pytest
import torch
from torch import nn

from codistill.engine.weight_files import load_but_classifier
from codistill.networks.families import EXAMPLES, architecture
from codistill.networks.parts import classifier_parameters, freeze, is_frozen, layer_depths
from support import zoo

# Where timm's own groups differ: it counts the norm or the convolution in front of the classifier with the one or with
# the other, so only networks are compared in which it says as we do that they belong to the last block.
ALIKE = ("resnet10t", "resnet50", "test_vit", "swin_tiny_patch4_window7_224", "test_efficientnet", "mixer_s32_224")


@pytest.mark.parametrize("name", ALIKE)
def test_depths_are_those_of_timms_layer_decay(name: str) -> None:
    with torch.device("meta"):
        backbone = architecture(f"timm:{name}").backbone(10)
        network = zoo.timm.create_model(name, num_classes=10)
    matcher = cast(Any, network).group_matcher(coarse=False)
    groups = zoo.timm.models.group_parameters(network, matcher, reverse=True)
    depths = layer_depths(backbone)
    found = {key.partition(".")[2]: depths[one] for key, one in backbone.named_parameters()}
    assert len(set(found.values())) > 4
    assert found == {key: max(groups.values()) - layer for key, layer in groups.items()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_depths_of_our_networks_fall_from_the_stem_to_the_classifier(name: str) -> None:
    with torch.device("meta"):
        backbone = architecture(name).backbone(10)
    depths = layer_depths(backbone)
    found = [depths[parameter] for parameter in backbone.parameters()]
    assert len(found) == len(depths)
    assert found == sorted(found, reverse=True)
    assert set(found) == set(range(max(found) + 1))
    assert {one for one, depth in depths.items() if not depth} == classifier_parameters(backbone)


# Networks of timm whose logits are the average of several classifiers.
SEVERAL = (
    *("deit_tiny_distilled_patch16_224", "pit_ti_distilled_224", "crossvit_9_240", "levit_128s", "repvit_m0_9"),
    *("efficientformer_l1", "efficientformerv2_s0", "efficientvim_m1", "efficientvim_m1_dist", "swiftformer_xs"),
)
ONE = ("timm:resnet10t", "timm:test_vit", "torchvision:squeezenet1_1", "torchvision:vgg11")


@pytest.mark.parametrize("name", [*ONE, *(f"timm:{name}" for name in SEVERAL)])
def test_the_classifier_is_what_changes_with_the_number_of_classes(name: str) -> None:
    with torch.device("meta"):
        ten, eleven = (architecture(name).backbone(classes) for classes in (10, 11))
    changed = {key for key, one in ten.named_parameters() if one.shape != eleven.get_parameter(key).shape}
    own = classifier_parameters(ten)
    assert {key for key, one in ten.named_parameters() if one in own} == changed
    assert changed


def test_several_classifiers_are_new_for_other_classes_and_learn_together() -> None:
    with torch.device("meta"):
        seven, ten = (architecture("timm:deit_tiny_distilled_patch16_224").backbone(classes) for classes in (7, 10))
    new = load_but_classifier(ten, seven.state_dict(), "the network")
    assert new == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]
    freeze(ten, "backbone")
    assert [name for name, one in ten.classifier.named_parameters() if one.requires_grad] == new


@pytest.mark.parametrize("name", ["timm:resnet10t", "timm:test_vit", "wrn-10-1"])
def test_freezing_up_to_an_exit_freezes_what_its_features_depend_on(name: str) -> None:
    backbone = architecture(name).backbone(10).eval()
    exit_name = backbone.exits[0].name
    freeze(backbone, exit_name)
    size = 160 if name == "timm:test_vit" else 32
    features = backbone.features(torch.rand(1, 3, size, size))
    assert not features[exit_name].requires_grad
    assert features["final"].requires_grad
    assert not is_frozen(backbone)
    assert is_frozen(backbone.requires_grad_(False))
    assert not is_frozen(nn.ReLU())
    with pytest.raises(ValueError, match=r"unknown part to freeze 'c9'.* Allowed: backbone, "):
        freeze(backbone, "c9")
