"""`codistill report`, `watch` and `compare` as they are typed."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from codistill.cli.app import app
from codistill.studies import catalogue
from support.made_up import look, made_up_run, quick


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="codistill")


def test_report_writes_one_page(study: Path, tmp_path: Path) -> None:
    done = call("report", study, "-o", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"wrote {tmp_path / 'page.html'}: 9 runs, 16 charts, ")
    assert (tmp_path / "page.html").read_text().lstrip().startswith("<!doctype html>")


def test_report_goes_to_the_working_folder_by_default(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("report", study / "runs").exit_code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_report_of_published_results(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "results" / "24-epochs"
    done = call("report", results, "-o", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "page.html").read_text()
    assert "WRN-28-4 twins on CIFAR-100" in text
    assert "only results were published" in text
    assert "28.35" in text


def test_a_run_that_is_left_out_is_warned_of(tmp_path: Path) -> None:
    made_up_run(tmp_path / "good", quick())
    (made_up_run(tmp_path / "bad", quick(seed=2), epochs=3) / "recipe.yaml").write_text("?")
    done = call("report", tmp_path, "-o", tmp_path / "new" / "page.html")
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: bad is left out: ")
    assert "page.html: 1 run, " in done.stdout  # in a folder that was not there


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "nowhere"], "nowhere: no such file or folder"),
        (["watch", "nowhere"], "nowhere: no such file or folder"),
        (["compare", "nowhere"], "nowhere: no such file or folder"),
        (["compare", "nowhere", "-o", "table.png"], "unknown format of a comparison '.png'"),
        (["compare", "nowhere", "-o", "table"], "unknown format of a comparison 'table'"),
    ],
)
def test_mistakes_are_said_in_a_sentence(arguments: list[str], words: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {words}")
    assert "Traceback" not in done.output


def test_compare_prints_errors_and_paired_differences(study: Path) -> None:
    done = call("compare", study)
    assert done.exit_code == 0, done.output
    assert "DCM − independent" in done.stdout
    assert "95 % interval" in done.stdout


@pytest.mark.parametrize(
    "others",
    [
        {"networks": {"x": "wrn-10-1", "y": "wrn-10-1"}},
        {"networks": {"a": "wrn-10-1", "y": "wrn-10-1"}, "method": "kd", "start": {"a": "a.safetensors"}},
    ],
    ids=["other names", "the one shared network only teaches"],
)
def test_runs_without_a_network_in_common_are_shown_and_not_compared(others: dict[str, Any], tmp_path: Path) -> None:
    runs = [made_up_run(tmp_path / "first", quick()), made_up_run(tmp_path / "second", quick().replace(**others))]
    done = call("compare", *runs, "--json")
    assert done.exit_code == 0, done.output
    tables = json.loads(done.stdout)
    assert [row["n"] for row in tables["errors"]["rows"]] == [1, 1]
    (difference,) = tables["differences"]["rows"]
    assert (difference["n"], difference["points"], difference["verdict"]) == (0, None, "no network in common")
    assert "Networks are matched by name" in call("compare", *runs).stdout
    page = tmp_path / "page.html"
    assert call("report", *runs, "-o", page).exit_code == 0
    assert "no network in common" in page.read_text()


def test_compare_as_json_is_the_same_in_full(study: Path) -> None:
    done = call("compare", study, "--json")
    tables = json.loads(done.stdout)
    exact = look(study).tables()
    assert tables["errors"]["rows"][0]["a"]["mean"] == exact.errors.rows[0][2].mean
    assert len(tables["differences"]["rows"]) == 9


@pytest.mark.parametrize("suffix", [".html", ".csv", ".md", ".tex", ".json"])
def test_compare_writes_the_form_that_the_suffix_says(study: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"table{suffix}"
    done = call("compare", study, "-o", out)
    assert done.exit_code == 0, done.output
    assert "DCM" in out.read_text()


def test_the_csv_has_means_deviations_and_n(study: Path, tmp_path: Path) -> None:
    call("compare", study, "-o", tmp_path / "table.csv")
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    exact = look(study).tables().errors.rows
    assert [float(row["a"]) for row in rows] == [row[2].mean for row in exact]
    assert [row["a n"] for row in rows] == ["3"] * 3
    differences = list(csv.DictReader((tmp_path / "table.differences.csv").read_text().splitlines()))
    assert len(differences) == 9


def test_compare_says_which_runs_do_not_count(tmp_path: Path) -> None:
    made_up_run(tmp_path / "done", quick(seed=1))
    made_up_run(tmp_path / "going", quick(seed=2), epochs=2)
    done = call("compare", tmp_path)
    assert done.exit_code == 0
    assert "warning: going is not finished and is left out" in done.stderr


def test_watch_in_a_terminal_and_as_json(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run", quick(), epochs=2)
    assert "2 of 12" in call("watch", folder, "--terminal").stdout
    assert json.loads(call("watch", folder, "--json").stdout)["runs"][0]["epoch"] == 2


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("codistill wat", ["watch"]), ("codistill train quick", ["quickstart"]), ("codistill study dem", ["demo"])],
)
def test_the_shell_completes_commands_and_names(typed: str, expected: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_CODISTILL_COMPLETE": "complete_bash"}
    done = CliRunner().invoke(app, [], prog_name="codistill", env=words)
    assert done.stdout.split() == expected


@pytest.mark.parametrize("name", ["demo", "efficiency"])
def test_looking_at_journals_needs_no_torch(tmp_path: Path, name: str) -> None:
    """A page that follows a training must not cost a second copy of torch, not even where a study counts operations."""
    for place, row in enumerate(catalogue.get(name).rows[:2]):
        made_up_run(tmp_path / str(place), row.resolve().replace(seed=catalogue.get(name).first_seed))
    code = (
        "import sys; from pathlib import Path; from codistill.report.server import RunWatcher;"
        f"RunWatcher([Path({str(tmp_path)!r})]).page(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
