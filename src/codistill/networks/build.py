"""From a network's name to its architecture."""

from typing import Any

from codistill.networks.adapters.architecture import LibraryArchitecture
from codistill.networks.backbone import Architecture
from codistill.networks.densenet import DenseNet
from codistill.networks.mobilenet import MobileNet, MobileNetV2
from codistill.networks.names import parse
from codistill.networks.preactivation import PreActivationResNet, WideResNet
from codistill.networks.resnet import CifarResNet, ImageNetResNet

FAMILIES: dict[str, type[Architecture]] = {
    "cifar_resnet": CifarResNet,
    "preactivation_resnet": PreActivationResNet,
    "imagenet_resnet": ImageNetResNet,
    "wide_resnet": WideResNet,
    "densenet": DenseNet,
    "mobilenet": MobileNet,
    "mobilenet_v2": MobileNetV2,
    "foreign": LibraryArchitecture,
}


def architecture(name: str) -> Architecture:
    """The architecture that ``name`` stands for: ``architecture("wrn-28-4").backbone(num_classes=100)``."""
    network = parse(name)
    options: dict[str, Any] = dict(network.options)
    return FAMILIES[network.family](**options)
