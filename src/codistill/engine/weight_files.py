"""Weight files, read safely and loaded into networks: a run's own, a library's, or those of another training.

A file may come from anywhere. Nothing in it is executed, and what is read is bounded by the network's own size.
"""

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from codistill.networks.adapters.naming import is_tagged
from codistill.networks.parts import classifier_layers, classifier_parameters
from codistill.recipes.schema import Recipe
from codistill.runs.checkpoint import fingerprint
from codistill.runs.records import WeightsReport
from codistill.runs.weights import load_strictly, refuse_damaged

HEADER_BYTES = 16 * 2**20
"""The most that a weight file may hold besides the weights."""
PICKLED = (".pth", ".pt")
"""The suffixes of what ``torch.save`` writes."""
WRAPPERS = ("state_dict", "model")
"""The keys under which checkpoints of trainings keep the weights."""
MOST_CLASSES = 2**15
"""More than any weight file's classifier has; ImageNet-21k has 21,843 classes."""
SAVE = "save the weights alone: torch.save(model.state_dict(), FILE)"
COUNTER = "num_batches_tracked"
"""The tensor of batch norms that files from before torch 0.4.1 lack; no result depends on it."""
DTYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool
"""What the tensors of a file may be; others are quantised, or would lose a part of their values."""
PER_WEIGHT = 4
"""The most bytes of a file for each of the network's: weights in float64, or with two averages and their average."""


def begin(backbone: nn.Module, recipe: Recipe, name: str, in_channels: int) -> dict[str, Any] | None:
    """Load what the recipe says that the network called ``name`` begins from; None if that is nothing but its seed.

    That is the file ``start.NAME``, or else the pretrained weights that the network's own name has a tag of.
    Returns what the run records about it.
    """
    network, label = recipe.networks[name], f"network {name!r}"
    if name in recipe.start:
        source, file = recipe.start[name], Path(recipe.start[name])
        weights = read_tensors(backbone, file, name)
    elif is_tagged(network):
        from codistill.networks.adapters.pretrained import pretrained_weights

        source = network
        try:
            file, weights = pretrained_weights(network, in_channels)
        except ValueError as error:
            raise ValueError(f"{label}: {str(error).replace('NETWORK', name)}") from None
    else:
        return None
    new = load_but_classifier(backbone, weights, f"{label}: the weights in {file}")
    classes = len(classifier_layers(backbone)[-1].weight)
    of_file = len(weights.get(new[0], ())) if new else classes
    if new and name not in recipe.graph.learning_networks:
        raise ValueError(
            f"{label} only teaches, and {file} has a classifier of {of_file} classes for data of {classes}; "
            "give weights that were trained on these classes"
        )
    return {"source": source, **fingerprint(file), "classes": of_file, "new_classifier": new}


def read_report(file: Path, name: str) -> WeightsReport:
    """Read what a run's weight file says of the data that its network, ``name``, was trained on."""
    if not file.is_file():
        raise ValueError(f"network {name!r}: there is no file {file}")
    refuse_damaged(file)
    try:
        with safe_open(file, framework="pt") as opened:
            return WeightsReport.check(json.loads(opened.metadata()["codistill"]), file)
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} does not say what its network was trained on ({error}); train again") from None


def load_weights(backbone: nn.Module, file: Path, name: str) -> None:
    """Load the weight file of the network called ``name`` in the recipe; raises ValueError if it does not fit."""
    load_strictly(backbone, read_tensors(backbone, file, name), f"network {name!r}: the weights in {file}")


def read_tensors(backbone: nn.Module, file: Path, name: str) -> dict[str, Tensor]:
    """Read a weight file for a network of this size: safetensors, or what ``torch.save`` wrote, if it is tensors only.

    ``name`` is the network's in the recipe, for errors.
    """
    if file.is_dir():
        raise ValueError(f"network {name!r}: {file} is a folder; give the weight file in it")
    if not file.is_file():
        raise ValueError(f"network {name!r}: there is no file {file}; give a safetensors or .pth file of its weights")
    refuse_damaged(file)
    # Before anything is mapped or read: a file may claim any size.
    others = sum(layer.weight[0].nbytes for layer in classifier_layers(backbone)) * MOST_CLASSES
    needed = sum(tensor.nbytes for tensor in backbone.state_dict().values())
    most = PER_WEIGHT * (needed + others) + HEADER_BYTES
    if (size := file.stat().st_size) > most:
        raise ValueError(f"network {name!r}: {file} has {size:,} bytes, too many for the network's {needed:,}")
    try:
        weights = read_pickled(file, most) if file.suffix in PICKLED else read_safetensors(file)
    except ValueError as error:
        raise ValueError(f"network {name!r}: {file} {error}") from None
    weights = without_prefix(weights)
    for key, tensor in weights.items():
        if tensor.dtype not in DTYPES or tensor.is_meta:
            kind = "without values" if tensor.is_meta else f"of {tensor.dtype}"
            raise ValueError(f"network {name!r}: {key!r} in {file} is {kind}; give the weights in float32")
    if sum(tensor.nbytes for tensor in weights.values()) > most:
        raise ValueError(f"network {name!r}: the tensors in {file} claim more bytes than the file can have")
    if non_finite := [key for key, tensor in weights.items() if not tensor.isfinite().all()]:
        raise ValueError(
            f"network {name!r}: {file} contains NaN or infinities, first in {non_finite[0]!r}; give finite weights"
        )
    return weights


def read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"is not a readable safetensors file ({error}); one of torch.save ends in .pth") from None


def read_pickled(file: Path, max_bytes: int) -> dict[str, Tensor]:
    """Read a state dict that ``torch.save`` wrote, or that of a training's checkpoint; nothing in it is executed.

    ``weights_only=True`` builds tensors, numbers and texts alone. What else a pickle names is refused, by that name.
    """
    try:
        unpacked = file.stat().st_size
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as parts:  # of which some could be compressed
                unpacked = sum(part.file_size for part in parts.infolist())
        content = torch.load(file, map_location="cpu", weights_only=True) if unpacked <= max_bytes else None
    except Exception as error:  # of a damaged file, torch raises many kinds
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise ValueError(f"is more than tensors: it names {found[1]}, which was not run; {SAVE}") from None
        reason = type(error).__name__ if "\n" in str(error) else str(error)
        raise ValueError(f"is not a file of torch.save with nothing but tensors ({reason}); {SAVE}") from None
    if unpacked > max_bytes:
        raise ValueError(f"unpacks to {unpacked:,} bytes, too many for the network")
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"has a {type(content).__name__} and no state dict; {SAVE}")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Tensor) or value.layout != torch.strided:
            raise ValueError(f"is more than tensors: {key!r} is of type {type(value).__name__}; {SAVE}")
    return dict(content)


def without_prefix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the network's own names, where DataParallel or torch.compile has put theirs before all."""
    for prefix in ("module.", "_orig_mod."):
        if weights and all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): tensor for key, tensor in weights.items()}
    return dict(weights)


def load_but_classifier(backbone: nn.Module, weights: Mapping[str, Tensor], label: str) -> list[str]:
    """Load a state dict of the same network for any number of classes; errors begin with ``label``.

    Returns the classifier's tensors that keep their values, as the state dict has none, or those of other classes.
    """
    own = backbone.state_dict(keep_vars=True)
    learned = classifier_parameters(backbone)
    classifier = {name: tensor.detach() for name, tensor in own.items() if tensor in learned}
    given = {name: weights[name] for name in classifier if name in weights}
    is_of_others = given.keys() == classifier.keys() and all(
        given[name].ndim == tensor.ndim and given[name].shape[1:] == tensor.shape[1:]
        for name, tensor in classifier.items()
    )
    has_another = any(given[name].shape != tensor.shape for name, tensor in classifier.items() if name in given)
    kept = classifier if not given or (is_of_others and has_another) else {}
    counters = {name: tensor for name, tensor in own.items() if name.endswith(COUNTER)}
    load_strictly(backbone, {**counters, **weights, **kept}, label)
    return list(kept)
