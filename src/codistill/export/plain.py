"""A network as it ships, out of any run: without heads, averaged where the recipe says so, finished or interrupted.

From the run's end, or where it is interrupted from its newest checkpoint; or from the best by validation error.
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
from codistill.data.load import load
from codistill.engine.schedule import Position
from codistill.engine.state import cohort_of
from codistill.export.identity import Identity, read_weights
from codistill.recipes import parse
from codistill.recipes.schema import Augment, Recipe
from codistill.runs.checkpoint import Saved, Store
from codistill.runs.files import read_json
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.journal import read_journal
from codistill.runs.weights import (
    best_checkpoint,
    cohort_weights,
    last_checkpoint,
    load_strictly,
    shipped_weights,
    ships_average,
)
from codistill.wording import unknown


@dataclass(frozen=True)
class History:
    """What a run's folder tells of one of its networks, besides the weights."""

    folder: RunFolder
    recipe: Recipe
    name: str
    finished: bool
    report: Mapping[str, Any]
    """What was noted of the data."""
    environment: Mapping[str, Any]

    @classmethod
    def read(cls, run: Path, name: str) -> "History":
        folder = RunFolder(run)
        folder.refuse_irregular()
        if not folder.recipe.is_file():
            raise folder.not_a_run()
        recipe = parse.load(folder.recipe)
        if name not in recipe.networks:
            raise unknown(f"network of {run}", name, recipe.networks)
        report, environment = (read_json(file, MAX_BYTES) for file in (folder.data, folder.environment))
        return cls(folder, recipe, name, folder.result.exists(), report, environment)

    @property
    def averaged(self) -> bool:
        """Whether it is the moving average that ships."""
        return ships_average(self.recipe, self.name)

    @property
    def augmentation(self) -> Augment:
        return self.recipe.augment

    @property
    def image_size(self) -> tuple[int, int]:
        """Of the images, before their centre is cut out."""
        _, height, width = self.report["sets"]["test"]["shape"]
        return height, width

    @property
    def store(self) -> Store:
        return Store(self.folder.checkpoints)

    def measured_until(self, epoch: int) -> dict[str, Any] | None:
        """The network's metrics at the last evaluation up to then, with its ``epoch``; None before the first."""
        records = [record for record in read_journal(self.folder.journal) if record["epoch"] <= epoch]
        return {"epoch": records[-1]["epoch"], **records[-1]["test"][f"{self.name}/final"]} if records else None

    def data_at_hand(self) -> ImageData | None:
        """The run's own data, if they can still be read and are still the same."""
        try:
            data = load(self.recipe.data, seed=self.recipe.seed)
        except (ValueError, OSError):
            return None
        return data if data.report["sets"]["test"] == self.report["sets"]["test"] else None


@dataclass(frozen=True)
class Shipped:
    """A network out of its run, beside the cohort that it learned in."""

    history: History
    done: Position
    identity: Identity
    network: nn.Module
    cohort: Cohort
    heads_kept: bool
    """Whether the cohort's heads are the trained ones; where no checkpoint is left they are new, in the same places."""
    data: ImageData | None
    is_best: bool = False
    """Whether it is of the epoch with the lowest validation error, instead of the last."""

    @property
    def heads(self) -> int:
        """How many it learned with; not every method has any."""
        return len(self.cohort.members[self.history.name].heads)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        history = self.history
        return self.identity.in_channels, *history.augmentation.crop_size(history.image_size)

    def prepared(self, pixels_BCHW: Tensor) -> Tensor:
        """Raw pixels as the network takes them at test."""
        mean, std = torch.tensor(self.identity.mean), torch.tensor(self.identity.std)
        return normalise(centre_crop(pixels_BCHW, self.history.augmentation), mean, std)


def take_out(run: Path, name: str, *, best: bool = False) -> Shipped:
    """The network called ``name`` in the run's recipe, as it was in the end or when it was ``best``."""
    history = History.read(run, name)
    if best:
        return replace(_from_checkpoint(history, best_checkpoint(history.folder)), is_best=True)
    return _from_finished(history) if history.finished else _from_interrupted(history)


def _from_finished(history: History) -> Shipped:
    identity, weights = read_weights(history.folder.weights(history.name))
    done = Position(history.recipe.length.epochs)
    # The weight file is what ships; a checkpoint only adds the trained heads to the proof.
    saved = last_checkpoint(history.folder, history.recipe)
    return _shipped(history, done, identity, weights, saved, history.data_at_hand())


def _from_interrupted(history: History) -> Shipped:
    saved = history.store.newest()
    if saved is None:
        raise ValueError(
            f"{history.folder.path} has saved nothing yet, so there is no network to export; "
            f"train on with: {history.folder.resume_command()}"
        )
    return _from_checkpoint(history, saved)


def _from_checkpoint(history: History, saved: Saved) -> Shipped:
    data = history.data_at_hand()
    weights = shipped_weights(history.recipe, history.name, saved.tensors)
    return _shipped(history, Position(**saved.state["position"]), _identity(history, data), weights, saved, data)


def _identity(history: History, data: ImageData | None) -> Identity:
    if history.finished:
        identity, _ = read_weights(history.folder.weights(history.name))
        return identity
    if data is None:
        where = f" ({history.recipe.data.folder})" if history.recipe.data.folder else ""
        raise ValueError(
            f"{history.folder.path} is not finished, and until then only its data tell how images are normalised, but "
            f"those of {history.report['name']}{where} are not at hand, or are others now; put them back, or finish "
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
) -> Shipped:
    recipe, name = history.recipe, history.name
    cohort = cohort_of(recipe, identity.num_classes, identity.in_channels)
    cohort.eval().requires_grad_(False)
    if saved is not None:
        load_strictly(cohort, cohort_weights(saved.tensors), f"the tensors saved in {history.folder.path}")
    network = cohort.strip(name)
    load_strictly(network, weights, f"the weights of {name} in {history.folder.path}")
    if saved is None or history.averaged:
        # Otherwise the cohort keeps its own, so that the proof also compares the weight file with the checkpoint.
        cohort.members[name].backbone.load_state_dict(weights)
    return Shipped(history, done, identity, network, cohort, saved is not None, data)
