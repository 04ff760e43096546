"""Our ResNet-18, ResNet-50 and MobileNetV2 are torchvision's: as many weights, the same logits from the same ones."""

import re

import pytest
import torch
from torch import Tensor, nn

from codistill.networks.families import architecture
from support import zoo

TWINS = {"resnet-18": "resnet18", "resnet-50": "resnet50", "mobilenetv2": "mobilenet_v2"}
PARAMETERS = {"resnet-18": 11_689_512, "resnet-50": 25_557_032, "mobilenetv2": 3_504_872}  # as torchvision publishes

# torchvision's convolution k of a block, with the norm behind it, in our block.
FIRST = {"conv1": "branch.0.0", "bn1": "branch.0.1.0"}
BASIC = {**FIRST, "conv2": "branch.1", "bn2": "activation.0"}
BOTTLENECK = {
    **FIRST, "conv2": "branch.1.0", "bn2": "branch.1.1.0", "conv3": "branch.2", "bn3": "activation.0",
}  # fmt: skip


def our_resnet_key(key: str, parts: dict[str, str]) -> str:
    match key.split("."):
        case ["conv1" | "bn1" as part, tensor]:
            return f"stages.stem.0.{'0' if part == 'conv1' else '1.0'}.{tensor}"
        case ["fc", tensor]:
            return f"classifier.2.{tensor}"
        case [layer, block, "downsample", index, tensor]:
            return f"stages.stage{layer[-1]}.{block}.shortcut.{'0' if index == '0' else '1.0'}.{tensor}"
        case [layer, block, part, tensor]:
            return f"stages.stage{layer[-1]}.{block}.{parts[part]}.{tensor}"
    raise AssertionError(key)


def our_mobilenet_key(key: str) -> str:
    """Its 17 blocks and last convolution are our four stages: 6, 7, 3 and 2 of them."""
    if key.startswith("classifier.1."):
        return key.replace("classifier.1.", "classifier.2.")
    found = re.fullmatch(r"features\.(\d+)\.(.*)", key)
    assert found, key
    number = int(found[1])
    rest = our_mobilenet_part(found[2], last="2" if number == 1 else "3")  # the first block does not widen
    if number == 0:
        return f"stages.stem.{rest}"
    first_of_stage = {"stage1": 1, "stage2": 7, "stage3": 14, "stage4": 17}
    stage = [name for name, first in first_of_stage.items() if first <= number][-1]
    return f"stages.{stage}.{number - first_of_stage[stage]}.{rest}"


def our_mobilenet_part(part: str, last: str) -> str:
    """Steps are of a convolution 0 and a norm 1; a block ends with the ``last`` norm, and a convolution before it."""
    match part.split("."):
        case ["conv", step, tensor] if step == last:
            return f"norm.0.{tensor}"
        case ["conv", step, "1", tensor]:
            return f"branch.{step}.1.0.{tensor}"
        case ["1", tensor]:
            return f"1.0.{tensor}"
    return part.replace("conv.", "branch.", 1)


def translated(name: str, key: str) -> str:
    if name == "mobilenetv2":
        return our_mobilenet_key(key)
    return our_resnet_key(key, BASIC if name == "resnet-18" else BOTTLENECK)


def twins(name: str) -> tuple[nn.Module, nn.Module]:
    """Ours and theirs, of the same weights, in evaluation mode.

    Norms have the statistics of real features: with 0 and 1, as they come, a MobileNetV2's features fade to nothing,
    and with numbers out of the air activations die. Either way any network would give these logits, for any image.
    """
    torch.manual_seed(0)
    theirs: nn.Module = zoo.torchvision.models.get_model(TWINS[name])
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        theirs.train()(torch.randn(8, 3, 96, 96))
    ours = architecture(name).backbone(1000)
    weights = {translated(name, key): tensor for key, tensor in theirs.state_dict().items()}
    assert len(weights) == len(theirs.state_dict())
    ours.load_state_dict(weights, strict=True)
    return ours.eval(), theirs.eval()


@pytest.mark.parametrize("name", TWINS)
def test_same_weights_give_the_same_logits(name: str) -> None:
    ours, theirs = twins(name)
    for network in (ours, theirs):
        assert sum(weight.numel() for weight in network.parameters()) == PARAMETERS[name]
    images = torch.randn(3, 3, 96, 96)
    with torch.no_grad():
        our_logits, their_logits = ours(images), theirs(images)
    assert (their_logits[0] - their_logits[1]).abs().max() > 0.1, "the logits do not depend on the image"
    assert torch.allclose(our_logits, their_logits, atol=1e-5, rtol=1e-5)


OUR_STAGES = ("stem", "stage1", "stage2", "stage3", "stage4")
RESNET_STAGES = ("maxpool", "layer1", "layer2", "layer3", "layer4")
THEIR_STAGES = {
    "resnet-18": RESNET_STAGES,
    "resnet-50": RESNET_STAGES,
    "mobilenetv2": ("features.0", "features.6", "features.13", "features.16", "features.18"),
}


@pytest.mark.parametrize("name", TWINS)
def test_every_stage_gives_the_same_features(name: str) -> None:
    ours, theirs = twins(name)
    seen: dict[str, list[Tensor]] = {stage: [] for stage in OUR_STAGES}
    for stage, path in zip(OUR_STAGES, THEIR_STAGES[name], strict=True):
        for module in (ours.get_submodule(f"stages.{stage}"), theirs.get_submodule(path)):
            module.register_forward_hook(lambda _, __, output, stage=stage: seen[stage].append(output))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        ours(images), theirs(images)
    assert list(seen) == [stage for stage, _ in ours.get_submodule("stages").named_children()]
    for one, other in seen.values():
        assert other.std() > 0.1
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["resnet-18", "resnet-50"])
def test_exits_and_features_are_the_same_places(name: str) -> None:
    torch.manual_seed(0)
    theirs, ours = architecture(f"torchvision:{TWINS[name]}"), architecture(name)
    assert [(place.stage, place.channels, place.stride) for place in theirs.exits[:2]] == [
        (place.stage, place.channels, place.stride) for place in ours.exits
    ]
    plain, own = theirs.backbone(10).eval(), ours.backbone(10).eval()
    own.load_state_dict({translated(name, key): tensor for key, tensor in plain.state_dict().items()}, strict=True)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        their_features, our_features = plain.features(images), own.features(images)
    for their_exit, our_exit in (("c2", "stage3"), ("c3", "stage2"), ("final", "final")):
        assert torch.allclose(their_features[their_exit], our_features[our_exit], atol=1e-5, rtol=1e-5)
