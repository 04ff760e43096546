"""Tables from made-up results, in every format: what they show, and what they must not claim."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from codistill.recipes import Recipe
from codistill.runs.result import Result, read_result
from codistill.runs.seal import write_sealed
from codistill.studies import catalogue
from codistill.studies.analysis import StudyTables, build_tables
from codistill.studies.statistics import Summary
from codistill.studies.study import Results, Study
from codistill.studies.tables import Table, format_cell
from support.synthetic import ENVIRONMENT, made_up_results, result_json

# Errors of networks a and b by method and seed, chosen so that the numbers below can be checked by hand.
ERRORS = {
    "independent": {1: (26.0, 28.0), 2: (28.0, 30.0), 3: (27.0, 29.0)},
    "dml": {1: (25.0, 27.0), 2: (27.5, 29.5), 3: (25.5, 27.5)},
    "dcm": {1: (23.0, 25.0), 2: (25.1, 27.1), 3: (23.9, 25.9)},
}


@pytest.fixture
def study() -> Study:
    return catalogue.get("demo")


def read(tmp_path: Path, recipe: Recipe, errors: tuple[float, float], **changes: Any) -> Result:
    path = tmp_path / "result.json"
    write_sealed(path, result_json(recipe, dict(zip("ab", errors, strict=True)), **changes), sort_keys=False)
    return read_result(path)


def results_of(study: Study, tmp_path: Path, *overrides: str, seeds: tuple[int, ...] = (1, 2, 3)) -> Results:
    return {
        row.key: {
            seed: read(tmp_path, row.resolve(overrides).replace(seed=seed), ERRORS[row.recipe.method][seed])
            for seed in seeds
        }
        for row in study.rows
    }


def differences(report: StudyTables) -> dict[str, dict[str, Any]]:
    """The rows of the table of differences that compare the mean of the networks."""
    rows = report.differences.to_json()["rows"]
    return {row["difference"]: row for row in rows if row["of"].startswith("mean")}


def test_every_network_of_every_method_with_its_spread(study: Study, tmp_path: Path) -> None:
    report = build_tables(study, results_of(study, tmp_path), [1, 2, 3])
    assert report.errors.columns == ("row", "n", "a", "b")
    assert report.errors.rows[0] == ("independent", 3, Summary(3, 27.0, 1.0), Summary(3, 29.0, 1.0))
    assert "| independent | 3 | 27.00(1.00) | 29.00(1.00) |" in report.to_markdown()


def test_paired_differences_and_verdicts(study: Study, tmp_path: Path) -> None:
    """The seeds of this study draw wrong labels and images."""
    found = differences(build_tables(study, results_of(study, tmp_path), [1, 2, 3]))
    # DML − independent: −1, −0.5, −1.5; mean −1, std 0.5, margin 4.3027 · 0.5 / √3 = 1.2421: contains 0.
    dml = found["DML − independent"]
    assert (dml["n"], dml["ahead in"], dml["verdict"]) == (3, "3 of 3", "not decided")
    assert dml["points"] == pytest.approx(-1.0)
    assert dml["95 % interval"] == {"low": pytest.approx(-2.2421, abs=1e-4), "high": pytest.approx(0.2421, abs=1e-4)}
    assert (dml["test"], found["DCM − independent"]["test"]) == ("paired", "primary, paired")
    # DCM − independent: −3, −2.9, −3.1: far from 0.
    assert found["DCM − independent"]["verdict"] == "lower error"
    per_network = [row[1] for row in build_tables(study, results_of(study, tmp_path), [1]).differences.rows]
    assert per_network == ["mean of a, b", "a", "b"] * 3


def test_intervals_have_two_digits_to_read_and_all_to_compute_with(study: Study, tmp_path: Path) -> None:
    made = build_tables(study, results_of(study, tmp_path), [1, 2, 3]).differences
    assert (
        "| DML − independent | mean of a, b | 3 | -1.00 | -2.24 … 0.24 | 3 of 3 | paired | 0.22 | not decided |"
        in made.to_markdown()
    )
    first, *_ = csv.DictReader(io.StringIO(made.to_csv()))
    assert float(first["95 % interval low"]) == pytest.approx(-2.2421, abs=1e-4)
    assert float(first["95 % interval high"]) == pytest.approx(0.2421, abs=1e-4)


def test_only_seeds_that_draw_the_data_make_pairs(study: Study, tmp_path: Path) -> None:
    """DCM − independent is −3, −2.9, −3.1. Welch's t: −3 / √((1 + 1.1033) / 3), as scipy has it, is not decided."""
    by_data = {
        "data.wrong_labels=0.5": "primary, paired",
        "data.train_limit=100": "primary, paired",
        "data.validation=0.1": "primary, paired",
        "data.test_limit=100": "primary, Welch",  # the same test images for every seed
    }
    plain = ["data.wrong_labels=0", "data.train_limit=null"]
    independent, dcm = ([sum(ERRORS[name][seed]) / 2 for seed in (1, 2, 3)] for name in ("independent", "dcm"))
    expected = stats.ttest_ind(dcm, independent, equal_var=False).pvalue
    for change, test in by_data.items():
        key = change.partition("=")[0]
        recipes_of = [one for one in plain if not one.startswith(key)]
        results = results_of(study, tmp_path, *recipes_of, change, "length.epochs=4000")
        found = differences(build_tables(study, results, [1, 2, 3]))["DCM − independent"]
        assert found["test"] == test, change
        assert found["p"] == pytest.approx(expected if "Welch" in test else stats.ttest_rel(dcm, independent).pvalue)
    two = differences(build_tables(study, results_of(study, tmp_path, seeds=(1, 2)), [1, 2]))
    assert two["DCM − independent"]["test"] == "primary, Welch", "one degree of freedom is too few"


def test_what_is_not_primary_is_corrected_for_its_number(study: Study, tmp_path: Path) -> None:
    """With p-values of scipy and the steps of Holm's method; one primary contrast needs no correction."""
    made = build_tables(study, results_of(study, tmp_path), [1, 2, 3]).differences
    by_row = {(row["difference"], row["of"]): row for row in made.to_json()["rows"]}
    assert len(by_row) == 9
    expected = {}
    for difference, of in by_row:
        ours, theirs = (name.lower() for name in difference.split(" − "))
        picked = {"mean of a, b": [0, 1], "a": [0], "b": [1]}[of]
        first, second = (
            [np.mean([ERRORS[method][seed][i] for i in picked]) for seed in (1, 2, 3)] for method in (ours, theirs)
        )
        expected[difference, of] = stats.ttest_rel(first, second).pvalue
    primary = ("DCM − independent", "mean of a, b")
    assert by_row[primary]["p"] == pytest.approx(expected.pop(primary))
    largest = 0.0
    for left, (key, p) in zip(range(8, 0, -1), sorted(expected.items(), key=lambda item: item[1]), strict=True):
        largest = max(largest, min(1.0, left * p))
        assert by_row[key]["p"] == pytest.approx(largest), key
        assert (by_row[key]["verdict"] == "lower error") == (largest < 0.05)
    assert any("primary contrasts (1), and apart from them for that of all others (8)" in note for note in made.notes)
    assert len({row["verdict"] for row in by_row.values()}) == 2, "some are decided, some are not"


def test_the_better_twin_stands_beside_the_papers_one_number(tmp_path: Path) -> None:
    study = catalogue.get("table4").select(rows=["densenet-40-12-same/apfc"])
    (row,) = study.rows
    # Network a is better with seed 1, b with both together.
    errors = {1: (25.0, 25.5), 2: (26.0, 24.0)}
    results = {row.key: {seed: read(tmp_path, row.recipe.replace(seed=seed), errors[seed]) for seed in errors}}
    made = build_tables(study, results, [1, 2]).errors
    (cells,) = made.to_json()["rows"]
    assert made.columns == ("row", "n", "a", "b", "better twin", "better twin, paper")
    assert cells["better twin"] == cells["b"] == {"n": 2, "mean": 24.75, "std": pytest.approx(1.0607, abs=1e-4)}
    assert cells["better twin, paper"] == {"n": 5, "mean": 25.10, "std": 0.25}
    assert any("two twins is the better one's" in note for note in made.notes)
    assert build_tables(study, {}, [1]).errors.rows[0][4] == "missing"


def test_what_the_paper_has_commented_out_is_shown_as_such(tmp_path: Path) -> None:
    study = catalogue.get("table1").select(rows=["mobilenet-same/dcm", "resnet-164-same/dcm"])
    made = build_tables(study, {}, [1]).errors
    assert "20.74(0.11)† |" in made.to_markdown()
    assert "19.57(0.20) |" in made.to_markdown()
    assert r"20.74(0.11)\dag{}" in made.to_latex()
    assert any(note.startswith("† Not in the printed paper") for note in made.notes)
    assert made.to_json()["rows"][1]["a, paper"] == {"n": 5, "mean": 20.74, "std": 0.11, "mark": "†"}
    printed = build_tables(study.select(rows=["resnet-164-same"]), {}, [1]).errors
    assert not any("†" in note for note in printed.notes)


def test_a_worse_method_is_called_worse(study: Study, tmp_path: Path) -> None:
    results = dict(results_of(study, tmp_path))
    keys = [row.key for row in study.rows]
    results[keys[0]], results[keys[2]] = results[keys[2]], results[keys[0]]
    assert differences(build_tables(study, results, [1, 2, 3]))["DCM − independent"]["verdict"] == "higher error"


def test_one_seed_has_no_spread_and_no_verdict(study: Study, tmp_path: Path) -> None:
    report = build_tables(study, results_of(study, tmp_path, seeds=(1,)), [1])
    assert "| independent | 1 | 26.00 | 28.00 |" in report.to_markdown()
    assert {row["verdict"] for row in differences(report).values()} == {"one seed: none"}
    assert {row["test"] for row in differences(report).values()} == {"primary", None}
    assert {row["95 % interval"] for row in differences(report).values()} == {None}


def test_one_method_has_nothing_to_be_compared_with(study: Study, tmp_path: Path) -> None:
    alone = study.select(methods=["dcm"])
    made = build_tables(alone, results_of(alone, tmp_path), [1, 2, 3])
    for text in (made.to_markdown(), made.to_latex(), made._repr_html_()):
        assert study.title in text
        assert "differences" not in text


def test_missing_runs_are_shown_as_missing_and_named(study: Study, tmp_path: Path) -> None:
    results = {key: dict(by_seed) for key, by_seed in results_of(study, tmp_path).items()}
    _, dml, dcm = results
    results[dcm] = {}
    del results[dml][2]
    report = build_tables(study, results, [1, 2, 3])
    assert "| DCM | 0 | missing | missing |" in report.to_markdown()
    assert report.errors.rows[1][1] == 2
    assert differences(report)["DCM − DML"]["verdict"] == "missing"
    assert differences(report)["DML − independent"]["n"] == 2, "paired over the seeds that both have"
    (note,) = [note for note in report.errors.notes if note.startswith("Missing")]
    assert "DML (seed 2); DCM (seed 1, 2, 3)" in note


def test_missing_runs_come_with_the_command_that_makes_them() -> None:
    def note(name: str, seeds: range) -> str:
        (missing,) = [
            note for note in build_tables(catalogue.get(name), {}, seeds).errors.notes if note.startswith("Missing")
        ]
        return missing

    assert "`codistill study curves --seeds 3` makes them" in note("curves", range(1, 4))
    assert "`codistill study demo --seeds 2` makes them" in note("demo", range(41, 43))


def test_short_trainings_claim_no_order(tmp_path: Path) -> None:
    study = catalogue.get("curves")
    short = build_tables(study, results_of(study, tmp_path, "length.epochs=99"), [1, 2, 3])
    assert {row["verdict"] for row in differences(short).values()} == {"inconclusive"}
    assert any(note.startswith("Inconclusive") for note in short.errors.notes)
    assert "Deviation: length.epochs: 200 → 99" in short.errors.notes
    half = build_tables(study, results_of(study, tmp_path, "length.epochs=100"), [1, 2, 3])
    assert differences(half)["DCM − independent"]["verdict"] == "not decided", "and not inconclusive"
    assert any(note.startswith("Scale 0.50") for note in half.errors.notes)


def test_few_images_are_a_short_training_too(tmp_path: Path) -> None:
    study = catalogue.get("curves")
    few = build_tables(study, results_of(study, tmp_path, "data.train_limit=24000"), [1, 2, 3])
    assert {row["verdict"] for row in differences(few).values()} == {"inconclusive"}
    assert any("has 0.48 of the full length" in note for note in few.errors.notes)
    assert [row[3] for row in few.errors.rows] == [None] * 3, "the paper's networks saw 50,000"


def test_the_papers_length_is_the_studys_to_say(tmp_path: Path) -> None:
    study = catalogue.get("curves")
    bent = build_tables(study, results_of(study, tmp_path, "length.epochs=20", "length.paper_epochs=20"), [1, 2, 3])
    assert {row["verdict"] for row in differences(bent).values()} == {"inconclusive"}


def test_without_a_length_of_the_paper_the_studys_own_counts(study: Study, tmp_path: Path) -> None:
    whole = build_tables(study, results_of(study, tmp_path), [1, 2, 3])
    assert differences(whole)["DCM − independent"]["verdict"] == "lower error"
    assert not any(note.startswith(("Scale", "Inconclusive")) for note in whole.errors.notes)
    for change in ("length.epochs=19", "data.train_limit=749"):  # of 40 and of 1500
        short = build_tables(study, results_of(study, tmp_path, change), [1, 2, 3])
        assert {row["verdict"] for row in differences(short).values()} == {"inconclusive"}


def test_a_longer_row_is_as_short_as_the_others(tmp_path: Path) -> None:
    study = catalogue.get("efficiency")
    (longer,) = [row for row in study.rows if row.length_factor != 1]
    recipe = longer.resolve(["length.epochs=80"])
    assert recipe.length.epochs == 224, "more than the paper's 200, and yet 0.4 of what the row stands for"
    report = build_tables(study, {longer.key: {1: read(tmp_path, recipe, (20.0, 20.0))}}, [1])
    assert any("has 0.40 of the full length" in note for note in report.errors.notes)
    assert any(note.startswith("Minutes are those of the clock") for note in report.errors.notes)


def test_ours_beside_the_papers(tmp_path: Path) -> None:
    study = catalogue.get("curves")
    report = build_tables(study, results_of(study, tmp_path), [1, 2, 3])
    assert report.errors.columns == ("row", "n", "a", "a, paper", "b", "b, paper")
    assert "| DML | 3 | 26.00(1.32) | 17.89(0.26) | 28.00(1.32) | 17.95(0.07) |" in report.to_markdown()
    assert any("The paper has 5 runs" in note for note in report.errors.notes)


def test_the_papers_number_goes_where_networks_were_changed(tmp_path: Path) -> None:
    study = catalogue.get("curves")
    changed = ["networks.a=wrn-16-2", "networks.b=wrn-16-2"]
    report = build_tables(study, results_of(study, tmp_path, *changed), [1, 2, 3])
    assert [row[3] for row in report.errors.rows] == [None] * 3
    assert "Deviation: networks.a: wrn-28-10 → wrn-16-2" in report.errors.notes


def test_deviations_of_some_rows_say_which(study: Study, tmp_path: Path) -> None:
    results = {key: dict(by_seed) for key, by_seed in results_of(study, tmp_path).items()}
    dcm = study.rows[2]
    recipe = dcm.resolve(
        ["label_smoothing=0.1", "runtime.kernels=torch", "runtime.threads=1", "checkpoints.keep=9"]
    ).replace(seed=1)
    results[dcm.key][1] = read(tmp_path, recipe, (23.0, 25.0))
    notes = [note for note in build_tables(study, results, [1, 2, 3]).errors.notes if note.startswith("Deviation")]
    assert notes == ["Deviation: label_smoothing: 0.0 → 0.1 (in DCM)"]


def test_runs_of_different_commits_are_warned_of(study: Study, tmp_path: Path) -> None:
    results = {key: dict(by_seed) for key, by_seed in results_of(study, tmp_path).items()}
    same = build_tables(study, results, [1, 2, 3]).errors.notes
    assert not any("Warning" in note for note in same)
    key, recipe = study.rows[0].key, study.rows[0].recipe
    other = {"commit": "fedcba9876543210", "dirty": True, "accelerators": ["NVIDIA H200"], "torch": "2.11.0"}
    results[key][1] = read(tmp_path, recipe, (26.0, 28.0), environment={**ENVIRONMENT, **other})
    notes = build_tables(study, results, [1, 2, 3]).errors.notes
    assert "Warning: these runs are of 2 different machines." in notes
    assert "Warning: these runs are of 2 different commits." in notes
    (machines,) = [note for note in notes if note.startswith("Ran on")]
    assert machines == (
        "Ran on NVIDIA H200, a CPU; torch 2.11.0, torch 2.13.0; commit 0123456789, fedcba9876 with changes."
    )


def test_the_precision_of_every_run_is_named(study: Study, tmp_path: Path) -> None:
    """Also where the machine chose it: the run recorded what ``auto`` was."""
    rows = {row.key: row.recipe.replace(seed=1) for row in study.rows}
    results = {
        key: {1: read(tmp_path, recipe, (26.0, 28.0), environment={**ENVIRONMENT, "precision": precision})}
        for (key, recipe), precision in zip(rows.items(), ["fp32", "bf16", "bf16"], strict=True)
    }
    notes = build_tables(study, results, [1]).errors.notes
    assert any(" in bf16, fp32; " in note for note in notes if note.startswith("Ran on"))
    assert "Warning: these runs are of 2 different precisions." in notes
    assert not any(note.startswith("Deviation") for note in notes)


def test_the_best_epoch_has_columns_of_its_own_on_request(study: Study, tmp_path: Path) -> None:
    report = build_tables(study, results_of(study, tmp_path), [1, 2, 3], best_epoch=True)
    assert report.errors.columns == ("row", "n", "a", "a, best epoch", "b", "b, best epoch")
    assert report.errors.rows[0][2:4] == (Summary(3, 27.0, 1.0), Summary(3, 26.0, 1.0))
    assert any("flatters" in note for note in report.errors.notes)


def test_top_5_where_the_paper_reports_it(tmp_path: Path) -> None:
    study = catalogue.get("table2").select(rows=["resnet-18-same"])
    report = build_tables(study, results_of(study, tmp_path, seeds=(1,)), [1])
    assert report.errors.columns[2:6] == ("a top-1", "a top-1, paper", "a top-5", "a top-5, paper")
    ours, theirs = report.errors.rows[0][2:6:2], report.errors.rows[0][3:6:2]
    assert ours == (Summary(1, 26.0, None), Summary(1, 13.0, None))
    assert theirs == (Summary(None, 31.08, None), Summary(None, 11.17, None))


def test_a_frozen_teacher_is_not_compared(tmp_path: Path) -> None:
    study = catalogue.get("kd")
    results = made_up_results(study, [1, 2], tmp_path)
    compared = [(row[0], row[1]) for row in build_tables(study, results, [1, 2]).differences.rows]
    assert ("KD − independent", "b") in compared
    assert not any("KD" in contrast and "a" in of.replace("mean", "") for contrast, of in compared)  # type: ignore[operator]


def test_every_study_makes_its_table_in_every_form(tmp_path: Path) -> None:
    assert len(catalogue.NAMES) == 26
    for study in map(catalogue.get, catalogue.NAMES):
        report = build_tables(study, made_up_results(study, [1, 2], tmp_path), [1, 2])
        assert len(report.errors.rows) == len(study.rows)
        assert report.differences.rows
        assert "missing" not in report.to_markdown()
        assert len(list(csv.DictReader(io.StringIO(report.errors.to_csv())))) == len(study.rows)
        assert report.to_latex().count(r"\begin{tabular}") == 2
        content = json.loads(json.dumps(report.to_json()))
        assert len(content["runs"]) == 2 * len(study.rows)
        assert report.errors.to_rich().row_count == len(study.rows)


TABLE = Table(
    "A & B",
    ("row", "a", "n"),
    (("x_1 | 5 % − 3", Summary(2, 18.725, 0.25), 2), ("y", "missing", 0), ("z", None, 1)),
    ("Deviation: length.epochs: 200 → 100",),
)


def test_markdown() -> None:
    assert TABLE.to_markdown() == (
        "### A & B\n\n| row | a | n |\n| --- | ---: | ---: |\n| x_1 \\| 5 % − 3 | 18.73(0.25) | 2 |\n"
        "| y | missing | 0 |\n| z |  | 1 |\n\n- Deviation: length.epochs: 200 → 100\n"
    )


def test_options_keep_both_dashes_in_latex() -> None:
    """TeX merges two dashes into one."""
    assert (
        r"`codistill study demo -{}-seeds 2`"
        in Table("t", ("a",), (), ("`codistill study demo --seeds 2`",)).to_latex()
    )


def test_csv_has_numbers_in_columns_of_their_own() -> None:
    assert TABLE.to_csv() == "row,a,a std,a n,n\nx_1 | 5 % − 3,18.725,0.25,2,2\ny,missing,,,0\nz,,,,1\n"


def test_numbers_have_two_decimals_and_small_ones_two_digits() -> None:
    numbers = {1.0: "1.00", -0.0999: "-0.10", 0.0: "0.00", 0.0042: "0.0042", 12.345: "12.35", -0.05: "-0.05"}
    for number, text in numbers.items():
        assert format_cell(number) == text


def test_latex_is_escaped() -> None:
    latex = TABLE.to_latex()
    assert r"x\_1 | 5 \% $-$ 3 & 18.73(0.25) & 2 \\" in latex
    assert r"\begin{tabular}{lrr}" in latex
    assert r"200 $\to$ 100" in latex


def test_json_has_numbers_in_full() -> None:
    content = TABLE.to_json()
    assert content["rows"][0] == {"row": "x_1 | 5 % − 3", "a": {"n": 2, "mean": 18.725, "std": 0.25}, "n": 2}
    assert content["rows"][2]["a"] is None


def test_a_ragged_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1 cells.* 2 columns"):
        Table("t", ("a", "b"), (("x",),))
