"""Results of finished runs as studies read them, and the names of their folders."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from codistill.recipes import Recipe
from codistill.runs.folder import read_result_file
from codistill.studies.study import slug


@dataclass(frozen=True)
class Result:
    """A finished run's recipe and its test errors in percent."""

    recipe: Recipe
    errors: Mapping[str, Mapping[str, float]]
    """By network: the last epoch's ``top1_error`` and ``top5_error``, and ``best_epoch``, the smallest top-1 of all."""
    curve: Mapping[int, Mapping[str, float]]
    """Top-1 test error by epoch and network."""
    environment: Mapping[str, Any]
    elapsed_s: float

    @property
    def scale(self) -> float | None:
        return self.recipe.length.scale

    @property
    def device(self) -> str:
        return device_name(self.recipe, self.environment)

    def mean_error(self, networks: Iterable[str]) -> float:
        errors = [self.errors[name]["top1_error"] for name in networks]
        return sum(errors) / len(errors)


Results = Mapping[str, Mapping[int, Result]]
"""By row key and seed."""


def device_name(recipe: Recipe, environment: Mapping[str, Any]) -> str:
    """The device that a recipe runs on in this environment: the first accelerator, or else the CPU."""
    accelerators = environment.get("accelerators") or []
    on_cpu = recipe.runtime.device == "cpu" or not accelerators
    return str(environment.get("cpu") or "an unknown CPU") if on_cpu else str(accelerators[0])


def read_result(path: Path, *, follow_links: bool = False) -> Result:
    """Read a result.json; raises ValueError that names the file. Callers add what to do about it."""
    return parse_result(read_result_file(path, follow_links=follow_links), path)


def parse_result(content: Mapping[str, Any], path: Path) -> Result:
    """Check the content of a result.json; ``path`` is for error messages."""
    recipe = Recipe.check(content.get("recipe"), f"{path}: recipe")
    try:
        networks, epochs = content["networks"], content["epochs"]
        return Result(
            recipe=recipe,
            errors={
                name: {
                    "top1_error": float(networks[name]["last"]["top1_error"]),
                    "top5_error": float(networks[name]["last"]["top5_error"]),
                    "best_epoch": float(networks[name]["best_epoch"]["top1_error"]),
                }
                for name in recipe.networks
            },
            curve={
                record["epoch"]: {
                    name: float(record["test"][f"{name}/final"]["top1_error"]) for name in recipe.networks
                }
                for record in epochs
            },
            environment=content["environment"],
            elapsed_s=float(content["elapsed_s"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a run's result ({error!r})") from None


def run_name(recipe: Recipe) -> str:
    """The name of a run's folder, as in ``cifar100-wrn-28-4-twins-dcm-seed1-0a1b2c3d4e``: readable and unique."""
    networks = list(recipe.networks.values())
    is_twins = len(networks) == 2 and networks[0] == networks[1]
    cohort = f"{networks[0]}-twins" if is_twins else "-".join(networks)
    return f"{slug(f'{recipe.data.name}-{cohort}-{recipe.method}')[:80]}-seed{recipe.seed}-{_digest(recipe)}"


def _digest(recipe: Recipe) -> str:
    """Hash of the recipe without its name, checkpoint settings, threads and the paths of known data sets.

    Defaults are left out, so that runs keep their names when a later version adds a key.
    """
    values = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"name", "checkpoints"})
    for section in ("optimizer", "schedule"):
        values[section]["kind"] = getattr(recipe, section).kind  # a default of its class, but it tells classes apart
    values.get("runtime", {}).pop("threads", None)
    if recipe.data.name != "folder":
        values["data"].pop("folder", None)
    if recipe.start:
        values["start"] = start_names(recipe.start)
    written = json.dumps({key: value for key, value in values.items() if value != {}}, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:10]


def start_names(start: Mapping[str, str]) -> dict[str, str]:
    """Shorten paths of weights to ``RUN/weights/a.safetensors``: the run's name identifies them on any machine."""
    return {name: "/".join(PurePath(file).parts[-3:]) for name, file in start.items()}
