"""``codistill list``: everything that has a name, without importing torch."""

from collections.abc import Callable
from inspect import getdoc

from codistill import recipes
from codistill.cli.output import console, two_columns
from codistill.errors import unknown
from codistill.networks import names
from codistill.transfer import methods

DATA = {
    "fashion": "ships with codistill: 10 kinds of clothes, 28×28 grey, 6,000 training and 2,000 test images",
    "cifar10": "10 kinds of things, 32×32 colour, 50,000 training and 10,000 test images",
    "cifar100": "100 kinds of things, 32×32 colour, 50,000 training and 10,000 test images",
    "folder": "your own images: DIR/train/CLASS/*.png or *.jpg, and the same under DIR/test",
}


def listed_recipes() -> dict[str, str]:
    return {entry.name: entry.summary for entry in recipes.describe()}


def listed_methods() -> dict[str, str]:
    return {name: _method(name) for name in methods.NAMES}


def _method(name: str) -> str:
    first_line = (getdoc(methods.get(name)) or "").partition("\n")[0]
    weights = [key for key, default in methods.settings(name).items() if default is not None]
    return f"{first_line} Weights: {', '.join(weights)}." if weights else first_line


def listed_studies() -> dict[str, str]:
    from codistill.studies import catalogue

    return {name: catalogue.get(name).title for name in catalogue.NAMES}


LISTINGS: dict[str, Callable[[], dict[str, str]]] = {
    "recipes": listed_recipes,
    "methods": listed_methods,
    "networks": names.families,
    "data": lambda: DATA,
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
