"""The tables in results/ follow from the published runs beside them."""

import shutil
from pathlib import Path

import pytest
import torch

from codistill import read_weights
from codistill.data.augmentation import normalise
from codistill.data.load import load
from codistill.runs.checkpoint import fingerprint
from codistill.runs.result import read_result, read_result_content
from codistill.studies import catalogue
from codistill.studies.published import rebuild_tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.mark.parametrize("folder", [RESULTS, *(tables.parent for tables in RESULTS.glob("*/tables"))])
def test_published_tables_are_made_from_published_runs(folder: Path, tmp_path: Path) -> None:
    runs = sorted(folder.glob("*.json"))
    assert len(runs) >= 2
    for file in (*runs, *folder.glob("*.yaml")):  # a study of one's own is published beside its runs
        shutil.copy(file, tmp_path)
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


def test_published_weights_are_those_of_their_results() -> None:
    files = sorted(RESULTS.glob("**/weights/*/*.safetensors"))
    assert len(files) >= 4
    assert sum(file.stat().st_size for file in files) < 20_000_000
    for file in files:
        published = file.parents[2] / f"{file.parent.name}.json"
        result, content = read_result(published), read_result_content(published)
        assert content["networks"][file.stem]["weights"] == fingerprint(file)
        identity, weights = read_weights(file)
        test = load(result.recipe.data).test
        assert isinstance(test.pixels, torch.Tensor)
        with torch.no_grad():
            images = normalise(test.pixels, torch.tensor(identity.mean), torch.tensor(identity.std))
            wrong = identity.build(weights)(images).argmax(dim=1) != test.labels
        assert 100 * wrong.double().mean().item() == pytest.approx(
            result.networks[file.stem].last.top1_error, abs=0.11
        )  # two images
