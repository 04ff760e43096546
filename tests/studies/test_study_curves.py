"""Curves: means, bands, and pictures with a text alternative."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from codistill.studies import catalogue, curves
from codistill.studies.study import Results, Study
from support.synthetic import made_up_results

SVG = "{http://www.w3.org/2000/svg}"


def drawn(study: Study, group: str, results: Results) -> ElementTree.Element:
    picture = curves.to_svg(study, group, results)
    assert picture is not None
    return ElementTree.fromstring(picture)


def test_means_and_bands_over_seeds(tmp_path: Path) -> None:
    study = catalogue.get("curves")
    results = made_up_results(study, [1, 2, 3], tmp_path)
    # made_up_error of independent: 20 + 11 + 0.1·(97 or 98) + 0.02·seed²; the networks' mean is 40.75 + 0.02·seed².
    points = curves.curve(list(results[study.rows[0].key].values()))
    assert [point.epoch for point in points] == [198, 199, 200]
    last = points[-1]
    assert (last.n, last.least, last.most) == (3, pytest.approx(40.77), pytest.approx(40.93))  # type: ignore[comparison-overlap]
    assert last.mean == pytest.approx(40.75 + 0.28 / 3)
    lines = curves.to_csv(study, results).splitlines()
    assert len(lines) == 1 + 3 * 3
    assert lines[3].startswith("WRN-28-10 & same,independent,200,3,40.84")


def test_a_long_title_goes_on_in_a_second_line(tmp_path: Path) -> None:
    study = catalogue.get("wrn-16-4-noise")
    picture = drawn(study, study.groups[1], made_up_results(study, [1], tmp_path))
    heading = [text for text in picture.iter(f"{SVG}text") if text.get("font-size") == "13"]
    assert " ".join(text.text or "" for text in heading) == f"Test error. {study.title}: {study.groups[1]}"
    assert all(len(text.text or "") <= 90 for text in heading)
    assert len({text.get("y") for text in heading}) == len(heading) == 2


def test_the_picture_has_a_title_a_description_and_a_line_and_band_per_row(tmp_path: Path) -> None:
    study = catalogue.get("curves")
    picture = drawn(study, study.groups[0], made_up_results(study, [1, 2], tmp_path))
    assert picture.findtext(f"{SVG}title") == study.title
    described = picture.findtext(f"{SVG}desc") or ""
    assert "DCM ends at 32.80 % (n = 2)" in described  # 20 + 3 + 9.75, and the mean of 0.02 and 0.08
    assert picture.get("role") == "img"
    assert len(picture.findall(f"{SVG}polyline")) == len(picture.findall(f"{SVG}polygon")) == 3
    _, _, width, height = map(float, (picture.get("viewBox") or "").split())
    legend = [float(text.get("y") or 0) for text in picture.findall(f"{SVG}text") if "n = " in (text.text or "")]
    assert len(legend) == 3
    for line in picture.findall(f"{SVG}polyline"):
        pairs = [tuple(map(float, pair.split(","))) for pair in (line.get("points") or "").split()]
        assert len(pairs) == 3
        assert all(0 <= x <= width and max(legend) < y < height for x, y in pairs)


def test_an_only_epoch_is_seen(tmp_path: Path) -> None:
    """A line through one point draws nothing, so it is a dot with a vertical stroke as its band."""
    study = catalogue.get("curves")
    results = made_up_results(study, [1, 2], tmp_path)
    once = {
        key: {
            seed: run.model_copy(update={"epochs": [one for one in run.epochs if one.epoch == 200]})
            for seed, run in by_seed.items()
        }
        for key, by_seed in results.items()
    }
    picture = drawn(study, study.groups[0], once)
    dots = picture.findall(f"{SVG}circle")
    assert len(dots) == 3
    assert len({dot.get("fill") for dot in dots}) == 3
    strokes = [path.get("d") or "" for path in picture.findall(f"{SVG}path") if path.get("opacity")]
    assert len(strokes) == 3
    for dot, stroke in zip(dots, strokes, strict=True):
        assert stroke.startswith(f"M{dot.get('cx')} ")
    assert not drawn(study, study.groups[0], results).findall(f"{SVG}circle")


@pytest.mark.parametrize(("last", "step"), [(1, 1), (8, 1), (9, 2), (24, 5), (40, 5), (41, 10), (200, 50), (558, 100)])
def test_epochs_are_marked_in_round_steps(last: int, step: int) -> None:
    assert curves._step(last) == step


def test_every_group_of_a_table_has_a_picture_of_its_own(tmp_path: Path) -> None:
    study = catalogue.get("table7")
    results = made_up_results(study, [1], tmp_path)
    titles = [drawn(study, group, results).findtext(f"{SVG}title") for group in study.groups]
    assert titles == [f"{study.title}: {share}% wrong" for share in (20, 50, 80)]
    of_first = {row.key: results[row.key] for row in study.rows if row.group == study.groups[0]}
    assert len(drawn(study, study.groups[0], of_first).findall(f"{SVG}polyline")) == 3
    assert curves.to_svg(study, study.groups[1], of_first) is None


def test_nothing_is_drawn_of_nothing() -> None:
    study = catalogue.get("curves")
    assert curves.to_svg(study, study.groups[0], {}) is None


def test_runs_without_results_have_no_curve() -> None:
    assert curves.curve([]) == []
