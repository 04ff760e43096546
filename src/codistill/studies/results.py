"""Finished runs as a study reads them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codistill.recipes import Recipe
from codistill.runs.folder import read_result_file


@dataclass(frozen=True)
class Result:
    """What a finished run says: errors in percent, by network."""

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


def device_name(recipe: Recipe, environment: Mapping[str, Any]) -> str:
    """What a recipe is computed on where the environment is this one: the accelerator if there is one, or the CPU."""
    accelerators = environment.get("accelerators") or []
    on_cpu = recipe.runtime.device == "cpu" or not accelerators
    return str(environment.get("cpu") or "an unknown CPU") if on_cpu else str(accelerators[0])


def read_result(path: Path, *, follow_links: bool = False) -> Result:
    """Read a result.json, or say which file is not one; what to do about it is for those to say who know its place."""
    return result_in(read_result_file(path, follow_links=follow_links), path)


def result_in(content: Mapping[str, Any], path: Path) -> Result:
    """The same of a file whose content was read already."""
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
