"""What to do with runs: ``codistill evaluate``, ``export``, ``predict``, ``report``, ``compare`` and ``watch``."""

import time
import webbrowser
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from codistill.cli.completion import complete
from codistill.cli.terminal import AsJson, ConsoleHandler, console, make_table, network_table, two_columns
from codistill.cli.train import memory_explained
from codistill.errors import ExitCode, RunError, number, unknown
from codistill.log import logging_to
from codistill.runs.files import to_json, write_atomically
from codistill.runs.folder import RunFolder

if TYPE_CHECKING:
    from codistill.engine.evaluate import ClassErrors
    from codistill.report.overview import Overview
    from codistill.report.read import SeenRun
    from codistill.studies.analysis import StudyTables

Best = Annotated[
    bool, typer.Option("--best", help="Use the epoch with the lowest validation error (needs checkpoints.best=true).")
]
Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN|STUDY", help="Folders of runs or studies, or published results, such as runs/demo."),
]

EXPORTED = ("safetensors", "pt2", "onnx", "timm")
"""The formats of export.export, which imports torch."""
FORMATS = (".html", ".csv", ".md", ".tex", ".json")
WATCH_EVERY_S = 2.0
MOST_CLASSES = 12
"""Rows of a table of classes; ``--json`` has all."""
ON_CPU = "free it from other programs, or set CUDA_VISIBLE_DEVICES= to evaluate on the CPU"


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    best: Best = False,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Evaluate on these images instead: FOLDER/CLASS/*.jpg, or a test/ in it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a finished run again, or on other images."""
    from codistill.engine.evaluate import evaluate_finished

    with memory_explained(ON_CPU), logging_to(ConsoleHandler(console(quiet=True))):
        evaluation = evaluate_finished(RunFolder(run), best=best, data=data)
    for skipped in evaluation.left_out.get("skipped", ()):
        typer.echo(f"warning: {skipped['file']} cannot be read and is skipped: {skipped['why']}", err=True)
    measured = {name: metrics.to_dict() for name, metrics in evaluation.metrics.items()}
    recipe, epoch, differences = evaluation.recipe, evaluation.epoch, evaluation.differences
    if as_json:
        alike = [asdict(pair) for pair in evaluation.agreement]
        content = {"run": str(run), "epoch": epoch, "networks": measured, "agreement": alike}
        content["classes"] = asdict(evaluation.classes) | {"balanced": evaluation.classes.balanced}
        content |= {"data": str(data)} if data else {"equals_result": not differences}
        typer.echo(to_json(content, indent=2))
    else:
        console().print(network_table(recipe.networks, measured))
        if pairs := evaluation.agreement:
            rows = ((" & ".join(one.networks), number(one.same, 2), number(one.both_wrong, 2)) for one in pairs)
            console().print(make_table(["networks"], ("same answer %", "both wrong %"), rows))
        print_classes(evaluation.classes)
    if differences:
        raise ValueError(f"{run}: the weights do not give the metrics in result.json:\n  " + "\n  ".join(differences))
    if evaluation.damage:
        raise RunFolder(run).damage_error(evaluation.damage)
    if best and not as_json:
        console().print(f"Epoch {epoch} of {recipe.length.epochs}, the best by validation error.")
    if not as_json:
        images = sum(evaluation.classes.images)
        console().print(f"On {images:,} images of {data}." if data else "Equal to result.json.", soft_wrap=True)


def print_classes(classes: "ClassErrors") -> None:
    """Print the errors by class, the largest first, and the balanced errors if classes differ in size."""
    mean = {place: sum(errors[place] or 0 for errors in classes.errors.values()) for place in range(len(classes.names))}
    order = sorted((place for place in mean if classes.images[place]), key=lambda place: -mean[place])
    rows = [
        (classes.names[place], f"{classes.images[place]:,}", *(number(e[place], 2) for e in classes.errors.values()))
        for place in order[:MOST_CLASSES]
    ]
    title = f"The {MOST_CLASSES} of {len(order)} classes with the largest errors" if len(order) > MOST_CLASSES else ""
    console().print(make_table(["class"], ("images", *(f"{name} error %" for name in classes.errors)), rows, title))
    if not classes.are_equal:
        balanced = ", ".join(f"{name} {value:.2f} %" for name, value in classes.balanced.items())
        console().print(f"Balanced error, every class counting alike: {balanced}", soft_wrap=True)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished or interrupted run.")],
    network: Annotated[str, typer.Option(metavar="NAME", help="Name of the network in the recipe, such as a.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder: new, empty or an earlier export.")],
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="One of safetensors, pt2, onnx and timm.",
            autocompletion=complete(EXPORTED),
        ),
    ] = "safetensors",
    best: Best = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that contains other files; they are kept.")
    ] = False,
) -> None:
    """Export one network of a run, without its heads."""
    from codistill.export import bundle
    from codistill.export.export import export_network

    with logging_to(ConsoleHandler(console(quiet=True))):
        exported = export_network(run, network, file_format, out, best=best, force=force)
    shipped, proof = exported.shipped, exported.proof
    epochs, done = shipped.history.recipe.length.epochs, shipped.done
    steps = f" and {done.step} steps" if done.step else ""
    taken = f"{done.epoch} of {epochs} epochs{steps} done"
    if best:
        taken = f"epoch {done.epoch} of {epochs}, the best by validation error"
    state = "finished" if shipped.history.finished else "interrupted"
    images = (
        f"{proof.images} test images"
        if proof.real_images
        else f"{proof.images} images of noise (the data are not available)"
    )
    heads = " with its trained heads" if proof.heads_kept else " with new heads (no checkpoint left)"
    close = f"to within {proof.largest_difference:.1e} of the largest" if proof.largest_difference else "bit for bit"
    plain, its = proof.latency_ms["plain"], proof.latency_ms["exported"]
    rows = {
        "run": f"{run}, {state}: {taken}",
        "network": f"{network}, {shipped.identity.network}" + (", moving average" if shipped.history.averaged else ""),
        "logits": f"bit for bit as in the cohort{heads if shipped.heads else ''}, on {images}",
        "graph": f"identical to the plain backbone, node for node ({proof.nodes} nodes)",
        "file": f"gives the same logits, {close}",
        "latency": f"plain {plain:.2f} ms, exported {its:.2f} ms, ratio {its / plain:.2f} (one image, this CPU)",
        "written": f"{exported.model}, {bundle.LABELS}, {bundle.PREPROCESSING}, {exported.card}",
    }
    console().print(two_columns(rows))


def predict(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder or model file of a safetensors or onnx export.")
    ],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES", help="Image files, or folders of them.")],
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of classes to show.")] = 5,
    as_json: AsJson = False,
) -> int:
    """Classify images with an exported network."""
    from codistill.export.predict import Unreadable, predict

    predicted: list[dict[str, object]] = []
    unreadable: list[dict[str, str]] = []
    for outcome in predict(model, images, top):
        if isinstance(outcome, Unreadable):
            unreadable.append({"file": str(outcome.file), "why": outcome.why})
            typer.echo(f"warning: {outcome.file} cannot be read and is skipped: {outcome.why}", err=True)
            continue
        predicted.append({"file": str(outcome.file), "top": [{"class": a, "probability": b} for a, b in outcome.top]})
        if not as_json:
            typer.echo(f"{outcome.file}  " + "  ".join(f"{name} {100 * value:.1f} %" for name, value in outcome.top))
    if as_json:
        typer.echo(to_json({"images": predicted, "unreadable": unreadable}, indent=2))
    if not predicted:
        raise ValueError("none of the images can be read")
    return ExitCode.FAILED if unreadable else ExitCode.DONE


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Output file.")] = Path("report.html"),
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Time limit for classifying test images.")
    ] = 20,
) -> None:
    """Write an HTML report: results, curves, mistakes and costs."""
    from codistill.report.overview import read_overview
    from codistill.report.page import report_page

    seen = read_overview(*runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    page = report_page(seen, patience_s=patience)
    page.write(out)
    for text in seen.left_out:
        typer.echo(f"warning: {text}", err=True)
    count = "1 run" if len(seen.runs) == 1 else f"{len(seen.runs)} runs"
    size_mb = out.stat().st_size / 1e6
    typer.echo(f"wrote {out}: {count}, {len(page.charts)} charts, {size_mb:.1f} MB; open it in a browser")


def prune(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN|STUDY", help="Folders of runs, or folders of them.")],
) -> int:
    """Delete the checkpoints of finished runs."""
    from codistill.report.read import expand

    code = ExitCode.DONE
    for folder in dict.fromkeys(folder for path in runs for folder in expand(path)):
        try:
            freed = RunFolder(folder).prune()
        except RunError as error:
            code = ExitCode.FAILED
            typer.echo(f"warning: kept: {error}", err=True)
        else:
            typer.echo(f"{folder}: {freed / 1e6:,.1f} MB freed")
    return code


def compare(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Also write the comparison: .html, .csv, .md, .tex or .json."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs or studies, with n, ± and differences."""
    from codistill.cli.study import print_table
    from codistill.report.overview import read_overview
    from codistill.report.sections import headline

    if out is not None and out.suffix not in FORMATS:
        raise unknown("format of a comparison", out.suffix or str(out), FORMATS)
    seen = read_overview(*runs)
    made = seen.tables()
    if as_json:
        typer.echo(to_json(made.to_json(), indent=2))
    else:
        for table in (made.errors, made.differences):
            if table.rows:
                print_table(table, console())
        console().print(f"\n{headline(seen)}", soft_wrap=True)
    for text in seen.left_out:
        typer.echo(f"warning: {text}", err=True)
    for run in seen.runs:
        if not run.finished:
            typer.echo(f"warning: {run.name} is not finished and is left out", err=True)
        for note in run.damage if run.finished else run.notes:
            typer.echo(f"warning: {run.name}: {note}", err=True)
    if out is not None:
        for file, content in _contents(seen, made, out).items():
            write_atomically(file, content)
            typer.echo(f"wrote {file}", err=True)


def _contents(seen: "Overview", made: "StudyTables", out: Path) -> dict[Path, str]:
    """Return the files of a comparison in the format of the suffix of ``out``."""
    match out.suffix:
        case ".html":
            from codistill.report import page

            return {out: page.report_page(seen).html()}
        case ".csv":
            return {out: made.errors.to_csv(), out.with_suffix(".differences.csv"): made.differences.to_csv()}
        case ".md":
            return {out: made.to_markdown()}
        case ".tex":
            return {out: made.to_latex()}
        case _:
            return {out: to_json(made.to_json(), indent=2) + "\n"}


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
    from codistill.report.overview import read_overview
    from codistill.report.server import RunWatcher, serve

    if as_json:
        typer.echo(to_json(progress_to_dict(read_overview(*runs)), indent=2))
        return
    if terminal:
        screen = console()
        follow(lambda: read_overview(*runs), screen, once=not screen.is_terminal)
        return
    news = RunWatcher(runs)
    news.page()  # reports wrong paths now, not in the browser

    def ready(address: str) -> None:
        typer.echo(f"{address}  (this machine only; Ctrl-C stops the server, not the training)")
        if browser:
            webbrowser.open(address)

    typer.echo(f"Watching took {serve(news, port, ready):.2f} CPU seconds.")


def follow(look: Callable[[], "Overview"], console: Console, *, once: bool, every_s: float = WATCH_EVERY_S) -> None:
    """Show the runs until all are finished or Ctrl-C; ``once`` shows them and returns."""
    seen = look()
    if once or all(run.finished for run in seen.runs):
        console.print(progress_table(seen))
        return
    with Live(progress_table(seen), console=console, auto_refresh=False) as shown:
        try:
            while not all(run.finished for run in seen.runs):
                time.sleep(every_s)
                seen = look()
                shown.update(progress_table(seen), refresh=True)
        except KeyboardInterrupt:
            pass


def progress_table(seen: "Overview") -> Table:
    """Return the page's table of runs: their progress, and the errors at their latest evaluation."""
    from codistill.report.sections import run_table

    shown = run_table(seen).to_rich()
    shown.title, shown.title_justify = Text(seen.study.title if len(seen.runs) > 1 else seen.runs[0].name), "left"
    return shown


def remaining_s(run: "SeenRun") -> float | None:
    if run.finished:
        return 0.0
    if not (run.epochs_done and run.elapsed_s):
        return None
    return run.elapsed_s / run.epochs_done * (run.recipe.length.epochs - run.epochs_done)


def progress_to_dict(seen: "Overview") -> dict[str, Any]:
    """Return the progress of the runs for ``--json``."""
    return {
        "study": seen.study.name if seen.known else None,
        "runs": [
            {
                "run": str(run.path),
                "row": entry.name,
                "seed": seed,
                "finished": run.finished,
                "epoch": run.epochs_done,
                "epochs": run.recipe.length.epochs,
                "elapsed_s": run.elapsed_s,
                "remaining_s": remaining_s(run),
                "networks": _latest(run, "test"),
                "validation": _latest(run, "validation"),
                "notes": list(run.notes),
            }
            for entry in seen.entries
            for seed, run in entry.runs.items()
        ],
        "left_out": list(seen.left_out),
    }


def _latest(run: "SeenRun", split: str) -> dict[str, Any]:
    """Return the metrics of every network at the latest evaluation; empty if the run does not have the split."""
    measured = (getattr(run.records[-1], split) if run.records else None) or {}
    finals = {name: measured.get(f"{name}/final") for name in run.recipe.networks}
    return {name: metrics.model_dump(exclude_unset=True) for name, metrics in finals.items() if metrics}
