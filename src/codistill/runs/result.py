"""A run's ``result.json``: reading it, checking it, and its numbers by network and epoch. Imports no torch."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from codistill.errors import RunError
from codistill.recipes.errors import written_by_an_earlier_version
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Runtime
from codistill.runs.files import read_bytes, read_json
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.records import (
    Content,
    Count,
    DataReport,
    Environment,
    Evaluation,
    HasNeeded,
    NetworkResult,
    Seconds,
    needed_by,
)
from codistill.runs.seal import JSON_END, KEY, damaged, unsealed

RESULT_FORMAT = 3
"""Raised when the recipe inside changes its keys; tools/convert_results.py converts results of earlier formats."""


class Result(Content):
    """The content of a finished run's result.json, or of a published one."""

    recipe: Recipe
    networks: Annotated[dict[str, NetworkResult], HasNeeded]
    epochs: Annotated[list[Evaluation], Field(min_length=1)]
    data: DataReport
    environment: Environment
    path: str = ""
    """How the step was computed, such as ``bf16, Triton kernels``."""
    elapsed_s: Seconds
    peak_device_bytes: Count | None = None
    slimmed: bool = False
    """Whether it was published with terms and auxiliary classifiers of the last epoch only."""

    @cached_property
    def errors(self) -> dict[str, dict[str, float]]:
        """By network: the last epoch's ``top1_error`` and ``top5_error``, and ``best_epoch``, the smallest top-1."""
        return {
            name: {
                "top1_error": self.networks[name].last.top1_error,
                "top5_error": self.networks[name].last.top5_error,
                "best_epoch": self.networks[name].best_epoch.top1_error,
            }
            for name in self.recipe.networks
        }

    @cached_property
    def curve(self) -> dict[int, dict[str, float]]:
        """Top-1 test error by epoch and network."""
        return {
            one.epoch: {name: one.test[f"{name}/final"].top1_error for name in self.recipe.networks}
            for one in self.epochs
        }

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


def device_name(recipe: Recipe, environment: Environment) -> str:
    """The name of the device that trains ``recipe`` in this environment: the first accelerator, or else the CPU."""
    if recipe.runtime.device == "cpu" or not environment.accelerators:
        return environment.cpu or "an unknown CPU"
    return environment.accelerators[0]


def precision_of(recipe: Recipe, environment: Environment) -> str:
    """The precision of a run: the recipe's, or the one that ``auto`` was when the run began."""
    asked = recipe.runtime.precision
    return environment.precision or asked if asked == "auto" else asked


def runtime_for_evaluation(recipe: Recipe, environment: Environment) -> Runtime:
    """The settings to evaluate a finished run with on any device: its own precision, and torch's kernels."""
    here = {"device": "auto", "kernels": "torch", "winograd": "auto"}
    return recipe.runtime.model_copy(update={**here, "precision": precision_of(recipe, environment)})


def read_finished(folder: RunFolder) -> Result:
    """Read a finished run's result.json; raises RunError if the run is missing or unfinished."""
    folder.refuse_irregular()
    folder.stored_recipe()
    if not folder.result.is_file():
        raise RunError(
            f"{folder.path} is not finished, so it has no result yet; finish it with: {folder.resume_command()}"
        )
    return read_result(folder.result)


def read_result(path: Path, *, follow_links: bool = False) -> Result:
    """Read and check a result.json; raises ValueError with the file's name and the key if it is not one."""
    content = read_result_content(path, follow_links=follow_links)
    recipe = Recipe.check(content.get("recipe"), f"{path}: recipe")
    return Result.check({**content, "recipe": recipe}, path, needed_by(recipe))


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
