"""A study is a value: rows of recipes, what the paper says about each, and the differences worth stating."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from codistill.errors import unknown
from codistill.networks.families import parse
from codistill.recipes import Recipe, apply, difference
from codistill.recipes.changes import key_of
from codistill.studies.statistics import Summary

PaperNumbers = Mapping[tuple[str, str], Summary]
"""By network and metric, as in ``{("a", "top1_error"): Summary(5, 18.72, 0.24)}``."""

MOST_SEEDS = 1_000  # beyond any budget, and few enough to be planned in a moment

# What a row may be about. Where a study's rows differ in these, they are not for an override to change.
SUBJECTS = (
    "method", "networks", "heads", "weights", "edges", "temperature", "t_squared", "data", "augment", "start",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One recipe over several seeds: a line of the table, ``label`` within its ``group``."""

    group: str
    label: str
    recipe: Recipe
    paper: PaperNumbers = field(default_factory=dict)
    longer: float = 1.0
    """Trains so many times as long as the recipe says, whatever an override makes of its length."""
    teachers: Mapping[str, tuple["Row", str]] = field(default_factory=dict)
    """Networks that start from another row's: ``{"a": (row, "a")}`` takes the weights of its run of the same seed."""

    @property
    def key(self) -> str:
        return f"{slug(self.group)}/{slug(self.label)}"

    def resolved(self, overrides: Sequence[str] = ()) -> Recipe:
        recipe = apply(self.recipe, [change for override in overrides for change in self._changes(override)])
        if recipe.networks.keys() != self.recipe.networks.keys():
            raise ValueError(
                f"networks: {self.group}, {self.label} has {', '.join(self.recipe.networks)}, and an override makes it "
                f"{', '.join(recipe.networks)}; replace one, as in networks.a=wrn-16-2, or use codistill train"
            )
        if self.longer == 1:
            return recipe
        epochs = round(self.longer * recipe.length.epochs)
        return recipe.replace(length={**recipe.length.model_dump(), "epochs": epochs})

    def _changes(self, override: str) -> list[str]:
        """``wrn-28-10=wrn-16-4`` replaces that network wherever a row has it, as in ``networks.a=wrn-16-4``."""
        key, equals, other = override.partition("=")
        if not (equals and is_network(key.strip())):
            return [override]
        return [f"networks.{name}={other}" for name, network in self.recipe.networks.items() if network == key.strip()]


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    rows: tuple[Row, ...]
    contrasts: tuple[tuple[str, str], ...]
    """Labels whose errors are subtracted, the first minus the second, in every group that has both."""
    seeds: int = 5
    first_seed: int = 1
    """Where a setting was chosen by results, its study begins with a seed that had no say in it."""
    metrics: tuple[str, ...] = ("top1_error",)
    notes: tuple[str, ...] = ()
    shows_cost: bool = False

    def __post_init__(self) -> None:
        keys = [row.key for row in self.rows]
        labels = {row.label for row in self.rows}
        if len(set(keys)) != len(keys):
            raise ValueError(f"study {self.name}: two rows have the same key: {', '.join(keys)}")
        for label in (label for contrast in self.contrasts for label in contrast):
            if label not in labels:
                raise unknown(f"row of study {self.name}", label, sorted(labels))

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.group for row in self.rows))

    def seed_range(self, count: int | None = None) -> range:
        """``count`` seeds, the study's own number of them if None, from its first on."""
        wanted = self.seeds if count is None else count
        if wanted < 1:
            raise ValueError(f"--seeds {wanted}: a study needs at least one seed; two or more give a spread")
        if wanted > MOST_SEEDS:
            raise ValueError(f"--seeds {wanted}: at most {MOST_SEEDS:,}; it is how many seeds, not which")
        return range(self.first_seed, self.first_seed + wanted)

    def only(self, methods: Iterable[str] | None = None, rows: Iterable[str] | None = None) -> "Study":
        """The study with some of its rows: those of the methods named, and of the groups or keys named."""
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
            raise ValueError(
                f"study {self.name}: no row is of both the methods and the rows named; leave one of them out"
            )
        return self.with_rows(chosen)

    def with_rows(self, rows: tuple[Row, ...]) -> "Study":
        """Some of its rows; where they are of one group among several, the title says of which."""
        labels, groups = {row.label for row in rows}, {row.group for row in rows}
        title = f"{self.title}: {rows[0].group}" if len(groups) == 1 < len(self.groups) else self.title
        contrasts = tuple(contrast for contrast in self.contrasts if labels.issuperset(contrast))
        return replace(self, title=title, rows=rows, contrasts=contrasts)

    def check_overrides(self, overrides: Sequence[str]) -> None:
        """Refuse changes to what the study itself sets: its table would not say what it seems to say."""
        for typed in (override.partition("=")[0].strip() for override in overrides):
            if typed == "seed":
                raise ValueError(
                    f"seed: study {self.name} gives its runs the seeds {self.first_seed}, {self.first_seed + 1}, …; "
                    "choose how many with --seeds N"
                )
            if is_network(typed) and typed not in self.networks:
                raise unknown(f"network of study {self.name}", typed, self.networks)
            for key in self._set_by_rows():
                if typed == key or typed.startswith(f"{key}.") or key.startswith(f"{typed}."):
                    raise ValueError(
                        f"{typed}: the rows of study {self.name} set {key} themselves; {self._advice(key)}"
                    )

    @property
    def networks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(network for row in self.rows for network in row.recipe.networks.values()))

    def _set_by_rows(self) -> list[str]:
        first, *others = (row.recipe for row in self.rows)
        differing = [key_of(line) for recipe in others for line in difference(first, recipe)]
        return [key for key in dict.fromkeys(["method", *differing]) if key.partition(".")[0] in SUBJECTS]

    def _advice(self, key: str) -> str:
        example = self.rows[-1]
        if key == "method":
            return f"choose among them, as in --methods {example.recipe.method}, or use codistill train for one run"
        choose = f"choose among them, as in --rows {example.key}, or use codistill train for one run"
        if key.startswith("networks"):
            return f"replace one in every row, as in {self.networks[0]}=wrn-16-2, or {choose}"
        return choose


def slug(text: str) -> str:
    """As typed and as a file is named: ``WRN-28-10(+) & same`` is ``wrn-28-10-plus-same``."""
    return re.sub("[^a-z0-9.]+", "-", text.lower().replace("+", " plus ")).strip("-")


def is_network(text: str) -> bool:
    """Whether this is the name of a network that can be built, as in ``wrn-28-10``."""
    try:
        parse(text)
    except ValueError:
        return False
    return True
