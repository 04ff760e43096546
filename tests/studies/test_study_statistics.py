"""Statistics against values computed by hand and against scipy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from codistill.studies.statistics import Difference, Interval, Summary, paired_difference, summarise, t_cdf, t_quantile


def test_mean_and_sample_deviation_by_hand() -> None:
    # 18, 19, 20, 23: mean 20, squares 4 + 1 + 0 + 9 = 14, over n − 1 = 3.
    summary = summarise([18.0, 19.0, 20.0, 23.0])
    assert (summary.n, summary.mean) == (4, 20.0)
    assert summary.std == pytest.approx(math.sqrt(14 / 3), abs=1e-15)
    assert str(summary) == "20.00(2.16)"


def test_one_value_has_no_deviation() -> None:
    assert summarise([18.72]) == Summary(1, 18.72, None)
    assert str(summarise([18.72])) == "18.72"


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="missing"):
        summarise([])


def test_quantiles_of_printed_tables() -> None:
    # Two-sided 95 %: degrees of freedom and t as in any textbook's table.
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042, 120: 1.980}
    for degrees, t in table.items():
        assert t_quantile(0.975, degrees) == pytest.approx(t, abs=5e-4)


def test_distribution_and_quantiles_equal_scipys() -> None:
    compared = 0
    for degrees in range(1, 61):
        for t in (-30.0, -2.5, -0.1, 0.0, 0.3, 1.0, 4.0, 100.0):
            assert t_cdf(t, degrees) == pytest.approx(stats.t.cdf(t, degrees), abs=1e-13)
            compared += 1
        for probability in (0.001, 0.025, 0.4, 0.5, 0.9, 0.975, 0.9999):
            expected = stats.t.ppf(probability, degrees)
            assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12)
            compared += 1
    assert compared == 60 * 15


@pytest.mark.parametrize(("probability", "degrees"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_quantiles_that_do_not_exist_are_refused(probability: float, degrees: int) -> None:
    with pytest.raises(ValueError, match="t_quantile"):
        t_quantile(probability, degrees)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=12))
def test_intervals_equal_scipys_paired_test(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = (dict(enumerate(column)) for column in zip(*pairs, strict=True))
    difference = paired_difference(ours, theirs)
    assert difference is not None
    raw = [a - b for a, b in pairs]
    assert difference.n == len(pairs)
    assert difference.ahead == sum(value < 0 for value in raw)
    assert difference.mean == pytest.approx(sum(raw) / len(raw), abs=1e-9)
    margin = stats.t.ppf(0.975, len(raw) - 1) * np.std(raw, ddof=1) / math.sqrt(len(raw))
    assert difference.interval.low == pytest.approx(difference.mean - margin, abs=1e-7)
    assert difference.interval.high == pytest.approx(difference.mean + margin, abs=1e-7)


def test_pairs_are_made_by_seed() -> None:
    # Seeds 1, 2, 3 in common: −1, −2, −3. Mean −2, std 1, t(0.975, 2) = 4.3027, margin 4.3027 / √3 = 2.4841.
    difference = paired_difference({3: 7.0, 1: 9.0, 2: 8.0, 8: 0.0}, {1: 10.0, 2: 10.0, 3: 10.0, 9: 99.0})
    assert difference is not None
    assert (difference.n, difference.mean, difference.ahead) == (3, -2.0, 3)
    assert difference.interval.low == pytest.approx(-4.4841, abs=1e-4)
    assert difference.interval.high == pytest.approx(0.4841, abs=1e-4)
    assert not difference.is_decided, "the interval contains 0"


def test_what_counts_as_decided() -> None:
    assert Difference(4, -1.0, Interval(-1.5, -0.5), 4).is_decided
    assert Difference(4, 1.0, Interval(0.5, 1.5), 0).is_decided
    assert not Difference(4, -1.0, Interval(-2.5, 0.5), 3).is_decided
    assert not Difference(1, -1.0, None, 1).is_decided
    assert not Difference(2, 0.5, Interval(0.5, 0.5), 0).is_decided, "errors are counts: equal differences happen"


def test_rounding_is_no_spread() -> None:
    """138 fewer errors in 10,000 with both seeds: in floating point, 21.37 − 22.75 is not 20.74 − 22.12."""
    difference = paired_difference({1: 21.37, 2: 20.74}, {1: 22.75, 2: 22.12})
    assert difference is not None
    assert difference.interval.low != difference.interval.high
    assert not difference.is_decided
    one_more = paired_difference({1: 21.37, 2: 20.74}, {1: 22.75, 2: 22.13})
    assert one_more is not None
    assert one_more.is_decided, "one answer is a spread"


def test_one_pair_has_no_interval_and_none_no_difference() -> None:
    assert paired_difference({1: 2.0}, {1: 3.0}) == Difference(1, -1.0, None, 1)
    assert paired_difference({1: 2.0}, {2: 3.0}) is None
