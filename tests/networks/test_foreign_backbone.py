"""Other people's networks in a cohort: compiled whole, saved under their own keys, copied, run again for memory."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from codistill.cohort import Cohort, Member
from codistill.networks.adapters.architecture import AdaptedBackbone
from codistill.networks.families import architecture
from support import zoo

NAMES = {
    "timm:resnet10t": 32,
    "timm:vit_tiny_patch16_224:img_size=32,patch_size=8": 32,
    "timm:swin_tiny_patch4_window7_224:img_size=64,window_size=2": 64,
    "torchvision:mobilenet_v2": 32,
}


def member(name: str, **options: int) -> Member:
    assert zoo.timm
    built = Cohort({"a": name}, 5, **options).members["a"]  # type: ignore[arg-type]
    assert isinstance(built, Member)
    return built


def images(size: int) -> Tensor:
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_a_member_is_one_graph(name: str) -> None:
    """``fullgraph`` refuses any break, at a hook too; in training mode, with its heads, forward and backward."""
    torch._dynamo.reset()
    network, x = member(name), images(NAMES[name])
    compiled = torch.compile(deepcopy(network), fullgraph=True, backend="eager")
    for learner in (network, compiled):
        torch.manual_seed(0)
        logits = learner(x)
        assert list(logits) == ["final", "c2", "c3"]
        sum(z.square().mean() for z in logits.values()).backward()
    pairs = list(zip(network.named_parameters(), compiled.named_parameters(), strict=True))  # type: ignore[attr-defined]
    assert len(pairs) > 20
    for (weight_name, mine), (_, its) in pairs:
        assert mine.grad is not None, weight_name
        assert torch.allclose(mine.grad, its.grad, atol=1e-6), weight_name


def test_features_are_kept_by_nobody_after_the_pass() -> None:
    backbone = architecture("timm:resnet10t").backbone(5)
    assert isinstance(backbone, AdaptedBackbone)
    backbone.features(images(32))
    backbone(images(32))
    assert [tap.kept for tap in backbone.taps.values()] == [None] * len(backbone.exits)


def test_a_copy_listens_to_itself() -> None:
    backbone = architecture("timm:resnet10t").backbone(5).eval()
    copied = deepcopy(backbone)
    with torch.no_grad():
        for weight in backbone.parameters():
            weight.zero_()
    assert copied.features(images(32))["c2"].abs().sum() > 0
    assert backbone.features(images(32))["c2"].abs().sum() == 0


class Awkward(nn.Module):
    """Its keys begin like the ones that hold a foreign network, and like each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, 2, 1)
        self.second = nn.Conv2d(4, 8, 3, 2, 1)
        self.third = nn.Conv2d(8, 16, 3, 2, 1)
        self.weight = nn.Parameter(torch.randn(5, 16))
        self.classifier = nn.Module()
        self.classifier.weight = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.first(x))).mean(dim=(2, 3))
        logits: Tensor = x @ self.weight.T + self.classifier.weight  # type: ignore[operator]
        return logits


def test_weights_are_saved_and_loaded_under_the_networks_own_keys() -> None:
    module = Awkward()
    cohort = Cohort({"mine": module, "b": "timm:resnet10t"}, 5)
    backbone = cohort.members["mine"].backbone
    assert list(backbone.state_dict()) == list(module.state_dict())
    assert {"weight", "classifier.weight"} < backbone.state_dict().keys()
    assert all(weight.equal(module.state_dict()[name]) for name, weight in backbone.state_dict().items())
    others = {name: torch.randn_like(weight) for name, weight in module.state_dict().items()}
    backbone.load_state_dict(others, strict=True)
    assert all(weight.equal(others[name]) for name, weight in cohort.strip("mine").state_dict().items())
    whole = cohort.state_dict()
    again = Cohort({"mine": Awkward(), "b": "timm:resnet10t"}, 5, seed=9)
    again.load_state_dict(whole, strict=True)
    assert whole.keys() == again.state_dict().keys()
    assert all(weight.equal(whole[name]) for name, weight in again.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        backbone.load_state_dict({"weight": others["weight"]})


@pytest.mark.parametrize("name", ["timm:resnet10t", "torchvision:mobilenet_v2"])
def test_running_it_again_in_the_backward_pass_changes_nothing(name: str) -> None:
    kept, recomputed = member(name), member(name)
    recomputed.backbone.recomputes = True
    x = images(32)
    for network in (kept, recomputed):
        torch.manual_seed(0)
        sum(z.square().mean() for z in network(x).values()).backward()
    gradients = [(mine.grad, its.grad) for mine, its in zip(kept.parameters(), recomputed.parameters(), strict=True)]
    assert len(gradients) > 50
    assert all(torch.equal(mine, its) for mine, its in gradients if mine is not None and its is not None)
    assert all((mine is None) == (its is None) for mine, its in gradients)
    buffers = list(zip(kept.named_buffers(), recomputed.named_buffers(), strict=True))
    assert len(buffers) > 20
    assert all(torch.equal(mine, its) for (_, mine), (_, its) in buffers)


def test_images_of_another_size_are_refused_with_what_to_type() -> None:
    network = member("timm:vit_tiny_patch16_224:img_size=32,patch_size=8")
    for run in (network, network.backbone):
        with pytest.raises(ValueError, match=r"takes images of 32×32, and not of 64×64; .* data\.image_size=32"):
            run(images(64))


def test_networks_build_on_meta_also_where_the_library_cannot() -> None:
    with torch.device("meta"):
        cohort = Cohort({"a": "torchvision:regnet_y_400mf", "b": "timm:resnet18"}, 5)
        logits = cohort(torch.empty(2, 3, 64, 64))
    assert all(weight.is_meta for weight in cohort.parameters())
    assert len(logits) == 6
