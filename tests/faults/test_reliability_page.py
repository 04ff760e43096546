"""docs/reliability.md speaks of tests that exist, and counts as they do under `make stress`."""

import re
import runpy
from pathlib import Path

import pytest
from test_hostile import HOSTILE  # type: ignore[import-not-found]

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, row by row."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| \n").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def files_named(cell: str) -> list[Path]:
    names = [re.sub(r"^tests/", "", name) for name in re.findall(r"`((?:tests/)?[\w/]+\.py)`", cell)]
    return [TESTS / name if "/" in name else TESTS / "faults" / name for name in names]


def test_every_promise_names_tests_that_exist() -> None:
    named = [(promise, file) for promise, cell, _ in table("Promises") for file in files_named(cell)]
    assert len({promise for promise, _ in named}) == len(table("Promises")) == 15
    assert [file for _, file in named if not file.is_file()] == []


def test_every_mutation_names_a_test_that_exists() -> None:
    rows = table("Mutations")
    assert len(rows) >= 30
    for _, caught_by in rows:
        file, test = re.findall(r"`([\w.]+)`", caught_by)
        (found,) = TESTS.rglob(file)
        assert f"def {test}(" in found.read_text(encoding="utf-8"), caught_by


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often `make stress` does each thing."""
    monkeypatch.setenv("CODISTILL_STRESS", "1")
    return {
        name: value for name, value in runpy.run_path(str(TESTS / "support" / "stress.py")).items() if name.isupper()
    }


def test_the_page_counts_as_the_tests_do(published: dict[str, int]) -> None:
    half = published["FUZZED"] // 2
    points, rounds = re.search(r"faults: (\d+) points, (\d+) times each", PAGE).groups()
    counted = {
        "test_killed.py": f"{published['KILLED_TRAININGS']} SIGKILLs",
        "test_checkpoint_damage.py": f"{published['DAMAGES']:,} damaged checkpoints",
        "test_signals.py": f"{published['SIGNALS_SENT']} signals",
        "test_non_finite_peer.py": f"{published['INJECTIONS'] * 5 // 4} injections",
        "test_fuzz.py": f"{half:,} by mutation and {half:,} by hypothesis",
        "test_hostile.py": f"{len(HOSTILE)} files",
    }
    assert int(rounds) == published["FAULT_ROUNDS"]
    for words in (f"{int(points) * int(rounds):,} faults", f"{published['KILLED_SAVES']:,} SIGKILLs of a process"):
        assert any(times.startswith(words) for _, cell, times in table("Promises") if "test_checkpoint_faults" in cell)
    for file, words in counted.items():
        (times,) = [times for _, cell, times in table("Promises") if file in cell]
        assert times.startswith(words), (file, times)
