"""Curves: means, bands, and a picture that can be read aloud."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from synthetic import made_up_results

from codistill.studies import catalogue, curves


def test_means_and_bands_over_seeds(tmp_path: Path) -> None:
    study = catalogue.get("curves")
    results = made_up_results(study, [1, 2, 3], tmp_path)
    # made_up_error of independent: 20 + 11 + 0.1·(97 or 98) + 0.02·seed²; the networks' mean is 40.75 + 0.02·seed².
    points = curves.curve(list(results[study.rows[0].key].values()))
    assert [point.epoch for point in points] == [198, 199, 200]
    last = points[-1]
    assert (last.n, last.least, last.most) == (3, pytest.approx(40.77), pytest.approx(40.93))
    assert last.mean == pytest.approx(40.75 + 0.28 / 3)
    lines = curves.to_csv(study, results).splitlines()
    assert len(lines) == 1 + 3 * 3
    assert lines[3].startswith("WRN-28-10 & same,independent,200,3,40.84")


def test_the_picture_has_a_title_a_description_and_a_line_and_band_per_row(tmp_path: Path) -> None:
    study = catalogue.get("curves")
    picture = ElementTree.fromstring(curves.to_svg(study, made_up_results(study, [1, 2], tmp_path)))
    svg = "{http://www.w3.org/2000/svg}"
    assert picture.findtext(f"{svg}title") == study.title
    described = picture.findtext(f"{svg}desc") or ""
    assert "DCM ends at 32.80 % (n = 2)" in described  # 20 + 3 + 9.75, and the mean of 0.02 and 0.08
    assert picture.get("role") == "img"
    assert len(picture.findall(f"{svg}polyline")) == len(picture.findall(f"{svg}polygon")) == 3
    for line in picture.findall(f"{svg}polyline"):
        pairs = [tuple(map(float, pair.split(","))) for pair in (line.get("points") or "").split()]
        assert len(pairs) == 3
        assert all(0 <= x <= curves.WIDTH and 0 <= y <= curves.HEIGHT for x, y in pairs)


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ValueError, match="codistill study curves"):
        curves.to_svg(catalogue.get("curves"), {})


def test_runs_without_results_have_no_curve() -> None:
    assert curves.curve([]) == []
