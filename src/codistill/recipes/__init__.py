"""Recipes: complete, typed, frozen descriptions of one training each. Imports no torch."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from codistill.recipes.catalogue import NAMES, ListedRecipe, describe
from codistill.recipes.changes import difference
from codistill.recipes.errors import Problem, RecipeError
from codistill.recipes.parse import SUFFIXES, apply, draft_of, dumps, load, loads
from codistill.recipes.schema import Recipe

__all__ = [
    "NAMES", "ListedRecipe", "Problem", "Recipe", "RecipeError", "apply", "describe", "difference", "dumps",
    "get", "json_schema", "load", "loads", "resolve",
]  # fmt: skip


def get(name: str, changes: Sequence[str] = ()) -> Recipe:
    """The catalogue's recipe of that name with ``key=value`` changes: ``get("quickstart", ["method=dml"])``."""
    return apply(draft_of(name), changes)


def resolve(source: str, changes: Sequence[str] = ()) -> Recipe:
    """The recipe of ``codistill train SOURCE [key=value …]``: a file by its suffix, otherwise a catalogue name."""
    return load(source, changes) if PurePath(source).suffix in SUFFIXES else get(source, changes)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a whole recipe, for editors; a file with a ``base`` has only some of its keys."""
    return Recipe.model_json_schema()
