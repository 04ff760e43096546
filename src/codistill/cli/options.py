"""Arguments and options that several commands share, with shell completion."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def complete(listing: str) -> Callable[[str], list[str]]:
    """Return a completion function for the names of a listing."""

    def names(incomplete: str) -> list[str]:
        from codistill.cli.explore import LISTINGS

        return [name for name in LISTINGS[listing]() if name.startswith(incomplete)]

    return names


Source = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|FILE",
        help="A recipe listed by `codistill list recipes`, or a .yaml or .json file.",
        autocompletion=complete("recipes"),
    ),
]


def key_values(what: str) -> Any:
    """Declare an argument that takes any number of KEY=VALUE."""
    return typer.Argument(metavar="KEY=VALUE", show_default=False, help=what, default_factory=list)


Changes = Annotated[list[str], key_values("Overrides, such as length.epochs=1.")]
Split = Annotated[
    str | None,
    typer.Option(metavar="A+C,B", help="Networks of each process; default: balanced by FLOPs."),
]
Shards = Annotated[
    int | None,
    typer.Option(metavar="N", help="Processes that share each batch of a network; default: chosen by FLOPs."),
]
Timeout = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="How long a process waits for the others before the run ends.")
]
Best = Annotated[
    bool, typer.Option("--best", help="Use the epoch with the lowest validation error (needs checkpoints.best=true).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN|STUDY", help="Folders of runs or studies, or published results, such as runs/demo."),
]
