"""Initial weights. Ours are what layers draw when they are built; the authors' code draws others for its two families.

Its WRNs start as He et al. 2015 by fan-in with uniform batch normalisation, its MobileNet as torch's own layers do.
"""

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from codistill.networks.backbone import Architecture
from codistill.networks.mobilenet import MobileNet
from codistill.networks.resnet import WideResNet

INITS = ("he", "authors")
BATCHNORM_INITS = ("ones", "uniform", "authors")


def initialise(module: nn.Module, network: Architecture, init: str, batchnorm_init: str) -> None:
    """Draw the weights of a part of ``network`` anew where ``init`` and ``batchnorm_init`` are not the defaults.

    Raises ValueError if they ask for the authors' start of a family that is not in the authors' code.
    """
    draw_layer = AUTHORS.get(type(network))
    if "authors" in (init, batchnorm_init) and draw_layer is None:
        raise ValueError(f"the authors' code has no {type(network).__name__}, so no initial weights for it")
    for layer in module.modules():
        if init == "authors" and draw_layer:
            draw_layer(layer)
        is_uniform = batchnorm_init == "uniform" or (batchnorm_init == "authors" and draw_layer is _by_fan_in)
        if is_uniform and isinstance(layer, _BatchNorm) and layer.affine:
            nn.init.uniform_(layer.weight)


def _by_fan_in(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _as_torch(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d):
        nn.Conv2d.reset_parameters(layer)  # not that of our subclass


AUTHORS: dict[type[Architecture], Callable[[nn.Module], None]] = {WideResNet: _by_fan_in, MobileNet: _as_torch}
"""How their code draws the weights of one layer; ``families.IN_AUTHORS_CODE`` has the same families."""
