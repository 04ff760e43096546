"""Loads a network from a run as it ships: without heads, and averaged if the recipe has a moving average.

Source is the end of a finished run, the newest checkpoint of an interrupted one, or the best by validation error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from codistill.cohort import Cohort
from codistill.data.augmentation import centre_crop, normalise
from codistill.data.images import ImageData
from codistill.data.load import load_for
from codistill.engine.evaluate import has_test_images_of
from codistill.engine.own import require_given
from codistill.engine.schedule import Position
from codistill.engine.state import cohort_of
from codistill.errors import RunError, unknown
from codistill.export.formats import Identity, read_weights
from codistill.networks.adapters.own import is_missing
from codistill.recipes.schema import Recipe
from codistill.runs.checkpoint import STATE_MAX_BYTES, Saved, Store
from codistill.runs.files import read_bytes
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.records import DataReport, Environment, read_evaluations, saved_state
from codistill.runs.seal import RESTORE
from codistill.runs.weights import (
    best_checkpoint,
    cohort_weights,
    last_checkpoint,
    load_strictly,
    refuse_damaged,
    shipped_weights,
    ships_average,
)


@dataclass(frozen=True)
class History:
    """The facts about one network in a run's folder, except its weights."""

    folder: RunFolder
    recipe: Recipe
    name: str
    finished: bool
    report: DataReport
    environment: Environment

    @classmethod
    def read(cls, run: Path, name: str) -> "History":
        folder = RunFolder(run)
        folder.refuse_irregular()
        recipe = folder.stored_recipe()
        if name not in recipe.networks:
            raise unknown(f"network of {run}", name, recipe.networks)
        require_given(recipe, [name], f"export_network({str(run)!r}, {name!r}, 'onnx', 'DIR'")
        report, environment = DataReport.read(folder.data, MAX_BYTES), Environment.read(folder.environment)
        return cls(folder, recipe, name, folder.result.exists(), report, environment)

    @property
    def averaged(self) -> bool:
        """Whether the moving average of the weights ships."""
        return ships_average(self.recipe, self.name)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images before the centre crop."""
        _, height, width = self.report.sets.test.shape
        return height, width

    def measured_until(self, epoch: int) -> dict[str, Any] | None:
        """Return the metrics of the last evaluation up to ``epoch``, with their epoch; None before the first."""
        records = [one for one in read_evaluations(self.folder.journal, self.recipe) if one.epoch <= epoch]
        return {"epoch": records[-1].epoch, **dict(records[-1].test[f"{self.name}/final"])} if records else None

    def data_at_hand(self) -> ImageData | None:
        """Return the run's data if they can be read and are unchanged, otherwise None."""
        try:
            data = load_for(self.recipe)
        except (ValueError, OSError):
            return None
        return data if has_test_images_of(self.report, data) else None


@dataclass(frozen=True)
class PlainNetwork:
    """A plain network taken from a run, and the cohort that it was trained in."""

    history: History
    done: Position
    identity: Identity
    network: nn.Module
    cohort: Cohort
    heads_kept: bool
    """Whether the cohort has its trained heads; without a checkpoint they are new, at the same exits."""
    data: ImageData | None
    is_best: bool = False
    """Whether it is from the epoch with the lowest validation error instead of the last."""

    @property
    def heads(self) -> int:
        """Number of heads in training; some methods have none."""
        return len(self.cohort.members[self.history.name].heads)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        history = self.history
        return self.identity.in_channels, *history.recipe.augment.crop_size(history.image_size)

    def prepared(self, pixels_BCHW: Tensor) -> Tensor:
        """Crop and normalise raw pixels as in evaluation."""
        mean, std = torch.tensor(self.identity.mean), torch.tensor(self.identity.std)
        return normalise(centre_crop(pixels_BCHW, self.history.recipe.augment), mean, std)


def load_network(run: Path, name: str, *, best: bool = False) -> PlainNetwork:
    """Load the network called ``name`` in the run's recipe, from the end of the run or from its ``best`` epoch."""
    history = History.read(run, name)
    if best:
        return replace(_from_checkpoint(history, best_checkpoint(history.folder), history.folder.best), is_best=True)
    return _from_finished(history) if history.finished else _from_interrupted(history)


def _from_finished(history: History) -> PlainNetwork:
    identity, weights = _read_shipped(history)
    done = Position(history.recipe.length.epochs)
    # The weight file is what ships; a checkpoint only adds the trained heads to the proof.
    saved = last_checkpoint(history.folder, history.recipe)
    return _shipped(history, done, identity, weights, saved, history.data_at_hand())


def _read_shipped(history: History) -> tuple[Identity, dict[str, Tensor]]:
    """Read the weight file of a finished run; raises RunError unless it is the one in the result."""
    file = history.folder.weights(history.name)
    refuse_damaged(file)
    return read_weights(file)


def _from_interrupted(history: History) -> PlainNetwork:
    saved = Store(history.folder.checkpoints, foreign=history.folder.foreign).newest()
    if saved is None:
        raise ValueError(
            f"{history.folder.path} has no checkpoint yet, so there is no network to export; "
            f"continue training with: {history.folder.resume_command()}"
        )
    return _from_checkpoint(history, saved, history.folder.checkpoints)


def _from_checkpoint(history: History, saved: Saved, checkpoints: Path) -> PlainNetwork:
    state = saved_state(saved, checkpoints)
    position, journal = state.position, history.folder.journal
    if not read_bytes(journal, STATE_MAX_BYTES).startswith(state.files.get(journal.name, "").encode()):
        raise RunError(f"{journal} is damaged: it is not the one that the checkpoint of this run continues; {RESTORE}")
    data = history.data_at_hand()
    weights = shipped_weights(history.recipe, history.name, saved.tensors)
    if not all(tensor.isfinite().all() for tensor in weights.values()):
        raise ValueError(
            f"network {history.name!r} of {history.folder.path} is not finite in its newest checkpoint; the end of the "
            f"epoch decides about it, so continue training with: {history.folder.resume_command()}"
        )
    done = Position(position.epoch, position.step)
    return _shipped(history, done, _identity(history, data), weights, saved, data)


def _identity(history: History, data: ImageData | None) -> Identity:
    if history.finished:
        identity, _ = _read_shipped(history)
        return identity
    if data is None:
        where = f" ({history.recipe.data.folder})" if history.recipe.data.folder else ""
        raise ValueError(
            f"{history.folder.path} is not finished, so its data are needed to know how images are normalised, but "
            f"those of {history.report.name}{where} are missing or have changed; restore them, or finish the run "
            f"with: {history.folder.resume_command()}"
        )
    return Identity.of_data(history.recipe.networks[history.name], data)


def _shipped(
    history: History,
    done: Position,
    identity: Identity,
    weights: Mapping[str, Tensor],
    saved: Saved | None,
    data: ImageData | None,
) -> PlainNetwork:
    recipe, name = history.recipe, history.name
    known = [one for one, network in recipe.networks.items() if not is_missing(network)]
    cohort = cohort_of(recipe, identity.num_classes, identity.in_channels, only=known)
    cohort.eval().requires_grad_(False)
    if saved is not None:
        load_strictly(cohort, cohort_weights(saved.tensors, known), f"the tensors saved in {history.folder.path}")
    network = cohort.strip(name)
    load_strictly(network, weights, f"the weights of {name} in {history.folder.path}")
    if saved is None or history.averaged:
        # Otherwise the cohort keeps its own, so that the proof also compares the weight file with the checkpoint.
        cohort.members[name].backbone.load_state_dict(weights)
    return PlainNetwork(history, done, identity, network, cohort, saved is not None, data)
