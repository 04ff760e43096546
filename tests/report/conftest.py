"""Made-up studies and runs, two that were really trained, and a browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from codistill.engine import trainer
from codistill.recipes.sections import Length
from support.browser import Tab
from support.made_up import METHODS, SEEDS, made_up_run, quick
from support.tiny import tiny_recipe


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods × three seeds, made up, in folders as `codistill study` leaves them."""
    folder = tmp_path_factory.mktemp("study")
    for method in METHODS:
        for seed in SEEDS:
            made_up_run(folder / "runs" / f"{method}-{seed}", quick(method, seed))
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run that was really trained to its end, with a moving average and auxiliary classifiers."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    for _ in trainer.train(tiny_recipe(length=Length(epochs=2).model_dump()), folder):
        pass
    return folder


@pytest.fixture
def tab(chromium: Any) -> Iterator[Tab]:
    context = chromium.new_context(viewport={"width": 1600, "height": 900})
    tab = Tab(context.new_page())
    tab.page.on("console", lambda message: tab.errors.append(message.text))
    tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
    tab.page.on("request", lambda request: tab.requests.append(request.url))
    yield tab
    context.close()
