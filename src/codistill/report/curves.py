"""What the journals tell, as charts: errors, losses, divergences, pace, cost. Means over seeds, bands their range."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from codistill.report.blocks import Axis, Block, Chart, Fold, Series, Words
from codistill.report.entries import Entry, Overview
from codistill.report.runs import SeenRun
from codistill.studies.curves import Point

EPOCH = Axis("epoch")
ERROR = Axis("test error", "%")
BANDS = "Lines are means over seeds, bands reach from the least to the most."

Measure = Callable[[SeenRun, str], Mapping[int, float]]
"""A number by epoch, of a run's network."""


def over_seeds(curves: Iterable[Mapping[int, float]]) -> list[Point]:
    """One point for each epoch that any run has; ``n`` says how many had it."""
    there = [curve for curve in curves if curve]
    points = []
    for epoch in sorted({epoch for curve in there for epoch in curve}):
        values = [curve[epoch] for curve in there if epoch in curve]
        points.append(Point(epoch, len(values), sum(values) / len(values), min(values), max(values)))
    return points


def line(name: str, curves: Iterable[Mapping[int, float]], colour: int, dash: int = 0) -> Series | None:
    """The series of some curves over seeds; None where none of them has a point."""
    points = over_seeds(curves)
    if not points:
        return None
    has_band = any(point.n > 1 for point in points)
    return Series(
        name,
        x=tuple(point.epoch for point in points),
        y=tuple(point.mean for point in points),
        low=tuple(point.least for point in points) if has_band else (),
        high=tuple(point.most for point in points) if has_band else (),
        n=tuple(point.n for point in points),
        colour=colour,
        dash=dash,
    )


def by_network(entries: Sequence[Entry], measure: Measure) -> Iterator[Series]:
    """A line for every network of every entry: the entry has the colour, the network the dashes."""
    alone, mixed = len(entries) == 1, len({entry.row.group for entry in entries}) > 1
    for entry in entries:
        for place, network in enumerate(entry.recipe.networks):
            name = (
                f"{network} ({entry.recipe.networks[network]})"
                if alone
                else f"{entry.name if mixed else entry.label}, {network}"
            )
            curves = [measure(run, network) for run in entry.runs.values()]
            series = line(name, curves, place if alone else entry.place, 0 if alone else place)
            if series:
                yield series


def learning(seen: Overview) -> tuple[Block, ...]:
    """Every network's curves; where a study has several groups, a fold of them for each."""
    if len(seen.groups) == 1:
        return _learning(seen.entries, "")
    return tuple(
        Fold(f"learning{place}", group, _learning(entries, f"group{place}-"), is_open=place == 0)
        for place, (group, entries) in enumerate(seen.groups.items())
    )


def _learning(entries: Sequence[Entry], prefix: str) -> tuple[Block, ...]:
    """Test error, validation error, NLL, training error and loss of every network over the training."""
    bands = BANDS if any(len(entry.runs) > 1 for entry in entries) else ""
    loss_axis = Axis("training loss", "nats")
    loss_words = "Labels and transfers together, as weighted in training."
    charts = (
        Chart(f"{prefix}error", "Test error", EPOCH, ERROR, tuple(by_network(entries, tested("top1_error"))), bands),
        *_validation(entries, prefix),
        Chart(f"{prefix}nll", "Test NLL", EPOCH, Axis("NLL", "nats"), tuple(by_network(entries, tested("nll")))),
        Chart(
            f"{prefix}train-error",
            "Training error",
            EPOCH,
            Axis("train error", "%"),
            tuple(by_network(entries, train_error)),
        ),
        Chart(f"{prefix}loss", "Training loss", EPOCH, loss_axis, tuple(by_network(entries, network_loss)), loss_words),
    )
    return tuple(chart if chart.series else absent(chart) for chart in charts)


def _validation(entries: Sequence[Entry], prefix: str) -> Iterator[Chart]:
    """Only where training images were set aside; most recipes keep none."""
    if any(entry.recipe.data.validation for entry in entries):
        series = tuple(by_network(entries, validation_error))
        words = "On training images that were set aside; what checkpoints.best goes by."
        axis = Axis("validation error", "%")
        yield Chart(f"{prefix}validation", "Validation error", EPOCH, axis, series, words)


def calibration_error(seen: Overview) -> Chart | Words:
    """How far confidence is from being right, over the training."""
    words = "The mean distance of confidence from the share of right answers, over 15 bins (ECE)."
    series = tuple(by_network(seen.entries, tested("ece")))
    chart = Chart("ece", "Calibration error", EPOCH, Axis("ECE", "%"), series, words)
    return chart if series else absent(chart)


def tested(metric: str) -> Measure:
    """Of a network as it ships, on the test images."""
    return lambda run, network: run.curve("test", f"{network}/final", metric)


def validation_error(run: SeenRun, network: str) -> Mapping[int, float]:
    return run.curve("validation", f"{network}/final", "top1_error")


def absent(chart: Chart) -> Words:
    return Words(f"{chart.title}: not shown, because no evaluation of these runs has recorded it.", missing=True)


def train_error(run: SeenRun, network: str) -> Mapping[int, float]:
    return run.curve("train_error", f"{network}/final")


def network_loss(run: SeenRun, network: str) -> Mapping[int, float]:
    """The sum of the terms whose learner is one of the network's classifiers."""
    edges = [edge for edge in run.recipe.graph.weights if edge.partition("->")[2].startswith(f"{network}/")]
    curves = [run.curve("terms", edge) for edge in edges]
    epochs = set.intersection(*map(set, curves)) if curves else set()
    return {epoch: sum(curve[epoch] for curve in curves) for epoch in sorted(epochs)}


def classifiers(entry: Entry, prefix: str) -> Chart:
    """Every classifier of an entry, auxiliary ones too, and the ensemble."""
    names = [classifier.name for classifier in entry.recipe.graph.classifiers]
    networks = list(entry.recipe.networks)
    stages = sorted({name.partition("/")[2] for name in names}, key=lambda stage: (stage != "final", stage))
    lines = [
        line(
            name,
            [run.curve("test", name, "top1_error") for run in entry.runs.values()],
            colour=stages.index(name.partition("/")[2]),
            dash=networks.index(name.partition("/")[0]),
        )
        for name in names
    ]
    ensemble = [run.curve("test", "ensemble", "top1_error") for run in entry.runs.values()]
    lines.append(line("ensemble", ensemble, colour=len(stages)))
    words = "Auxiliary classifiers and the ensemble are evaluated less often. Colours are exits, dashes networks."
    return Chart(f"{prefix}-classifiers", "Test error by classifier", EPOCH, ERROR, _present(lines), words)


def divergences(entry: Entry, prefix: str) -> Chart | None:
    """Each transfer's divergence, its weight taken out again; None for a method without transfers."""
    graph = entry.recipe.graph
    if not graph.transfers:
        return None
    factor = graph.temperature**2 if graph.t_squared else 1.0
    networks = list(entry.recipe.networks)
    ways = list(dict.fromkeys(_way(edge.source, edge.learner) for edge in graph.transfers))
    lines = []
    for edge in graph.transfers:
        curves = [run.curve("terms", edge.name) for run in entry.runs.values()]
        scaled = [{epoch: value / (edge.weight * factor) for epoch, value in curve.items()} for curve in curves]
        colour = ways.index(_way(edge.source, edge.learner))
        lines.append(line(edge.name, scaled, colour, dash=networks.index(edge.source.partition("/")[0])))
    words = "KL divergence of the learner from its source on training images, before its weight. Dashes: the source."
    axis = Axis("divergence", "nats")
    return Chart(f"{prefix}-edges", "Divergence of each transfer", EPOCH, axis, _present(lines), words)


def _way(source: str, learner: str) -> tuple[str, str]:
    """From which exit to which, whatever the networks."""
    return source.partition("/")[2], learner.partition("/")[2]


def pace(seen: Overview) -> Chart:
    """Images per second between evaluations, by the clock that each run kept."""
    lines = [line(entry.name, [_paces(run) for run in entry.runs.values()], entry.place) for entry in seen.entries]
    words = "Training images per second since the evaluation before, evaluation and saving included."
    return Chart("pace", "Throughput over the training", EPOCH, Axis("images/s"), _present(lines), words)


def _paces(run: SeenRun) -> dict[int, float]:
    """Without the first stretch, which warms up and compiles, where there is another."""
    marks = sorted(run.clock.items())
    if not run.train_images:
        return {}
    return {
        later: run.train_images * (later - earlier) / (then - now)
        for (earlier, now), (later, then) in pairwise(marks)
        if then > now
    }


def error_against_cost(seen: Overview, cost: Callable[[SeenRun], float | None], id_: str, axis: Axis) -> Chart:
    """A point for each finished run: the mean error of its networks that learn."""
    series = []
    for entry in seen.entries:
        learning = entry.recipe.graph.learning_networks
        points = [
            (spent, run.result.mean_error(learning))
            for run in entry.runs.values()
            if run.result is not None and (spent := cost(run))
        ]
        if points:
            x, y = zip(*points, strict=True)
            series.append(Series(entry.name, x, y, colour=entry.place))
    title = f"Test error against {axis.title}"
    words = "A point for each finished run: the mean error of its networks at the last epoch."
    return Chart(id_, title, axis, ERROR, tuple(series), words, points=True)


def _present(lines: Sequence[Series | None]) -> tuple[Series, ...]:
    return tuple(series for series in lines if series is not None)
