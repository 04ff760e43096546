"""Charts of the journals: errors, losses, divergences, throughput, cost. Lines are means over seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

from codistill.report.blocks import Axis, Block, Chart, Fold, Series, Words
from codistill.report.overview import Entry, Overview
from codistill.report.read import SeenRun
from codistill.studies.curves import over_seeds

EPOCH = Axis("epoch")
ERROR = Axis("test error", "%")
RANGES = "Means over seeds. Whiskers, and the band of a line that you point at, span the lowest to the highest value."
FEW_TRANSFERS = 4  # more are grouped by kind

Measure = Callable[[SeenRun, str], Mapping[int, float]]
"""A value by epoch, of a network of a run."""


def line(name: str, curves: Sequence[Mapping[int, float]], colour: int, dash: int = 0) -> Series | None:
    """Return the series of some curves over seeds, or None if they have no points."""
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
    """Yield a line per network and entry; colours distinguish entries, dashes networks."""
    alone, mixed = len(entries) == 1, len({entry.row.group for entry in entries}) > 1
    for entry in entries:
        for place, network in enumerate(entry.recipe.networks):
            name = f"{entry.name if mixed else entry.row.label}, {network}"
            if alone:
                name = f"{network} ({entry.recipe.networks[network]})"
            curves = [measure(run, network) for run in entry.runs.values()]
            series = line(name, curves, place if alone else entry.index, 0 if alone else place)
            if series:
                yield series


def learning(seen: Overview) -> tuple[Block, ...]:
    """Return the curves of all networks, in one fold per group if a study has several."""
    if len(seen.groups) == 1:
        return _learning(seen.entries, "")
    return tuple(
        Fold(f"learning{place}", group, _learning(entries, f"group{place}-"), is_open=place == 0)
        for place, (group, entries) in enumerate(seen.groups.items())
    )


def _learning(entries: Sequence[Entry], prefix: str) -> tuple[Block, ...]:
    """Return test error, validation error, NLL, training error and loss of every network by epoch."""

    def chart(id_: str, title: str, axis: Axis, measure: Measure, words: str = "") -> Chart:
        return Chart(f"{prefix}{id_}", title, EPOCH, axis, tuple(by_network(entries, measure)), words)

    bands = RANGES if any(len(entry.runs) > 1 for entry in entries) else ""
    charts = [chart("error", "Test error", ERROR, measured("test", "top1_error"), bands)]
    if any(entry.recipe.data.validation for entry in entries):
        words = "Measured on held-out training images; checkpoints.best is selected by it."
        axis = Axis("validation error", "%")
        charts.append(chart("validation", "Validation error", axis, measured("validation", "top1_error"), words))
    charts.append(chart("nll", "Test NLL", Axis("NLL", "nats"), measured("test", "nll")))
    charts.append(chart("train-error", "Training error", Axis("train error", "%"), measured("train_error")))
    words = "Labels and transfers together, weighted as in training."
    charts.append(chart("loss", "Training loss", Axis("training loss", "nats"), network_loss, words))
    return tuple(chart if chart.series else missing_note(chart) for chart in charts)


def calibration_error(seen: Overview) -> Chart | Words:
    """Return the calibration error by epoch."""
    words = "The mean distance between confidence and accuracy over 15 bins (ECE)."
    series = tuple(by_network(seen.entries, measured("test", "ece")))
    chart = Chart("ece", "Calibration error", EPOCH, Axis("ECE", "%"), series, words)
    return chart if series else missing_note(chart)


def measured(*keys: str) -> Measure:
    """Return the measure of a network's own classifier at these keys of the journal, as in ``("test", "nll")``."""
    first, *others = keys
    return lambda run, network: run.curve(first, f"{network}/final", *others)


def missing_note(chart: Chart) -> Words:
    return Words(f"{chart.title}: not shown, because no evaluation of these runs recorded it.", missing=True)


def network_loss(run: SeenRun, network: str) -> Mapping[int, float]:
    """Return the sum of the terms whose learner is a classifier of the network."""
    edges = [edge for edge in run.recipe.graph.weights if edge.partition("->")[2].startswith(f"{network}/")]
    curves = [run.curve("terms", edge) for edge in edges]
    epochs = set.intersection(*map(set, curves)) if curves else set()
    return {epoch: sum(curve[epoch] for curve in curves) for epoch in sorted(epochs)}


def classifiers(entry: Entry, prefix: str) -> Chart:
    """Return the test error of every classifier of an entry, auxiliary ones included, and of the ensemble."""
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
    words = "Auxiliary classifiers and the ensemble are evaluated less often. Colours show exits, dashes networks."
    return Chart(f"{prefix}-classifiers", "Test error by classifier", EPOCH, ERROR, _present(lines), words)


def divergences(entry: Entry, prefix: str) -> Chart | None:
    """Return the unweighted divergence of each transfer; None for a method without transfers."""
    graph = entry.recipe.graph
    if not graph.transfers:
        return None
    factor = graph.temperature**2 if graph.t_squared else 1.0
    every, epochs = entry.recipe.evaluation.every_epochs, entry.recipe.length.epochs

    @cache
    def weights(epoch: int) -> dict[str, float]:
        """The mean weights since the evaluation before, at ten moments of a ramp."""
        if graph.ramp is None:
            return graph.weights
        moments = [graph.at((epoch - every * (part + 0.5) / 10) / epochs).weights for part in range(10)]
        return {name: sum(moment.get(name, 0.0) for moment in moments) / 10 for name in graph.weights}

    networks = list(entry.recipe.networks)
    routes = list(dict.fromkeys(_exits(edge.source, edge.learner) for edge in graph.transfers))
    lines = []
    for edge in graph.transfers:
        curves = [run.curve("terms", edge.name) for run in entry.runs.values()]
        scaled = [
            {epoch: value / (mean * factor) for epoch, value in curve.items() if (mean := weights(epoch)[edge.name])}
            for curve in curves
        ]
        colour = routes.index(_exits(edge.source, edge.learner))
        lines.append(line(edge.name, scaled, colour, dash=networks.index(edge.source.partition("/")[0])))
    words = "Unweighted KL divergence of the learner from its source on training images. Dashes show sources."
    axis = Axis("divergence", "nats")
    return Chart(f"{prefix}-edges", "Divergence of each transfer", EPOCH, axis, _present(lines), words)


def by_kind(entry: Entry, chart: Chart) -> Chart:
    """Return the divergences with one line per kind of transfer, if there are more than a few."""
    if len(chart.series) <= FEW_TRANSFERS:
        return chart
    stages = {classifier.name: classifier.stage for classifier in entry.recipe.graph.classifiers}
    kinds: dict[str, list[Series]] = {}
    for series in chart.series:
        kinds.setdefault(_kind(*map(stages.__getitem__, series.name.split("->"))), []).append(series)
    lines = (
        line(
            f"{kind} ({len(those)})", [{int(x): y for x, y in zip(one.x, one.y, strict=True)} for one in those], colour
        )
        for colour, (kind, those) in enumerate(kinds.items())
    )
    words = "Mean KL divergence of the learners from their sources, unweighted; whiskers span the transfers of a kind."
    title = "Divergence by kind of transfer"
    return replace(
        chart, id=chart.id.replace("-edges", "-kinds"), title=title, series=_present(tuple(lines)), words=words
    )


def _kind(source: int, learner: int) -> str:
    """Return the kind of a transfer between two stages, which count from the output."""
    if source == learner:
        return f"same stage, {'final' if source == 1 else 'auxiliary'}"
    names = ["final" if stage == 1 else "auxiliary" for stage in (source, learner)]
    return " → ".join(names) if 1 in (source, learner) else "auxiliary, other stage"


def shares(entry: Entry, prefix: str) -> Chart:
    """Return the teacher share of each learner over the training; learners with equal shares have one line."""
    graph, epochs = entry.recipe.graph, entry.recipe.length.epochs
    moments = {epochs * part / 100: graph.at(part / 100).shares for part in range(101)}
    learners: dict[tuple[float, ...], list[str]] = {}
    for learner in graph.learners:
        curve = tuple(moment.get(learner.name, 0.0) for moment in moments.values())
        learners.setdefault(curve, []).append(learner.name)
    series = (Series(", ".join(names), tuple(moments), y, colour=k) for k, (y, names) in enumerate(learners.items()))
    words = "How much of what it learns a learner takes from its sources, as the recipe says."
    return Chart(f"{prefix}-shares", "Teacher share over the training", EPOCH, Axis("share"), tuple(series), words)


def _exits(source: str, learner: str) -> tuple[str, str]:
    """Return the exits of source and learner, without the networks."""
    return source.partition("/")[2], learner.partition("/")[2]


def pace(seen: Overview) -> Chart:
    """Return images per second between evaluations, from the timing of each run."""
    lines = [line(entry.name, [_paces(run) for run in entry.runs.values()], entry.index) for entry in seen.entries]
    words = "Training images per second since the previous evaluation, including evaluation and saving."
    return Chart("pace", "Throughput over the training", EPOCH, Axis("images/s"), _present(lines), words)


def _paces(run: SeenRun) -> dict[int, float]:
    """Return the throughput by epoch, without the first interval, which includes warm-up and compilation."""
    marks = sorted(run.clock.items())
    if not run.train_images:
        return {}
    return {
        later: run.train_images * (later - earlier) / (then - now)
        for (earlier, now), (later, then) in pairwise(marks)
        if then > now
    }


def error_against_cost(seen: Overview, cost: Callable[[SeenRun], float | None], id_: str, axis: Axis) -> Chart | None:
    """Return a point per finished run: the mean error of its learning networks against a cost; None for one point."""
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
            series.append(Series(entry.name, x, y, colour=entry.index))
    if sum(len(one.x) for one in series) < 2:
        return None
    title = f"Test error against {axis.title}"
    words = "One point per finished run: the mean error of its networks at the last epoch."
    return Chart(id_, title, axis, ERROR, tuple(series), words, points=True)


def _present(lines: Sequence[Series | None]) -> tuple[Series, ...]:
    return tuple(series for series in lines if series is not None)
