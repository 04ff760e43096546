"""What came out: errors with n and ±, what the paper has, differences paired by seed, and how far each run is."""

from collections.abc import Iterator
from dataclasses import replace

from codistill.report import facts
from codistill.report.blocks import Axis, Block, Chart, Fold, Grid, Series, Words
from codistill.report.curves import ERROR
from codistill.report.entries import Entry, Overview
from codistill.studies.analysis import shared_networks
from codistill.studies.statistics import Difference, paired_difference

FEW_RUNS = 12  # more are folded away, once they are finished


def blocks(seen: Overview) -> Iterator[Block]:
    if any(run.finished for run in seen.runs):
        yield from _finished(seen)
    else:
        yield Words("No run is finished yet, so there is no result; below is what has been evaluated so far.")
    runs = Grid(facts.run_table(seen))
    yield runs if seen.unfinished or len(seen.runs) <= FEW_RUNS else Fold("runs", f"{len(seen.runs)} runs", (runs,))
    yield from (Words(text, missing=True) for text in seen.left_out)
    for run in seen.runs:
        yield from (Words(f"{run.name}: {note}", missing=True) for note in run.notes)


def _finished(seen: Overview) -> Iterator[Block]:
    """The tables side by side, then the same as charts."""
    made = seen.tables()
    yield Grid(replace(made.errors, title="Test error"))
    if made.differences.rows:
        yield Grid(replace(made.differences, title="Differences, paired by seed"))
    yield outcome(seen)
    if (chart := differences(seen)).series[0].y:
        yield chart


def outcome(seen: Overview) -> Chart:
    """Every finished run's error beside the paper's mean, row by row."""
    labels = tuple(entry.name for entry in seen.entries)
    networks = list(dict.fromkeys(name for entry in seen.entries for name in entry.recipe.networks))
    series = []
    for colour, network in enumerate(networks):
        ours = [
            (float(entry.place), run.result.errors[network]["top1_error"])
            for entry in seen.entries
            for run in entry.runs.values()
            if run.result is not None and network in run.result.errors
        ]
        paper = [
            (float(entry.place), entry.row.paper[network, "top1_error"].mean)
            for entry in seen.entries
            if (network, "top1_error") in entry.row.paper
        ]
        for name, points, shift in ((network, ours, 0), (f"{network}, paper", paper, len(networks))):
            if points:
                x, y = zip(*points, strict=True)
                series.append(Series(name, x, y, colour=colour + shift))
    words = "A point for each network and seed, at the last epoch."
    return Chart("outcome", "Test error by row", Axis("row", labels=labels), ERROR, tuple(series), words, points=True)


def differences(seen: Overview) -> Chart:
    """The paired difference of every contrast with its interval."""
    found = list(_contrasts(seen))
    places = tuple(float(place) for place in range(len(found)))
    # One pair has no interval: its whiskers end where they begin.
    series = Series(
        "mean of the networks",
        places,
        tuple(one.mean for _, one in found),
        low=tuple(one.mean if one.low is None else one.low for _, one in found),
        high=tuple(one.mean if one.high is None else one.high for _, one in found),
        colour=1,
    )
    words = "Below 0 the first has the smaller error. Whiskers are 95 % intervals (Student's t), each by itself."
    axes = Axis("difference", labels=tuple(label for label, _ in found)), Axis("difference of test error", "points")
    return Chart("differences", "Differences with their intervals", *axes, (series,), words, points=True)


def _contrasts(seen: Overview) -> Iterator[tuple[str, Difference]]:
    """What is subtracted, and the difference, of those that have a seed in common."""
    for group, entries in seen.groups.items():
        by_label = {entry.label: entry for entry in entries}
        for ours, theirs in seen.study.contrasts:
            if ours in by_label and theirs in by_label:
                pair = by_label[ours], by_label[theirs]
                shared = shared_networks(*(entry.recipe for entry in pair))
                if shared and (found := paired_difference(*(_errors(entry, shared) for entry in pair))):
                    yield (f"{group}: " if len(seen.groups) > 1 else "") + f"{ours} − {theirs}", found


def _errors(entry: Entry, networks: list[str]) -> dict[int, float]:
    return {seed: run.result.mean_error(networks) for seed, run in entry.runs.items() if run.result is not None}
