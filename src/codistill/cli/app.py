"""The commands and their options. The modules beside this one do the work and are imported when a command runs."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from codistill.errors import ExitCode


class Commands(TyperGroup):
    """Turns an exception into one message and an exit code. CODISTILL_DEBUG=1 shows the traceback instead."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, typer.Exit, typer.Abort):
            raise  # the reader closed the pipe, as in `codistill list | head -1`, or the message is already printed
        except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
            from codistill.cli.terminal import describe_error, shows_tracebacks

            if shows_tracebacks():
                raise
            typer.echo(f"error: {describe_error(error)}", err=True)
            raise typer.Exit(ExitCode.WRONG_INPUT) from None


class Command(TyperCommand):
    """Shows arguments in help by their metavar alone; typer adds Python types such as ``<list[str]>``."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                name, text = record
                records[parameter.param_type_name].append((re.sub(r" <[^<>]+>$", "", name), text))
        for kind, rows in records.items():
            if rows:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(rows)


app = typer.Typer(
    cls=Commands,
    help="Train networks that teach each other, and export each one as a plain network.",
    epilog="Exit codes: 0 success, 1 a run of a study failed or an image could not be read, 2 invalid input, "
    "75 stopped and saved (run the same command to continue), 130 interrupted.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

command = partial(app.command, cls=Command)


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


Changes = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY=VALUE", show_default=False, help="Overrides, such as length.epochs=1.", default_factory=list
    ),
]
Best = Annotated[
    bool, typer.Option("--best", help="Use the epoch with the lowest validation error (needs checkpoints.best=true).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN|STUDY", help="Folders of runs or studies, or published results, such as runs/demo."),
]


@app.callback(invoke_without_command=True)
def codistill(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from codistill import __version__

        typer.echo(f"codistill {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@command()
def train(
    source: Source,
    changes: Changes,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the run; default: runs/RECIPE-METHOD-seedSEED.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result, no progress.")] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also log to tensorboard, mlflow or wandb; can be repeated."),
    ] = None,
    nproc: Annotated[int | None, typer.Option(metavar="N", help="Train in N processes on this machine.")] = None,
    split: Annotated[
        str | None, typer.Option(metavar="A+C,B", help="Networks of each process; default: balanced by FLOPs.")
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes that share each batch of a network; default: chosen by FLOPs."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="How long a process waits for the others before the run ends."),
    ] = 600.0,
    restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="With --nproc: maximum number of restarts after a process is killed."),
    ] = 3,
) -> None:
    """Train a recipe, or continue a stopped run.

    Ctrl-C (or SIGTERM or SIGUSR1) saves and stops. The same command continues exactly where the run stopped.
    """
    from codistill.cli.train import LaunchOptions, train
    from codistill.distributed.layout import LayoutRequest

    options = LaunchOptions(nproc, LayoutRequest(split, shards), timeout, restarts)
    raise typer.Exit(train(source, changes, out, options, quiet=quiet, trackers=track or []))


@command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    best: Best = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate the weight files of a finished run again."""
    from codistill.cli.results import evaluate

    evaluate(run, best=best, as_json=as_json)


@command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished or interrupted run.")],
    network: Annotated[str, typer.Option(metavar="NAME", help="Name of the network in the recipe, such as a.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder: new, empty or an earlier export.")],
    file_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="One of safetensors, pt2 and onnx.")
    ] = "safetensors",
    best: Best = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that contains other files; they are kept.")
    ] = False,
) -> None:
    """Export one network of a run, without its heads."""
    from codistill.cli.results import export

    export(run, network, file_format, out, best=best, force=force)


@command()
def predict(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder or model file of a safetensors or onnx export.")
    ],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES", help="PNG or JPEG files, or folders of them.")],
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of classes to show.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Classify images with an exported network."""
    from codistill.cli.results import predict

    raise typer.Exit(predict(model, images, top=top, as_json=as_json))


@command("list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[WHAT]", help="One of recipes, methods, networks, data and studies; default: all."),
    ] = None,
) -> None:
    """List recipes, methods, networks, data sets and studies."""
    from codistill.cli.explore import show_listings

    show_listings(what)


@command()
def show(
    source: Source,
    changes: Changes,
    as_json: AsJson = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only write the transfer graph to this file.")
    ] = None,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Only print the transfer graph as a Mermaid diagram.")
    ] = False,
) -> None:
    """Show a complete recipe, its cost and its transfer graph."""
    from codistill import recipes
    from codistill.cli import explore

    recipe = recipes.resolve(source, changes)
    if svg:
        svg.write_text(f"{recipe.graph.to_svg()}\n", encoding="utf-8")
        typer.echo(f"wrote {svg}")
    elif mermaid:
        typer.echo(recipe.graph.to_mermaid())
    else:
        explore.show(recipe, as_json=as_json)


@command()
def data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A data set listed by `codistill list data`.", autocompletion=complete("data")
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the data; default: $CODISTILL_DATA, or the user's cache."),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download it from its authors if it is missing.")
    ] = False,
    image_size: Annotated[int, typer.Option(min=1, metavar="N", help="For `folder`: side to resize images to.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Check a data set: location and contents."""
    from codistill.cli.explore import describe

    describe(name, folder, download=download, image_size=image_size, as_json=as_json)


@command()
def bench(
    source: Source,
    changes: Changes,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Number of steps to measure.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a recipe trains on this machine."""
    from codistill.cli.explore import bench

    bench(source, changes, steps=steps, as_json=as_json)


@command()
def doctor(as_json: AsJson = False) -> None:
    """Check whether this machine is ready to train."""
    from codistill.cli.doctor import report

    raise typer.Exit(report(as_json=as_json))


@command()
def study(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A study listed by `codistill list studies`.", autocompletion=complete("studies")
        ),
    ],
    changes: Changes,
    seeds: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of seeds, from the study's first; default: as in the study."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Output folder; default: runs/NAME.")] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Number of runs at a time; default: one per core, one on a GPU.")
    ] = None,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="Only rows with these methods.")] = None,
    rows: Annotated[str | None, typer.Option(metavar="A,B", help="Only these rows or groups of rows.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only print what would be trained.")] = False,
    best_epoch: Annotated[
        bool, typer.Option("--best-epoch", help="Also show the best epoch of every run, in separate columns.")
    ] = False,
    publish: Annotated[Path | None, typer.Option(metavar="DIR", help="Copy the results of finished runs here.")] = None,
) -> None:
    """Train all runs of a study and print its table, with n and ±."""
    from codistill.cli.study import run_study
    from codistill.cli.terminal import console

    code = run_study(
        name,
        seeds=seeds,
        overrides=changes,
        out=out or Path("runs") / name,
        jobs=jobs,
        console=console(),
        methods=None if methods is None else methods.split(","),
        rows=None if rows is None else rows.split(","),
        plan=plan,
        best_epoch=best_epoch,
        publish_to=publish,
    )
    raise typer.Exit(code)


@command()
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Output file.")] = Path("report.html"),
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Time limit for classifying test images.")
    ] = 20,
) -> None:
    """Write an HTML report: results, curves, mistakes and costs."""
    from codistill.cli.results import report

    report(runs, out, patience_s=patience)


@command()
def watch(
    runs: Runs,
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port to serve on; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser.")] = False,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show a table in the terminal instead, for example over ssh.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the progress of the runs once, as JSON.")] = False,
) -> None:
    """Follow runs during training, in a browser or in the terminal."""
    from codistill.cli.results import watch

    watch(runs, port, browser=browser, terminal=terminal, as_json=as_json)


@command()
def compare(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Also write the comparison: .html, .csv, .md, .tex or .json."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs or studies, with n, ± and differences."""
    from codistill.cli.results import compare

    compare(runs, out, as_json=as_json)
