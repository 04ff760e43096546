"""Settings of every test process; what tests share is in tests/support."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("support")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for whatever a script starts with &: commands leave it so
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # and for whatever nohup starts
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

CHROMIUM = Path("/usr/bin/chromium")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests give a reason, and come first, so that none keeps a single worker busy at the end."""
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is not None and not mark.kwargs.get("reason"):
            raise pytest.UsageError(f'{item.nodeid}: say why it is slow, as in slow(reason="builds a wheel")')
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser of all tests: playwright starts only once in a process."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here; type pip install playwright")
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}; type apt install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()
