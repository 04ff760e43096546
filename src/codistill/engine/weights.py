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
    mine = module.state_dict()
    odd = sorted(mine.keys() ^ weights.keys()) or [key for key in mine if mine[key].shape != weights[key].shape]
    if odd:
        raise ValueError(f"{what} do not fit the network: {len(odd)} tensors differ, the first is {odd[0]!r}")
    module.load_state_dict(weights)


def load_weights(backbone: nn.Module, file: Path, name: str) -> None:
    """Load a plain network's weight file."""
    if not file.is_file():
        raise ValueError(f"network {name!r}: there is no file {file}; give a weight file of a finished run")
    # Before anything is mapped or read: a file may claim any size.
    needed = sum(tensor.nbytes for tensor in backbone.state_dict().values())
    if (size := file.stat().st_size) > 2 * needed + HEADER_BYTES:
        raise ValueError(f"network {name!r}: {file} has {size:,} bytes, more than the network's {needed:,} can take")
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"network {name!r}: {file} is not a readable safetensors file ({error})") from None
    if sick := [key for key, tensor in weights.items() if not tensor.isfinite().all()]:
        raise ValueError(
            f"network {name!r}: {file} holds NaN or infinities, first in {sick[0]!r}; give weights of a sound network"
        )
    load_strictly(backbone, weights, f"network {name!r}: the weights in {file}")
