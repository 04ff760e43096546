"""Which runs a path stands for: a run, a study's folder, a folder of either, or published results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from codistill.report.runs import SeenRun, read_published, read_run
from codistill.runs.folder import RunFolder
from codistill.studies.study import METHOD_LABELS

ACCEPTED = "a run's folder, a study's folder, a result.json, or a folder of such files"


@dataclass
class Found:
    """The runs that could be read, and a word about each that could not."""

    runs: list[SeenRun] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def find(paths: Sequence[Path]) -> Found:
    """All runs below these paths, each once. One that cannot be read does not keep the others from being shown.

    Paths are in the order in which they were named, and the runs below one in that of their methods, whatever they are
    called: what is compared comes after what it is compared with.
    """
    if not paths:
        raise ValueError(f"no run is named; give {ACCEPTED}, as in runs/demo")
    found, known = Found(), set[Path]()
    for path in paths:
        places = [place for place in expand(path) if place not in known]
        known.update(places)
        found.runs += sorted(_read(places, found.left_out), key=_place_of_method)
    if not found.runs:
        raise ValueError("none of the runs can be read:\n  " + "\n  ".join(found.left_out))
    return found


def _read(places: Sequence[Path], left_out: list[str]) -> Iterator[SeenRun]:
    for place in places:
        try:
            yield read_run(place) if place.is_dir() else read_published(place)
        except (ValueError, OSError) as error:
            left_out.append(f"{place.name} is left out: {error}")


def _place_of_method(run: SeenRun) -> int:
    methods = list(METHOD_LABELS)
    return methods.index(run.recipe.method) if run.recipe.method in methods else len(methods)


def expand(path: Path) -> list[Path]:
    """The run folders and result files that ``path`` stands for."""
    if path.is_file():
        return [_run_or_result(path)]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder; give {ACCEPTED}")
    if _is_run(path):
        return [path]
    for folder in (path / "runs", path):
        if folder.is_dir() and (inside := [run for run in sorted(folder.iterdir()) if _is_run(run)]):
            return inside
    if results := sorted(path.glob("*.json")):
        return results
    raise ValueError(f"{path} holds no run; give {ACCEPTED}")


def _is_run(folder: Path) -> bool:
    """Whether it has a recipe; a link in its place counts too, so that the run is named and not passed over."""
    recipe = RunFolder(folder).recipe
    return recipe.exists() or recipe.is_symlink()


def _run_or_result(file: Path) -> Path:
    """A result.json beside its recipe stands for the whole run, which has more to show."""
    folder = RunFolder(file.parent)
    if file.suffix != ".json":
        raise ValueError(f"{file} is no run; give {ACCEPTED}")
    return file.parent if file.name == folder.result.name and folder.recipe.exists() else file
