"""What a weight file says of itself: enough to build its network and to feed it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from codistill.data.images import ImageData
from codistill.networks.families import architecture
from codistill.runs.files import to_json
from codistill.runs.weights import load_strictly

METADATA = "codistill"  # the one key, as a run's own weight files have it


@dataclass(frozen=True)
class Identity:
    network: str
    num_classes: int
    in_channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]

    @classmethod
    def of_data(cls, network: str, data: ImageData) -> "Identity":
        return cls(network, data.num_classes, data.channels, data.mean, data.std, data.class_names)

    def __post_init__(self) -> None:
        if len(self.class_names) != self.num_classes or not len(self.mean) == len(self.std) == self.in_channels:
            raise ValueError(f"{self.num_classes} classes or {self.in_channels} channels: the lists have other lengths")

    def build(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """A freshly made network that holds exactly these weights; to be used, not trained."""
        network = architecture(self.network).backbone(self.num_classes, self.in_channels).release()
        load_strictly(network, weights, "these weights")
        network.eval().requires_grad_(False)
        return network


def write_weights(path: Path, identity: Identity, weights: Mapping[str, Tensor]) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    safetensors.torch.save_file(plain, path, {METADATA: to_json(asdict(identity))})


def read_weights(path: Path) -> tuple[Identity, dict[str, Tensor]]:
    """A weight file that codistill wrote, whether a run's or an export's."""
    try:
        with safe_open(path, framework="pt") as file:
            identity = TypeAdapter(Identity).validate_json(file.metadata()[METADATA], strict=True)
            return identity, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error})") from None
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} does not say which network it holds, so codistill did not write it") from None
