"""The site in Chromium: every page stands by itself, fits a telephone, and follows the theme."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WIDTHS = {"telephone": 320, "desk": 1600}


@pytest.fixture(params=WIDTHS.values(), ids=WIDTHS)  # type: ignore[call-overload, untyped-decorator]
def page(request: pytest.FixtureRequest, chromium: Any, address: str) -> Iterator[Any]:
    """A page on which nothing may go wrong and from which nothing may go out."""
    context = chromium.new_context(viewport={"width": request.param, "height": 900}, color_scheme="light")
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("response", lambda answer: wrong.append(answer.url) if answer.status >= 400 else None)
    page.on("request", lambda asked: None if asked.url.startswith((address, "data:")) else wrong.append(asked.url))
    yield page
    context.close()
    assert wrong == []


def test_every_page_stands_and_fits(page: Any, site: Path, address: str) -> None:
    files = [file for file in sorted(site.rglob("*.html")) if file.name != "404.html"]
    assert len(files) >= 25
    for file in files:
        page.goto(f"{address}{file.relative_to(site)}")
        assert page.locator("h1").count() == 1, file
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, f"{file} is too wide"
        broken = "[...document.images].filter((one) => one.complete && !one.naturalWidth).map((one) => one.src)"
        assert page.evaluate(broken) == [], file


def test_the_theme_can_be_chosen(page: Any, address: str) -> None:
    page.goto(f"{address}methods/")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    seen = {page.evaluate(scheme)}
    for _ in range(2):
        page.locator("form[data-md-component=palette] label:visible").click()
        seen.add(page.evaluate(scheme))
    assert seen == {"default", "slate"}
    assert page.evaluate("getComputedStyle(document.querySelector('img[src*=\"dcm.svg\"]')).colorScheme") == "dark"


def test_the_search_finds_without_asking_anybody(page: Any, address: str) -> None:
    page.goto(f"{address}?q=temperature")  # typing would have to wait until the page listens
    page.locator(".md-search-result__item a").first.wait_for(state="visible")
    assert page.locator(".md-search-result__item").count() >= 2
