"""What the page says first, and three of its sections: the results, the cost, and how to repeat the runs."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from codistill import recipes
from codistill.recipes import difference
from codistill.recipes.changes import as_change, key_of
from codistill.recipes.schema import Recipe
from codistill.report import curves
from codistill.report.blocks import Axis, Block, Chart, Code, Fold, Grid, Series, Words
from codistill.report.curves import ERROR
from codistill.report.overview import Entry, Overview
from codistill.report.read import SeenRun
from codistill.runs.result import device_name
from codistill.studies.conclusion import conclude, latest_errors
from codistill.studies.costs import training_flops
from codistill.studies.differences import Comparison
from codistill.studies.published import study_command
from codistill.studies.statistics import Interval, mean
from codistill.studies.tables import Cell, Table

TIME_UNITS = {"h": 3600, "min": 60, "s": 1}
FLOP_UNITS = {"PFLOP": 10**15, "TFLOP": 10**12, "GFLOP": 10**9}
# Facts of an environment, in this order; the command is shown separately.
ENVIRONMENT = ("accelerators", "cpu", "cores", "threads", "platform", "python", "torch", "cuda", "cudnn", "numpy")
FEW_RUNS = 12  # more finished runs are collapsed


def headline(seen: Overview, *, count_flops: bool = True) -> str:
    """Return who is ahead, or the errors of a single run, also of an unfinished one; counting FLOPs imports torch."""
    if len(seen.runs) > 1 or seen.runs[0].finished:
        return conclude(seen.tables(), len(seen.unfinished), count_flops=count_flops)
    (run,) = seen.runs
    networks = run.recipe.graph.learning_networks
    errors = latest_errors({name: run.curve("test", f"{name}/final", "top1_error") for name in networks})
    after = f"Not finished, after epoch {run.epochs_done} of {run.recipe.length.epochs}"
    return f"{after}: test error {errors}." if errors else f"{after}: no test error yet."


def caveats(seen: Overview) -> tuple[str, ...]:
    """Return what was done to the data or the length on purpose, which updates are missing, and which runs."""
    names: dict[str, list[str]] = {}
    for entry in seen.entries:
        names.setdefault(", ".join(_caveats_of(entry)), []).append(entry.name)
    of = {fact: f" ({'; '.join(rows)})" if len(names) > 1 else "" for fact, rows in names.items()}
    limits = tuple(f"{fact[0].upper()}{fact[1:]}{of[fact]}." for fact in names if fact)
    skipped = tuple(
        f"{run.name}: {count} updates of {name} were left out, because they were not finite."
        for run in seen.runs
        for name in run.recipe.networks
        if run.records and (count := run.records[-1].skipped.get(name))
    )
    return (*limits, *skipped, *seen.left_out)


def _caveats_of(entry: Entry) -> Iterator[str]:
    data, scale = entry.recipe.data, entry.recipe.length.scale
    if data.wrong_labels:
        yield f"{100 * data.wrong_labels:g} % of the training labels are wrong on purpose"
    if data.train_limit:
        yield f"only {data.train_limit:,} training images"
    if data.test_limit:
        yield f"only {data.test_limit:,} test images"
    if scale is not None and scale < 1:
        yield f"trained for {scale:.2f} of the full length"


def result_blocks(seen: Overview) -> Iterator[Block]:
    if any(run.finished for run in seen.runs):
        yield from _finished(seen)
    else:
        yield Words("No run is finished yet, so there are no results; evaluations so far are shown below.")
    runs = Grid(run_table(seen))
    yield runs if seen.unfinished or len(seen.runs) <= FEW_RUNS else Fold("runs", f"{len(seen.runs)} runs", (runs,))
    yield from (Words(text, missing=True) for text in seen.left_out)
    for run in seen.runs:
        yield from (Words(f"{run.name}: {note}", missing=True) for note in run.notes)


def _finished(seen: Overview) -> Iterator[Block]:
    """Yield the tables, then the same as charts."""
    made = seen.tables()
    yield Grid(replace(made.errors, title="Test error"))
    if made.differences.rows:
        yield Grid(replace(made.differences, title="Differences"))
    if sum(run.finished for run in seen.runs) > 1:
        yield outcome(seen)
    if (chart := differences(made.compared)).series[0].y:
        yield chart


def outcome(seen: Overview) -> Chart:
    """Return the error of every finished run next to the paper's mean, by row."""
    labels = tuple(entry.name for entry in seen.entries)
    networks = list(dict.fromkeys(name for entry in seen.entries for name in entry.recipe.networks))
    series = []
    for colour, network in enumerate(networks):
        ours = [
            (float(entry.index), run.result.errors[network]["top1_error"])
            for entry in seen.entries
            for run in entry.runs.values()
            if run.result is not None and network in run.result.errors
        ]
        paper = [
            (float(entry.index), entry.row.paper[network, "top1_error"].mean)
            for entry in seen.entries
            if (network, "top1_error") in entry.row.paper
        ]
        for name, points, shift in ((network, ours, 0), (f"{network}, paper", paper, len(networks))):
            if points:
                x, y = zip(*points, strict=True)
                series.append(Series(name, x, y, colour=colour + shift))
    words = "One point per network and seed, at the last epoch."
    return Chart("outcome", "Test error by row", Axis("row", labels=labels), ERROR, tuple(series), words, points=True)


def differences(compared: Sequence[Comparison]) -> Chart:
    """Return the difference of every contrast, of the mean over networks, with its interval."""
    whole = [(one, one.difference) for one in compared if one.is_whole and one.difference]
    means = tuple(found.mean for _, found in whole)
    # A single seed has no interval: its whiskers have no length.
    bounds = [found.interval or Interval(found.mean, found.mean) for _, found in whole]
    low, high = (tuple(getattr(bound, end) for bound in bounds) for end in ("low", "high"))
    places = tuple(map(float, range(len(means))))
    series = Series("mean of the networks", places, means, low, high, colour=1)
    labels = tuple(": ".join(one.title) for one, _ in whole)
    words = "Below 0, the first has the lower error. Whiskers are individual 95 % intervals."
    axes = Axis("difference", labels=labels), Axis("difference of test error", "points")
    return Chart("differences", "Differences with their intervals", *axes, (series,), words, points=True)


def run_table(seen: Overview) -> Table:
    """Return a table of all runs with their progress and the errors at their latest evaluation."""
    networks = list(dict.fromkeys(name for entry in seen.entries for name in entry.recipe.networks))
    rows: list[tuple[Cell, ...]] = []
    for entry in seen.entries:
        for seed, run in entry.runs.items():
            errors = [run.latest("test", f"{name}/final", "top1_error") for name in networks]
            epochs = f"{run.epochs_done} of {run.recipe.length.epochs}"
            spent = None if run.elapsed_s is None else str(timedelta(seconds=round(run.elapsed_s)))
            rows.append((entry.name, seed, state(run), epochs, *errors, spent, run.name))
    errors_of = tuple(f"{name}, error %" for name in networks)
    columns = ("row", "seed", "state", "epochs", *errors_of, "time", "run")
    return Table("Runs", columns, tuple(rows))


def state(run: SeenRun) -> str:
    if run.finished:
        return "finished"
    if run.updated_at is None:
        return "not finished"
    updated_at = datetime.fromtimestamp(run.updated_at).astimezone()
    return f"not finished; last written {updated_at:%Y-%m-%d %H:%M:%S}"


def cost_blocks(seen: Overview) -> Iterator[Block]:
    """Yield error against time, then throughput and memory."""
    unit, seconds = _time_unit(seen)
    axis = Axis("training time", unit)
    by_time = curves.error_against_cost(seen, lambda run: (run.elapsed_s or 0) / seconds, "cost-time", axis)
    pace = curves.pace(seen)
    yield from (chart for chart in (by_time, pace) if chart and chart.series)
    if not any(run.finished for run in seen.runs):
        yield Words("Error against cost: not shown, because no run is finished.", missing=True)
    if not pace.series:
        why = "it takes two evaluations of a run with their times, which published results lack"
        yield Words(f"Throughput over the training: not shown, because {why}.", missing=True)
    yield Grid(cost_table(seen))


def counted_cost(seen: Overview) -> Iterator[Block]:
    """Yield error against operations; counting them imports torch."""
    flops = {run.path: count for run in seen.runs if (count := training_flops(run.recipe))}
    unit, size = _unit(FLOP_UNITS, max(flops.values(), default=0))
    axis = Axis("training cost", unit)
    chart = curves.error_against_cost(seen, lambda run: flops.get(run.path, 0) / size, "cost-flops", axis)
    if chart:
        yield chart


def _time_unit(seen: Overview) -> tuple[str, int]:
    return _unit(TIME_UNITS, max((run.elapsed_s or 0 for run in seen.runs), default=0))


def _unit(units: Mapping[str, int], most: float) -> tuple[str, int]:
    """Return the largest unit that does not exceed ``most``, or the smallest unit."""
    return next((unit, size) for unit, size in units.items() if size <= most or size == min(units.values()))


def cost_table(seen: Overview) -> Table:
    unit, seconds = _time_unit(seen)
    rows: list[tuple[Cell, ...]] = []
    for entry in seen.entries:
        runs = list(entry.runs.values())
        finished = [run.result for run in runs if run.result is not None]
        pace = mean([rate for run in runs if (rate := run.images_per_s)])
        memory = [result.peak_device_bytes / 2**30 for result in finished if result.peak_device_bytes]
        rows.append(
            (
                entry.name,
                len(finished),
                mean([result.elapsed_s / seconds for result in finished]),
                None if pace is None else round(pace),
                max(memory) if memory else "not measured",
                ", ".join(dict.fromkeys(device_name(run.recipe, run.environment) for run in runs)),
                ", ".join(dict.fromkeys(result.path for result in finished if result.path)) or None,
            )
        )
    columns = ("row", "finished", f"{unit} a run", "images/s", "peak GiB", "device", "step")
    notes = ("Peak device memory is measured on CUDA devices only; for a continued run, of its last part.",)
    return Table("Time and memory", columns, tuple(rows), notes)


def repeat_blocks(seen: Overview) -> Iterator[Block]:
    """Yield the commands, the complete recipes, and the environments."""
    if seen.known and len(seen.entries) > 1 and min(seen.seeds) >= seen.study.first_seed:
        plain = next((entry for entry in seen.entries if entry.row.length_factor == 1), seen.entries[0])
        yield Code("The whole study", study_command(seen.study, plain.row, plain.recipe, seen.seeds))
    yield Code("Each row, with its first seed", "\n".join(command(entry.recipe) for entry in seen.entries))
    if len(seen.entries) > 1:
        yield Grid(_differences(seen))
    for entry in seen.entries:
        typed = "\n".join(shlex.join(run.environment.command or []) for run in entry.runs.values())
        blocks: tuple[Block, ...] = (
            Code("Recipe", recipes.dumps(entry.recipe)),
            Grid(_environment(entry)),
            *([Code("Original command", typed)] if typed else []),
        )
        yield Fold(f"recipe-{entry.index}", f"Recipe and environment: {entry.name}", blocks)


def command(recipe: Recipe) -> str:
    """Return the command that trains this recipe again: a catalogue name with overrides if possible, or its file."""
    if recipe.name in recipes.NAMES:
        changed = [as_change(line) for line in difference(recipes.get(recipe.name), recipe)]
        try:
            if recipes.get(recipe.name, changed) == recipe:
                return shlex.join(["codistill", "train", recipe.name, *changed])
        except ValueError:
            pass  # a change that is not a valid override, such as a network that the catalogue's recipe lacks
    return f"codistill train recipe.yaml  # the recipe {shlex.quote(recipe.name)} below, saved as a file"


def _differences(seen: Overview) -> Table:
    """Return the keys in which the recipes differ, with one column per row of the study."""
    first = seen.entries[0].recipe
    lines = [{key_of(line): line for line in difference(first, entry.recipe)} for entry in seen.entries]
    keys = [key for key in dict.fromkeys(key for by_key in lines for key in by_key) if key != "seed"]

    def cells(key: str) -> Iterator[Cell]:
        own = next(by_key[key] for by_key in lines if key in by_key)
        for by_key in lines:
            yield by_key[key].rpartition(" → ")[2] if key in by_key else own.partition(": ")[2].partition(" → ")[0]

    rows = tuple((key, *cells(key)) for key in keys)
    return Table("What differs between the recipes", ("key", *(entry.name for entry in seen.entries)), rows)


def _environment(entry: Entry) -> Table:
    """Return a table with a row per fact and a column per machine and version."""
    seeds_of: dict[tuple[Cell, ...], list[int]] = {}
    for seed, run in entry.runs.items():
        facts = (_version(run), *(_fact(getattr(run.environment, key)) for key in ENVIRONMENT))
        seeds_of.setdefault(facts, []).append(seed)
    rows = zip(("codistill", *ENVIRONMENT), *seeds_of, strict=True)
    of = (f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}" for seeds in seeds_of.values())
    return Table("Environment", ("fact", *of), tuple(row for row in rows if any(row[1:])))


def _version(run: SeenRun) -> str:
    facts = run.environment
    words = [word for word in (facts.codistill, facts.commit) if word]
    return (" ".join(words) or "unknown") + (" with changes" if facts.commit and facts.dirty else "")


def _fact(value: object) -> str | None:
    return None if value in (None, []) else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
