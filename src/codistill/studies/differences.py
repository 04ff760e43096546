"""A study's table of differences: which test, which p-values, and what may be said of them.

A study is for its primary contrasts, which it names before it runs. The more differences a table has, the likelier one
of them looks decided by chance: so p-values are corrected for the number of the primary ones, and apart from them for
that of all others.

The test is Welch's unless the seed draws the training data too. What else two runs of one seed share (initial weights,
the order of images) hardly makes their errors go together, and pairs have half of the degrees of freedom.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from codistill.recipes import Recipe
from codistill.runs.result import Result
from codistill.studies.statistics import ALPHA, Difference, compare, holm
from codistill.studies.study import Results, Study, StudyRow
from codistill.studies.tables import Cell, Table

# Below this fraction of the paper's length the methods do not differ reliably: they are regularisers.
CONCLUSIVE_SCALE = 0.5
# With two seeds a paired t has one degree of freedom, and an interval of 12.7 standard errors.
PAIRED_FROM = 3
NOTHING_SHARED, INCONCLUSIVE = "no network in common", "inconclusive"


@dataclass(frozen=True)
class Comparison:
    """A row of the table of differences: one contrast, of the mean over networks or of one of them."""

    rows: tuple[StudyRow, StudyRow]
    title: tuple[str, ...]
    of: str | None = None
    is_whole: bool = True
    """Whether it is of all networks that both rows have."""
    is_primary: bool = False
    is_paired: bool = False
    difference: Difference | None = None
    p: float | None = None
    """Corrected by Holm's method."""
    verdict: str = ""

    @property
    def points(self) -> float:
        """How far the two rows are apart."""
        return abs(self.difference.mean) if self.difference else 0.0

    def cells(self) -> tuple[Cell, ...]:
        found, primary = self.difference, "primary" if self.is_primary else None
        if found is None:
            return (*self.title, self.of, 0, None, None, None, primary, None, self.verdict)
        names = [primary, None if found.interval is None else "paired" if self.is_paired else "Welch"]
        test = ", ".join(filter(None, names)) or None
        ahead = f"{found.ahead} of {found.n}"
        return (*self.title, self.of, found.n, found.mean, found.interval, ahead, test, self.p, self.verdict)


def compare_rows(study: Study, found: Results, scale: float | None) -> tuple[Comparison, ...]:
    """Return the differences of the mean over the networks that both rows have, then of each network.

    ``scale`` is the shortest run's fraction of its full length.
    """
    compared = list(_comparisons(study, found))
    for is_primary in (True, False):
        p_values = {
            place: one.difference.p
            for place, one in enumerate(compared)
            if one.is_primary is is_primary and one.difference and one.difference.p is not None
        }
        for place, p in zip(p_values, holm(list(p_values.values())), strict=True):
            compared[place] = replace(compared[place], p=p)
    return tuple(replace(one, verdict=_verdict(one, scale)) for one in compared)


def differences_table(study: Study, compared: Sequence[Comparison]) -> Table:
    counts = [sum(one.is_primary is primary and one.p is not None for one in compared) for primary in (True, False)]
    group_column = [study.grouped_by] if len(study.groups) > 1 else []
    columns = (*group_column, "difference", "of", "n", "points", "95 % interval", "ahead in", "test", "p", "verdict")
    notes = [
        "Differences of top-1 error in percentage points over the n seeds that both rows have; below 0 the first is "
        "better. Intervals are each by itself, of Welch's t-test, or of Student's paired by seed where the seed also "
        f"draws the training data (wrong labels, a part of the images) and n is at least {PAIRED_FROM}.",
        f"p is corrected by Holm's method: for the number of primary contrasts ({counts[0]}), and apart from them for "
        f"that of all others ({counts[1]}). A verdict needs p below {ALPHA}.",
    ]
    if any(one.verdict == NOTHING_SHARED for one in compared):
        notes.append(
            f"{NOTHING_SHARED.capitalize()}: the two rows train no network of the same name, so no difference can be "
            "formed. Networks are matched by name: train with the same names, as in 'networks={a: …, b: …}'."
        )
    return Table(f"{study.title}: differences", columns, tuple(one.cells() for one in compared), tuple(notes))


def _comparisons(study: Study, found: Results) -> Iterator[Comparison]:
    for group in study.groups:
        by_label = {row.label: row for row in study.rows if row.group == group}
        for contrast in study.contrasts:
            if by_label.keys() >= set(contrast):
                ours, theirs = (by_label[label] for label in contrast)
                title = (*([group] if len(study.groups) > 1 else []), " − ".join(contrast))
                runs, others = found[ours.key], found[theirs.key]
                shared = shared_networks(ours.recipe, theirs.recipe)
                if not shared:
                    yield Comparison((ours, theirs), title)
                is_paired = _is_paired(runs, others)
                for part in [shared, *([name] for name in shared if len(shared) > 1)] if shared else []:
                    first, second = (
                        {seed: run.mean_error(part) for seed, run in by_seed.items()} for by_seed in (runs, others)
                    )
                    of = "mean of " + ", ".join(part) if len(part) > 1 else part[0]
                    whole = part is shared
                    is_primary = whole and contrast in study.primary
                    difference = compare(first, second, paired=is_paired)
                    yield Comparison((ours, theirs), title, of, whole, is_primary, is_paired, difference)


def _is_paired(runs: Mapping[int, Result], others: Mapping[int, Result]) -> bool:
    """Whether enough seeds are shared, and each draws the same training images or wrong labels for both rows."""

    def drawn(run: Result) -> tuple[object, ...]:
        data = run.recipe.data
        return data.wrong_labels, data.train_limit, data.validation

    seeds = [seed for seed in runs if seed in others]
    return len(seeds) >= PAIRED_FROM and all(any(drawn(runs[s])) and drawn(runs[s]) == drawn(others[s]) for s in seeds)


def shared_networks(ours: Recipe, theirs: Recipe) -> list[str]:
    """The networks that both recipes train, by name; a frozen teacher is not trained."""
    return [name for name in ours.graph.learning_networks if name in theirs.graph.learning_networks]


def _verdict(compared: Comparison, scale: float | None) -> str:
    if compared.difference is None:
        return "missing" if compared.of else NOTHING_SHARED
    if scale is not None and scale < CONCLUSIVE_SCALE:
        return INCONCLUSIVE
    if compared.difference.interval is None:
        return "one seed: none"
    if compared.p is None or compared.p >= ALPHA:
        return "not decided"
    return "lower error" if compared.difference.mean < 0 else "higher error"
