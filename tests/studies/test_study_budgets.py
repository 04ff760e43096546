"""The studies of trainings as one has them: settings by hand, and that runs of one never fill another's table."""

from pathlib import Path

import pytest

from codistill import recipes
from codistill.studies import catalogue
from codistill.studies.budgets import FIRST_SEED, LONGER, SMOOTHED
from codistill.studies.plan import run_name
from codistill.studies.published import publish, rebuild_tables
from codistill.transfer import methods
from support.synthetic import fill

# Data, images to train on, share of wrong labels, networks, epochs, side in pixels, seeds.
SETTINGS = {
    "budget-30-epochs": ("cifar100", None, 0.0, ("wrn-16-2",) * 2, 30, 32, 5),
    "budget-100-epochs": ("cifar100", None, 0.0, ("wrn-16-2",) * 2, 100, 32, 3),
    "budget-own-images": ("folder", None, 0.0, ("timm:resnet18",) * 2, 20, 64, 5),
    "budget-unequal": ("folder", None, 0.0, ("timm:resnet18", "timm:efficientnet_b0"), 20, 64, 3),
    "budget-few-images": ("cifar100", 5_000, 0.0, ("wrn-16-2",) * 2, 100, 32, 5),
    "budget-wrong-labels": ("cifar10", None, 0.5, ("wrn-16-2",) * 2, 30, 32, 5),
    "budget-embedded": ("fashion", 1_500, 0.0, ("wrn-10-1",) * 2, 40, 14, 5),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_differ_in_their_method_alone_but_for_the_two_that_say_so(name: str) -> None:
    study = catalogue.get(name)
    rows = {row.label: row.resolve() for row in study.rows}
    data, images, wrong, networks, epochs, side, seeds = SETTINGS[name]
    for label, recipe in rows.items():
        assert (recipe.data.name, recipe.data.train_limit, recipe.data.wrong_labels) == (data, images, wrong)
        assert (tuple(recipe.networks.values()), recipe.data.side) == (networks, side)
        assert (recipe.length.epochs, recipe.length.paper_epochs) == (epochs * (2 if label == LONGER else 1), None)
        differences = recipes.difference(rows["independent"], recipe)
        assert [line.partition(":")[0] for line in differences] == {
            "independent": [],
            SMOOTHED: ["label_smoothing"],
            LONGER: ["length.epochs"],
        }.get(label, ["method"])
    assert [recipe.method for recipe in rows.values()][3:6] == ["dml", "dcm", "mutual"]
    assert study.primary == (("mutual", "independent"),)
    assert (study.first_seed, study.seeds) == (FIRST_SEED, seeds)
    assert study.shows_cost


def test_share_and_scale_are_what_the_rows_say_on_seeds_of_their_own() -> None:
    study = catalogue.get("share-scale")
    seen = {}
    for row in study.rows:
        graph = row.recipe.graph
        ends = [(set(at.shares.values()), set(at.scales.values())) for at in (graph.at(0.0), graph.at(1.0))]
        seen[row.label] = [(round(share, 9), round(scale, 9)) for (share,), (scale,) in ends]
    assert seen == {
        "independent": [(0, 1)] * 2,
        "DS": [(0, 1)] * 2,
        "DML": [(0.5, 2)] * 2,
        "DCM": [(0.75, 4)] * 2,
        "share 1/2, scale 2": [(0.5, 2)] * 2,
        "share 1/2, scale 4": [(0.5, 4)] * 2,
        "share 3/4, scale 2": [(0.75, 2)] * 2,
        "share 1/2, scale 2, ramped": [(0, 1), (0.5, 2)],
        "share 1/2, ramped at scale 2": [(0, 2), (0.5, 2)],
        "DCM, ramped": [(0, 1), (0.75, 4)],
    }
    assert max(study.seed_range("10")) < FIRST_SEED
    budget = {row.label: row.resolve() for row in catalogue.get("budget-30-epochs").rows}
    assert {run_name(row.resolve()) for row in study.rows} & set(map(run_name, budget.values())), "one setting"
    edges = [row.recipe.graph.transfers for row in study.rows if row.recipe.transfer.share is not None]
    pairs = [{(edge.source, edge.learner) for edge in of_row} for of_row in edges]
    assert pairs == [{(e.source, e.learner) for e in methods.dcm(study.rows[0].recipe.outline).transfers}] * len(edges)


def test_runs_of_one_budget_never_fill_the_table_of_another(tmp_path: Path) -> None:
    """They differ in the length and the number of images, which a study with a length of the paper may shorten."""
    for row in catalogue.get("budget-30-epochs").rows:
        recipe = row.resolve().replace(seed=FIRST_SEED)
        fill(tmp_path / "runs" / run_name(recipe), recipe)
        publish(tmp_path / "runs" / run_name(recipe), tmp_path / "results")
    written = rebuild_tables(tmp_path / "results")
    # Of share-scale it has independent, DS, DML and DCM.
    assert {path.name for path in written if path.suffix == ".md"} == {"budget-30-epochs.md", "share-scale.md"}
    table = (tmp_path / "results" / "tables" / "budget-30-epochs.md").read_text()
    assert "| row | n | a | b | minutes a run | PFLOP a run |" in table
    assert "| mutual | 1 |" in table
    assert "claims no order" not in table
