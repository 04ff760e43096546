"""Which networks are known to draw no random numbers, so that it does not matter when their parts run."""

from torch import nn

LAYERS = (
    *(nn.Sequential, nn.ModuleDict, nn.ReLU, nn.ReLU6, nn.Linear, nn.Flatten, nn.Identity),
    *(nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.MaxPool2d),
)
"""What our networks take from torch, but for dropout. Of other people's layers nobody knows."""


def is_steady(module: nn.Module) -> bool:
    return all(type(part) in LAYERS or type(part).__module__.startswith("codistill.") for part in module.modules())
