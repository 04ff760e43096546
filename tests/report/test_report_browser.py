"""The page in a real browser: drawn whole, silent, and doing what its buttons and keys say."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from codistill.report import page
from codistill.studies import catalogue
from support.browser import Tab
from support.made_up import SEEDS, look, made_up_run, quick

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def written(study: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the study."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    page.report_page(look(study), patience_s=0).write(file)
    return file


@pytest.fixture
def opened(written: Path, tab: Tab) -> Tab:
    tab.open(written.as_uri())
    tab.draw_all()
    return tab


def chart(tab: Tab, name: str) -> Any:
    return tab.page.locator(f"[data-chart={name}]")


def drawn(tab: Tab, name: str) -> int:
    return int(chart(tab, name).locator("[data-series]").count())


def test_it_opens_without_an_error_or_a_request(opened: Tab, written: Path) -> None:
    assert opened.errors == []
    assert opened.requests == [written.as_uri()]


def test_every_chart_has_its_series_drawn(opened: Tab, study: Path) -> None:
    expected = {
        one.id: [series.name for series in one.series] for one in page.report_page(look(study), patience_s=0).charts
    }
    assert len(expected) == 16
    for name, series in expected.items():
        nodes = chart(opened, name).locator("[data-series]")
        assert [nodes.nth(place).get_attribute("data-series") for place in range(nodes.count())] == series
        assert chart(opened, name).locator("[data-series] path, [data-series] polygon").count() >= len(series)
        assert chart(opened, name).locator(".legend button").count() == len(series)
    assert len(expected["error"]) == 6
    assert (len(expected["row2-edges"]), len(expected["row2-kinds"])) == (18, 5)


def test_a_screenshot_of_the_whole_page_has_every_chart_of_it(written: Path, tab: Tab) -> None:
    """Nothing waits for a reader who scrolls."""
    tab.open(written.as_uri())
    places = "[...document.querySelectorAll('[data-chart]:not(details:not([open]) *) .plot')]"
    tab.wait(f"{places}.length >= 11")
    tab.wait(f"{places}.every((plot) => plot.querySelector('svg') && plot.dataset.drawn > 0)")
    assert drawn(tab, "row2-kinds") == 5


def test_a_band_is_shown_of_the_line_that_is_pointed_at(opened: Tab) -> None:
    figure = chart(opened, "error")
    seen = "[...charts.get('error').frame.querySelectorAll('.band')].filter((one) => one.checkVisibility()).length"
    whiskers = figure.locator("[data-series='DCM, a'] .whisker")
    assert (opened.page.evaluate(seen), whiskers.count()) == (0, 4)
    button = figure.locator(".legend button").nth(4)
    button.hover()
    assert opened.page.evaluate(seen) == 1
    assert figure.locator("[data-series='DCM, a'].lit").count() == 1
    opened.page.mouse.move(0, 0)
    assert opened.page.evaluate(seen) == 0
    button.focus()
    assert opened.page.evaluate(seen) == 1, "by keyboard too"
    button.dblclick()
    assert opened.page.evaluate(seen) == 1, "and of a line that is alone"


def test_lines_are_named_at_their_ends_without_touching(opened: Tab) -> None:
    boxes = opened.page.evaluate(
        "[...charts.get('error').frame.querySelectorAll('[data-label] text')].map((one) => one.getBBox())"
        ".map((box) => [box.y, box.y + box.height, box.x + box.width])"
    )
    assert len(boxes) == 6
    edges = [edge for top, bottom, _ in sorted(boxes) for edge in (top, bottom)]
    assert all(later - earlier > -2 for earlier, later in pairwise(edges))
    width = opened.page.evaluate("charts.get('error').plot.width")
    assert max(right for *_, right in boxes) <= width


def test_the_first_epochs_do_not_squash_the_last(opened: Tab, study: Path) -> None:
    """The scale covers what comes after a quarter of the epochs, says what it cuts, and a button shows all."""
    figure = chart(opened, "error")
    spec = json.loads(figure.locator("script").text_content())
    every = [value for series in spec["series"] for value in series["high"]]
    scale_top = "charts.get('error').plot.y(Math.max(...charts.get('error').spec.series.flatMap((one) => one.high)))"
    assert opened.page.evaluate(scale_top) < 0, "above the picture"
    assert f"first epochs: up to {max(every):.1f}, cut by “focus”" in tick_labels(opened, "error")
    focus = figure.get_by_role("button", name="Leave out the range of the first epochs")
    assert focus.get_attribute("aria-pressed") == "true"
    focus.click()
    assert opened.page.evaluate(scale_top) >= 10
    assert not [text for text in tick_labels(opened, "error") if "focus" in text]
    assert chart(opened, "outcome").get_by_role("button", name="Leave out").count() == 0, "only where something is cut"


def test_the_tables_have_the_results_own_numbers(opened: Tab, study: Path) -> None:
    """Every run's errors as result.json has them, to the last digit."""
    shown = opened.page.evaluate(
        "[...document.querySelectorAll('#results tr')].map((row) => [row.lastElementChild.textContent,"
        " ...[...row.querySelectorAll('[data-value]')].map((cell) => Number(cell.dataset.value))])"
    )
    by_run = {row[0]: row[2:] for row in shown if (study / "runs" / row[0]).is_dir()}
    assert len(by_run) == 9
    for name, values in by_run.items():
        networks = json.loads((study / "runs" / name / "result.json").read_text())["networks"]
        assert values == [networks[network]["last"]["top1_error"] for network in "ab"]


def test_the_charts_have_the_results_own_numbers(opened: Tab, study: Path) -> None:
    spec = json.loads(chart(opened, "outcome").locator("script").text_content())
    assert spec["x"]["labels"] == ["independent", "DML", "DCM"]
    points = {(series["name"], x): [] for series in spec["series"] for x in series["x"]}  # type: ignore[var-annotated]
    for series in spec["series"]:
        for x, y in zip(series["x"], series["y"], strict=True):
            points[series["name"], x].append(y)
    for (network, place), values in points.items():
        method = ("independent", "dml", "dcm")[int(place)]
        files = [study / "runs" / f"{method}-{seed}" / "result.json" for seed in SEEDS]
        exact = [json.loads(file.read_text())["networks"][network]["last"]["top1_error"] for file in files]
        assert values == pytest.approx(exact, rel=1e-5)
    assert len(points) == 6


def test_a_legend_hides_shows_and_isolates(opened: Tab) -> None:
    button = chart(opened, "error").locator(".legend button").first
    button.click()
    assert (drawn(opened, "error"), button.get_attribute("aria-pressed")) == (5, "false")
    button.click()
    assert (drawn(opened, "error"), button.get_attribute("aria-pressed")) == (6, "true")
    button.dblclick()
    assert drawn(opened, "error") == 1
    button.dblclick()
    assert drawn(opened, "error") == 6
    assert opened.errors == []


def tick_labels(tab: Tab, name: str) -> list[str]:
    return list(chart(tab, name).locator("svg text").all_text_contents())


def test_zoom_by_mouse_buttons_and_keys(opened: Tab) -> None:
    whole = tick_labels(opened, "error")
    figure = chart(opened, "error")
    figure.scroll_into_view_if_needed()
    box = figure.locator(".plot").bounding_box()
    mouse = opened.page.mouse
    mouse.move(box["x"] + 300, box["y"] + 100)
    mouse.down()
    mouse.move(box["x"] + 500, box["y"] + 120)
    mouse.up()
    zoomed = tick_labels(opened, "error")
    assert zoomed != whole
    figure.get_by_role("button", name="Show all").click()
    assert tick_labels(opened, "error") == whole
    figure.locator(".plot").focus()
    opened.page.keyboard.press("+")
    assert tick_labels(opened, "error") != whole
    opened.page.keyboard.press("0")
    assert tick_labels(opened, "error") == whole
    figure.get_by_role("button", name="Logarithmic scale").click()
    assert tick_labels(opened, "error") != whole
    assert opened.errors == []


def test_values_are_read_by_pointer_and_by_keyboard(opened: Tab) -> None:
    figure = chart(opened, "error")
    figure.locator(".plot").focus()
    for _ in range(3):
        opened.page.keyboard.press("ArrowRight")
    said = opened.page.locator("#announce").text_content()
    assert said.startswith("epoch 3: independent, a ")
    tip = figure.locator(".tip")
    assert tip.locator("div").count() == 6
    opened.page.keyboard.press("End")
    last = json.loads(figure.locator("script").text_content())["series"][0]["y"][-1]
    assert f"epoch 12: independent, a {last:.2f} %" in opened.page.locator("#announce").text_content()
    opened.page.keyboard.press("Escape")
    assert tip.is_hidden()
    figure.scroll_into_view_if_needed()
    box = figure.locator(".plot").bounding_box()
    opened.page.mouse.move(box["x"] + 400, box["y"] + 100)
    assert tip.is_visible()


@pytest.mark.parametrize("width", [320, 1600])
@pytest.mark.parametrize("key", ["Home", "End"])
def test_values_are_shown_inside_the_window(opened: Tab, width: int, key: str) -> None:
    opened.page.set_viewport_size({"width": width, "height": 800})
    opened.wait("charts.get('error').plot.width === charts.get('error').frame.clientWidth")
    chart(opened, "error").locator(".plot").focus()
    opened.page.keyboard.press(key)
    values = chart(opened, "error").locator(".tip .value")
    assert values.count() == 6
    for place in range(6):
        box = values.nth(place).bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= width


def test_the_numbers_can_be_saved(opened: Tab) -> None:
    with opened.page.expect_download() as download:
        chart(opened, "error").get_by_role("button", name="Save the numbers").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0] == '"series","epoch","test error","least","most","n"'
    assert len(lines) == 1 + 6 * 12


@pytest.mark.parametrize("width", [320, 1600])
def test_it_fits_the_window(opened: Tab, width: int) -> None:
    opened.page.set_viewport_size({"width": width, "height": 800})
    opened.wait("charts.get('error').plot.width === charts.get('error').frame.clientWidth")
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width


def ground(tab: Tab) -> str:
    return str(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_dark_and_light_follow_the_system_and_the_button(opened: Tab) -> None:
    opened.page.emulate_media(color_scheme="dark")
    dark = ground(opened)
    opened.page.emulate_media(color_scheme="light")
    light = ground(opened)
    assert dark != light
    button = opened.page.get_by_role("button", name="Colours")
    button.click()  # light
    button.click()  # dark
    assert ground(opened) == dark
    assert button.get_attribute("aria-label") == "Colours: dark"


def test_everything_has_a_name_and_can_be_reached_by_keyboard(opened: Tab) -> None:
    nameless = opened.page.evaluate(
        "[...document.querySelectorAll('button, a, [role=region], [role=group], img, svg[role=img]')].filter((one) =>"
        " !(one.textContent.trim() || one.ariaLabel || one.alt || one.getAttribute('aria-labelledby')))"
        ".map((one) => one.outerHTML)"
    )
    assert nameless == []
    twice = opened.page.evaluate(
        "(() => { const ids = [...document.querySelectorAll('[id]')].map((one) => one.id);"
        " return ids.filter((id, place) => ids.indexOf(id) !== place); })()"
    )
    assert twice == []
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.textContent") == "Skip to the results"


def test_a_name_is_shown_as_text(tab: Tab, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    page.report_page(look(made_up_run(tmp_path / "run", quick(name=EVIL))), patience_s=0).write(file)
    dialogs: list[Any] = []
    tab.page.on("dialog", lambda dialog: dialogs.append(dialog))
    tab.open(file.as_uri()).draw_all()
    assert tab.page.locator("h1").text_content() == f"{EVIL}, DCM, seed 1"
    assert (dialogs, tab.errors) == ([], [])


def test_a_report_of_a_trained_run_has_all_its_pictures(tab: Tab, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    page.report_page(look(trained), patience_s=60).write(file)
    tab.open(file.as_uri()).draw_all()
    pictures = tab.page.evaluate("[...document.images].map((image) => image.naturalWidth)")
    assert pictures
    assert all(width == 28 for width in pictures)
    assert tab.page.get_by_role("heading", name="Agreement").count() == 1
    assert tab.errors == []


def test_a_large_study_is_a_small_file(tab: Tab, tmp_path: Path) -> None:
    """Seven rows, five seeds, 200 epochs: under 8 MB, and every chart is drawn."""
    study = catalogue.get("efficiency")
    for row in study.rows:
        for seed in range(1, 6):
            made_up_run(tmp_path / "runs" / f"{row.label}-{seed}".replace("/", "-"), row.resolve().replace(seed=seed))
    file = tmp_path / "report.html"
    written = page.report_page(look(tmp_path), patience_s=0)
    written.write(file)
    assert len(look(tmp_path).runs) == 35
    assert file.stat().st_size < 8e6
    tab.open(file.as_uri()).draw_all()
    assert tab.page.evaluate("charts.size") == len(written.charts) == 26
    tab.page.set_viewport_size({"width": 320, "height": 900})
    tab.draw_all()
    spans = tab.page.evaluate(
        """[...document.querySelectorAll("svg:has(.x-tick)")].map((svg) => ({
             width: svg.viewBox.baseVal.width,
             ticks: [...svg.querySelectorAll(".x-tick")]
               .map((tick) => tick.getBBox()).map((box) => [box.x, box.x + box.width]),
           }))"""
    )
    assert len(spans) == 26
    for chart in spans:
        assert chart["ticks"]
        ends = [0.0, *(edge for tick in chart["ticks"] for edge in tick), chart["width"]]
        assert ends == sorted(ends), "labels on a narrow window neither touch nor leave it"
    assert tab.errors == []
