"""docs/reliability.md: its promises are on the tests that keep them, and its mutations name tests that exist."""

import re
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
sys.path.append(str(TESTS.parent / "tools"))

from promises import promises  # noqa: E402

PROMISES = 26


def test_every_promise_is_on_the_page() -> None:
    """With counts as `make stress` has them, not as `make test`."""
    found = promises()
    assert len(found) == PROMISES
    assert all(f"| {promise.sentence} | " in PAGE for promise in found.values())
    assert found["killed"].repeated.startswith("200 SIGKILLs")
    assert found["hostile-files"].repeated.startswith("32 files")
    assert [len(tests) for tests in found["disk"].tests.values()] == [3, 1]


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ('@pytest.mark.promise("kept")', "kept"),
        ('@pytest.mark.promise("kept", "It holds.")', "kept"),
        ('@pytest.mark.promise("kept", "It holds.", repeated="{UNKNOWN} times")', "UNKNOWN"),
        ('@pytest.mark.promise("kept", "It holds.", repeated="once")\n' * 2, "kept"),
    ],
)
def test_a_mark_that_says_too_little_is_refused(written: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "support").mkdir()
    (tmp_path / "support" / "stress.py").write_text("ROUNDS = times(20, 1)\n")
    (tmp_path / "test_it.py").write_text(f"{written}\ndef test_it(): ...\n")
    with pytest.raises((ValueError, KeyError), match=complaint):
        promises(tmp_path)


def test_every_mutation_names_a_test_that_exists() -> None:
    section = PAGE.partition("\n## Mutations\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 30
    for _, caught_by in rows:
        file, test = re.findall(r"`([\w.]+)`", caught_by)
        (found,) = TESTS.rglob(file)
        assert f"def {test}(" in found.read_text(encoding="utf-8"), caught_by
