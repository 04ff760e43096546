"""Recipes as YAML or JSON files: a whole recipe, or a ``base`` in the catalogue and what differs from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from codistill.recipes import catalogue, overrides, text
from codistill.recipes.draft import Draft
from codistill.recipes.errors import Problem, RecipeError, brief
from codistill.recipes.schema import Recipe

SUFFIXES = (".yaml", ".yml", ".json")


def load(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, with ``key=value`` changes applied before it is checked."""
    return overrides.apply(read(path), changes)


def loads(written: str, source: str = "recipe") -> Recipe:
    """The recipe that a text writes down; ``source`` is what errors call the text."""
    return parse(written, source).recipe()


def dumps(recipe: Recipe, form: Literal["yaml", "json"] = "yaml") -> str:
    """The whole recipe, defaults too, as a text that ``loads`` takes back."""
    values = recipe.model_dump(mode="json")
    return text.to_json(values) if form == "json" else text.to_yaml(values)


def read(path: str | Path) -> Draft:
    path = Path(path)
    source = str(path)
    try:
        if not path.is_file():
            found = "not a regular file" if path.exists() else "no such file"
            raise FileNotFoundError(2, "is a folder" if path.is_dir() else found)
        with path.open("rb") as file:
            content = file.read(text.MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError([Problem("", f"cannot be read: {error.strerror}")], source) from None
    if len(content) > text.MAX_BYTES:
        raise RecipeError([Problem("", f"more than {text.MAX_BYTES // 1024} KiB, which no recipe needs")], source)
    try:
        written = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError([Problem("", f"not UTF-8 text (byte {error.start + 1})")], source) from None
    # A JSON file may be indented with tabs, which YAML refuses; inside its strings they cannot be.
    return parse(written.replace("\t", " ") if path.suffix == ".json" else written, source)


def parse(written: str, source: str) -> Draft:
    parsed = text.parse(written, source)
    if not isinstance(parsed.value, dict):
        found = "nothing" if parsed.value is None else brief(parsed.value)
        raise RecipeError([Problem("", f"a recipe is written as key: value lines, and this has {found}")], source)
    values = dict(parsed.value)
    places = {path: f"line {line}" for path, line in parsed.lines.items()}
    if "base" not in values:
        return Draft(values, places, source)
    base = values.pop("base")
    try:
        draft = catalogue.draft(str(base))
    except RecipeError as error:
        raise RecipeError([Problem("base", error.problems[0].message, places["base",])], source) from None
    changed = draft.changed({(key,): value for key, value in values.items()}, places)
    return Draft(changed.values, changed.places, source)
