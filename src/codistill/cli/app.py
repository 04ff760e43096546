"""The commands and what they take. What they do is in the modules beside this one, imported when a command runs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from codistill.cli.options import AsJson, Best, Changes, Runs, Shards, Source, Split, Timeout, complete, key_values

WRONG_INPUT = 2


class Commands(TyperGroup):
    """Turns what went wrong into one message and an exit code. Set CODISTILL_DEBUG=1 to see where it came from."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, typer.Exit, typer.Abort):
            raise  # whoever read our output has seen enough, as in `codistill list | head -1`; or it has been said
        except (ValueError, OSError, RuntimeError) as error:
            from codistill.cli.output import in_words, shows_tracebacks

            if shows_tracebacks():
                raise
            typer.echo(f"error: {in_words(error)}", err=True)
            raise typer.Exit(WRONG_INPUT) from None


app = typer.Typer(
    cls=Commands,
    help="Train networks that teach each other; ship plain networks, with nothing added.",
    epilog="Exit codes: 0 done, 1 a run of a study failed or an image cannot be read, 2 wrong input, "
    "75 stopped and saved (the same command continues), 130 interrupted.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def codistill(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from codistill import __version__

        typer.echo(f"codistill {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command()
def train(
    source: Source,
    changes: Changes,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's folder; runs/RECIPE-METHOD-seedSEED if not given.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress, only how it ended.")] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also tell tensorboard, mlflow or wandb; may be given more than once."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Spread the training over N processes on this machine.")
    ] = None,
    split: Split = None,
    shards: Shards = None,
    timeout: Timeout = 600.0,
    restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="With --nproc: so often all start again when a process is killed.")
    ] = 3,
) -> None:
    """Train a recipe, or continue it where it stopped.

    Ctrl-C saves and stops (so do SIGTERM and SIGUSR1); the same command continues, exactly as if it had never stopped.
    """
    from codistill.cli.together import Spread, train
    from codistill.distributed.layout import Wish

    spread = Spread(nproc, Wish(split, shards), timeout, restarts)
    raise typer.Exit(train(source, changes, out, spread, quiet=quiet, trackers=track or []))


@app.command()
def slurm(
    source: Source,
    changes: Changes,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder, which all nodes see.")] = None,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="How many.")] = 1,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Processes on each node.")] = 1,
    time: Annotated[str, typer.Option(metavar="[D-]HH:MM:SS", help="How long a job may take.")] = "24:00:00",
    split: Split = None,
    shards: Shards = None,
    timeout: Timeout = 600.0,
) -> None:
    """Print an sbatch file that trains a recipe until it is done.

    A job saves when its time is nearly up, and queues itself again.
    """
    from codistill.cli.slurm import slurm
    from codistill.distributed.layout import Wish

    slurm(source, changes, out, nodes=nodes, nproc=nproc, time=time, wish=Wish(split, shards), timeout_s=timeout)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    best: Best = False,
    as_json: AsJson = False,
) -> None:
    """Measure a finished run's weight files again."""
    from codistill.cli.evaluate import evaluate

    evaluate(run, best=best, as_json=as_json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, finished or interrupted.")],
    network: Annotated[str, typer.Option(metavar="NAME", help="The network's name in the recipe, such as a.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where it goes: a new or empty folder, or an old export.")],
    file_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="safetensors, pt2 or onnx.")
    ] = "safetensors",
    best: Best = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also into a folder that holds other files; those stay.")
    ] = False,
) -> None:
    """Write a network, without its heads, for other programs."""
    from codistill.cli.export import export

    export(run, network, file_format, out, best=best, force=force)


@app.command()
def predict(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A safetensors or onnx export: its folder, or its model file.")
    ],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES", help="PNG and JPEG files, or folders of them.")],
    top: Annotated[int, typer.Option(min=1, metavar="N", help="How many classes to show.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Say what an exported network takes images for."""
    from codistill.cli.predict import predict

    raise typer.Exit(predict(model, images, top=top, as_json=as_json))


@app.command("list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[WHAT]", help="recipes, methods, networks, data or studies; all if not given."),
    ] = None,
) -> None:
    """List what there is to train with."""
    from codistill.cli.listing import show_listings

    show_listings(what)


@app.command()
def show(
    source: Source,
    changes: Changes,
    as_json: AsJson = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only draw the transfer graph into this file.")
    ] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Only print the transfer graph for Mermaid.")] = False,
) -> None:
    """Show a recipe in full, its costs, and who teaches whom."""
    from codistill.cli import show

    if svg:
        show.draw(source, changes, svg)
    elif mermaid:
        show.print_mermaid(source, changes)
    else:
        show.show(source, changes, as_json=as_json)


@app.command()
def data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A name that `codistill list data` shows.", autocompletion=complete("data")
        ),
    ],
    changes: Annotated[list[str], key_values("With --bench: changes to the recipe, as in batch_size=64.")],
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where it lies; $CODISTILL_DATA or the user's cache if not given."),
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch it from its authors if it is not there.")] = False,
    image_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="For `folder`: the side that images are resized to; 32, or the --bench recipe's."
        ),
    ] = None,
    bench: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="For `folder`: measure whether it is read as fast as this trains."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, metavar="N", help="With --bench: how long to measure.")] = 5,
    images_per_s: Annotated[
        float | None, typer.Option(min=1, metavar="N", help="With --bench: what the training takes, if you know it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a data set is there, what is in it, and how fast."""
    from codistill.cli import data

    if bench is None and changes:
        raise ValueError(f"{changes[0]} is a change to a recipe; type --bench RECIPE too, or leave it out")
    if bench is None:
        data.describe(name, folder, download=download, image_size=image_size or 32, as_json=as_json)
    elif name != "folder" or folder is None:
        raise ValueError("--bench is for a folder of images; type codistill data folder --folder DIR --bench RECIPE")
    else:
        size = [f"data.image_size={image_size}"] if image_size else []
        data.bench(folder, bench, [*size, *changes], seconds=seconds, images_per_s=images_per_s, as_json=as_json)


@app.command()
def bench(
    source: Source,
    changes: Changes,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="How many steps to measure.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a recipe trains here, and where the time goes."""
    from codistill.cli.bench import bench

    bench(source, changes, steps=steps, as_json=as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say whether this machine is ready, and what it lacks."""
    from codistill.cli.doctor import report

    raise typer.Exit(report(as_json=as_json))


@app.command()
def study(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A name that `codistill list studies` shows.", autocompletion=complete("studies")
        ),
    ],
    changes: Changes,
    seeds: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many, from the study's first on; its own number if not given."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where it goes; runs/NAME if not given.")] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Runs at a time; by default one per core, or one on a GPU.")
    ] = None,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="Only the rows of these methods.")] = None,
    rows: Annotated[str | None, typer.Option(metavar="A,B", help="Only these rows, or groups of rows.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what there is to train.")] = False,
    best_epoch: Annotated[bool, typer.Option("--best-epoch", help="Show every run's best epoch too, as such.")] = False,
    publish: Annotated[Path | None, typer.Option(metavar="DIR", help="Copy the finished runs' results here.")] = None,
) -> None:
    """Train many runs and print their table, with n and ±."""
    from codistill.cli.output import console
    from codistill.cli.study import run_study

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


@app.command()
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long the networks may be asked about test images.")
    ] = 20,
) -> None:
    """Write one page to look at: results, curves, mistakes, costs."""
    from codistill.cli.report import report

    report(runs, out, patience_s=patience)


@app.command()
def watch(
    runs: Runs,
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Of the page; any that is free if not given.")
    ] = 0,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser.")] = False,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show a table here instead, as over ssh.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print how far the runs are as JSON, once.")] = False,
) -> None:
    """Look at runs while they learn, in a browser or in the terminal."""
    from codistill.cli import watch

    if as_json:
        watch.print_state(runs)
    elif terminal:
        watch.watch_in_terminal(runs)
    else:
        watch.watch(runs, port, browser=browser)


@app.command()
def compare(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Also write it: .html, .csv, .md, .tex or .json.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs or studies: errors with n and ±, paired by seed."""
    from codistill.cli.compare import compare

    compare(runs, out, as_json=as_json)
