"""The tables in results/ follow from the published runs beside them, and docs/demo.md shows the demonstration's."""

import csv
import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from codistill.studies import catalogue
from codistill.studies.published import rebuild_tables
from codistill.studies.results import read_result

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
README = (RESULTS / "README.md").read_text(encoding="utf-8")


def test_published_tables_are_made_from_published_runs(tmp_path: Path) -> None:
    runs = sorted(RESULTS.glob("*.json"))
    assert len(runs) >= 2
    for run in runs:
        shutil.copy(run, tmp_path)
    made = {path.name: path.read_bytes() for path in rebuild_tables(tmp_path)}
    assert {"demo.md", "wrn-28-4-twins.md", "wrn-28-4-twins.curves.svg"} <= made.keys()
    assert made == {path.name: path.read_bytes() for path in (RESULTS / "tables").iterdir()}


def test_the_demonstration_is_published_with_the_seeds_that_it_shows() -> None:
    study = catalogue.get("demo")
    published = [read_result(path).recipe for path in RESULTS.glob("fashion-*.json")]
    shown = [row.resolve().replace(seed=seed) for row in study.rows for seed in study.seed_range()]
    assert len(published) == len(shown) == 9
    for recipe in published:
        assert recipe.model_copy(update={"runtime": shown[0].runtime}) in shown


def test_the_demonstrations_page_shows_the_published_differences() -> None:
    """To update them, replace the text between the two comments. test_readme.py compares the first table."""
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    included = re.findall(r"<!-- differences of (results/\S+) -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert len(included) == 1
    for source, shown in included:
        _, differences = re.findall(r"(?:^\|.*\n)+", (ROOT / source).read_text(encoding="utf-8"), re.MULTILINE)
        assert shown == differences.strip()


def readme_rows() -> list[tuple[list[Path], str, str]]:
    """The files, the description and the commit of each row of results/README.md."""
    rows = re.findall(r"^\| `([\w{},./-]+)` \| (.*) \| (\w+) \|$", README, re.MULTILINE)
    return [([file for name in spelt_out(names) for file in _files(name)], *others) for names, *others in rows]


def spelt_out(name: str) -> list[str]:
    """Expand ``a-{b,c}`` as a shell does."""
    if (match := re.search(r"\{([^}]*)\}", name)) is None:
        return [name]
    return [one for choice in match[1].split(",") for one in spelt_out(name.replace(match[0], choice, 1))]


def _files(name: str) -> list[Path]:
    """All files of a folder, one file by its full name, or all whose names continue with the digest of a recipe."""
    if name.endswith("/"):
        return sorted((RESULTS / name).glob("*.json"))
    whole = RESULTS / f"{name}.json"
    return [whole] if whole.exists() else sorted(RESULTS.glob(f"{name}-*.json"))


def test_every_published_run_is_described_with_its_own_commit_and_time() -> None:
    rows = readme_rows()
    assert sorted(file for files, _, _ in rows for file in files) == sorted(RESULTS.rglob("*-seed*.json"))
    for files, what, commit in rows:
        for file in files:
            content = json.loads(file.read_text(encoding="utf-8"))
            assert (content["environment"]["commit"] or commit).startswith(commit), file.name
            if took := re.search(r"(\d+) min (\d+) s", what):
                assert round(content["elapsed_s"]) == 60 * int(took[1]) + int(took[2]), file.name


def test_which_runs_are_bf16() -> None:
    assert "All runs on the GPU are bf16; the demonstration's are float32." in README
    for file in RESULTS.rglob("*-seed*.json"):
        precision = json.loads(file.read_text(encoding="utf-8"))["recipe"]["runtime"]["precision"]
        assert precision == ("fp32" if file.name.startswith("fashion") else "bf16"), file.name


def test_what_is_still_to_be_run_is_priced_by_what_was_run() -> None:
    def minutes(method: str) -> float:
        (file,) = RESULTS.glob(f"cifar100-wrn-28-4-twins-{method}-seed1-*.json")
        return float(json.loads(file.read_text(encoding="utf-8"))["elapsed_s"]) / 60

    quoted = re.search(r"measured ([\d,]+) images/s with heads and ([\d,]+) without", README)
    assert quoted is not None
    images = 50_000 * 200
    for shown, method in zip(quoted.groups(), ("dcm", "independent"), strict=True):
        assert int(shown.replace(",", "")) == round(images / minutes(method) / 60, -2)
    assert f"2 × {round(minutes('independent') + minutes('dml') + 2 * minutes('dcm'))} |" in README
    assert f"6 × {round(minutes('dcm'))} |" in README


Figure = Callable[[dict[str, Any]], Iterable[float]]
"""Numbers of both networks, from a published run."""


TRANSFERS = ["independent", "DML", "DML + DS", "DCM-1", "DCM-2", "DCM"]


def means(runs: str, rows: Sequence[str], figure: Figure, digits: int, seeds: str = "*") -> list[str]:
    """Mean errors by row, over all networks and seeds or one of them, without the runs with mixup (another row)."""
    found = []
    for row in rows:
        files = sorted(RESULTS.glob(f"{runs}-{row}-seed{seeds}-*.json"))
        published = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        numbers = [number for run in published if not run["recipe"]["augment"]["mixup"] for number in figure(run)]
        assert numbers, f"{row}: nothing is published"
        found.append(f"{mean(numbers):.{digits}f}")
    return found


def last(run: dict[str, Any]) -> Iterable[float]:
    return [network["last"]["top1_error"] for network in run["networks"].values()]


def best(run: dict[str, Any]) -> Iterable[float]:
    return [network["best_epoch"]["top1_error"] for network in run["networks"].values()]


def finals(epoch: dict[str, Any]) -> Iterable[dict[str, float]]:
    return [metrics for name, metrics in epoch["test"].items() if name.endswith("/final")]


def paragraph(beginning: str) -> str:
    (found,) = [text for text in README.split("\n\n") if text.startswith(f"**{beginning}")]
    return found.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "figure"),
    [
        ("with {}, {} and {} as means", best),
        (
            "{}, {} and {} in epoch 60",
            lambda run: [run["epochs"][59]["test"][f"{n}/final"]["top1_error"] for n in "ab"],
        ),
        ("at the end it is {}, {} and {} %", lambda run: run["epochs"][-1]["train_error"].values()),
    ],
)
def test_what_is_said_of_wrong_labels(words: str, figure: Figure) -> None:
    of = means("cifar10-wrn-16-4-twins", ["independent", "dml", "dcm"], figure, 1)
    assert words.format(*of) in paragraph("Wrong labels")


def test_the_readme_has_the_best_epochs_and_the_interval_beside_the_last() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = ["independent", "dml", "dcm"]
    of = means("cifar10-wrn-16-4-twins", rows, best, 2)
    assert "independent networks have {}, DML {} and DCM {}.".format(*of) in readme
    dcm = difference("wrn-16-4-noise", "DCM − independent")
    interval = "{points:.1f} points, 95 %: {low:.1f} to {high:.1f}".format(**dcm).replace("-", "−")
    assert f"DCM − independent is {interval}" in readme
    mixup = difference("wrn-16-4-noise", "DCM − independent, mixup")
    interval = "{points:.1f} points (95 %: {low:.1f} to {high:.1f}, so {verdict})".format(**mixup).replace("-", "−")
    assert f"is ahead of DCM there**, on both seeds, by {interval}" in readme


def test_the_table_of_wrong_labels_is_said_in_words_too() -> None:
    table = (RESULTS / "tables" / "wrn-16-4-noise.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\w[^|]*) \| [1-9]\d* \| (\S+) \| (\S+) \|$", table, re.MULTILINE)
    assert len(shown) >= 3
    for row, a, b in shown:
        assert f"{a}/{b} ({row})" in paragraph("Wrong labels")


def test_what_is_said_of_transfers() -> None:
    of = means("cifar100-wrn-16-2-twins", [label.lower().replace(" + ", "-") for label in TRANSFERS], last, 2)
    said = ", ".join(f"{label} {figure}" for label, figure in zip(TRANSFERS, of, strict=True))
    assert f"{said}." in paragraph("Which transfers matter")


def difference(study: str, of: str) -> dict[str, Any]:
    """Points, interval and verdict of the difference of the mean over networks."""
    with (RESULTS / "tables" / f"{study}.differences.csv").open(encoding="utf-8", newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if (row["difference"], row["of"]) == (of, "mean of a, b")]
    points, low, high = (float(row[name]) for name in ("points", "95 % interval low", "95 % interval high"))
    return {"points": points, "low": low, "high": high, "verdict": row["verdict"]}


def test_differences_are_said_as_the_tables_have_them() -> None:
    wrong, transfers = paragraph("Wrong labels"), paragraph("Which transfers matter")
    of = difference("wrn-16-4-noise", "DCM − DML")
    assert f"below DML by {-of['points']:.1f} points (95 %: {-of['high']:.1f} to {-of['low']:.1f})" in wrong
    of = difference("wrn-16-2-edges", "DML − independent")
    assert f"{-of['points']:.1f} points here (95 %: {-of['high']:.1f} to {-of['low']:.1f})" in transfers
    of = difference("wrn-16-2-edges", "DCM − independent")
    assert f"(−{-of['points']:.1f}, 95 %: −{-of['low']:.1f} to {of['high']:.1f})" in transfers
    assert f"DML + DS) {-difference('wrn-16-2-edges', 'DCM-2 − DML + DS')['points']:.1f} here" in transfers
    assert f"(DCM-1) {-difference('wrn-16-2-edges', 'DCM-1 − DML + DS')['points']:.1f} and" in transfers
    second = [means("cifar100-wrn-16-2-twins", [row], last, 2, seeds="2")[0] for row in ("dcm", "dcm-2")]
    assert "DCM has {} and DCM-2 {}".format(*second) in transfers


def test_what_is_said_to_be_decided_is() -> None:
    verdicts = {row: difference("wrn-16-2-edges", f"{row} − independent")["verdict"] for row in TRANSFERS[1:]}
    decided = [row for row, verdict in verdicts.items() if verdict == "lower error"]
    assert f"What is decided by two seeds: {', '.join(decided[:-1])} and {decided[-1]} are below" in paragraph("Which")
    assert [row for row, verdict in verdicts.items() if verdict == "not decided"] == ["DCM"]
    for other in ("DML", "independent"):  # as results/README.md has it
        assert difference("wrn-16-4-noise", f"DCM − {other}")["verdict"] == "lower error"


def test_what_is_said_of_complete() -> None:
    dml, dcm, complete = map(float, means("cifar100-wrn-28-4-twins", ["dml", "dcm", "complete"], last, 3))
    words = paragraph("Does `complete` beat DCM?")
    assert f"by {dcm - complete:.2f} points" in words
    assert f"DCM beats DML by {dml - dcm:.2f}" in words
