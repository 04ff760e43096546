"""What was run, on what, at which cost, and how to run it again."""

import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from codistill import recipes
from codistill.recipes import difference
from codistill.recipes.overrides import as_change, key_of
from codistill.recipes.schema import Recipe
from codistill.report import curves
from codistill.report.blocks import Axis, Block, Code, Fold, Grid, Words
from codistill.report.entries import Entry, Overview
from codistill.report.runs import SeenRun
from codistill.studies.analysis import training_differences
from codistill.studies.flops import training_flops
from codistill.studies.statistics import summarise
from codistill.studies.tables import Cell, Table

TIME_UNITS = {"h": 3600, "min": 60, "s": 1}
FLOP_UNITS = {"PFLOP": 10**15, "TFLOP": 10**12, "GFLOP": 10**9}
# Of an environment, in this order; the command line is shown by itself.
ENVIRONMENT = ("accelerators", "cpu", "cores", "threads", "platform", "python", "torch", "cuda", "cudnn", "numpy")


def run_table(seen: Overview) -> Table:
    """Every run: how far it is, and its networks' errors at its latest evaluation."""
    networks = list(dict.fromkeys(name for entry in seen.entries for name in entry.recipe.networks))
    rows: list[tuple[Cell, ...]] = []
    for entry in seen.entries:
        for seed, run in entry.runs.items():
            errors = [run.latest("test", f"{name}/final", "top1_error") for name in networks]
            rows.append((entry.name, seed, state(run), epochs(run), *errors, spent(run), run.name))
    errors_of = tuple(f"{name}, error %" for name in networks)
    columns = ("row", "seed", "state", "epochs", *errors_of, "time", "run")
    return Table("Runs", columns, tuple(rows))


def state(run: SeenRun) -> str:
    if run.finished:
        return "finished"
    if run.heard_at is None:
        return "not finished"
    heard_at = datetime.fromtimestamp(run.heard_at).astimezone()
    return f"not finished; last written {heard_at:%Y-%m-%d %H:%M:%S}"


def epochs(run: SeenRun) -> str:
    return f"{run.epochs_done} of {run.recipe.length.epochs}"


def spent(run: SeenRun) -> str | None:
    return None if run.elapsed_s is None else str(timedelta(seconds=round(run.elapsed_s)))


def cost_blocks(seen: Overview) -> Iterator[Block]:
    """Error against time, then pace and memory."""
    unit, seconds = _time_unit(seen)
    axis = Axis("training time", unit)
    by_time = curves.error_against_cost(seen, lambda run: (run.elapsed_s or 0) / seconds, "cost-time", axis)
    pace = curves.pace(seen)
    yield from (chart for chart in (by_time, pace) if chart.series)
    if not by_time.series:
        yield Words("Error against cost: not shown, because no run is finished.", missing=True)
    if not pace.series:
        yield Words("Throughput over the training: not shown, because published results have no clock.", missing=True)
    yield Grid(cost_table(seen))


def counted_cost(seen: Overview) -> Iterator[Block]:
    """Error against operations. They are counted on networks, so this imports torch."""
    flops = {run.place: count for run in seen.runs if (count := training_flops(run.recipe))}
    unit, size = _unit(FLOP_UNITS, max(flops.values(), default=0))
    axis = Axis("training cost", unit)
    chart = curves.error_against_cost(seen, lambda run: flops.get(run.place, 0) / size, "cost-flops", axis)
    if chart.series:
        yield chart


def _time_unit(seen: Overview) -> tuple[str, int]:
    return _unit(TIME_UNITS, max((run.elapsed_s or 0 for run in seen.runs), default=0))


def _unit(units: Mapping[str, int], most: float) -> tuple[str, int]:
    """Such that the most is at least one of them, or the smallest."""
    return next((unit, size) for unit, size in units.items() if size <= most or size == min(units.values()))


def cost_table(seen: Overview) -> Table:
    unit, seconds = _time_unit(seen)
    rows: list[tuple[Cell, ...]] = []
    for entry in seen.entries:
        runs = list(entry.runs.values())
        finished = [run for run in runs if run.finished]
        memory = [run.peak_device_bytes / 2**30 for run in runs if run.peak_device_bytes]
        rows.append(
            (
                entry.name,
                len(finished),
                _mean([run.elapsed_s / seconds for run in finished if run.elapsed_s]),
                _whole(_mean([pace for run in runs if (pace := run.images_per_s)])),
                max(memory) if memory else "not measured",
                ", ".join(dict.fromkeys(device(run) for run in runs)),
                ", ".join(dict.fromkeys(run.computed for run in runs if run.computed)) or None,
            )
        )
    columns = ("row", "finished", f"{unit} a run", "images/s", "peak GiB", "device", "step")
    notes = (
        "The peak of device memory is measured on CUDA devices alone; of a continued run it is that of the last part.",
    )
    return Table("Time and memory", columns, tuple(rows), notes)


def _mean(values: list[float]) -> float | None:
    return summarise(values).mean if values else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def device(run: SeenRun) -> str:
    accelerators = run.environment.get("accelerators") or []
    on_cpu = run.recipe.runtime.device == "cpu" or not accelerators
    return str(run.environment.get("cpu") or "unknown") if on_cpu else str(accelerators[0])


def repeat_blocks(seen: Overview) -> Iterator[Block]:
    """The commands, each recipe in full, and the environments."""
    if seen.known and len(seen.entries) > 1 and min(seen.seeds) >= seen.study.first_seed:
        yield Code("The whole study", _study_command(seen))
    yield Code("Each row, with its first seed", "\n".join(command(entry.recipe) for entry in seen.entries))
    if len(seen.entries) > 1:
        yield Grid(_differences(seen))
    for entry in seen.entries:
        typed = "\n".join(_typed(run) for run in entry.runs.values())
        blocks: tuple[Block, ...] = (
            Code("Recipe", recipes.dumps(entry.recipe)),
            Grid(_environment(entry)),
            *([Code("As it was typed", typed)] if typed else []),
        )
        yield Fold(f"recipe-{entry.place}", f"Recipe and environment: {entry.name}", blocks)


def _study_command(seen: Overview) -> str:
    """With the changes that its runs have in common, told by a row whose length is not the study's to set."""
    study = seen.study
    plain = next((entry for entry in seen.entries if entry.row.length_factor == 1), seen.entries[0])
    changes = [as_change(line) for line in training_differences(plain.row.resolve(), plain.recipe)]
    count = max(seen.seeds) - study.first_seed + 1
    return shlex.join(["codistill", "study", study.name, *changes, "--seeds", str(count)])


def command(recipe: Recipe) -> str:
    """What trains this recipe again: a catalogue's name with changes, if that gives it back, otherwise its file."""
    if recipe.name in recipes.NAMES:
        changed = [as_change(line) for line in difference(recipes.get(recipe.name), recipe)]
        try:
            if recipes.get(recipe.name, changed) == recipe:
                return shlex.join(["codistill", "train", recipe.name, *changed])
        except ValueError:
            pass  # a change that cannot be typed, such as a network that the catalogue's recipe does not have
    return f"codistill train recipe.yaml  # the recipe {shlex.quote(recipe.name)} below, saved as a file"


def _differences(seen: Overview) -> Table:
    """Only what differs, one column per row of the study."""
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
    """A line for each fact, a column for each machine and version that ran some of the seeds."""
    seeds_of: dict[tuple[Cell, ...], list[int]] = {}
    for seed, run in entry.runs.items():
        facts = (_version(run), *(_fact(run.environment.get(key)) for key in ENVIRONMENT))
        seeds_of.setdefault(facts, []).append(seed)
    rows = zip(("codistill", *ENVIRONMENT), *seeds_of, strict=True)
    of = (f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}" for seeds in seeds_of.values())
    return Table("Environment", ("fact", *of), tuple(row for row in rows if any(row[1:])))


def _version(run: SeenRun) -> str:
    facts = run.environment
    words = [str(facts[key]) for key in ("codistill", "commit") if facts.get(key)]
    return (" ".join(words) or "unknown") + (" with changes" if facts.get("commit") and facts.get("dirty") else "")


def _typed(run: SeenRun) -> str:
    typed = run.environment.get("command")
    return shlex.join(map(str, typed)) if isinstance(typed, list) else ""


def _fact(value: object) -> str | None:
    return None if value in (None, []) else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
