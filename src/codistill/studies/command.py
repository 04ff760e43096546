"""``codistill study``: plans, trains what is missing, writes the tables, and says what did not go well."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from codistill.runs.result import Result, read_result
from codistill.studies import catalogue
from codistill.studies.output import print_report, print_table, write
from codistill.studies.planning import Pace, plan_table, share_machine, to_do
from codistill.studies.progress import Board
from codistill.studies.published import publish_all, tables_from
from codistill.studies.report import Results, build
from codistill.studies.runner import STOPPED, Command, Failure, Outcome, run_all, train_command
from codistill.studies.runs import Plan, plan_runs, require_data
from codistill.studies.study import Study

DONE, FAILED = 0, 1


def run_study(
    name: str,
    *,
    seeds: int | None,
    overrides: Sequence[str],
    out: Path,
    jobs: int | None,
    console: Console,
    methods: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
    plan: bool = False,
    best_epoch: bool = False,
    publish_to: Path | None = None,
    command: Command = train_command,
) -> int:
    """Do all that ``codistill study NAME`` does; the exit code: 0 done, 1 a run failed, 75 stopped on the way.

    ``seeds`` says how many, from the study's first on, ``jobs`` how many trainings run at once; None leaves both to the
    study and the machine. ``plan`` only says what there is to do and how long it takes.
    """
    whole = catalogue.get(name)
    study = whole.only(methods, rows)
    whole.check_overrides(overrides)
    chosen_seeds = study.seed_range(seeds)
    if publish_to is not None and publish_to.is_file():
        raise ValueError(f"--publish {publish_to} is a file; name a folder")
    crowd, threads = share_machine(study.rows[0].resolved(overrides), jobs)
    planned = plan_runs(study, chosen_seeds, overrides, out, threads)
    if plan:
        print_table(plan_table(study, planned, crowd.size, Pace.of(planned)), console)
        return DONE
    require_data(planned.runs)
    _announce(study, planned, crowd.size, console)
    display = Board(planned.runs, console)
    outcome = run_all(planned.runs, out, crowd=crowd, display=display, command=command)
    results = _finished(planned)
    options = {"--jobs": jobs, "--methods": _listed(methods), "--rows": _listed(rows), "--publish": publish_to}
    again = _command_line(name, overrides, {"--seeds": len(chosen_seeds), **options, "--out": out}, best_epoch)
    made = build(study, results, chosen_seeds, best_epoch=best_epoch, command=again)
    print_report(made, write(made, results, out), console)
    code = _conclude(outcome, planned, again, console)
    if publish_to is not None:
        published, refused = publish_all([run.folder for run in planned.runs if run.finished], publish_to)
        tables = tables_from(publish_to)
        console.print(f"Published {len(published)} runs in {publish_to}, and {len(tables)} files of tables from them")
        if refused:
            raise ValueError("\n".join(refused))
    return code


def _announce(study: Study, planned: Plan, jobs: int, console: Console) -> None:
    finished = sum(run.finished for run in planned.runs)
    console.print(f"{study.title}: {len(planned.runs)} runs, {finished} finished before")
    if finished < len(planned.runs):
        pace = Pace.of(planned)
        console.print(f"{to_do(planned, jobs, pace)} {pace.source}")


def _finished(planned: Plan) -> Results:
    results: dict[str, dict[int, Result]] = {}
    for (key, seed), run in planned.of.items():
        if run.finished:
            results.setdefault(key, {})[seed] = read_result(run.result_file)
    return results


def _command_line(name: str, overrides: Sequence[str], options: Mapping[str, object], best_epoch: bool) -> str:
    given = [str(part) for option, value in options.items() if value is not None for part in (option, value)]
    flags = ["--best-epoch"] if best_epoch else []
    return shlex.join(["codistill", "study", name, *overrides, *given, *flags])


def _listed(names: Sequence[str] | None) -> str | None:
    return ",".join(names) if names else None


def _conclude(outcome: Outcome, planned: Plan, again: str, console: Console) -> int:
    # Another study of the same folder may have been training it, and have finished it since.
    failures = [failure for failure in outcome.failures if not failure.run.finished]
    for failure in failures:
        _print_failure(failure, console)
    unfinished = sum(not run.finished for run in planned.runs)
    if unfinished:
        console.print(
            f"\n{unfinished} of {len(planned.runs)} runs are not finished. To continue them:\n  {again}", soft_wrap=True
        )
    if failures:
        return FAILED
    return STOPPED if unfinished else DONE


def _print_failure(failure: Failure, console: Console) -> None:
    console.print(f"\nFailed: {failure.run.title}: {failure.reason}")
    for line in failure.log_tail:
        console.print(f"  | {line}", soft_wrap=True)
    if failure.recipe_file is not None:
        typed = shlex.join(["codistill", "train", str(failure.recipe_file), "--out", str(failure.run.folder)])
        console.print(f"  The whole log: {failure.log_file}\n  To try it by itself: {typed}", soft_wrap=True)
        if failure.run.folder.exists():
            anew = f"move {failure.run.folder} away; the study then begins it anew"
            console.print(f"  If it cannot go on: {anew}", soft_wrap=True)
