"""The file formats of an export, how each is written and read back, and the identity that a weight file carries.

A format can ``write`` a network, list the ``nodes`` of a file's graph, and ``load`` a file as images → logits.
"""

import io
import logging
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import safetensors.torch
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from codistill.data.images import ImageData
from codistill.errors import install_hint, unknown
from codistill.export.bundle import CARD, TIMM_CARD, TIMM_CONFIG, Preprocessing
from codistill.export.limits import image_bytes, onnx_image_bytes
from codistill.networks.adapters.architecture import build_network, imported
from codistill.networks.families import architecture, parse
from codistill.runs.files import to_json, write_json
from codistill.runs.weights import load_strictly

if TYPE_CHECKING:
    import onnx

Classify = Callable[[Tensor], Tensor]
"""Normalised images in, logits out."""

InputShape = tuple[int, int, int]

PT2_RUNS_CODE = "torch.export.load runs code that a pt2 file may contain"
METADATA = "codistill"  # the only metadata key, the same as in the weight files of a run
MAX_HEADER_BYTES = 8 * 2**20
"""Limit for a weight file's header: names, shapes and the identity, of which class names are the most."""
TIMM_KEYS = ("architecture", "first_conv", "classifier", "pool_size", "fixed_input_size")
"""What is taken over from timm's own description of the network; the rest is about weights of its own."""
TIMM_CARD_HEADER = (
    "---\nlibrary_name: timm\npipeline_tag: image-classification\ntags:\n- image-classification\n- timm\n---\n"
)


@dataclass(frozen=True)
class Identity:
    """What a weight file says about itself: enough to build its network and to normalise its input."""

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
            raise ValueError(f"the lists do not match {self.num_classes} classes and {self.in_channels} channels")

    def build(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Return a new network with these weights, in evaluation mode and without gradients."""
        self.require_fit(weights)
        network = architecture(self.network).backbone(self.num_classes, self.in_channels).release()
        load_strictly(network, weights, "these weights")
        network.eval().requires_grad_(False)
        return network

    def require_fit(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Raise unless the network has exactly tensors of these shapes; return it on the meta device, without memory.

        A file may name a network that is much larger than its tensors.
        """
        network = _on_meta(self.network, self.num_classes, self.in_channels)
        load_strictly(network, {name: tensor.to("meta") for name, tensor in weights.items()}, "these weights")
        return network


@lru_cache(maxsize=1)
def _on_meta(network: str, num_classes: int, in_channels: int) -> nn.Module:
    with torch.device("meta"):
        return architecture(network).backbone(num_classes, in_channels).release().eval().requires_grad_(False)


def write_weights(path: Path, identity: Identity, weights: Mapping[str, Tensor]) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    try:
        safetensors.torch.save_file(plain, path, {METADATA: to_json(asdict(identity))})
    except SafetensorError as error:
        # The library's own error is not an OSError, but has the number of one.
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error)) from error


def read_weights(path: Path) -> tuple[Identity, dict[str, Tensor]]:
    """Read a weight file of a run or an export; return its identity and its tensors."""
    with _opened(path) as (identity, file):
        return identity, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_shapes(path: Path) -> tuple[Identity, dict[str, Tensor]]:
    """Read a weight file's header; return its identity, and its tensors on the meta device, without their values."""
    with _opened(path) as (identity, file):
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        return identity, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Identity, Any]]:
    try:
        with path.open("rb") as raw:
            if (length := int.from_bytes(raw.read(8), "little")) > MAX_HEADER_BYTES:
                raise OSError(f"its header has {length:,} bytes, more than {MAX_HEADER_BYTES:,}")
        with safe_open(path, framework="pt") as file:
            yield TypeAdapter(Identity).validate_json(file.metadata()[METADATA], strict=True), file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error})") from None
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} does not name its network, so it was not written by codistill") from None


class Format(ABC):
    name: ClassVar[str]
    file: ClassVar[str]
    tolerance: ClassVar[float] = 0.0
    """Largest relative difference from the network's logits; 0 requires identical bits."""
    card: ClassVar[str] = CARD
    card_header: ClassVar[str] = ""
    """What the model card begins with."""

    def check_network(self, network: str) -> None:  # noqa: B027
        """Raise if the format cannot hold networks of this name."""

    def describe(self, folder: Path, identity: Identity, preprocessing: Preprocessing) -> None:  # noqa: B027
        """Write the files of the format's own that describe the model; most formats have none."""

    def check_libraries(self) -> None:  # noqa: B027
        """Raise before any work is done if a required library is missing; most formats need none."""

    @abstractmethod
    def write(self, path: Path, network: nn.Module, identity: Identity, shape: InputShape) -> None: ...

    @abstractmethod
    def nodes(self, path: Path, shape: InputShape) -> list[str]:
        """Return the nodes of the file's graph as comparable text."""

    @abstractmethod
    def load(self, path: Path) -> Classify: ...

    @abstractmethod
    def image_bytes(self, path: Path, shape: InputShape) -> int:
        """Return about how much memory one image takes, before a network is built; raises if the file has none."""


class Safetensors(Format):
    """The weights alone; the name of the network determines the graph."""

    name, file = "safetensors", "model.safetensors"

    def write(self, path: Path, network: nn.Module, identity: Identity, shape: InputShape) -> None:
        write_weights(path, identity, network.state_dict())

    def nodes(self, path: Path, shape: InputShape) -> list[str]:
        return _program_nodes(_traced(Safetensors.load(self, path), shape))  # for timm's folders too

    def load(self, path: Path) -> nn.Module:
        identity, weights = read_weights(path)
        return identity.build(weights)

    def image_bytes(self, path: Path, shape: InputShape) -> int:
        identity, shapes = read_shapes(path)
        return image_bytes(identity.require_fit(shapes), shape)


class Pt2(Format):
    """The archive of torch.export: needs torch but not codistill.

    torch.export.load imports modules and unpickles objects that a file names. So ``load`` accepts only files that
    ``write`` produced in this process: enough to verify an export, and no other file is ever run.
    """

    name, file = "pt2", "model.pt2"

    def __init__(self) -> None:
        self._written: set[bytes] = set()
        """SHA-256 of every file written by this process."""

    def write(self, path: Path, network: nn.Module, identity: Identity, shape: InputShape) -> None:
        program = _traced(network, shape)
        program.example_inputs = None  # they would be pickled
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # contains paths of this machine
        archive = io.BytesIO()
        torch.export.save(program, archive)
        self._written.add(sha256(archive.getbuffer()).digest())
        path.write_bytes(archive.getbuffer())

    def nodes(self, path: Path, shape: InputShape) -> list[str]:
        return _program_nodes(self._read(path))

    def load(self, path: Path) -> Classify:
        return self._read(path).module()

    def image_bytes(self, path: Path, shape: InputShape) -> int:
        raise ValueError(f"{path}: {PT2_RUNS_CODE}")

    def _read(self, path: Path) -> ExportedProgram:
        content = path.read_bytes()  # loaded from memory, because the file could be replaced after the comparison
        if sha256(content).digest() not in self._written:
            raise ValueError(f"{path}: {PT2_RUNS_CODE}; only files written by this process are loaded")
        return torch.export.load(io.BytesIO(content))


class Onnx(Format):
    name, file = "onnx", "model.onnx"
    tolerance = 1e-4

    def check_libraries(self) -> None:
        try:
            import onnx  # noqa: F401
            import onnxruntime  # type: ignore[import-untyped]  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            missing = error.name or error
            raise ValueError(f"onnx needs {missing}, which is missing; {install_hint('export')}") from None

    def write(self, path: Path, network: nn.Module, identity: Identity, shape: InputShape) -> None:
        with _quiet_export():
            program = torch.onnx.export(
                network,
                (torch.zeros(2, *shape),),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: Dim("batch")},),
            )
        assert program is not None
        model = program.model_proto
        for part in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output):
            del part.metadata_props[:]  # debugging notes of torch, including paths of this machine
        path.write_bytes(model.SerializeToString())

    def nodes(self, path: Path, shape: InputShape) -> list[str]:
        self.check_libraries()
        import onnx

        return [_onnx_node(node) for node in onnx.load(path).graph.node]

    def load(self, path: Path) -> Classify:
        self.check_libraries()
        import onnxruntime

        session = onnxruntime.InferenceSession(
            path.read_bytes(),
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],  # would hold all constants of a graph in memory at once
        )

        def classify(images: Tensor) -> Tensor:
            (logits,) = session.run(["logits"], {"images": images.contiguous().numpy()})
            return torch.from_numpy(logits)

        return classify

    def image_bytes(self, path: Path, shape: InputShape) -> int:
        import onnx

        return onnx_image_bytes(onnx.load(path, load_external_data=False), shape)


class TimmFolder(Safetensors):
    """A folder that ``timm.create_model("local-dir:DIR", pretrained=True)`` loads and a hub serves; timm proves it."""

    name, card, card_header = "timm", TIMM_CARD, TIMM_CARD_HEADER

    def check_network(self, network: str) -> None:
        if not network.startswith("timm:"):
            raise ValueError(f"timm does not know {network}, only networks called timm:…; type --format safetensors")

    def describe(self, folder: Path, identity: Identity, preprocessing: Preprocessing) -> None:
        write_json(folder / TIMM_CONFIG, timm_config(identity, preprocessing))

    def load(self, path: Path) -> nn.Module:
        with imported("timm"):
            import timm
        network: nn.Module = timm.create_model(f"local-dir:{path.parent}", pretrained=True)
        return network.eval().requires_grad_(False)


def timm_config(identity: Identity, how: Preprocessing) -> dict[str, Any]:
    """Return the content of config.json, as timm writes it for a hub."""
    named: Any = parse(identity.network).options
    model, options = named["model"], dict(named["options"])
    with torch.device("meta"):
        network: Any = build_network("timm", model, identity.num_classes, identity.in_channels, options)
    known = dict(network.pretrained_cfg)
    return {
        "architecture": model,
        "num_classes": identity.num_classes,
        "num_features": network.num_features,
        "label_names": list(identity.class_names),
        **({"model_args": options} if options else {}),
        "pretrained_cfg": {
            **{key: known[key] for key in TIMM_KEYS if known.get(key) is not None},
            "num_classes": identity.num_classes,
            "input_size": [identity.in_channels, *how.centre_crop],
            "interpolation": how.resampling,
            "crop_pct": how.centre_crop[0] / how.resize[0],
            "crop_mode": "squash" if how.fit == "stretch" else "center",
            "mean": list(identity.mean),
            "std": list(identity.std),
        },
    }


FORMATS: dict[str, Format] = {one.name: one for one in (Safetensors(), Pt2(), Onnx())}
"""The formats of every network; only timm's networks have its own too."""
ALL_FORMATS = {**FORMATS, "timm": TimmFolder()}


def get(name: str) -> Format:
    """Return a format by name; raise if it is unknown or its libraries are missing."""
    if name not in ALL_FORMATS:
        raise unknown("format", name, ALL_FORMATS)
    ALL_FORMATS[name].check_libraries()
    return ALL_FORMATS[name]


def _traced(network: nn.Module, shape: InputShape) -> ExportedProgram:
    """Trace for any batch size; with an example batch of 1, torch would treat the size as constant."""
    return torch.export.export(network, (torch.zeros(2, *shape),), dynamic_shapes=({0: Dim("batch")},))


def _program_nodes(program: ExportedProgram) -> list[str]:
    return [str(node.format_node()) for node in program.graph.nodes]


def _onnx_node(node: "onnx.NodeProto") -> str:
    attributes = sorted(str(attribute).replace("\n", " ") for attribute in node.attribute)
    return f"{node.op_type}({', '.join(node.input)}) -> {', '.join(node.output)} {attributes}"


@contextmanager
def _quiet_export() -> Iterator[None]:
    """Silence torch's developer warnings and its notes on torchvision, which do not apply here."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
            yield
    finally:
        registration.setLevel(level)
