"""timm and torchvision as sources of networks; each is imported when one of its networks is built."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from codistill.errors import did_you_mean, install_hint

IMAGE_SIZE = 224  # nearly all of torchvision's networks are made for it


class Library(Protocol):
    """What codistill needs from a library of networks."""

    def image_size(self, network: nn.Module) -> int:
        """The side of the images that a network of the library is made for."""

    def check(self, model: str) -> None:
        """Raises unless the library is installed and has this model."""

    def build(self, model: str, num_classes: int, in_channels: int, options: Mapping[str, float]) -> nn.Module:
        """A freshly initialised network; weights are never downloaded."""


class Timm:
    def image_size(self, network: nn.Module) -> int:
        *_, size = network.pretrained_cfg["input_size"]  # type: ignore[index]
        return int(size)

    def check(self, model: str) -> None:
        try:
            import timm
        except (ImportError, RuntimeError) as error:
            raise unusable("timm", error) from None
        if not timm.is_model(model):
            hint = did_you_mean(model, timm.list_models()) or ";"
            raise ValueError(f"timm has no network {model!r}{hint} timm.list_models() names them all")

    def build(self, model: str, num_classes: int, in_channels: int, options: Mapping[str, float]) -> nn.Module:
        import timm

        settings: dict[str, Any] = {**options, "num_classes": num_classes, "in_chans": in_channels}
        return timm.create_model(model, pretrained=False, **settings)


class Torchvision:
    def image_size(self, network: nn.Module) -> int:
        return IMAGE_SIZE

    def check(self, model: str) -> None:
        try:
            from torchvision import models  # type: ignore[import-untyped]
        except (ImportError, RuntimeError) as error:
            raise unusable("torchvision", error) from None
        if model not in (known := models.list_models(module=models)):
            hint = did_you_mean(model, known) or ";"
            raise ValueError(f"torchvision has no classifier {model!r}{hint} Allowed: {', '.join(known)}")

    def build(self, model: str, num_classes: int, in_channels: int, options: Mapping[str, float]) -> nn.Module:
        from torchvision import models

        if in_channels != 3:
            raise ValueError(
                f"torchvision:{model} takes images of 3 channels, but the data have {in_channels}; "
                f"timm's networks take any number"
            )
        network: nn.Module = models.get_model(model, weights=None, num_classes=num_classes, **options)
        return network


LIBRARIES: dict[str, Library] = {"timm": Timm(), "torchvision": Torchvision()}


def unusable(library: str, error: Exception) -> ValueError:
    if isinstance(error, ImportError):
        return ValueError(f"{library}:… needs {error.name}, which is missing; {install_hint('zoo')}")
    return ValueError(
        f"{library} is installed, but not for this torch {torch.__version__} ({error}); install torch and torchvision "
        "of the same build, as in: pip install --force-reinstall torch torchvision"
    )


def build_network(
    library: str, model: str, num_classes: int, in_channels: int, options: Mapping[str, float]
) -> nn.Module:
    """The library's network, freshly initialised, on the default device."""
    zoo = LIBRARIES[library]
    zoo.check(model)
    try:
        return _on_default_device(lambda: zoo.build(model, num_classes, in_channels, options))
    except ValueError:
        raise
    # Constructors raise TypeError for an unknown setting, AssertionError for a bad value, and others.
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise ValueError(f"{library} cannot build {model} with {given or 'its defaults'}: {error}") from None


def _on_default_device(build: Callable[[], nn.Module]) -> nn.Module:
    try:
        return build()
    except NotImplementedError:
        if torch.get_default_device().type != "meta":
            raise
        # torchvision's RegNets compute their widths in tensors, which have no values on the meta device.
        with torch.device("cpu"):
            return build().to("meta")
