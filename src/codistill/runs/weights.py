"""Weights into networks, strictly: all of them, none besides, and each of the right shape."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

HEADER_BYTES = 16 * 2**20
"""What a weight file may have besides the weights."""


def load_strictly(module: nn.Module, weights: Mapping[str, Tensor], what: str) -> None:
    """Every tensor of the module, and none besides; ``what`` is how the error calls the weights."""
    if misfit := _misfit(module.state_dict(), weights):
        raise ValueError(f"{what} do not fit the network: {misfit}")
    module.load_state_dict(weights)


def _misfit(mine: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """What keeps the tensors from fitting, with the first of each kind; nothing where they do."""
    missing, strange = sorted(mine.keys() - given.keys()), sorted(given.keys() - mine.keys())
    said = [f"{len(missing)} tensors are missing, such as {missing[0]!r}"] if missing else []
    said += [f"{len(strange)} are not the network's, such as {strange[0]!r}"] if strange else []
    if said:
        return ", and ".join(said)
    resized = [key for key in mine if mine[key].shape != given[key].shape]
    if not resized:
        return ""
    its, wanted = ("×".join(map(str, tensors[resized[0]].shape)) for tensors in (given, mine))
    return (
        f"{len(resized)} tensors have another shape, such as {resized[0]!r}, {its} and not {wanted}; "
        "a file for other classes is changed as docs/networks.md says"
    )


def load_weights(backbone: nn.Module, file: Path, name: str) -> None:
    """Load a plain network's weight file."""
    if file.is_dir():
        raise ValueError(f"network {name!r}: {file} is a folder; give the safetensors file in it")
    if not file.is_file():
        raise ValueError(f"network {name!r}: there is no file {file}; give a safetensors file of its weights")
    # Before anything is mapped or read: a file may claim any size.
    needed = sum(tensor.nbytes for tensor in backbone.state_dict().values())
    if (size := file.stat().st_size) > 2 * needed + HEADER_BYTES:
        raise ValueError(f"network {name!r}: {file} has {size:,} bytes, more than the network's {needed:,} can take")
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"network {name!r}: {file} is not a readable safetensors file ({error}); what torch.save wrote is "
            "converted as docs/networks.md says"
        ) from None
    if sick := [key for key, tensor in weights.items() if not tensor.isfinite().all()]:
        raise ValueError(
            f"network {name!r}: {file} holds NaN or infinities, first in {sick[0]!r}; give weights of a sound network"
        )
    load_strictly(backbone, weights, f"network {name!r}: the weights in {file}")
