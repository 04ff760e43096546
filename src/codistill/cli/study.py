"""``codistill study``: plans a study, trains the missing runs, writes the tables, and reports failures."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from codistill.cli.completion import complete, complete_in_study
from codistill.cli.terminal import Changes, console
from codistill.errors import ExitCode
from codistill.runs.files import write_atomically
from codistill.runs.folder import RunFolder
from codistill.runs.result import Result, read_result
from codistill.studies import catalogue
from codistill.studies.analysis import StudyTables, build_tables
from codistill.studies.conclusion import conclude
from codistill.studies.costs import epoch_flops
from codistill.studies.files import resolve
from codistill.studies.plan import (
    Pace,
    Plan,
    PlannedRun,
    choose_jobs,
    describe_work,
    plan_runs,
    plan_table,
    require_data,
)
from codistill.studies.published import publish_all, rebuild_tables
from codistill.studies.runner import Failure, Outcome, run_all, train_command
from codistill.studies.study import Results, Study
from codistill.studies.tables import Table


def study(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="A study listed by `codistill list studies`, or a .yaml or .json file.",
            autocompletion=complete(catalogue.NAMES),
        ),
    ],
    changes: Changes,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N|A-B", help="The study's first N seeds, or those from A to B; default: the study's own."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Output folder; default: runs/NAME.")] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Number of runs at a time; default: one per core, one on a GPU.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Only rows with these methods.", autocompletion=complete_in_study("method")),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Only these rows or groups of rows.", autocompletion=complete_in_study("key")),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only print what would be trained.")] = False,
    best_epoch: Annotated[
        bool, typer.Option("--best-epoch", help="Also show the best epoch of every run, in separate columns.")
    ] = False,
    publish: Annotated[Path | None, typer.Option(metavar="DIR", help="Copy the results of finished runs here.")] = None,
    weights: Annotated[bool, typer.Option("--weights", help="With --publish: copy the weight files too.")] = False,
) -> int:
    """Train all runs of a study and print its table, with n and ±."""
    whole = resolve(name)
    chosen = whole.select(*(None if names is None else names.split(",") for names in (methods, rows)))
    whole.check_overrides(changes)
    chosen_seeds = chosen.seed_range(seeds)
    if publish is not None and publish.is_file():
        raise ValueError(f"--publish {publish} is a file; name a folder")
    if weights and publish is None:
        raise ValueError("--weights copies what --publish DIR publishes; name that folder too")
    folder, screen = out or Path("runs") / whole.name, console()
    at_once, threads = choose_jobs(chosen.rows[0].resolve(changes), jobs)
    planned = plan_runs(chosen, chosen_seeds, changes, folder, threads)
    if plan:
        print_table(plan_table(chosen, planned, at_once, Pace.of(planned)), screen)
        return ExitCode.DONE
    require_data(planned.runs)
    if whole.written:  # so that reports know its rows
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{whole.name}.yaml", whole.written)
    _announce(chosen, planned, at_once, screen)
    display = StudyProgress(planned.runs, screen)
    outcome = run_all(planned.runs, folder, jobs=at_once, display=display, command=train_command)
    results = _read_finished(planned)
    options = {"--jobs": jobs, "--methods": methods, "--rows": rows, "--publish": publish, "--out": folder}
    again = _command_line(name, changes, {"--seeds": seeds or len(chosen_seeds), **options}, best_epoch)
    made = build_tables(chosen, results, chosen_seeds, best_epoch=best_epoch, command=again)
    _print_tables(made, made.write(results, folder), screen)
    unfinished = sum(not run.is_finished for run in planned.runs)
    screen.print(f"\n{conclude(made, unfinished)}", soft_wrap=True)
    code = _report_unfinished(outcome, unfinished, planned, again, screen)
    if publish is not None:
        published, refused = publish_all(
            [run.folder for run in planned.runs if run.is_finished], publish, weights=weights
        )
        if whole.written:
            write_atomically(publish / f"{whole.name}.yaml", whole.written)
        tables = rebuild_tables(publish)
        screen.print(f"Published {len(published)} runs in {publish}, and rebuilt {len(tables)} files of tables there")
        if refused:
            raise ValueError("\n".join(refused))
    return code


def _announce(study: Study, planned: Plan, jobs: int, console: Console) -> None:
    finished = sum(run.is_finished for run in planned.runs)
    console.print(f"{study.title}: {len(planned.runs)} runs, {finished} finished before")
    if finished < len(planned.runs):
        pace = Pace.of(planned)
        console.print(f"{describe_work(planned, jobs, pace)} {pace}")


def _read_finished(planned: Plan) -> Results:
    """The results of the finished runs; prints what is damaged in their folders, or another run's."""
    results: dict[str, dict[int, Result]] = {}
    for (key, seed), run in planned.by_row.items():
        if run.is_finished:
            results.setdefault(key, {})[seed] = read_result(run.result_file)
    for folder in (RunFolder(run.folder) for run in planned.runs if run.is_finished):
        if damage := folder.damage():
            typer.echo(f"warning: {folder.damage_error(damage)}", err=True)
    return results


def _command_line(name: str, overrides: Sequence[str], options: Mapping[str, object], best_epoch: bool) -> str:
    given = [str(part) for option, value in options.items() if value is not None for part in (option, value)]
    flags = ["--best-epoch"] if best_epoch else []
    return shlex.join(["codistill", "study", name, *overrides, *given, *flags])


def _report_unfinished(outcome: Outcome, unfinished: int, planned: Plan, again: str, console: Console) -> int:
    # A run that failed here because another study was writing it may have been finished there since.
    failures = [failure for failure in outcome.failures if not failure.run.is_finished]
    for failure in failures:
        _print_failure(failure, console)
    if unfinished:
        console.print(
            f"\n{unfinished} of {len(planned.runs)} runs are not finished. To continue them:\n  {again}", soft_wrap=True
        )
    if failures:
        return ExitCode.FAILED
    return ExitCode.STOPPED if unfinished else ExitCode.DONE


def _print_failure(failure: Failure, console: Console) -> None:
    console.print(f"\nFailed: {failure.run.title}: {failure.reason}")
    for line in failure.log_tail:
        console.print(f"  | {line}", soft_wrap=True)
    if failure.recipe_file is not None:
        typed = shlex.join(["codistill", "train", str(failure.recipe_file), "--out", str(failure.run.folder)])
        console.print(f"  The whole log: {failure.log_file}\n  To run it alone: {typed}", soft_wrap=True)
        if failure.run.folder.exists():
            restart = f"move {failure.run.folder} away; the study then trains it again"
            console.print(f"  If it cannot continue: {restart}", soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    console.print(f"\n{table.title}")
    console.print(table.to_rich())
    for note in table.notes:  # unwrapped: some contain commands to copy
        console.print(f"  {note}", soft_wrap=True)


def _print_tables(made: StudyTables, written: Sequence[Path], console: Console) -> None:
    for table in made.tables:
        print_table(table, console)
    console.print(f"\nTables: {', '.join(map(str, written))}")
    console.print(f"Runs, with every network's weights: {written[0].parent / 'runs'}")


class _Bars(Progress):
    """Progress bars that ignore errors of a terminal that was closed."""

    def refresh(self) -> None:
        with suppress(OSError):
            super().refresh()


class RemainingTime:
    """Estimates how long a study still takes from the epochs finished since it began, weighted by their FLOPs."""

    def __init__(self, runs: Sequence[PlannedRun], now: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._now, self._began_at = list(runs), now, now()
        self._epoch_flops = {run.folder: epoch_flops(run.recipe) for run in runs}
        self._flops_to_do = self.flops_left()

    def flops_left(self) -> int:
        epochs = {run.folder: run.recipe.length.epochs - run.epochs_done for run in self._runs if not run.is_finished}
        return sum(self._epoch_flops[folder] * number for folder, number in epochs.items())

    def drop(self, failed: PlannedRun) -> None:
        """Take a failed run out, and the runs that start from its weights."""
        before = self.flops_left()
        self._runs = [run for run in self._runs if failed not in (run, *run.needs)]
        self._flops_to_do -= before - self.flops_left()

    def seconds(self) -> float | None:
        """The remaining seconds; None until an epoch is finished."""
        left = self.flops_left()
        done = self._flops_to_do - left
        return (self._now() - self._began_at) * left / done if done > 0 else None


class StudyProgress:
    """Shows the progress of all ``runs`` and the remaining time: bars on a terminal, a line per event elsewhere.

    A closed terminal must not end a study, so errors of writing to it are ignored.
    """

    def __init__(self, runs: Sequence[PlannedRun], console: Console) -> None:
        self.runs, self.console = runs, console
        self._bars = _Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            auto_refresh=False,
        )
        self._overall = self._bars.add_task("study", total=len(runs), note="")
        self._tasks: dict[Path, TaskID] = {}
        self._remaining = RemainingTime(runs)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._bars.stop()

    def show(self, message: str) -> None:
        with suppress(OSError):
            self._bars.console.print(message, highlight=False)

    def started(self, run: PlannedRun) -> None:
        epochs = run.recipe.length.epochs
        self._tasks[run.folder] = self._bars.add_task(run.title, total=epochs, note=f"0/{epochs} epochs")
        if not self.console.is_terminal:
            self.show(f"{'continued' if run.has_begun else 'started'}: {run.title}")

    def ended(self, run: PlannedRun, how: str) -> None:
        finished = sum(run.is_finished for run in self.runs)
        left = f"; {self._time_left()}" if self._remaining.flops_left() else ""
        self.show(f"{how}: {run.title} ({finished} of {len(self.runs)} runs{left})")
        self._bars.remove_task(self._tasks.pop(run.folder))

    def failed(self, run: PlannedRun, how: str) -> None:
        self._remaining.drop(run)
        self.ended(run, how)

    def update(self, running: Sequence[PlannedRun]) -> None:
        if not self.console.is_terminal:
            return
        shares = 0.0
        for run in running:
            epochs = run.recipe.length.epochs
            done = run.epochs_done
            shares += done / epochs
            self._bars.update(self._tasks[run.folder], completed=done, note=f"{done}/{epochs} epochs")
        finished = sum(run.is_finished for run in self.runs)
        note = f"{finished}/{len(self.runs)} runs, {self._time_left()}"
        self._bars.update(self._overall, completed=finished + shares, note=note, refresh=True)

    def _time_left(self) -> str:
        seconds = self._remaining.seconds()
        return "time left not known yet" if seconds is None else f"about {timedelta(seconds=round(seconds))} left"
