"""What the page says first: its answer in a sentence, and what a reader has to know before believing it."""

from collections.abc import Iterator

from codistill.report.overview import Entry, Overview
from codistill.studies.conclusion import conclude, latest_errors


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
        names.setdefault(", ".join(_facts(entry)), []).append(entry.name)
    of = {fact: f" ({'; '.join(rows)})" if len(names) > 1 else "" for fact, rows in names.items()}
    limits = tuple(f"{fact[0].upper()}{fact[1:]}{of[fact]}." for fact in names if fact)
    skipped = tuple(
        f"{run.name}: {count} updates of {name} were left out, because they were not finite."
        for run in seen.runs
        for name in run.recipe.networks
        if run.records and (count := run.records[-1].skipped.get(name))
    )
    return (*limits, *skipped, *seen.left_out)


def _facts(entry: Entry) -> Iterator[str]:
    data, scale = entry.recipe.data, entry.recipe.length.scale
    if data.wrong_labels:
        yield f"{100 * data.wrong_labels:g} % of the training labels are wrong on purpose"
    if data.train_limit:
        yield f"only {data.train_limit:,} training images"
    if data.test_limit:
        yield f"only {data.test_limit:,} test images"
    if scale is not None and scale < 1:
        yield f"trained for {scale:.2f} of the full length"
