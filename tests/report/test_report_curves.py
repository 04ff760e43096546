"""Charts say what the journals say: means and ranges by numpy, weights taken out, paces from the clock."""

from pathlib import Path

import numpy as np

from codistill.report import curves, sections
from codistill.report.blocks import Axis, Chart, Grid, Matrix, Series, thin_out
from codistill.report.page import live_page
from support.made_up import SECONDS_PER_EPOCH, SEEDS, TRAIN_IMAGES, look, made_up_error, made_up_run, quick


def test_lines_are_means_and_bands_the_range(study: Path) -> None:
    chart = next(one for one in live_page(look(study)).charts if one.id == "error")
    assert [series.name for series in chart.series] == [
        f"{label}, {network}" for label in ("independent", "DML", "DCM") for network in "ab"
    ]
    for series in chart.series[4:]:
        values = np.array(
            [
                [made_up_error(quick("dcm", seed), f"{series.name[-1]}/final", epoch) for epoch in range(1, 13)]
                for seed in SEEDS
            ]
        )
        np.testing.assert_allclose(series.y, values.mean(axis=0))
        np.testing.assert_allclose(series.low, values.min(axis=0))
        np.testing.assert_allclose(series.high, values.max(axis=0))
        assert series.n == (3,) * 12


def test_a_validation_split_has_a_chart_of_its_own(study: Path, tmp_path: Path) -> None:
    recipe = quick(data={**quick().data.model_dump(), "validation": 0.1})
    chart = next(one for one in live_page(look(made_up_run(tmp_path / "run", recipe))).charts if one.id == "validation")
    assert [series.name for series in chart.series] == ["a (wrn-10-1)", "b (wrn-10-1)"]
    for series, network in zip(chart.series, "ab", strict=True):
        exact = [made_up_error(recipe, f"{network}/final", epoch) + 1 for epoch in range(1, 13)]
        np.testing.assert_allclose(series.y, exact)
    assert "validation" not in [one.id for one in live_page(look(study)).charts]


def test_seeds_that_are_not_so_far_yet_are_not_counted(tmp_path: Path) -> None:
    made_up_run(tmp_path / "one", quick(seed=1), epochs=4)
    made_up_run(tmp_path / "two", quick(seed=2), epochs=2)
    chart = next(one for one in live_page(look(tmp_path)).charts if one.id == "error")
    assert [series.n for series in chart.series] == [(2, 2, 1, 1)] * 2


def test_a_networks_loss_is_the_sum_of_what_it_learns_from(tmp_path: Path) -> None:
    run = look(made_up_run(tmp_path / "run", quick())).runs[0]
    losses = [curves.network_loss(run, network) for network in "ab"]
    total = [sum(value or 0 for value in one.terms.values()) for one in run.records]
    np.testing.assert_allclose([losses[0][epoch] + losses[1][epoch] for epoch in range(1, 13)], total)


def test_divergences_are_without_their_weights(tmp_path: Path) -> None:
    recipe = quick(weights={"alpha": 2.0}, temperature=3.0, t_squared=True)
    (entry,) = look(made_up_run(tmp_path / "run", recipe)).entries
    chart = curves.divergences(entry, "row0")
    assert chart is not None
    assert len(chart.series) == len(recipe.graph.transfers) == 18
    terms = {edge: value or 0 for edge, value in entry.first.records[0].terms.items()}
    for series, edge in zip(chart.series, recipe.graph.transfers, strict=True):
        assert series.name == edge.name
        np.testing.assert_allclose(series.y[0], terms[edge.name] / (edge.weight * 9))
    assert len({(series.colour % 7, series.dash, series.colour // 7) for series in chart.series}) == 18


def test_many_transfers_are_grouped_by_kind(tmp_path: Path) -> None:
    """DCM's 18: means and ranges by numpy over the transfers of a kind, read off their names."""
    (entry,) = look(made_up_run(tmp_path / "run", quick())).entries
    single = curves.divergences(entry, "row0")
    assert single is not None
    found = curves.by_kind(entry, single)

    def kind(name: str) -> tuple[str, str]:
        source, learner = (end.partition("/")[2] for end in name.split("->"))
        return (
            ("same", source.replace("1", "2"))
            if source == learner
            else tuple(  # type: ignore[return-value]
                end if end == "final" else "auxiliary" for end in (source, learner)
            )
        )

    expected: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for series in single.series:
        expected.setdefault(kind(series.name), []).append(series.y)
    assert [len(those) for those in expected.values()] == [2, 4, 4, 4, 4]
    assert [series.name for series in found.series] == [
        "same stage, final (2)",
        "auxiliary → final (4)",
        "final → auxiliary (4)",
        "same stage, auxiliary (4)",
        "auxiliary, other stage (4)",
    ]
    for series, those in zip(found.series, expected.values(), strict=True):
        np.testing.assert_allclose(series.y, np.mean(those, axis=0))
        np.testing.assert_allclose((series.low, series.high), (np.min(those, axis=0), np.max(those, axis=0)))
    (few,) = look(made_up_run(tmp_path / "few", quick("dml"))).entries
    pair = curves.divergences(few, "row0")
    assert pair is not None
    assert curves.by_kind(few, pair) is pair


def test_a_single_point_is_no_chart(tmp_path: Path) -> None:
    seen = look(made_up_run(tmp_path / "run", quick()))
    assert [one.id for one in live_page(seen).charts if one.id in ("outcome", "cost-time", "pace")] == ["pace"]


def test_a_ramp_has_a_chart_and_its_mean_weights_are_taken_out(tmp_path: Path) -> None:
    ramp = {"share": 0.5, "scale": 2.0, "initial_share": 0.0, "initial_scale": 1.0, "begin": 0.25, "end": 0.75}
    (entry,) = look(made_up_run(tmp_path / "run", quick(transfer=ramp))).entries
    chart = curves.divergences(entry, "row0")
    assert chart is not None
    terms = [one.terms["b/final->a/final"] for one in entry.first.records]
    # The weight rises from 0 to 1/3 in epochs 4 to 9, by 1/18 in each; before, nothing was transferred.
    gates = [0.5 / 6, 1.5 / 6, 2.5 / 6, 3.5 / 6, 4.5 / 6, 5.5 / 6, 1, 1, 1]
    assert chart.series[0].x == tuple(range(4, 13))
    np.testing.assert_allclose(chart.series[0].y, np.array(terms[3:]) / (np.array(gates) / 3), rtol=1e-6)

    blocks = live_page(look(tmp_path)).sections[2].blocks[0].blocks  # type: ignore[attr-defined]
    (table,) = [block.table for block in blocks if isinstance(block, Grid)]
    assert [row[1:] for row in table.rows] == [("0 → 0.5", "1 → 2")] * 6
    (shares,) = [block for block in blocks if isinstance(block, Chart) and block.id == "row0-shares"]
    (series,) = shares.series
    assert (len(series.x), series.x[0], series.x[-1]) == (101, 0, 12)
    gate = np.clip((np.array(series.x) / 12 - 0.25) / 0.5, 0, 1)
    np.testing.assert_allclose(series.y, gate / (1 + gate), atol=1e-6)


def test_independent_networks_have_no_divergences(tmp_path: Path) -> None:
    (entry,) = look(made_up_run(tmp_path / "run", quick("independent"))).entries
    assert curves.divergences(entry, "row0") is None


def test_every_classifier_and_the_ensemble_have_a_line(tmp_path: Path) -> None:
    (entry,) = look(made_up_run(tmp_path / "run", quick())).entries
    chart = curves.classifiers(entry, "row0")
    assert [series.name for series in chart.series] == [
        *(f"{network}/{exit}" for network in "ab" for exit in ("final", "stage2", "stage1")),
        "ensemble",
    ]
    assert [len(series.x) for series in chart.series] == [12, 1, 1, 12, 1, 1, 1]


def test_pace_and_cost_follow_the_clock(study: Path) -> None:
    seen = look(study)
    assert {value for series in curves.pace(seen).series for value in series.y} == {TRAIN_IMAGES / SECONDS_PER_EPOCH}
    chart = next(iter(sections.cost_blocks(seen)))
    assert isinstance(chart, Chart)
    assert chart.x.unit == "min"
    assert {x for series in chart.series for x in series.x} == {12 * SECONDS_PER_EPOCH / 60}
    row = sections.cost_table(seen).rows[0]
    assert row[:5] == ("independent", 3, 2.0, 150, 1.0)


def test_the_text_form_of_a_long_chart_has_some_of_its_places() -> None:
    values = tuple(float(x) for x in range(1, 201))
    table = Chart("id", "Title", Axis("epoch"), Axis("error"), (Series("s", values, values),)).table()
    assert len(table.rows) == 24
    assert (table.rows[0], table.rows[-1]) == ((1, 1.0), (200, 200.0))
    assert table.notes == ("24 of 200 rows; the CSV has all.",)
    assert thin_out([1.0, 2.0], 5) == [1.0, 2.0]


def test_matrices_shade_from_the_least_to_the_most() -> None:
    matrix = Matrix("m", "x", ("r",), ("a", "b", "c", "d"), ((0.0, 5.0, 10.0, None),), form=".1f")
    assert matrix.cells() == [("r", [("0.0", 0.0, 0), ("5.0", 5.0, 50), ("10.0", 10.0, 100), ("·", None, 0)])]
