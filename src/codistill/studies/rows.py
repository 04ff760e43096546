"""How rows are made of recipes: labels as the paper writes them, and its numbers beside those that it has."""

from collections.abc import Mapping

from codistill import recipes
from codistill.networks.families import title
from codistill.recipes import Recipe
from codistill.studies import paper
from codistill.studies.study import Row

LABELS = {
    "independent": "independent",
    "ds": "DS",
    "kd": "KD",
    "dml": "DML",
    "dml_ds": "DML + DS",
    "dcm_1": "DCM-1",
    "dcm_2": "DCM-2",
    "dcm": "DCM",
    "dks": "DKS",
    "complete": "complete",
}
THREE = ("independent", "dml", "dcm")
THREE_CONTRASTS = (("DML", "independent"), ("DCM", "independent"), ("DCM", "DML"))


def group(recipe: Recipe) -> str:
    """``WRN-28-10 & same``, ``WRN-28-10 & MobileNet``: the networks as the paper writes a pair."""
    first, *others = recipe.networks.values()
    return " & ".join([title(first), *("same" if other == first else title(other) for other in others)])


def method_rows(
    recipe: Recipe,
    methods: tuple[str, ...],
    cells: Mapping[str, str] | None = None,
    *,
    of: str | None = None,
    runs: int | None = paper.RUNS,
) -> tuple[Row, ...]:
    """One row per method on the same recipe, the paper's cells beside those that have one."""
    return tuple(
        Row(
            of or group(recipe),
            LABELS[method],
            recipe.replace(method=method),
            paper.numbers((cells or {}).get(method, ""), runs),
        )
        for method in methods
    )


def pair_rows(cells: Mapping[str, Mapping[str, str]], runs: int | None = paper.RUNS) -> tuple[Row, ...]:
    return tuple(row for name, pair in cells.items() for row in method_rows(recipes.get(name), THREE, pair, runs=runs))


def noise_rows(recipe: Recipe, cells: Mapping[str, str] | None = None) -> tuple[Row, ...]:
    return method_rows(recipe, THREE, cells, of=f"{recipe.data.wrong_labels:.0%} wrong")
