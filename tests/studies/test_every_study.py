"""Every study from its command to its tables and curves, at toy size: one real training of each kind of recipe."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from codistill.studies import catalogue
from codistill.studies.runner import Command
from codistill.studies.study import slug
from support.study_call import run_study
from support.study_rows import ROWS
from support.warm import first_of_each_kind, warm_trainings

SMALLER = {
    "resnet-164": "resnet-14",
    "resnet-110": "resnet-8",
    "wrn-28-10": "wrn-10-1",
    "wrn-28-10-dropout-0.3": "wrn-10-1-dropout-0.3",
    "wrn-28-4": "wrn-16-1",
    "wrn-16-4": "wrn-16-1",
    "densenet-40-12": "densenet-7-4",
    "mobilenet": "wrn-10-2",
    "resnet-18": "resnet-8",
    "resnet-50": "resnet-14",
    "mobilenetv2": "wrn-10-1",
    "timm:resnet18": "wrn-10-1",
    "timm:efficientnet_b0": "wrn-10-2",
}
TOY = [
    "length.epochs=2",
    "batch_size=10",
    "data.train_limit=20",
    "data.test_limit=20",
    "evaluation.every_epochs=1",
    "evaluation.all_every_epochs=2",
    "runtime.device=cpu",
]
EMBEDDED = ["data.name=fashion", "data.image_size=14"]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    with warm_trainings(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="module")
def first_trainings(trainings: Command) -> Command:
    return first_of_each_kind(trainings)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of ten images each, for training and for testing, in place of ImageNet."""
    noise = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for index in range(10):
                Image.fromarray(noise.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return tmp_path / "photos"


def test_no_study_is_forgotten() -> None:
    assert len(ROWS) == 26
    assert set(ROWS) == set(catalogue.NAMES)


@pytest.mark.slow(reason="26 studies, each kind of training once")
@pytest.mark.parametrize("name", ROWS)
def test_a_study_runs_to_its_tables_and_curves(
    name: str, trainings: Command, first_trainings: Command, photos: Path, tmp_path: Path
) -> None:
    study, out = catalogue.get(name), tmp_path / "out"
    has_photos = study.rows[0].recipe.data.name == "folder"
    data = [f"data.folder={photos}", "data.image_size=16", "augment.crop=14"] if has_photos else EMBEDDED
    replacements = [f"{old}={new}" for old, new in SMALLER.items() if old in study.networks]
    printed = io.StringIO()
    code = run_study(
        name,
        seeds=1,
        overrides=[*TOY, *data, *replacements],
        out=out,
        jobs=2,
        console=Console(file=printed, width=200),
        command=trainings if name in ("kd", "finetune") else first_trainings,  # which read weights of other runs
    )
    assert code == 0, printed.getvalue()
    pretraining = name == "finetune"  # which is no row
    assert len(list((out / "runs").glob("*/result.json"))) == ROWS[name] + pretraining

    content = json.loads((out / f"{name}.json").read_text())
    assert [row["n"] for row in content["errors"]["rows"]] == [1] * len(study.rows)
    assert len(content["runs"]) == ROWS[name]
    assert all(0 <= error["top1_error"] <= 100 for run in content["runs"] for error in run["networks"].values())
    claims = {row["verdict"] for row in content["differences"]["rows"]}
    assert claims == {"inconclusive"}

    markdown, latex = (out / f"{name}.md").read_text(), (out / f"{name}.tex").read_text()
    assert markdown.count("\n| --- |") == latex.count(r"\begin{tabular}") == 2
    assert "missing" not in markdown
    for network in set(study.networks) & set(SMALLER):
        assert f": {network} → {SMALLER[network]}" in markdown
    for file, rows in {"csv": len(study.rows), "differences.csv": len(content["differences"]["rows"])}.items():
        assert len(list(csv.reader(io.StringIO((out / f"{name}.{file}").read_text())))) == 1 + rows

    epochs = sum(round(2 * row.length_factor) for row in study.rows)
    assert len((out / f"{name}.curves.csv").read_text().splitlines()) == 1 + epochs
    pictures = {path.name for path in out.glob("*.svg")}
    several = {f"{name}.{slug(group)}.curves.svg" for group in study.groups}
    assert pictures == (several if len(study.groups) > 1 else {f"{name}.curves.svg"})
