"""The recipes that ship: functions by name. Their docstrings have the source, the expected result and the command."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getdoc

from codistill.errors import did_you_mean
from codistill.recipes.catalogue import ablations, cifar, imagenet
from codistill.recipes.catalogue.quickstart import quickstart
from codistill.recipes.draft import Draft
from codistill.recipes.errors import Problem, RecipeError, brief
from codistill.recipes.schema import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {
    "quickstart": quickstart,
    **cifar.RECIPES,
    **imagenet.RECIPES,
    **ablations.RECIPES,
}
NAMES = tuple(RECIPES)


@dataclass(frozen=True)
class ListedRecipe:
    """A recipe as a listing shows it. What only the person who trains can name (a teacher's weights) reads ``FILE``."""

    name: str
    recipe: Recipe
    text: str

    @property
    def summary(self) -> str:
        """The text's first paragraph on one line: what it trains and the expected result."""
        return " ".join(self.text.partition("\n\n")[0].split())

    @property
    def commands(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if line.strip().startswith("codistill ")]


def describe() -> list[ListedRecipe]:
    """All entries, in the paper's order."""
    return [ListedRecipe(name, build().replace(name=name), getdoc(build) or "") for name, build in RECIPES.items()]


def draft(name: str) -> Draft:
    """An entry to make changes to, without what only the person who trains can name."""
    if name not in RECIPES:
        hint = did_you_mean(name, NAMES) or ";"
        message = f"unknown recipe {brief(name)}{hint} codistill list shows all {len(NAMES)}"
        raise RecipeError([Problem("", message)], "recipe")
    values = RECIPES[name]().model_dump(mode="json")
    start = {member: file for member, file in values["start"].items() if file != ablations.TO_BE_GIVEN}
    return Draft({**values, "name": name, "start": start}, source=name)


def table() -> str:
    """The catalogue as the Markdown table of docs/recipes.md."""
    rows = [f"| `{entry.name}` | {entry.recipe.length.epochs} | {entry.summary} |" for entry in describe()]
    return "\n".join(["| recipe | epochs | what it trains, and the expected test error |", "|---|---|---|", *rows])
