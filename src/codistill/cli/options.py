"""What several commands take, and how a shell completes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def complete(listing: str) -> Callable[[str], list[str]]:
    """For a shell's completion: the names of a listing that begin as typed."""

    def names(incomplete: str) -> list[str]:
        from codistill.cli.listing import LISTINGS

        return [name for name in LISTINGS[listing]() if name.startswith(incomplete)]

    return names


Source = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|FILE",
        help="A name that `codistill list recipes` shows, or a .yaml or .json file.",
        autocompletion=complete("recipes"),
    ),
]


def key_values(what: str) -> Any:
    """The argument for any number of KEY=VALUE."""
    return typer.Argument(metavar="KEY=VALUE", show_default=False, help=what, default_factory=list)


Changes = Annotated[list[str], key_values("Changes to it, as in length.epochs=1.")]
Split = Annotated[
    str | None,
    typer.Option(metavar="A+C,B", help="Which process trains which networks; shared by their cost if not given."),
]
Shards = Annotated[
    int | None,
    typer.Option(metavar="N", help="How many processes share each batch of a network; by the cost if not given."),
]
Timeout = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="How long processes wait for each other before they give up.")
]
Best = Annotated[
    bool, typer.Option("--best", help="The epoch with the lowest validation error, which checkpoints.best=true keeps.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN|STUDY…", help="Folders of runs or studies, or published results, as in runs/demo."),
]
