"""The proofs hold for every family of networks, and fail for an export that is not the plain network."""

import dataclasses
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from codistill.export.export import Exported, latency_ms, prove, require_same, same_nodes
from codistill.export.formats import FORMATS
from codistill.export.network import load_network
from codistill.networks.adapters.architecture import LibraryArchitecture, OwnArchitecture
from codistill.networks.backbone import Architecture, Backbone
from codistill.networks.densenet import DenseNet
from codistill.networks.families import FAMILIES
from codistill.networks.mobilenet import MobileNet, MobileNetV2
from codistill.networks.resnet import CifarResNet, ImageNetResNet, PreActivationResNet, WideResNet
from support import zoo
from support.own_network import OwnNet

SHAPE = (1, 28, 28)


class HeadAdded(Backbone):
    """A head's logits are added to the network's own, times nothing: the logits are the same, the graph is not."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features = self.features(images_BCHW)
        added: Tensor = features["final"] + 0 * self.get_submodule("left_in")(features["stage2"])
        return added


class HeadComputed(Backbone):
    """A head is computed for nothing."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features = self.features(images_BCHW)
        self.get_submodule("left_in")(features["stage2"])
        return features["final"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, HeadAdded) for name in FORMATS), ("safetensors", HeadComputed), ("pt2", HeadComputed)],
)
def test_a_head_that_is_left_in_is_noticed(name: str, kind: type[Backbone], finished: Path, tmp_path: Path) -> None:
    shipped, form = load_network(finished, "a"), FORMATS[name]
    with_head = deepcopy(shipped.network)
    with_head.left_in = deepcopy(shipped.cohort.members["a"].heads["stage2"])
    with_head.__class__ = kind
    images = torch.randn(3, *SHAPE)
    assert with_head(images).equal(shipped.network(images))
    form.write(tmp_path / form.file, with_head, shipped.identity, SHAPE)
    with pytest.raises(ValueError, match=r"exported graph|do not fit the network"):
        prove(shipped, form, tmp_path / form.file)


def test_the_graph_has_as_many_nodes_as_counted_by_hand(exported: dict[str, Exported]) -> None:
    # wrn-10-1: a stem, 3 blocks (2 normalisations, 2 activations, 2 convolutions, dropout and addition each, 2 of them
    # with a projection), then normalisation, activation, pooling, flattening and a linear layer.
    operators = 1 + 3 * 8 + 2 + 5
    # 9 convolutions, 7 normalisations of 2 parameters and 3 buffers each, 2 of the linear layer; images and output.
    tensors = 9 + 7 * 5 + 2
    assert exported["pt2"].proof.nodes == operators + tensors + 2
    assert exported["safetensors"].proof.nodes == exported["pt2"].proof.nodes
    # onnxruntime's graph has no dropout, and no normalisation that follows its convolution.
    assert exported["onnx"].proof.nodes == operators - 3 - 3


def test_what_was_proved(exported: dict[str, Exported]) -> None:
    for name in FORMATS:
        proof = exported[name].proof
        assert (proof.images, proof.real_images, proof.heads_kept) == (50, True, True)
        assert 0 <= proof.largest_difference <= FORMATS[name].tolerance
        assert set(proof.latency_ms) == {"plain", "exported"}


SMALLEST = (
    WideResNet(10, 1),
    CifarResNet(8),
    PreActivationResNet(11),
    ImageNetResNet(18),
    DenseNet(7, 4),
    MobileNet(),
    MobileNetV2(),
    LibraryArchitecture("timm", "vit_tiny_patch16_224", {"img_size": 28, "patch_size": 14}),
    OwnArchitecture(OwnNet()),
)


@pytest.mark.parametrize("architecture", SMALLEST, ids=lambda architecture: type(architecture).__name__)
def test_every_family_has_nothing_that_our_own_look_into_the_file_refuses(
    architecture: Architecture, exported: dict[str, Exported], tmp_path: Path
) -> None:
    assert zoo.timm
    form, network = FORMATS["pt2"], architecture.backbone(10, in_channels=1).release().eval()
    form.write(tmp_path / form.file, network, exported["pt2"].shipped.identity, SHAPE)
    loaded = form.load(tmp_path / form.file)
    for size in (1, 3):
        images = torch.randn(size, *SHAPE)
        assert loaded(images).equal(network(images))
    assert {type(architecture) for architecture in SMALLEST} == {family.load() for family in FAMILIES}


def test_another_network_of_the_same_weights_is_noticed(finished: Path, tmp_path: Path) -> None:
    """How much is dropped has no effect in evaluation, but a node says it."""
    shipped, form = load_network(finished, "a"), FORMATS["pt2"]
    other = dataclasses.replace(shipped.identity, network="wrn-10-1-dropout-0.2")
    form.write(tmp_path / form.file, shipped.network, shipped.identity, SHAPE)
    with pytest.raises(ValueError, match=r"not the plain backbone's: node \d+ is %dropout"):
        same_nodes(form, tmp_path / form.file, other.build(shipped.network.state_dict()), other, SHAPE)


def test_tolerance() -> None:
    logits = torch.tensor([[1.0, -200.0]])
    assert require_same(logits, logits, "both") == 0
    with pytest.raises(ValueError, match=r"both give logits that differ by up to 1\.53e-05"):
        require_same(logits, logits.nextafter(torch.tensor(-300.0)), "both")
    assert require_same(logits, logits + 0.01, "both", tolerance=1e-4) == pytest.approx(0.01 / 200, rel=1e-2)
    assert require_same(logits / 1000, logits / 1000 + 5e-5, "both", tolerance=1e-4) == pytest.approx(5e-5, rel=1e-2)
    with pytest.raises(ValueError, match="differ"):
        require_same(logits, logits + 0.03, "both", tolerance=1e-4)
    with pytest.raises(ValueError, match="differ"):
        require_same(logits, logits * torch.nan, "both", tolerance=1e-4)


def test_latency_is_measured_in_turns() -> None:
    calls: list[str] = []

    def called(name: str) -> nn.Module:
        module = nn.Identity()
        module.register_forward_pre_hook(lambda *_: calls.append(name))
        return module

    measured = latency_ms({"plain": called("plain"), "exported": called("exported")}, torch.zeros(1))
    assert calls == ["plain", "exported"] * 22
    assert all(value > 0 for value in measured.values())
