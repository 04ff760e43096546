"""Weight files that a training begins from: what ``torch.save`` writes, read safely; classifiers of other classes."""

import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from codistill.engine.weight_files import load_but_classifier, read_tensors
from codistill.networks.backbone import Backbone
from codistill.networks.families import architecture


def network(classes: int = 10, name: str = "wrn-10-1") -> Backbone:
    torch.manual_seed(classes)
    return architecture(name).backbone(classes)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        dict,
        OrderedDict,
        lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"lr": 0.1}},
        lambda state: {"model": state, "args": None},
        lambda state: {"state_dict": under("module.", state)},
        partial(under, "_orig_mod."),
    ],
)
@pytest.mark.parametrize("is_zip", [True, False])
def test_what_torch_saves_is_read(wrap: Any, is_zip: bool, tmp_path: Path) -> None:
    state = network().state_dict()
    file = tmp_path / "weights.pth"
    torch.save(wrap(state), file, _use_new_zipfile_serialization=is_zip)
    assert same(read_tensors(network(), file, "a"), state)


def test_names_of_data_parallel_are_read_in_safetensors_too(tmp_path: Path) -> None:
    state = network().state_dict()
    save_file(nn.DataParallel(network()).state_dict(), tmp_path / "weights.safetensors")
    assert same(read_tensors(network(), tmp_path / "weights.safetensors", "a"), state)


def test_files_without_the_counters_of_batch_norms_are_read() -> None:
    """Such as torchvision's: torch before 0.4.1 had none."""
    given = {name: tensor for name, tensor in network().state_dict().items() if "num_batches" not in name}
    assert len(given) < len(network().state_dict())
    learner = architecture("wrn-10-1").backbone(10)
    assert load_but_classifier(learner, given, "the weights") == []
    assert all(learner.state_dict()[name].equal(tensor) for name, tensor in given.items())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_types_that_lose_values_are_named(dtype: torch.dtype, suffix: str, tmp_path: Path) -> None:
    state = network().state_dict()
    first, file = next(iter(state)), tmp_path / f"weights{suffix}"
    state[first] = state[first].to(dtype)
    (torch.save if suffix == ".pth" else save_file)(dict(state), file)
    with pytest.raises(ValueError, match=f"network 'a': '{first}' in .* is of {dtype}; give the weights"):
        read_tensors(network(), file, "a")


def test_tensors_without_values_are_named(tmp_path: Path) -> None:
    torch.save({"conv.weight": torch.empty(2, device="meta")}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"'conv.weight' in .* is without values; give the weights"):
        read_tensors(network(), tmp_path / "weights.pth", "a")


class Evil:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.promise(
    "weight-files-run-nothing",
    "A `.pth` file that is more than tensors (a pickled network, a function to call) is refused by the name of what it "
    "has, and nothing of it is executed.",
    repeated="5 kinds of file",
)
@pytest.mark.parametrize("kind", ["evil", "evil beside weights", "evil in the old format", "bare pickle", "network"])
def test_a_pickle_that_is_more_than_tensors_executes_nothing(kind: str, tmp_path: Path) -> None:
    file, trace = tmp_path / "weights.pth", tmp_path / "trace"
    evil = Evil(f"touch {trace}")
    torch.save(network().state_dict(), file)
    match kind:
        case "evil":
            torch.save(evil, file)
        case "evil beside weights":
            torch.save({"state_dict": network().state_dict(), "args": evil}, file)
        case "evil in the old format":
            torch.save(evil, file, _use_new_zipfile_serialization=False)
        case "bare pickle":
            file.write_bytes(pickle.dumps(evil))
        case "network":
            torch.save(nn.Sequential(nn.Linear(2, 2)), file)
    with pytest.raises(ValueError, match=r"network 'a': .*weights\.pth .*save the weights alone: torch\.save") as error:
        read_tensors(network(), file, "a")
    names = "torch.nn.modules.container.Sequential" if kind == "network" else f"{os.system.__module__}.system"
    assert kind == "bare pickle" or f"is more than tensors: it names {names}, which was not run" in str(error.value)
    assert "\n" not in str(error.value)
    assert not trace.exists()


def test_the_evil_file_would_have_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(f"touch {tmp_path / 'trace'}")))
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"conv": torch.zeros(1), "epoch": 3}, "is more than tensors: 'epoch' is of type int; save the weights alone"),
        ({"state_dict": {"lr": 0.1}}, "is more than tensors: 'lr' is of type float"),
        ([torch.zeros(1)], "has a list and no state dict"),
        ({}, "has a dict and no state dict"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "'a' is of type Tensor|is more than tensors"),
        ({"a": torch.zeros(1).expand(2**40)}, "claim more bytes than the file can have"),
        ({"a": torch.tensor([1.0, float("nan")])}, "contains NaN or infinities, first in 'a'"),
    ],
)
def test_content_that_is_no_state_dict_is_refused(content: object, said: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=said):
        read_tensors(network(), tmp_path / "weights.pt", "a")


def test_sizes_are_bounded_before_anything_is_read(tmp_path: Path) -> None:
    file, zipped = tmp_path / "huge.pth", tmp_path / "bomb.pth"
    with file.open("wb") as large:
        large.truncate(2**40)
    with pytest.raises(ValueError, match=r"has 1,099,511,627,776 bytes, too many for the network's"):
        read_tensors(network(), file, "a")
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as parts, parts.open("archive/data.pkl", "w") as part:
        for _ in range(64):
            part.write(bytes(2**20))
    assert zipped.stat().st_size < 2**20
    with pytest.raises(ValueError, match=r"unpacks to 67,108,864 bytes, too many for the network"):
        read_tensors(network(), zipped, "a")


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    torch.save(network().state_dict(), file)
    whole = file.read_bytes()
    for damaged in (b"", b"text", whole[:1000], whole[:-1000]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"is not a file of torch\.save with nothing but tensors") as error:
            read_tensors(network(), file, "a")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["wrn-10-1", "resnet-8", "mobilenet", "densenet-7-4"])
def test_weights_of_other_classes_leave_the_classifier_as_it_was_drawn(name: str) -> None:
    given, begun = network(100, name).state_dict(), network(10, name)
    drawn = {key: tensor.clone() for key, tensor in begun.state_dict().items()}
    kept = load_but_classifier(begun, given, "these weights")
    assert [key.rpartition(".")[2] for key in kept] == ["weight", "bias"]
    state = begun.state_dict()
    assert all(state[key].equal(drawn[key]) for key in kept)
    assert all(state[key].equal(tensor) for key, tensor in given.items() if key not in kept)
    assert load_but_classifier(begun, network(10, name).state_dict(), "these weights") == []
    assert same(begun.state_dict(), network(10, name).state_dict())


def test_weights_without_a_classifier_leave_it_as_it_was_drawn() -> None:
    given = {key: tensor for key, tensor in network().state_dict().items() if not key.startswith("classifier.3.")}
    assert load_but_classifier(network(), given, "these weights") == ["classifier.3.weight", "classifier.3.bias"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: network(10, "wrn-16-1").state_dict(), r"\d+ are not the network's, such as 'stages"),
        (lambda state: network(10, "wrn-10-2").state_dict(), r"1 are not the network's, such as 'stages.*projection"),
        (
            lambda state: state | {"classifier.3.weight": torch.zeros(100, 3)},
            r"'classifier\.3\.weight', 100×3 and not 10×64",
        ),
        (lambda state: state | {"classifier.0.0.bias": torch.zeros(3)}, r"'classifier\.0\.0\.bias', 3 and not 64"),
        (
            lambda state: {k: v for k, v in state.items() if k != "classifier.3.bias"},
            r"1 tensors are missing, such as 'cl",
        ),
        (lambda state: state | {"extra": torch.zeros(1)}, r"1 are not the network's, such as 'extra'"),
    ],
)
def test_weights_of_another_network_are_refused_and_nothing_is_loaded(change: Any, said: str) -> None:
    begun = network()
    before = {key: tensor.clone() for key, tensor in begun.state_dict().items()}
    with pytest.raises(ValueError, match=f"these weights do not fit the network: .*{said}"):
        load_but_classifier(begun, change(network(7).state_dict() | network().state_dict()), "these weights")
    assert same(begun.state_dict(), before)
