"""``codistill list``: everything that has a name, without importing torch."""

from collections.abc import Callable
from inspect import getdoc

from codistill import recipes
from codistill.cli.output import console, two_columns
from codistill.networks import names
from codistill.recipes.datasets import DATASETS
from codistill.transfer import methods
from codistill.wording import unknown


def listed_recipes() -> dict[str, str]:
    return {entry.name: entry.summary for entry in recipes.describe()}


def listed_methods() -> dict[str, str]:
    return {name: _method(name) for name in methods.NAMES}


def _method(name: str) -> str:
    first_line = (getdoc(methods.get(name)) or "").partition("\n")[0]
    weights = [key for key, default in methods.settings(name).items() if default is not None]
    return f"{first_line} Weights: {', '.join(weights)}." if weights else first_line


def listed_data() -> dict[str, str]:
    return {name: row.description for name, row in DATASETS.items()}


def listed_studies() -> dict[str, str]:
    from codistill.studies import catalogue

    return {name: catalogue.get(name).title for name in catalogue.NAMES}


LISTINGS: dict[str, Callable[[], dict[str, str]]] = {
    "recipes": listed_recipes,
    "methods": listed_methods,
    "networks": names.families,
    "data": listed_data,
    "studies": listed_studies,
}


def show_listings(what: str | None) -> None:
    """One listing, or all of them with a heading each."""
    if what is not None and what not in LISTINGS:
        raise unknown("listing", what, LISTINGS)
    screen = console()
    if what is not None:
        screen.print(two_columns(LISTINGS[what]()))
        return
    for name, listing in LISTINGS.items():
        screen.print(name, style="bold underline")
        screen.print(two_columns(listing()), "")
