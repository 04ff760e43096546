"""Which networks are known to draw no random numbers, so that it does not matter when their parts run."""

from torch import nn

LAYERS = (
    *(nn.Sequential, nn.ModuleDict, nn.ReLU, nn.ReLU6, nn.Linear, nn.Flatten, nn.Identity),
    *(nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.MaxPool2d),
)
"""What our networks take from torch, but for dropout. Of other people's layers nobody knows."""


def is_steady(module: nn.Module) -> bool:
    return all(_is_known(type(part)) for part in module.modules())


def _is_known(kind: type) -> bool:
    if kind.__module__.startswith("torch.distributed."):  # fully_shard puts a class before that of what it cuts
        return _is_known(kind.__bases__[-1])
    return kind in LAYERS or kind.__module__.startswith("codistill.")
