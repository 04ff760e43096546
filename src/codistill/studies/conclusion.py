"""What a study's runs say in one sentence: who is ahead, by how much, whether that is decided, and at what cost."""

from collections.abc import Callable, Mapping, Sequence

from codistill.runs.result import Result
from codistill.studies.analysis import StudyTables
from codistill.studies.costs import training_flops
from codistill.studies.differences import CONCLUSIVE_SCALE, INCONCLUSIVE, NOTHING_SHARED, Comparison
from codistill.studies.statistics import ALPHA, Interval, mean, summarise
from codistill.studies.study import StudyRow
from codistill.studies.tables import format_cell

DECIDED = ("lower error", "higher error")
ALIKE = 1.25  # the largest ratio between the times of runs of one row that is noise


def conclude(made: StudyTables, unfinished: int = 0, *, count_flops: bool = True) -> str:
    """Return the sentence about the finished runs; counting FLOPs imports torch."""
    finished = sum(map(len, made.results.values()))
    if not finished:
        return f"None of {unfinished} runs is finished." if unfinished > 1 else "The run is not finished."
    sentence = _compared(made, count_flops) if len(made.study.rows) > 1 else _alone(made)
    so_far = f"{unfinished} of {finished + unfinished} runs not finished; so far: " if unfinished else ""
    if so_far or not sentence.startswith(("the ", "nothing ")):  # a row's name stays as it is
        return so_far + sentence
    return sentence[0].upper() + sentence[1:]


def latest_errors(curves: Mapping[str, Mapping[int, float]]) -> str:
    """Return the last error of every network, and where its lowest was; ``curves`` are errors by network and epoch."""

    def words(name: str, curve: Mapping[int, float]) -> str:
        last, best = max(curve), min(curve, key=lambda epoch: (curve[epoch], epoch))
        where = "its lowest" if curve[best] == curve[last] else f"lowest: {curve[best]:.2f} % after epoch {best}"
        return f"{name} {curve[last]:.2f} % ({where})"

    return ", ".join(words(name, curve) for name, curve in curves.items() if curve)


def _alone(made: StudyTables) -> str:
    """Return the errors of the only row."""
    (row,) = made.study.rows
    runs = list(made.results[row.key].values())
    networks = row.recipe.graph.learning_networks
    if len(runs) == 1:
        curves = {name: {epoch: by[name] for epoch, by in runs[0].curve.items()} for name in networks}
        return f"the test error after {runs[0].recipe.length.epochs} epochs, with one seed: {latest_errors(curves)}."
    errors = (f"{name} {summarise(run.errors[name]['top1_error'] for run in runs)} %" for name in networks)
    return f"the test error of {row.label} at the last epoch, mean(std) over {len(runs)} seeds: {', '.join(errors)}."


def _compared(made: StudyTables, count_flops: bool) -> str:
    whole = [one for one in made.compared if one.is_whole]
    asked = [one for one in whole if one.is_primary] or whole
    formed = sorted((one for one in asked if one.difference), key=lambda one: one.points)
    if not formed:
        return f"nothing is compared: {_why_not(asked)}."
    rows = made.study.rows
    best = min((row for row in rows if made.results[row.key]), key=lambda row: _error(made, row))
    one, begin, where, also = formed[-1], "", "", ""
    if len(made.study.groups) > 1:
        where = f" ({one.rows[0].group})"
    elif len(formed) > 1 and not one.is_primary:  # the row with the lowest error, and the one that is closest to it
        one = next((one for one in formed if best in one.rows), one)
        begin = f"{best.label} has the lowest error of {len(rows)} rows: "
    elif best not in one.rows:
        also = f" {best.label} has the lowest mean error of the {len(rows)} rows, {_error(made, best):.2f} %."
    if len(formed) > 1 and not begin:
        kind = "primary differences" if one.is_primary else "differences"
        begin = f"{sum(one.verdict in DECIDED for one in formed)} of {len(formed)} {kind} are decided; the largest: "
    first, second = one.rows if one.difference and one.difference.mean <= 0 else reversed(one.rows)
    costs = _costs(made, first, second, count_flops)
    return f"{begin}{_verdict(one, first.label, second.label)}{where}{costs}.{also}"


def _why_not(asked: Sequence[Comparison]) -> str:
    if not asked:
        return "no two rows were tested on the same images"
    if all(one.verdict == NOTHING_SHARED for one in asked):
        return "the rows train no network of the same name"
    return "no two rows have finished runs of the same seed"


def _verdict(one: Comparison, first: str, second: str) -> str:
    """Return by how much the first is ahead, whether that is decided, and by which rule."""
    found = one.difference
    assert found is not None
    points = format_cell(abs(found.mean))
    gap = f"the test error of {first} is {points} points below that of {second}"
    if not found.mean:
        gap = f"the test errors of {first} and {second} are the same"
    if found.interval is None:
        return f"{gap}, but one seed allows no verdict (n = 1)"
    interval = found.interval if found.mean > 0 else Interval(-found.interval.high, -found.interval.low)
    facts = f"95 % interval {interval}, n = {found.n}"
    if one.verdict in DECIDED:
        return f"{first} is ahead of {second} by {points} points ({facts}): decided, p = {format_cell(one.p)} < {ALPHA}"
    if one.verdict == INCONCLUSIVE:
        return f"{gap} ({facts}), but less than {CONCLUSIVE_SCALE} of the full length allows no verdict"
    why = "the interval contains 0"
    if interval.low > 0:
        why = f"p = {format_cell(one.p)} after Holm's correction is not below {ALPHA}"
    return f"{gap} ({facts}), which is not decided: {why if one.p else 'no spread over seeds'}"


def _costs(made: StudyTables, first: StudyRow, second: StudyRow, count_flops: bool) -> str:
    """Return what the first row's training costs in terms of the second's, where that is known."""
    pair = [list(made.results[row.key].values()) for row in (first, second)]
    known = []
    costs: dict[str, Callable[[Result], float]] = {"FLOPs": _flops} if count_flops else {}
    if len({run.device for runs in pair for run in runs}) == 1 and all(map(_took_alike, pair)):
        costs = {"time": lambda run: run.elapsed_s, **costs}
    for what, cost in costs.items():
        ours, theirs = (mean([cost(run) for run in runs]) for runs in pair)
        if ours and theirs:
            known.append(f"{ours / theirs:.2f} times the {what}")
    return f"; training {first.label} takes {' and '.join(known)} of {second.label}" if known else ""


def _took_alike(runs: Sequence[Result]) -> bool:
    """Whether the runs of a row took about the same time: if not, some shared the device, and time is not a cost."""
    seconds = [run.elapsed_s for run in runs]
    return max(seconds, default=0) <= ALIKE * min(seconds, default=0)


def _flops(run: Result) -> float:
    """Return the FLOPs of a training; 0 if they cannot be counted here, as without the library of a network."""
    try:
        return training_flops(run.recipe) or 0
    except ValueError:
        return 0


def _error(made: StudyTables, row: StudyRow) -> float:
    return mean([run.mean_error(row.recipe.graph.learning_networks) for run in made.results[row.key].values()]) or 0.0
