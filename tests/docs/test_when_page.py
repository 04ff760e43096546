"""The commands of docs/when.md as they are printed, in an empty folder; the recipe that they train is shorter."""

import re
import shlex
from pathlib import Path

import pytest

from codistill.recipes import catalogue
from codistill.recipes.catalogue import ListedRecipe, quickstart
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Data, Evaluation, Length, Runtime
from support.cli import call
from support.site import ROOT

PAGE = (ROOT / "docs" / "when.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]


def short() -> Recipe:
    return quickstart().replace(
        data=Data(name="fashion", image_size=14, train_limit=60, test_limit=40),
        length=Length(epochs=1),
        evaluation=Evaluation(),
        runtime=Runtime(device="cpu"),
    )


def test_the_page_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(catalogue.RECIPES, "quickstart", ListedRecipe("quickstart", "shorter", short))
    assert [shlex.split(line)[1] for line in LINES] == ["train"] * 3 + ["compare"] + ["study"] * 3
    for line in LINES:
        done = call(*shlex.split(line)[1:])
        assert done.exit_code == 0, (line, done.stderr, done.exception)
        if line == "codistill compare runs/which":
            assert all(f"│ {row} " in done.stdout for row in ("independent", "DML", "mutual")), done.stdout
            assert "one seed allows no verdict" in done.stdout
