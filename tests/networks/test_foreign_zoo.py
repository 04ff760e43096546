"""Twelve families of timm and seven networks of torchvision: each learns with a network of another kind, and leaves.

Every one is built by its name with the heads that it gets by itself, takes two steps of DCM, and what is stripped is
loaded, strictly, into a network that the library itself builds.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from codistill.cohort import Cohort
from codistill.networks.families import architecture
from codistill.transfer import methods
from codistill.transfer.objective import Objective
from support import zoo

CLASSES = 5
PARTNER = "wrn-10-1"

# What the library is asked for, the side of the images, and where the library's networks have their exits C2 and C3.
TIMM = {
    "resnet": ("resnet10t", {}, 32, ["layer3", "layer2"]),
    "resnext": ("resnext26ts", {}, 32, ["stages.2", "stages.1"]),
    "mobilenetv2": ("mobilenetv2_035", {}, 32, ["blocks.4", "blocks.2"]),
    "mobilenetv3": ("mobilenetv3_small_050", {}, 32, ["blocks.3", "blocks.1"]),
    "mobilenetv4": ("mobilenetv4_conv_small_035", {}, 32, ["blocks.2", "blocks.1"]),
    "efficientnet": ("efficientnet_b0", {}, 32, ["blocks.4", "blocks.2"]),
    "convnext": ("convnext_atto", {}, 32, ["stages.2", "stages.1"]),
    "regnet": ("regnetx_002", {}, 32, ["s3", "s2"]),
    "densenet": ("densenet121", {}, 32, ["features.denseblock3", "features.denseblock2"]),
    "vgg": ("vgg11", {}, 32, ["features.14", "features.9"]),
    "vit": ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8}, 32, ["blocks.7", "blocks.3"]),
    "swin": ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 2}, 64, ["layers.2", "layers.1"]),
}
TORCHVISION = {
    "resnet": ("resnet18", {}, 32, ["layer3", "layer2"]),
    "mobilenetv2": ("mobilenet_v2", {}, 32, ["features.13", "features.6"]),
    "shufflenet": ("shufflenet_v2_x0_5", {}, 32, ["stage3", "stage2"]),
    "squeezenet": ("squeezenet1_1", {}, 64, ["features.7", "features.4"]),
    "regnet": ("regnet_y_400mf", {}, 32, ["trunk_output.block3", "trunk_output.block2"]),
    "swin": ("swin_t", {}, 32, ["features.5", "features.3"]),
    "vit": ("vit_b_32", {"image_size": 64}, 64, ["encoder.layers.encoder_layer_7", "encoder.layers.encoder_layer_3"]),
}
ZOO = {
    f"{library}:{family}": (library, *described)
    for library, families in (("timm", TIMM), ("torchvision", TORCHVISION))
    for family, described in families.items()
}
# A VGG's head has the three large linear layers of its network, so only one is trained here.
EXITS = {"timm:vgg": ("c3",)}


def full_name(library: str, model: str, options: dict[str, int]) -> str:
    settings = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{library}:{model}:{settings}" if settings else f"{library}:{model}"


def plain(library: str, model: str, options: dict[str, Any]) -> nn.Module:
    """What the library alone builds."""
    if library == "timm":
        network: nn.Module = zoo.timm.create_model(model, num_classes=CLASSES, **options)
    else:
        network = zoo.torchvision.models.get_model(model, num_classes=CLASSES, **options)
    return network.eval()


def take_steps(cohort: Cohort, images: Tensor, labels: Tensor, steps: int) -> list[float]:
    objective = Objective(methods.dcm(cohort.outline))
    optimizer = torch.optim.SGD(cohort.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = objective(cohort(images), labels).total
        optimizer.zero_grad()
        loss.backward()
        assert [name for name, weight in cohort.named_parameters() if weight.grad is None] == []
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_twelve_families_of_timm_and_six_of_torchvision_are_here() -> None:
    assert len(TIMM) == 12
    assert len(TORCHVISION) == 7
    assert len({model for _, model, *_ in ZOO.values()}) == len(ZOO) == 19


@pytest.mark.parametrize("which", ZOO)
def test_exits_lie_where_the_stages_end(which: str) -> None:
    library, model, options, size, paths = ZOO[which]
    network = architecture(full_name(library, model, options))
    assert [place.path for place in network.exits[:2]] == paths
    assert [place.stage for place in network.exits] == list(range(2, 2 + len(network.exits)))
    with torch.device("meta"):
        backbone = network.backbone(CLASSES)
        features = backbone.features(torch.empty(2, 3, size, size))
        tokens = features["c2"].ndim == 3
        for place in network.exits[:2]:
            heads = {kind: network.head(place.name, kind, CLASSES) for kind in ("paper", "apfc")}
            assert all(head(features[place.name]).shape == (2, CLASSES) for head in heads.values())
    if not tokens:
        assert network.exits[0].stride == 2 * network.exits[1].stride
    assert (network.image_size is not None) == (which in ("timm:vit", "timm:swin", "torchvision:vit"))


@pytest.mark.parametrize("which", ZOO)
def test_each_learns_with_another_family_and_leaves_as_the_librarys_own(which: str) -> None:
    library, model, options, size, _ = ZOO[which]
    exits = {"a": EXITS.get(which), "b": None}
    cohort = Cohort({"a": full_name(library, model, options), "b": PARTNER}, CLASSES, exits=exits, seed=1)
    before = {name: weight.detach().clone() for name, weight in cohort.named_parameters() if weight.numel() < 1e6}
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(4, 3, size, size, generator=generator), torch.tensor([0, 1, 2, 3])
    losses = take_steps(cohort, images, labels, steps=2)
    assert all(torch.tensor(losses).isfinite())
    moved = [name for name, weight in cohort.named_parameters() if name in before and not weight.equal(before[name])]
    assert any(name.startswith("members.a.backbone.") for name in moved)
    assert any(name.startswith("members.a.heads.") for name in moved)
    del before

    stripped = cohort.strip("a").eval()
    ours = cohort.eval()
    with torch.no_grad():
        expected = ours(images)["a/final"]
        reference = plain(library, model, options)
        assert type(stripped) is type(reference)
        assert not any(module._forward_hooks for module in stripped.modules())
        assert list(stripped.state_dict()) == list(reference.state_dict())
        assert cohort.members["a"].backbone.state_dict().keys() == reference.state_dict().keys()
        reference.load_state_dict(stripped.state_dict(), strict=True)
        assert expected.isfinite().all()
        assert torch.equal(stripped(images), expected)
        assert torch.equal(reference(images), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("which", ZOO)
def test_each_learns_on_a_gpu(which: str) -> None:
    """With the operators that the libraries really have there."""
    library, model, options, size, _ = ZOO[which]
    with torch.device("cuda"):
        cohort = Cohort({"a": full_name(library, model, options), "b": PARTNER}, CLASSES)
        images, labels = torch.randn(4, 3, size, size), torch.tensor([0, 1, 2, 3])
    assert all(torch.tensor(take_steps(cohort, images, labels, steps=2)).isfinite())
