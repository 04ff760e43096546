"""The page answers first: its sentence against numpy and scipy, from made-up errors."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats
from typer.testing import CliRunner

from codistill.cli.app import app
from codistill.recipes.schema import Recipe
from codistill.report.page import live_page, report_page
from codistill.report.sections import caveats, headline
from codistill.runs.seal import write_sealed
from codistill.studies.costs import count_costs
from support.made_up import look, made_up_run, quick, rewrite

# Errors of the networks a and b by seed. The data of quickstart are drawn by the seed, so seeds make pairs.
BASELINE = [(26.0, 28.0), (28.0, 30.0), (27.0, 29.0)]
AHEAD = [(23.0, 25.0), (25.1, 27.1), (23.9, 25.9)]
OPEN = [(25.0, 27.0), (28.5, 30.5), (25.5, 27.5)]


def recipe(method: str, seed: int, **changes: object) -> Recipe:
    return quick(method, seed, batch_size=32, **changes)  # of no study: the page's own comparison


def write(folder: Path, errors: Mapping[str, Sequence[tuple[float, float]]], elapsed_s: float = 120.0) -> Path:
    for method, by_seed in errors.items():
        for seed, (a, b) in enumerate(by_seed, start=1):
            run = made_up_run(folder / f"{method}-{seed}", recipe(method, seed))
            rewrite(run, {"a": a, "b": b}, elapsed_s if method == "dcm" else 50.0)
    return folder


def paired(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> tuple[float, float, float, float]:
    gaps = np.mean(theirs, axis=1) - np.mean(ours, axis=1)
    low, high = stats.t.interval(0.95, len(gaps) - 1, gaps.mean(), stats.sem(gaps))
    return gaps.mean(), low, high, float(stats.ttest_1samp(gaps, 0).pvalue)


def test_who_is_ahead_by_how_much_by_which_rule_and_at_what_cost(tmp_path: Path) -> None:
    said = headline(look(write(tmp_path, {"independent": BASELINE, "dcm": AHEAD})))
    points, low, high, p = paired(AHEAD, BASELINE)
    assert p < 0.05
    ours, theirs = (sum(c.training_flops for c in count_costs(recipe(m, 1)).values()) for m in ("dcm", "independent"))
    assert said == (
        f"DCM is ahead of independent by {points:.2f} points (95 % interval {low:.2f} … {high:.2f}, n = 3): decided, "
        f"p = {p:.2g} < 0.05; training DCM takes {120 / 50:.2f} times the time and {ours / theirs:.2f} times the FLOPs "
        "of independent."
    )


def test_an_interval_that_contains_0_decides_nothing(tmp_path: Path) -> None:
    said = headline(look(write(tmp_path, {"independent": BASELINE, "dcm": OPEN})), count_flops=False)
    points, low, high, p = paired(OPEN, BASELINE)
    assert low < 0 < high
    assert p > 0.05
    assert said == (
        f"The test error of DCM is {points:.2f} points below that of independent (95 % interval {low:.2f} … "
        f"{high:.2f}, n = 3), which is not decided: the interval contains 0; training DCM takes 2.40 times the time "
        "of independent."
    )


def test_times_of_runs_that_shared_a_device_are_no_cost(tmp_path: Path) -> None:
    folder = write(tmp_path, {"independent": BASELINE, "dcm": AHEAD})
    rewrite(folder / "dcm-2", dict(zip("ab", AHEAD[1], strict=True)), 160.0)
    assert headline(look(folder), count_flops=False).endswith("< 0.05.")


def test_whoever_is_ahead_is_named_first(tmp_path: Path) -> None:
    """Also the row that the difference is taken from."""
    said = headline(look(write(tmp_path, {"independent": AHEAD, "dcm": BASELINE})), count_flops=False)
    assert said.startswith("independent is ahead of DCM by 3.00 points (95 % interval 2.75 … 3.25, n = 3): decided")
    assert said.endswith(f"training independent takes {50 / 120:.2f} times the time of DCM.")


def test_of_several_rows_the_lowest_and_its_distance_to_the_next_corrected(tmp_path: Path) -> None:
    near = [(24.5, 26.5), (28.1, 30.1), (25.8, 27.8)]
    said = headline(look(write(tmp_path, {"independent": BASELINE, "dml": near, "dcm": AHEAD})), count_flops=False)
    points, low, high, _ = paired(AHEAD, near)
    assert low > 0, "the interval alone does not contain 0"
    begin = f"DCM has the lowest error of 3 rows: the test error of DCM is {points:.2f} points below that of DML (95 % "
    assert said.startswith(f"{begin}interval {low:.2f} … {high:.2f}, n = 3), which is not decided: p = ")
    assert "after Holm's correction is not below 0.05" in said


def test_the_primary_difference_of_a_study_and_who_is_lower_still(study: Path, tmp_path: Path) -> None:
    for method, errors in {"independent": BASELINE, "dml": AHEAD, "dcm": OPEN}.items():
        for seed, (a, b) in enumerate(errors, start=41):
            whole = quick(method, seed, length={"epochs": 40})
            rewrite(made_up_run(tmp_path / f"{method}-{seed}", whole), {"a": a, "b": b})
    said = headline(look(tmp_path), count_flops=False)
    assert said.startswith("The test error of DCM is 0.67 points below that of independent")
    assert said.endswith(f"DML has the lowest mean error of the 3 rows, {np.mean(AHEAD):.2f} %.")
    assert "less than 0.5 of the full length allows no verdict" in headline(look(study), count_flops=False)


def test_one_seed_allows_no_verdict(tmp_path: Path) -> None:
    said = headline(look(write(tmp_path, {"independent": BASELINE[:1], "dcm": AHEAD[:1]})), count_flops=False)
    assert said.startswith(
        "The test error of DCM is 3.00 points below that of independent, but one seed allows no verdict"
    )


def test_one_run_has_its_errors_and_best_epochs(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", quick())
    content = json.loads((run / "result.json").read_text())
    content["epochs"][6]["test"]["b/final"]["top1_error"] = 11.5
    write_sealed(run / "result.json", content, sort_keys=False)
    a, b = (content["networks"][name]["last"]["top1_error"] for name in "ab")
    expected = f"a {a:.2f} % (its lowest), b {b:.2f} % (lowest: 11.50 % after epoch 7)."
    assert headline(look(run)) == f"The test error after 12 epochs, with one seed: {expected}"


def test_several_seeds_of_one_row_have_a_mean_and_a_spread(tmp_path: Path) -> None:
    a = np.array(AHEAD)[:, 0]
    said = headline(look(write(tmp_path, {"dcm": AHEAD})))
    assert f"over 3 seeds: a {a.mean():.2f}({a.std(ddof=1):.2f}) %, b " in said


def test_unfinished_runs_are_said_to_be(tmp_path: Path) -> None:
    going = made_up_run(tmp_path / "going", recipe("dml", 1), epochs=5)
    latest = look(going).runs[0].latest("test", "a/final", "top1_error")
    assert headline(look(going)).startswith(f"Not finished, after epoch 5 of 12: test error a {latest:.2f} % (")
    write(tmp_path, {"dcm": AHEAD})
    nothing = "1 of 4 runs not finished; so far: nothing is compared: no two rows have finished runs of the same seed."
    assert headline(look(tmp_path)) == nothing
    made_up_run(tmp_path / "later", recipe("dml", 2), epochs=1)
    assert headline(look(tmp_path / "going", tmp_path / "later")) == "None of 2 runs is finished."


def test_rows_without_a_common_network_or_test_set_are_not_compared(tmp_path: Path) -> None:
    one = made_up_run(tmp_path / "one", quick())
    other = made_up_run(tmp_path / "two", quick(networks={"x": "wrn-10-1", "y": "wrn-10-1"}))
    assert headline(look(one, other)) == "Nothing is compared: the rows train no network of the same name."
    larger = made_up_run(tmp_path / "three", quick(data={**quick().data.model_dump(), "image_size": 28}))
    assert headline(look(one, larger)) == "Nothing is compared: no two rows were tested on the same images."


def test_of_several_test_sets_the_largest_difference(tmp_path: Path) -> None:
    data = {**quick().data.model_dump(), "image_size": 28}
    for seed in range(3):
        for name, method, errors, changes in (
            ("a", "dml", BASELINE, {}),
            ("b", "dcm", OPEN, {}),
            ("c", "dml", BASELINE, {"data": data}),
            ("d", "dcm", AHEAD, {"data": data}),
        ):
            run = made_up_run(tmp_path / f"{name}{seed}", recipe(method, seed, **changes))
            rewrite(run, dict(zip("ab", errors[seed], strict=True)))
    said = headline(look(tmp_path), count_flops=False)
    assert said.startswith("1 of 2 primary differences are decided; the largest: DCM is ahead of DML by 3.00 points")
    assert "(fashion at 28×28, 2000 images)" in said


def test_what_was_done_to_the_data_is_said_first(tmp_path: Path) -> None:
    one = made_up_run(tmp_path / "one", quick())
    wrong = "50 % of the training labels are wrong on purpose, only 1,500 training images, only 2,000 test images"
    assert caveats(look(one)) == (f"{wrong[0].upper()}{wrong[1:]}.",)
    right = {**quick().data.model_dump(), "wrong_labels": 0.0, "train_limit": None}
    two = made_up_run(tmp_path / "two", quick("dml", data=right, length={"epochs": 6, "paper_epochs": 12}))
    assert set(caveats(look(one, two))) == {
        f"{wrong} (DCM).",
        "Only 2,000 test images, trained for 0.50 of the full length (DML).",
    }
    content = json.loads((one / "result.json").read_text())
    content["epochs"][-1]["skipped"] = {"a": 0, "b": 7}
    write_sealed(one / "result.json", content, sort_keys=False)
    assert caveats(look(one))[1:] == ("one: 7 updates of b were left out, because they were not finite.",)


def test_page_live_page_and_terminal_say_the_same(tmp_path: Path) -> None:
    seen = look(write(tmp_path / "runs", {"independent": BASELINE, "dcm": AHEAD}))
    said = headline(seen)
    text = report_page(seen, patience_s=0).html()
    header = text[text.index("<header>") : text.index("</header>")]
    assert said.replace("<", "&lt;") in header
    assert "labels are wrong on purpose" in header
    assert headline(seen, count_flops=False).replace("<", "&lt;") in live_page(seen).html()
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "runs")], prog_name="codistill")
    assert done.stdout.splitlines()[-1] == said
