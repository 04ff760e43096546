"""The tables in results/ follow from the published runs beside them."""

import shutil
from pathlib import Path

from codistill.studies.published import tables_from

RESULTS = Path(__file__).parents[2] / "results"


def test_published_tables_are_made_from_published_runs(tmp_path: Path) -> None:
    runs = sorted(RESULTS.glob("*.json"))
    assert len(runs) >= 2
    for run in runs:
        shutil.copy(run, tmp_path)
    made = {path.name: path.read_bytes() for path in tables_from(tmp_path)}
    assert {"wrn-28-4-twins.md", "wrn-28-4-twins.curves.svg"} <= made.keys()
    assert made == {path.name: path.read_bytes() for path in (RESULTS / "tables").iterdir()}
