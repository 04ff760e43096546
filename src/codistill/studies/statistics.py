"""Sample standard deviations, differences with intervals and p-values, and Holm's correction, always with n."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

ALPHA = 0.05
"""How often a difference that is none may look decided."""
# Percentage points. A smaller width of an interval is rounding, not a spread: one answer in 10⁸ is 1e-6 points.
ROUNDING = 1e-7


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (n − 1) of n values; one value has no deviation."""

    n: int | None  # None: the source does not say
    mean: float
    std: float | None
    mark: str = ""
    """Printed behind the number; a note explains it."""

    def __str__(self) -> str:
        return f"{self.mean:.2f}{'' if self.std is None else f'({self.std:.2f})'}{self.mark}"


def summarise(values: Iterable[float]) -> Summary:
    """Mean and sample standard deviation; raises ValueError without values."""
    numbers = list(values)
    if not numbers:
        raise ValueError("no values to summarise; a row without runs is shown as missing instead")
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return Summary(1, mean, None)
    variance = math.fsum((value - mean) ** 2 for value in numbers) / (len(numbers) - 1)
    return Summary(len(numbers), mean, math.sqrt(variance))


def mean(values: list[float]) -> float | None:
    """The mean; None without values."""
    return summarise(values).mean if values else None


@dataclass(frozen=True)
class Interval:
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.2f} … {self.high:.2f}"


@dataclass(frozen=True)
class Difference:
    """One method's error minus another's over the seeds that both have: below 0, the first is better."""

    n: int
    mean: float
    interval: Interval | None
    """Contains the mean difference with 95 % confidence; one seed has none."""
    p: float | None
    """Two-sided. None for one seed and without a spread: errors are counts, so they may tie, which decides nothing."""
    ahead: int
    """The number of seeds with which the first had the smaller error."""


def compare(errors: Mapping[int, float], against: Mapping[int, float], *, paired: bool) -> Difference | None:
    """Student's t of the differences by seed if ``paired``, else Welch's; None when the two have no seed in common."""
    seeds = [seed for seed in errors if seed in against]
    if not seeds:
        return None
    n = len(seeds)
    difference = summarise(errors[seed] - against[seed] for seed in seeds)
    ahead = sum(errors[seed] < against[seed] for seed in seeds)
    if difference.std is None:
        return Difference(n, difference.mean, None, None, ahead)
    if paired:
        variance, degrees = difference.std**2 / n, float(n - 1)
    else:
        first, second = ((summarise(one[seed] for seed in seeds).std or 0.0) ** 2 / n for one in (errors, against))
        variance, squares = first + second, first**2 + second**2
        degrees = (n - 1) * variance**2 / squares if squares else float(n - 1)
    error = math.sqrt(variance)
    margin = t_quantile(1 - ALPHA / 2, degrees) * error
    p = 2 * t_cdf(-abs(difference.mean) / error, degrees) if 2 * margin > ROUNDING else None
    return Difference(n, difference.mean, Interval(difference.mean - margin, difference.mean + margin), p, ahead)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in their order: that any true null hypothesis is below 0.05 has a probability of 0.05."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def t_cdf(t: float, degrees: float) -> float:
    """Student's distribution; Welch's degrees of freedom are not whole numbers."""
    tail = _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2
    return tail if t < 0 else 1 - tail


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) by its continued fraction (DLMF 8.17.22), on the side where that converges fast."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    if x == 0:
        return 0.0
    fraction = 1.0
    for m in range(20 + round(2 * math.sqrt(a + b)), -1, -1):
        fraction = 1 - (a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)) / fraction
        if m:
            fraction = 1 + m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)) / fraction
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_front) / (a * fraction)


@cache
def t_quantile(probability: float, degrees: float) -> float:
    """The inverse of ``t_cdf``, by Newton's method, which approaches it from 0 without going beyond."""
    if not (0 < probability < 1 and degrees >= 1):
        raise ValueError(f"t_quantile: 0 < probability < 1 and degrees ≥ 1, not {probability} and {degrees}")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    log_peak = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    t, step = 0.0, 1.0
    while step > 1e-13 * t:
        density = math.exp(log_peak - (degrees + 1) / 2 * math.log1p(t * t / degrees))
        step = (t_cdf(-t, degrees) - (1 - probability)) / density
        t += step
    return t
