"""Statistics against values computed by hand and against scipy."""

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from codistill.studies.catalogue import EDGE_CONTRASTS, EDGE_PRIMARY
from codistill.studies.statistics import ALPHA, Summary, compare, holm, summarise, t_cdf, t_quantile


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
    whole, fractional = range(1, 61), [1.001, 1.5, 2.3, 7.9, 250.7]  # Welch's are from n − 1 to 2 (n − 1)
    for degrees in (*whole, *fractional):
        for t in (-30.0, -2.5, -0.1, 0.0, 0.3, 1.0, 4.0, 100.0):
            assert t_cdf(t, degrees) == pytest.approx(stats.t.cdf(t, degrees), rel=1e-9 if t < -1 else None, abs=2e-13)
            compared += 1
        for probability in (0.001, 0.025, 0.4, 0.5, 0.9, 0.975, 0.9999):
            expected = stats.t.ppf(probability, degrees)
            assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12)
            compared += 1
    assert compared == 65 * 15


@pytest.mark.parametrize(("probability", "degrees"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_quantiles_that_do_not_exist_are_refused(probability: float, degrees: int) -> None:
    with pytest.raises(ValueError, match="t_quantile"):
        t_quantile(probability, degrees)


ERRORS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=12)


@pytest.mark.filterwarnings("ignore:Precision loss")  # scipy's, where one of two samples is constant
@pytest.mark.parametrize("paired", [True, False])
@given(ERRORS)
def test_intervals_and_p_values_equal_scipys(paired: bool, pairs: list[tuple[float, float]]) -> None:
    ours, theirs = (dict(enumerate(column)) for column in zip(*pairs, strict=True))
    difference = compare(ours, theirs, paired=paired)
    assert difference is not None
    first, second = np.array(pairs).T
    assert (difference.n, difference.ahead) == (len(pairs), int((first < second).sum()))
    assert difference.mean == pytest.approx((first - second).mean(), abs=1e-9)
    spreads = [np.ptp(first - second)] if paired else [np.ptp(first), np.ptp(second)]
    if max(spreads) < 1e-4:  # where scipy divides by rounding errors
        assert difference.interval is not None
        assert difference.interval.high - difference.interval.low < 0.1
        return
    found = stats.ttest_rel(first, second) if paired else stats.ttest_ind(first, second, equal_var=False)
    interval = found.confidence_interval(0.95)
    assert (difference.interval.low, difference.interval.high) == pytest.approx(tuple(interval), rel=1e-6, abs=1e-6)
    assert difference.p == pytest.approx(found.pvalue, rel=1e-6, abs=1e-12)


def test_pairs_are_made_by_seed() -> None:
    # Seeds 1, 2, 3 in common: −1, −2, −3. Mean −2, std 1, t(0.975, 2) = 4.3027, margin 4.3027 / √3 = 2.4841.
    errors, against = {3: 7.0, 1: 9.0, 2: 8.0, 8: 0.0}, {1: 10.0, 2: 10.0, 3: 10.0, 9: 99.0}
    difference = compare(errors, against, paired=True)
    assert difference is not None
    assert (difference.n, difference.mean, difference.ahead) == (3, -2.0, 3)
    assert difference.interval.low == pytest.approx(-4.4841, abs=1e-4)
    assert difference.interval.high == pytest.approx(0.4841, abs=1e-4)
    # t = −2 √3 with 2 degrees of freedom: 2 P(T < −3.4641) = 1 − 3.4641 / √(2 + 12).
    assert difference.p == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-12)
    unpaired = compare(errors, against, paired=False)
    assert unpaired is not None
    assert (unpaired.n, unpaired.mean, unpaired.ahead) == (3, -2.0, 3), "of the same seeds"


def test_rounding_is_no_spread() -> None:
    """138 fewer errors in 10,000 with both seeds: in floating point, 21.37 − 22.75 is not 20.74 − 22.12."""
    difference = compare({1: 21.37, 2: 20.74}, {1: 22.75, 2: 22.12}, paired=True)
    assert difference is not None
    assert difference.interval.low != difference.interval.high
    assert difference.p is None, "errors are counts: equal differences happen, and decide nothing"
    one_more = compare({1: 21.37, 2: 20.74}, {1: 22.75, 2: 22.13}, paired=True)
    assert one_more is not None
    assert one_more.p is not None
    assert one_more.p < 0.01, "one answer is a spread"
    equal = compare({1: 21.0, 2: 21.0}, {1: 22.0, 2: 22.0}, paired=False)
    assert equal is not None
    assert (equal.mean, equal.p) == (-1.0, None)


@pytest.mark.parametrize("paired", [True, False])
def test_one_seed_has_no_interval_and_none_no_difference(paired: bool) -> None:
    one = compare({1: 2.0}, {1: 3.0}, paired=paired)
    assert one is not None
    assert (one.n, one.mean, one.interval, one.p, one.ahead) == (1, -1.0, None, None, 1)
    assert compare({1: 2.0}, {2: 3.0}, paired=paired) is None


def test_holms_correction_by_hand() -> None:
    # Sorted: 5 · 0.001, 4 · 0.01, then 3 · 0.02 = 0.06, 2 · 0.02 = 0.04 < 0.06, 1 · 0.9.
    assert holm([0.02, 0.001, 0.9, 0.01, 0.02]) == pytest.approx([0.06, 0.005, 0.9, 0.04, 0.06], rel=1e-12)
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03], "one contrast is not corrected"
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_holms_correction_is_bonferronis_closed_test(p_values: list[float]) -> None:
    """Another definition: the largest Bonferroni p of all intersections of hypotheses that contain this one."""
    indices = range(len(p_values))
    subsets = [set(chosen) for size in range(1, len(p_values) + 1) for chosen in combinations(indices, size)]
    closed = [max(min(1.0, len(s) * min(p_values[j] for j in s)) for s in subsets if i in s) for i in indices]
    assert holm(p_values) == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3])
def test_a_table_without_any_effect_rarely_claims_one(n: int) -> None:
    """The tables of edges: 12 contrasts, each of the mean and of both networks, so 36 differences."""
    rng, tables, wrong, uncorrected = np.random.default_rng(n), 60, 0, 0
    labels = list(dict.fromkeys(label for contrast in EDGE_CONTRASTS for label in contrast))
    for _ in range(tables):
        errors = {label: rng.normal(25, 0.25, (2, n)) for label in labels}
        of = {label: [found.mean(axis=0), *found] for label, found in errors.items()}
        p_values: dict[tuple[tuple[str, str], int], float] = {}
        for contrast, part in product(EDGE_CONTRASTS, range(3)):
            ours, theirs = (dict(enumerate(of[label][part].tolist())) for label in contrast)
            difference = compare(ours, theirs, paired=False)
            assert difference is not None
            assert difference.p is not None
            p_values[contrast, part] = difference.p
        primary = [p for (contrast, part), p in p_values.items() if contrast in EDGE_PRIMARY and part == 0]
        others = [p for (contrast, part), p in p_values.items() if contrast not in EDGE_PRIMARY or part]
        assert (len(primary), len(others)) == (1, 35)
        wrong += min(*holm(primary), *holm(others)) < ALPHA
        uncorrected += min(p_values.values()) < ALPHA
    assert uncorrected > 0.4 * tables, "each by itself, most tables would claim something"
    assert wrong <= 0.2 * tables, "0.1 is expected at most: 0.05 of each family"
