"""Converts the recipes in results and run folders of an earlier version to today's keys.

    python tools/convert_results.py                  # results/ of this repository, and its tables
    python tools/convert_results.py runs/x y.json    # run folders, folders of them, single files

Published results, and a run's recipe.yaml and result.json, are rewritten in place, once: files of today's format are
left unchanged. Files get the checksum that they end with since format 3. What changes in a recipe:

- ``runtime.compile: true`` becomes ``runtime.kernels: triton`` if the run was on a CUDA device, else ``inductor``;
  ``false`` becomes ``torch``.
- ``runtime.winograd`` is ``on`` for runs with the Triton kernels of a commit that has the Winograd kernels (7c3fa01 or
  later), and ``off`` for earlier ones, for all other kernels, and where git does not know the run's commit.
- ``sick`` becomes ``on_nonfinite``; ``processes.predictions`` is dropped. A file with ``one_step_old``, which has no
  equivalent, is reported and left unchanged.

Measured numbers, the recorded environment and its command line stay as they are.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codistill.recipes.parse import parse_yaml, to_yaml
from codistill.recipes.schema import Recipe
from codistill.runs.files import write_atomically
from codistill.runs.result import RESULT_FORMAT
from codistill.runs.seal import YAML_END, is_sealed, seal, sealed_json
from codistill.studies.published import rebuild_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
WINOGRAD = "7c3fa01"
"""The commit that brought the Winograd kernels."""

Values = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[RESULTS], help="run folders, results, folders of them")
    refused = 0
    for path in parser.parse_args().paths:
        converted = False
        for file in files_below(path):
            try:
                if convert_file(file):
                    converted = True
                    print(f"converted {file}")
            except ValueError as error:
                refused += 1
                print(f"{file}: left unchanged: {error}", file=sys.stderr)
        if converted and (path / "tables").is_dir():
            rebuild_tables(path)
    sys.exit(1 if refused else 0)


def files_below(path: Path) -> Iterator[Path]:
    """The files that may hold a recipe: one, or those below a folder."""
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.suffix == ".json" or file.name == "recipe.yaml")
    else:
        sys.exit(f"{path}: no such file or folder")


def convert_file(file: Path) -> bool:
    """Rewrite the file if it is of an earlier version; return whether it was. Raises ValueError if it cannot be."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".yaml":
        recipe = parse_yaml(text, str(file)).value
        if not isinstance(recipe, dict) or is_sealed(text.encode(), YAML_END):
            return False
        beside = file.with_name("environment.json")
        environment = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
        converted = convert_recipe(recipe, environment) if has_old_keys(recipe) else recipe
        write_atomically(file, seal(to_yaml(converted).encode(), YAML_END))
        return True
    content = json.loads(text)
    is_result = isinstance(content, dict) and isinstance(content.get("recipe"), dict)
    if not is_result or content.get("format") not in range(1, RESULT_FORMAT):
        return False
    recipe = convert_recipe(content["recipe"], content.get("environment") or {})
    lines = text.splitlines()
    indent = len(lines[1]) - len(lines[1].lstrip()) if len(lines) > 1 else 2
    converted = {**content, "format": RESULT_FORMAT, "recipe": recipe}
    write_atomically(file, sealed_json(converted, sort_keys=False, indent=indent))
    return True


def has_old_keys(recipe: Values) -> bool:
    return "sick" in recipe or "compile" in recipe.get("runtime", {}) or "predictions" in recipe.get("processes", {})


def convert_recipe(recipe: Values, environment: Values) -> Values:
    """The recipe with today's keys, checked; keys are where their predecessors were, or sorted if all were."""
    if recipe.get("processes", {}).get("predictions", "fresh") != "fresh":
        raise ValueError("processes.predictions=one_step_old was removed; train again without it")
    converted: Values = {}
    for key, value in recipe.items():
        if key == "sick":
            converted["on_nonfinite"] = value
        elif key == "runtime":
            converted[key] = convert_runtime(value, environment)
        elif key == "processes":
            converted[key] = {name: setting for name, setting in value.items() if name != "predictions"}
        else:
            converted[key] = value
    Recipe.check(converted)
    return dict(sorted(converted.items())) if list(recipe) == sorted(recipe) else converted


def convert_runtime(runtime: Values, environment: Values) -> Values:
    if "compile" not in runtime:
        return runtime
    accelerators = environment.get("accelerators") or []
    on_cuda = runtime.get("device", "auto") == "cuda" or (
        runtime.get("device", "auto") == "auto" and accelerators not in ([], ["Apple MPS"])
    )
    kernels = ("triton" if on_cuda else "inductor") if runtime["compile"] else "torch"
    has_winograd = kernels == "triton" and is_after_winograd(environment.get("commit"))
    new = {"kernels": kernels, "winograd": "on" if has_winograd else "off"}
    converted: Values = {}
    for key, value in runtime.items():
        converted |= new if key == "compile" else {key: value}
    return dict(sorted(converted.items())) if list(runtime) == sorted(runtime) else converted


def is_after_winograd(commit: str | None) -> bool:
    """Whether a commit of this repository has the Winograd kernels; False if git does not know it."""
    command = ["git", "merge-base", "--is-ancestor", WINOGRAD, str(commit)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
