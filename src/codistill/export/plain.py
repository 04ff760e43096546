"""A network as it ships, out of any run: without heads, averaged where the recipe says so, finished or interrupted."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codistill.cohort import Cohort
from codistill.data.augment import centre_crop, normalise
from codistill.data.batches import AugmentSettings
from codistill.data.images import ImageData
from codistill.data.load import load
from codistill.engine.checkpoint import Saved, Store
from codistill.engine.files import RunError, read_json
from codistill.engine.journal import read_journal
from codistill.engine.run import MAX_BYTES, RECIPE_FILE, RESULT_FILE, RESULT_FORMAT
from codistill.engine.timetable import Position
from codistill.export.identity import Identity, read_weights
from codistill.networks.backbone import Backbone
from codistill.recipes import files
from codistill.recipes.schema import Recipe
from codistill.wording import unknown


@dataclass(frozen=True)
class Shipped:
    """A network out of its run, beside the cohort that it learned in."""

    name: str
    recipe: Recipe
    finished: bool
    done: Position
    identity: Identity
    network: Backbone
    cohort: Cohort
    heads_kept: bool
    """Whether the cohort's heads are the trained ones; where no checkpoint is left they are new, in the same places."""
    data: ImageData | None
    """The run's own data; None where they are not at hand any more."""
    report: Mapping[str, Any]
    """What the run noted of its data."""
    measured: Mapping[str, Any] | None
    """The network's metrics at the last evaluation, and its ``epoch``; None before the first."""
    environment: Mapping[str, Any]

    @property
    def averaged(self) -> bool:
        return self.recipe.ema > 0 and self.name not in self.recipe.graph.frozen

    @property
    def augmentation(self) -> AugmentSettings:
        return AugmentSettings(**self.recipe.augment.model_dump())

    @property
    def image_size(self) -> tuple[int, int]:
        """Of the images, before their centre is cut out."""
        _, height, width = self.report["sets"]["test"]["shape"]
        return height, width

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.identity.in_channels, *self.augmentation.cropped(self.image_size)

    def prepared(self, pixels_BCHW: Tensor) -> Tensor:
        """Raw pixels as the network takes them at test."""
        mean, std = torch.tensor(self.identity.mean), torch.tensor(self.identity.std)
        return normalise(centre_crop(pixels_BCHW, self.augmentation), mean, std)


def take_out(run: Path, name: str) -> Shipped:
    """The network that ``name`` has in the run, with everything that its export and its model card tell."""
    if not (run / RECIPE_FILE).is_file():
        raise ValueError(f"{run} is no run: it has no {RECIPE_FILE}; give the folder that `codistill train --out` wrote")
    recipe = files.load(run / RECIPE_FILE)
    if name not in recipe.networks:
        raise unknown(f"network of {run}", name, recipe.networks)
    finished = (run / RESULT_FILE).exists()
    take = _from_finished if finished else _from_interrupted
    return take(run, recipe, name)


def _from_finished(run: Path, recipe: Recipe, name: str) -> Shipped:
    result = read_json(run / RESULT_FILE, MAX_BYTES)
    if not isinstance(result, dict) or result.get("format") != RESULT_FORMAT:
        raise ValueError(f"{run / RESULT_FILE} is not a result that this version reads (format {RESULT_FORMAT})")
    identity, weights = read_weights(run / "weights" / f"{name}.safetensors")
    report, done = result["data"], Position(recipe.length.epochs)
    try:
        saved = Store(run / "checkpoints").newest()
    except RunError:
        saved = None  # the weight file is what ships; checkpoints only let the proof use the trained heads
    if saved is not None and Position(**saved.state["position"]) != done:
        saved = None
    cohort = _cohort(recipe, identity, saved)
    network = identity.build(weights)
    if saved is None or recipe.ema:
        cohort.members[name].backbone.load_state_dict(weights)
    return Shipped(
        name=name,
        recipe=recipe,
        finished=True,
        done=done,
        identity=identity,
        network=network,
        cohort=cohort,
        heads_kept=saved is not None,
        data=_data_at_hand(recipe, report),
        report=report,
        measured={"epoch": recipe.length.epochs, **result["networks"][name]["last"]},
        environment=result["environment"],
    )
