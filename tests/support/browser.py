"""A page in a browser, as tests look at it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tab:
    """A page that is open, and all that went wrong or went out on it."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, address: str) -> "Tab":
        self.page.goto(address)
        return self

    def wait(self, expression: str) -> None:
        """Until it is true. Playwright's own waiting evaluates strings in the page, which the page forbids."""
        for _ in range(600):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"not so after 30 s: {expression}; errors: {self.errors}")

    def draw_all(self) -> None:
        """Open every fold and draw every chart, as a reader of the whole page does."""
        self.page.evaluate(
            "document.querySelectorAll('details').forEach((one) => { one.open = true; });"
            "document.querySelectorAll('[data-chart]').forEach(drawChart)"
        )
        self.wait(
            "[...document.querySelectorAll('[data-chart] .plot')].every((plot) => plot.dataset.drawn !== undefined)"
        )
