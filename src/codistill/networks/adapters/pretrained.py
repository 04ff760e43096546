"""Pretrained weights of timm and torchvision, from the library's own cache, and the input statistics they go with.

Only ``fetch`` uses the network, which `codistill train --download` calls. Everything else reads a file that is there.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codistill.errors import unknown
from codistill.networks.adapters.architecture import build_network, imported
from codistill.networks.adapters.naming import LibraryName, parse_library_name

AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
"""The heads of torchvision's GoogLeNet and Inception, which its files have and the networks here do not."""
OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)")
"""What torchvision's files of DenseNets call otherwise: ``norm.1`` and not ``norm1``."""
HUB_FILES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin")
"""The files in which a repository of the Hugging Face Hub has a timm network's weights, the safest first."""


def pretrained_weights(network: str, in_channels: int) -> tuple[Path, dict[str, Tensor]]:
    """The cached file of a tagged name, and the state dict that the library makes of it, with its own classifier.

    Raises ValueError if the library's cache does not have it.
    """
    name = parse_library_name(network)
    file = cached_file(name)
    if file is None:
        raise ValueError(
            f"the weights {name.tag} of {name.library}:{name.model} are not in the cache of {name.library}; add "
            "--download to fetch them, or give a file with start.NETWORK=FILE"
        )
    try:
        return file, _state_dict(name, in_channels, file)
    except Exception as error:  # of a damaged file, libraries raise many kinds
        reason = str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{file}, which has the weights {name.tag} of {name.library}:{name.model}, cannot be read ({reason}); "
            "remove it and add --download to fetch it again, or give a file with start.NETWORK=FILE"
        ) from None


def fetch(network: str) -> None:
    """Download the weights of a tagged name into its library's cache unless they are there."""
    name = parse_library_name(network)
    if cached_file(name) is None:
        try:
            _state_dict(name, 3, None)
        except Exception as error:  # of whatever the library uses to download
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{network} cannot be downloaded: {reason}; or give a file with start.NETWORK=FILE"
            ) from None


def input_statistics(network: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the channels with which the library trained the network."""
    name = parse_library_name(network)
    if name.library == "timm":
        configuration = _timm_configuration(name)
        return tuple(configuration["mean"]), tuple(configuration["std"])
    transforms = _torchvision_weights(name).transforms()
    return tuple(transforms.mean), tuple(transforms.std)


def cached_file(name: LibraryName) -> Path | None:
    """The file of a tagged name in its library's cache; None if it is not there."""
    if name.library == "torchvision":
        return _in_torch_cache(_torchvision_weights(name).url)
    configuration = _timm_configuration(name)
    repository, _, revision = (configuration.get("hf_hub_id") or "").partition("@")
    if not repository:
        return _in_torch_cache(configuration.get("url"))
    from huggingface_hub import try_to_load_from_cache

    for file in (*filter(None, [configuration.get("hf_hub_filename")]), *HUB_FILES):
        if isinstance(path := try_to_load_from_cache(repository, file, revision=revision or None), str):
            return Path(path)
    return None


def _state_dict(name: LibraryName, in_channels: int, file: Path | None) -> dict[str, Tensor]:
    """Load a file of the cache, or let the library download it. Neither unpickles more than tensors.

    The library converts what its authors' files call otherwise, and timm the first layer to other numbers of channels.
    """
    if name.library == "torchvision":
        state: dict[str, Tensor] = _torchvision_weights(name).get_state_dict(
            progress=False, check_hash=True, weights_only=True, map_location="cpu"
        )
        return _as_named_now(name, state)
    import timm

    if file and file.suffix != ".safetensors":
        torch.load(file, map_location="cpu", weights_only=True)  # raises for what older versions of timm would run
    options: dict[str, Any] = {**name.options, **({"pretrained_cfg_overlay": {"file": str(file)}} if file else {})}
    with torch.random.fork_rng(devices=[]):
        network = timm.create_model(f"{name.model}.{name.tag}", pretrained=True, in_chans=in_channels, **options)
    return dict(network.state_dict())


def _as_named_now(name: LibraryName, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a file of torchvision under the names that its network has in this version."""
    for key in list(state):  # in place, because the dictionary has the versions that the network's code looks at
        tensor = state.pop(key)
        if not key.startswith(AUXILIARY):
            state[OLD_DENSENET.sub(r"\1", key)] = tensor
    with torch.device("meta"):
        network = build_network(
            name.library, name.model, len(_torchvision_weights(name).meta["categories"]), 3, name.options
        )
    try:
        network.load_state_dict(state, assign=True)
    except RuntimeError:  # as for images of another size, which is named when the network loads it
        return state
    return dict(network.state_dict())


def _timm_configuration(name: LibraryName) -> Mapping[str, Any]:
    with torch.device("meta"):  # which also says what is wrong with the name
        network = build_network(name.library, f"{name.model}.{name.tag}" if name.tag else name.model, 2, 3, {})
    configuration: Mapping[str, Any] = network.pretrained_cfg  # type: ignore[assignment]
    return configuration


def _torchvision_weights(name: LibraryName) -> Any:
    with imported("torchvision"):
        from torchvision import models  # type: ignore[import-untyped]
    known = models.get_model_weights(name.model)
    if not name.tag:
        return known.DEFAULT
    if name.tag not in known.__members__:
        raise unknown(f"pretrained weights of torchvision:{name.model}", name.tag, known.__members__)
    return known[name.tag]


def _in_torch_cache(url: str | None) -> Path | None:
    file = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2]) if url else None
    return file if file and file.is_file() else None
