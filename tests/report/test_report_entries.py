"""Runs in order: rows of a study that is known, otherwise rows of their own, compared seed by seed."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from codistill import recipes
from codistill.report import sections
from codistill.report.overview import known_study
from codistill.studies import catalogue
from support.made_up import METHODS, SEEDS, look, made_up_error, made_up_run, quick


def test_runs_of_a_study_are_its_rows_in_its_order(study: Path) -> None:
    seen = look(study)
    assert (seen.study.name, seen.known) == ("demo", True)
    assert [entry.row.label for entry in seen.entries] == ["independent", "DML", "DCM"]
    assert [list(entry.runs) for entry in seen.entries] == [list(SEEDS)] * 3
    assert any("length.epochs: 40 → 12" in note for note in seen.tables().errors.notes)


def test_differences_are_paired_by_seed(study: Path) -> None:
    """Against scipy's paired t interval, from the made-up errors themselves."""
    errors = {
        method: np.array(
            [[made_up_error(quick(method, seed), f"{net}/final", 12) for net in "ab"] for seed in SEEDS]
        ).mean(axis=1)
        for method in METHODS
    }
    chart = sections.differences(look(study).tables().compared)
    assert chart.x.labels == ("DML − independent", "DCM − independent", "DCM − DML")
    for place, (ours, theirs) in enumerate([("dml", "independent"), ("dcm", "independent"), ("dcm", "dml")]):
        gaps = errors[ours] - errors[theirs]
        low, high = stats.t.interval(0.95, 2, gaps.mean(), stats.sem(gaps))
        assert low < high - 0.1
        (series,) = chart.series
        found = series.y[place], series.low[place], series.high[place]
        np.testing.assert_allclose(found, (gaps.mean(), low, high), atol=1e-6)


def test_every_seed_is_a_point_and_the_paper_has_its_own(tmp_path: Path) -> None:
    for seed in (1, 2):
        rarely = ["evaluation.every_epochs=50", "evaluation.all_every_epochs=50"]
        made_up_run(tmp_path / f"run-{seed}", recipes.get("cifar100/wrn-28-10-twins", [f"seed={seed}", *rarely]))
    chart = sections.outcome(look(tmp_path))
    assert {series.name: len(series.y) for series in chart.series} == {"a": 2, "a, paper": 1, "b": 2, "b, paper": 1}
    paper = {series.name: series.y for series in chart.series if "paper" in series.name}
    assert paper == {"a, paper": (16.61,), "b, paper": (16.65,)}
    assert len(chart.table().rows) == 6  # no seed is lost in the text form


def test_runs_that_no_study_has_get_labels_that_tell_them_apart(tmp_path: Path) -> None:
    made_up_run(tmp_path / "one", quick(batch_size=32))
    made_up_run(tmp_path / "two", quick(batch_size=128))
    made_up_run(tmp_path / "three", quick("dml", batch_size=32))
    seen = look(tmp_path / "one", tmp_path / "two", tmp_path / "three")
    assert not seen.known
    assert [entry.row.label for entry in seen.entries] == ["DCM", "DCM, batch_size=128", "DML"]
    notes = " ".join(seen.tables().errors.notes)
    assert "DCM, batch_size=128 differs from DCM in batch_size: 32 → 128" in notes


def test_the_same_recipe_and_seed_twice_are_two_rows(tmp_path: Path) -> None:
    places = [made_up_run(tmp_path / name / "runs" / "same", quick()) for name in ("old", "new")]
    seen = look(tmp_path / "old", tmp_path / "new")
    assert [entry.row.label for entry in seen.entries] == [f"DCM, {place}" for place in places]
    assert seen.tables().differences.rows[0][2:4] == (1, 0.0)


def test_rows_tested_on_different_images_are_not_compared(tmp_path: Path) -> None:
    other = {**quick().data.model_dump(), "image_size": 28}
    made_up_run(tmp_path / "a", quick())
    made_up_run(tmp_path / "b", quick(data=other))
    seen = look(tmp_path)
    assert seen.study.groups == ("fashion at 14×14, 2000 images", "fashion at 28×28, 2000 images")
    tables = seen.tables()
    assert tables.differences.rows == ()
    assert tables.errors.columns[0] == "tested on"
    assert [entry.name for entry in seen.entries] == [f"{group}, DCM" for group in seen.study.groups]


def test_what_is_not_compared_need_not_be_alike(tmp_path: Path) -> None:
    """Seeds and lengths matter where rows are compared."""
    other, whole = {**quick().data.model_dump(), "image_size": 28}, {"epochs": 12, "paper_epochs": 12}
    cut = {"epochs": 12, "paper_epochs": 24}
    made_up_run(tmp_path / "a", quick())
    made_up_run(tmp_path / "b", quick(seed=2, data=other, length=whole))
    warned = ("Not every row has the same seeds", "different shares of their full length")
    for words in warned:
        assert not any(words in note for note in look(tmp_path).tables().errors.notes)
    made_up_run(tmp_path / "c", quick("dml", seed=3, data=other, length=cut))
    for words in warned:
        assert any(words in note for note in look(tmp_path).tables().errors.notes)


def test_unequal_seeds_are_named_and_only_shared_ones_pair(tmp_path: Path) -> None:
    for method, seeds in (("dml", (1, 2)), ("dcm", (2, 3))):
        for seed in seeds:
            made_up_run(tmp_path / f"{method}-{seed}", quick(method, seed, batch_size=32))
    tables = look(tmp_path).tables()
    assert any("Not every row has the same seeds" in note for note in tables.errors.notes)
    assert {row[2] for row in tables.differences.rows} == {1}


def test_a_single_contrast_is_the_primary_one_and_of_several_none_is(tmp_path: Path) -> None:
    for method in ("dml", "dcm"):
        made_up_run(tmp_path / method, quick(method, batch_size=32))
    assert look(tmp_path).study.primary == look(tmp_path).study.contrasts == (("DCM", "DML"),)
    made_up_run(tmp_path / "ds", quick("ds", batch_size=32))
    three = look(tmp_path).study
    assert (len(three.contrasts), three.primary) == (3, ())


def test_unfinished_runs_do_not_count_as_results(tmp_path: Path) -> None:
    made_up_run(tmp_path / "done", quick(seed=1))
    made_up_run(tmp_path / "going", quick(seed=2), epochs=4)
    seen = look(tmp_path)
    assert [run.name for run in seen.unfinished] == ["going"]
    assert seen.tables().errors.rows[0][1] == 1  # n


COMMANDS = [
    (["method=dml", "seed=4"], "codistill train quickstart method=dml seed=4"),
    (["data.train_limit=100"], "codistill train quickstart data.train_limit=100"),
    (["networks.c=wrn-10-1"], "codistill train quickstart networks.c=wrn-10-1"),
]


@pytest.mark.parametrize(("changes", "command"), COMMANDS)
def test_the_command_gives_the_recipe_back(changes: list[str], command: str) -> None:
    recipe = recipes.get("quickstart", changes)
    assert sections.command(recipe) == command
    assert recipes.get("quickstart", command.split()[3:]) == recipe


def test_a_recipe_of_no_catalogue_is_repeated_from_its_file() -> None:
    assert (
        sections.command(quick(name="my own"))
        == "codistill train recipe.yaml  # the recipe 'my own' below, saved as a file"
    )


def test_every_study_of_the_catalogue_is_recognised_from_its_rows() -> None:
    """Where two studies have the same rows, either tells the same of them."""
    assert len(catalogue.NAMES) >= 15
    for name in catalogue.NAMES:
        recipes_of = [row.resolve() for row in catalogue.get(name).rows]
        found = known_study(recipes_of)
        assert found is not None, name
        assert [row.resolve() for row in found.rows] == recipes_of


def test_networks_of_other_libraries_are_named_as_they_are(tmp_path: Path) -> None:
    recipe = quick(networks={"a": "timm:resnet18", "b": "timm:resnet18", "c": "wrn-10-1"}, method="dml")
    seen = look(made_up_run(tmp_path / "run", recipe, epochs=2))
    assert seen.study.title == "2 × timm:resnet18 and WRN-10-1"


def test_runs_of_a_folder_are_in_the_order_of_their_methods(tmp_path: Path) -> None:
    """By name DCM would come first, and all others would be compared with it."""
    for method in METHODS:
        made_up_run(tmp_path / method, quick(method, batch_size=32))
    seen = look(tmp_path)
    assert not seen.known
    assert [entry.row.label for entry in seen.entries] == ["independent", "DML", "DCM"]
    assert seen.study.contrasts == (("DML", "independent"), ("DCM", "independent"), ("DCM", "DML"))
    named = look(tmp_path / "dcm", tmp_path / "independent")
    assert [entry.row.label for entry in named.entries] == ["DCM", "independent"]
