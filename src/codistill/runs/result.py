"""A run's ``result.json``: reading it, checking it, and its numbers by network and epoch. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codistill.errors import RunError
from codistill.recipes.errors import written_by_an_earlier_version
from codistill.recipes.schema import Recipe, Runtime
from codistill.runs.files import read_bytes, read_json
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.seal import JSON_END, KEY, damaged, unsealed

RESULT_FORMAT = 3
"""Raised when the recipe inside changes its keys; tools/convert_results.py converts results of earlier formats."""


@dataclass(frozen=True)
class Result:
    """The recipe of a finished run and its errors in percent."""

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

    @property
    def trained(self) -> Recipe:
        """The recipe with the precision that the run was computed in, where the recipe left it to the machine."""
        return self.recipe.replace(runtime={**self.recipe.runtime.model_dump(), "precision": self.precision})

    @property
    def precision(self) -> str:
        return precision_of(self.recipe, self.environment)

    def mean_error(self, networks: Iterable[str]) -> float:
        errors = [self.errors[name]["top1_error"] for name in networks]
        return sum(errors) / len(errors)


def device_name(recipe: Recipe, environment: Mapping[str, Any]) -> str:
    """The name of the device that trains ``recipe`` in this environment: the first accelerator, or else the CPU."""
    accelerators = environment.get("accelerators") or []
    on_cpu = recipe.runtime.device == "cpu" or not accelerators
    return str(environment.get("cpu") or "an unknown CPU") if on_cpu else str(accelerators[0])


def precision_of(recipe: Recipe, environment: Mapping[str, Any]) -> str:
    """The precision of a run: the recipe's, or the one that ``auto`` was when the run began."""
    asked = recipe.runtime.precision
    return str(environment.get("precision", asked)) if asked == "auto" else asked


def runtime_for_evaluation(recipe: Recipe, environment: Mapping[str, Any]) -> Runtime:
    """The settings to evaluate a finished run with on any device: its own precision, and torch's kernels."""
    here = {"device": "auto", "kernels": "torch", "winograd": "auto"}
    return recipe.runtime.model_copy(update={**here, "precision": precision_of(recipe, environment)})


def read_finished(folder: RunFolder) -> dict[str, Any]:
    """Read the content of a finished run's result.json; raises RunError if the run is missing or unfinished."""
    folder.refuse_irregular()
    folder.stored_recipe()
    if not folder.result.is_file():
        raise RunError(
            f"{folder.path} is not finished, so it has no result yet; finish it with: {folder.resume_command()}"
        )
    return read_result_content(folder.result)


def read_result(path: Path, *, follow_links: bool = False) -> Result:
    """Read and check a result.json; raises ValueError with the file's name if it is not one."""
    return parse_result(read_result_content(path, follow_links=follow_links), path)


def read_result_content(path: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """Read a result.json as it is; only its checksum and format are checked."""
    content = unsealed(read_bytes(path, MAX_BYTES, follow_links=follow_links), JSON_END)
    if content is None or content.get("format") != RESULT_FORMAT:
        raise _not_a_result(path, read_json(path, MAX_BYTES, follow_links=follow_links))
    return content


def _not_a_result(path: Path, content: object) -> RunError:
    """The error for a file of another format, or a damaged one."""
    if isinstance(content, dict) and KEY in content:
        return damaged(path)
    if isinstance(content, dict) and content.get("format") in range(1, RESULT_FORMAT) and "recipe" in content:
        run = path.parent if path.name == RunFolder(path.parent).result.name else path
        return RunError(f"{path} has format {content['format']}. {written_by_an_earlier_version(str(run))}")
    return RunError(f"{path} is not a run's result in the format that this version reads ({RESULT_FORMAT})")


def parse_result(content: Mapping[str, Any], path: Path) -> Result:
    """Check the content of the result.json at ``path``; raises ValueError if something in it is missing or wrong."""
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
