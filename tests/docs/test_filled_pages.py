"""The numbers in README, docs and results are what tools/fill_docs.py makes of the published JSON."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import fill_docs  # noqa: E402


def test_filling_the_pages_changes_nothing() -> None:
    ran = subprocess.run([sys.executable, ROOT / "tools" / "fill_docs.py", "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "nothing to change\n"


def test_every_template_is_used() -> None:
    pages = "".join(file.read_text(encoding="utf-8") for pattern in fill_docs.PAGES for file in ROOT.glob(pattern))
    used = {name for _, name, _ in fill_docs.BLOCK.findall(pages)}
    assert used == {file.stem for file in (ROOT / "tools" / "blocks").glob("*.md")}
    assert len(used) >= 10


def test_another_number_is_noticed() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    typed = page.replace("18.70", "17.70")
    assert typed != page
    assert fill_docs.filled(typed) == page


def test_a_remark_about_no_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    published = fill_docs.Published()
    monkeypatch.setattr(fill_docs, "read", lambda file: {"cifar100-nothing-seed1": {}})
    published.runs = {}
    with pytest.raises(ValueError, match="cifar100-nothing-seed1"):
        _ = published.remarks
