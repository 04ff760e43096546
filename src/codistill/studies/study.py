"""A study is a value: rows of recipes, the paper's number for each, and the pairs of rows whose errors are compared."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from codistill.errors import unknown
from codistill.networks.families import parse, title
from codistill.recipes import Recipe, apply, difference
from codistill.recipes.changes import key_of
from codistill.recipes.paper import BETTER, COMMENTED_OUT, RUNS
from codistill.runs.result import Result
from codistill.studies.statistics import Summary

_PRINTED = re.compile(r"(\d+\.\d+)(?:\((\d+\.\d+)\))?")

BETTER_TWIN = "better twin"
"""Stands for a network's name where the paper has one number for two networks; no network can be called so."""

PaperNumbers = Mapping[tuple[str, str], Summary]
"""By network and metric, as in ``{("a", "top1_error"): Summary(5, 18.72, 0.24)}``."""

Results = Mapping[str, Mapping[int, Result]]
"""A study's results by row key and seed."""

MAX_SEEDS = 1_000  # more than anyone can afford to train, and still planned in a moment

# Keys that a study may compare. An override may not change those in which the study's rows differ.
SUBJECTS = (
    "method", "networks", "heads", "weights", "teachers", "edges", "temperature", "t_squared", "transfer", "data",
    "augment", "label_smoothing", "start",
)  # fmt: skip

# Methods and families of networks as the paper writes them.
METHOD_LABELS = {
    "independent": "independent",
    "ds": "DS",
    "kd": "KD",
    "cml": "CML",
    "dml": "DML",
    "dml_ds": "DML + DS",
    "dcm_1": "DCM-1",
    "dcm_2": "DCM-2",
    "dcm": "DCM",
    "dks": "DKS",
    "complete": "complete",
    "mutual": "mutual",
}


@dataclass(frozen=True)
class StudyRow:
    """One recipe over several seeds: a line of the table, named by its ``label`` within its ``group``."""

    group: str
    label: str
    recipe: Recipe
    paper: PaperNumbers = field(default_factory=dict)
    length_factor: float = 1.0
    """Multiplies the recipe's number of epochs, after overrides."""
    teachers: Mapping[str, tuple["StudyRow", str]] = field(default_factory=dict)
    """Networks that start from another row's weights: ``{"a": (row, "a")}`` takes those of its run of the same seed."""

    @property
    def key(self) -> str:
        return f"{slug(self.group)}/{slug(self.label)}"

    def resolve(self, overrides: Sequence[str] = ()) -> Recipe:
        """The recipe with the overrides and the row's own length; raises ValueError if they rename or add networks."""
        recipe = apply(self.recipe, [change for override in overrides for change in self._changes(override)])
        if recipe.networks.keys() != self.recipe.networks.keys():
            raise ValueError(
                f"networks: {self.group}, {self.label} has {', '.join(self.recipe.networks)}, but the override has "
                f"{', '.join(recipe.networks)}; replace one, as in networks.a=wrn-16-2, or use codistill train"
            )
        if self.length_factor == 1:
            return recipe
        epochs = round(self.length_factor * recipe.length.epochs)
        return recipe.replace(length={**recipe.length.model_dump(), "epochs": epochs})

    def _changes(self, override: str) -> list[str]:
        """Expand ``wrn-28-10=wrn-16-4`` to ``networks.a=wrn-16-4`` for every network of the row with that name."""
        key, equals, other = override.partition("=")
        if not (equals and is_network(key.strip())):
            return [override]
        return [f"networks.{name}={other}" for name, network in self.recipe.networks.items() if network == key.strip()]


@dataclass(frozen=True)
class Study:
    """Rows of recipes that are trained with the same seeds and compared in one table."""

    name: str
    title: str
    rows: tuple[StudyRow, ...]
    contrasts: tuple[tuple[str, str], ...]
    """Pairs of labels to compare, the error of the first minus that of the second, in every group that has both."""
    primary: tuple[tuple[str, str], ...] = ()
    """The contrasts that the study is for, named before its runs; verdicts on all others are corrected apart."""
    seeds: int = 5
    first_seed: int = 1
    """A study whose setting was chosen by results begins with a seed that was not used for the choice."""
    metrics: tuple[str, ...] = ("top1_error",)
    notes: tuple[str, ...] = ()
    shows_cost: bool = False
    source: str = ""
    """The file that describes it, as it is typed; a study that ships has none."""
    compared: tuple[str, ...] = ()
    """Keys that the rows of a file set: no override may change them."""
    grouped_by: str = "networks"
    """Heading of the groups in tables."""
    written: str = ""
    """The content of that file if it needs no other file, kept beside the tables."""

    def __post_init__(self) -> None:
        keys = [row.key for row in self.rows]
        labels = {row.label for row in self.rows}
        if len(set(keys)) != len(keys):
            raise ValueError(f"study {self.name}: two rows have the same key: {', '.join(keys)}")
        for label in (label for contrast in self.contrasts for label in contrast):
            if label not in labels:
                raise unknown(f"row of study {self.name}", label, sorted(labels))
        if others := set(self.primary) - set(self.contrasts):
            raise ValueError(f"study {self.name}: {sorted(others)} are primary, but not among its contrasts")

    @property
    def typed(self) -> str:
        """What to type behind ``codistill study``."""
        return self.source or self.name

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.group for row in self.rows))

    def seed_range(self, wanted: str | None = None) -> range:
        """All seeds of the study, or those ``wanted``: the first N, as in ``2``, or from A to B, as in ``4-5``."""
        if wanted is None:
            return range(self.first_seed, self.first_seed + self.seeds)
        given = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", wanted)
        if given is None:
            raise ValueError(f"--seeds {wanted}: give a number of seeds, or the first and the last seed, as in 4-5")
        if given[2] is None:
            first, last = self.first_seed, self.first_seed + int(given[1]) - 1
        else:
            first, last = int(given[1]), int(given[2])
        if first < self.first_seed:
            raise ValueError(f"--seeds {wanted}: the seeds of {self.name} begin at {self.first_seed}")
        if last < first:
            raise ValueError(f"--seeds {wanted}: a study needs at least one seed; two or more give a spread")
        if last - first >= MAX_SEEDS:
            raise ValueError(f"--seeds {wanted}: at most {MAX_SEEDS:,}; a single seed is {last}-{last}")
        return range(first, last + 1)

    def select(self, methods: Iterable[str] | None = None, rows: Iterable[str] | None = None) -> "Study":
        """The study with only the rows of these methods and of these groups or row keys."""
        chosen = self.rows
        if methods is not None:
            wanted = set(methods)
            known = dict.fromkeys(row.recipe.method for row in self.rows)
            for method in sorted(wanted - set(known)):
                raise unknown(f"method in study {self.name}", method, known)
            chosen = tuple(row for row in chosen if row.recipe.method in wanted)
        if rows is not None:
            named = set(rows)
            keys = dict.fromkeys(name for row in self.rows for name in (slug(row.group), row.key))
            for name in sorted(named - set(keys)):
                raise unknown(f"row of study {self.name}", name, keys)
            chosen = tuple(row for row in chosen if named & {slug(row.group), row.key})
        if not chosen:
            raise ValueError(f"study {self.name}: no row matches both --methods and --rows; leave one of them out")
        return self.with_rows(chosen)

    def with_rows(self, rows: tuple[StudyRow, ...]) -> "Study":
        """The study with only these rows; if they are one of several groups, the title names it."""
        labels, groups = {row.label for row in rows}, {row.group for row in rows}
        title = f"{self.title}: {rows[0].group}" if len(groups) == 1 < len(self.groups) else self.title
        contrasts, primary = (
            tuple(contrast for contrast in chosen if labels.issuperset(contrast))
            for chosen in (self.contrasts, self.primary)
        )
        return replace(self, title=title, rows=rows, contrasts=contrasts, primary=primary)

    def check_overrides(self, overrides: Sequence[str]) -> None:
        """Raise ValueError for overrides of what the study's rows compare: the table's labels would be wrong."""
        for typed in (override.partition("=")[0].strip() for override in overrides):
            if typed == "seed":
                raise ValueError(
                    f"seed: study {self.name} sets the seeds itself ({self.first_seed}, {self.first_seed + 1}, …); "
                    "choose how many with --seeds N"
                )
            if is_network(typed) and typed not in self.networks:
                raise unknown(f"network of study {self.name}", typed, self.networks)
            for key in self._compared_keys():
                if typed == key or typed.startswith(f"{key}.") or key.startswith(f"{typed}."):
                    raise ValueError(
                        f"{typed}: the rows of study {self.name} set {key} themselves; {self._advice(key)}"
                    )

    @property
    def networks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(network for row in self.rows for network in row.recipe.networks.values()))

    def _compared_keys(self) -> list[str]:
        first, *others = (row.recipe for row in self.rows)
        differing = [key_of(line) for recipe in others for line in difference(first, recipe)]
        subjects = [key for key in dict.fromkeys(["method", *differing]) if key.partition(".")[0] in SUBJECTS]
        return [*subjects, *(key for key in self.compared if key not in subjects)]

    def _advice(self, key: str) -> str:
        example = self.rows[-1]
        if key == "method":
            return f"choose among them, as in --methods {example.recipe.method}, or use codistill train for one run"
        choose = f"choose among them, as in --rows {example.key}, or use codistill train for one run"
        if key.startswith("networks"):
            return f"replace one in every row, as in {self.networks[0]}=wrn-16-2, or {choose}"
        return choose


def slug(text: str) -> str:
    """The text as it is typed and as files are named: ``WRN-28-10(+) & same`` is ``wrn-28-10-plus-same``."""
    return re.sub("[^a-z0-9.]+", "-", text.lower().replace("+", " plus ")).strip("-")


def is_network(text: str) -> bool:
    """Whether this is the name of a network, as in ``wrn-28-10``."""
    try:
        parse(text)
    except ValueError:
        return False
    return True


def cohort_title(recipe: Recipe) -> str:
    """The networks as the paper writes a pair: ``WRN-28-10 & same``, ``WRN-28-10 & MobileNet``."""
    first, *others = recipe.networks.values()
    return " & ".join([title(first), *("same" if other == first else title(other) for other in others)])


def paper_numbers(text: str, runs: int | None = RUNS) -> PaperNumbers:
    """A cell of the paper's tables: a space between networks, a slash between top-1 and top-5, ``-`` for no number.

    ``better 22.35(0.12)`` is the number of one of two twins, the better one; ``†`` marks what is not in print.
    """
    networks, words = ["a", "b"], text.split()
    if words[:1] == [BETTER]:
        networks, words = [BETTER_TWIN], words[1:]
    return {
        (network, metric): _printed_summary(number, runs, mark)
        for network, word in zip(networks, words, strict=False)
        for cell, mark, _ in [word.partition(COMMENTED_OUT)]
        for metric, number in zip(("top1_error", "top5_error"), cell.split("/"), strict=False)
        if number != "-"
    }


def _printed_summary(text: str, runs: int | None, mark: str) -> Summary:
    match = _PRINTED.fullmatch(text)
    if match is None:
        raise ValueError(f"not a number as the paper prints it: {text!r}; write 18.72 or 18.72(0.24)")
    return Summary(runs, float(match[1]), float(match[2]) if match[2] else None, mark)
