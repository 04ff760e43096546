"""The tables in results/ follow from the published runs beside them."""

import shutil
from pathlib import Path

import pytest

from codistill.runs.result import read_result
from codistill.studies import catalogue
from codistill.studies.published import rebuild_tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.mark.parametrize("folder", [RESULTS, *(tables.parent for tables in RESULTS.glob("*/tables"))])
def test_published_tables_are_made_from_published_runs(folder: Path, tmp_path: Path) -> None:
    runs = sorted(folder.glob("*.json"))
    assert len(runs) >= 2
    for run in runs:
        shutil.copy(run, tmp_path)
    made = {path.name: path.read_bytes() for path in rebuild_tables(tmp_path)}
    assert folder != RESULTS or {"demo.md", "wrn-28-4-twins.md", "wrn-28-4-twins.curves.svg"} <= made.keys()
    assert made == {path.name: path.read_bytes() for path in (folder / "tables").iterdir()}


def test_the_demonstration_is_published_with_the_seeds_that_it_shows() -> None:
    study = catalogue.get("demo")
    published = [read_result(path).recipe for path in RESULTS.glob("fashion-*.json")]
    shown = [row.resolve().replace(seed=seed) for row in study.rows for seed in study.seed_range()]
    assert len(published) == len(shown) == 9
    for recipe in published:
        assert recipe.model_copy(update={"runtime": shown[0].runtime}) in shown
