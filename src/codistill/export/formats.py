"""The three ways in which a network is written, and how each is read back.

A format knows how to ``write`` a network, which ``nodes`` the file holds, and how to ``load`` it as images → logits.
"""

import io
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from codistill.errors import install_hint, unknown
from codistill.export.identity import Identity, read_weights, write_weights

if TYPE_CHECKING:
    import onnx

Classify = Callable[[Tensor], Tensor]
"""Normalised images in, logits out."""

InputShape = tuple[int, int, int]

PT2_RUNS_CODE = "torch.export.load runs code that a pt2 file may contain"


class Format(ABC):
    name: ClassVar[str]
    file: ClassVar[str]
    tolerance: ClassVar[float] = 0.0
    """How far logits may be from the network's own; 0: not by a bit."""

    def check_libraries(self) -> None:  # noqa: B027
        """Raise if a library that it needs is missing, before any work is done; most need none."""

    @abstractmethod
    def write(self, path: Path, network: nn.Module, identity: Identity, shape: InputShape) -> None: ...

    @abstractmethod
    def nodes(self, path: Path, shape: InputShape) -> list[str]:
        """The file's graph, node for node, as text that can be compared."""

    @abstractmethod
    def load(self, path: Path) -> Classify: ...


class Safetensors(Format):
    """The weights alone. The graph is the one that the network's name stands for."""

    name, file = "safetensors", "model.safetensors"

    def write(self, path: Path, network: nn.Module, identity: Identity, shape: InputShape) -> None:
        write_weights(path, identity, network.state_dict())

    def nodes(self, path: Path, shape: InputShape) -> list[str]:
        return _program_nodes(_traced(self.load(path), shape))

    def load(self, path: Path) -> nn.Module:
        identity, weights = read_weights(path)
        return identity.build(weights)


class Pt2(Format):
    """torch.export's own archive: runs wherever torch does, without codistill.

    torch.export.load imports modules and unpickles objects that a file names. So ``load`` takes only what ``write`` of
    this process made: enough to check an export, and no file from elsewhere can be run.
    """

    name, file = "pt2", "model.pt2"

    def __init__(self) -> None:
        self._written: set[bytes] = set()
        """SHA-256 of every file that this process has written."""

    def write(self, path: Path, network: nn.Module, identity: Identity, shape: InputShape) -> None:
        program = _traced(network, shape)
        program.example_inputs = None  # they would be pickled
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # it names folders of the machine that wrote it
        archive = io.BytesIO()
        torch.export.save(program, archive)
        self._written.add(sha256(archive.getbuffer()).digest())
        path.write_bytes(archive.getbuffer())

    def nodes(self, path: Path, shape: InputShape) -> list[str]:
        return _program_nodes(self._read(path))

    def load(self, path: Path) -> Classify:
        return self._read(path).module()

    def _read(self, path: Path) -> ExportedProgram:
        content = path.read_bytes()  # loaded from memory: the file may be replaced after it was compared
        if sha256(content).digest() not in self._written:
            raise ValueError(f"{path}: {PT2_RUNS_CODE}; only a file that this process has written is loaded")
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
            del part.metadata_props[:]  # notes for torch's developers, folders of the machine that wrote it among them
        path.write_bytes(model.SerializeToString())

    def nodes(self, path: Path, shape: InputShape) -> list[str]:
        self.check_libraries()
        import onnx

        return [_onnx_node(node) for node in onnx.load(path).graph.node]

    def load(self, path: Path) -> Classify:
        self.check_libraries()
        import onnxruntime

        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])

        def classify(images: Tensor) -> Tensor:
            (logits,) = session.run(["logits"], {"images": images.contiguous().numpy()})
            return torch.from_numpy(logits)

        return classify


FORMATS: dict[str, Format] = {one.name: one for one in (Safetensors(), Pt2(), Onnx())}


def get(name: str) -> Format:
    """The format of that name, its libraries there."""
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    FORMATS[name].check_libraries()
    return FORMATS[name]


def _traced(network: nn.Module, shape: InputShape) -> ExportedProgram:
    """For a batch of any size; with an example of 1, torch would take the size for a constant."""
    return torch.export.export(network, (torch.zeros(2, *shape),), dynamic_shapes=({0: Dim("batch")},))


def _program_nodes(program: ExportedProgram) -> list[str]:
    return [str(node.format_node()) for node in program.graph.nodes]


def _onnx_node(node: "onnx.NodeProto") -> str:
    attributes = sorted(str(attribute).replace("\n", " ") for attribute in node.attribute)
    return f"{node.op_type}({', '.join(node.input)}) -> {', '.join(node.output)} {attributes}"


@contextmanager
def _quiet_export() -> Iterator[None]:
    """Without torch's words to its own developers and on torchvision, of which nothing here has any use."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
            yield
    finally:
        registration.setLevel(level)
