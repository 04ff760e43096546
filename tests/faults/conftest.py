"""Tests say how often they did what they promise; `make stress` prints it at the end."""

from collections.abc import Callable

import pytest

from support.stress import Counted

MARK = "stress: "


@pytest.fixture
def counted(record_property: Callable[[str, object], None]) -> Counted:
    """``counted("SIGKILLs of a training", 200)``"""
    return lambda what, times: record_property(MARK + what, times)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals: dict[str, int] = {}
    for report in terminalreporter.getreports("passed"):
        for name, times in report.user_properties:
            if name.startswith(MARK):
                totals[name.removeprefix(MARK)] = totals.get(name.removeprefix(MARK), 0) + int(str(times))
    if totals:
        terminalreporter.section("done and survived")
        for what, times in sorted(totals.items()):
            terminalreporter.write_line(f"{times:>8,}  {what}")
