"""Sample standard deviations and paired differences with confidence intervals, always with n."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CONFIDENCE = 0.95
# Percentage points. A smaller width of an interval is rounding, not a spread: one answer in 10⁸ is 1e-6 points.
ROUNDING = 1e-7


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (n − 1) of n values; one value has no deviation."""

    n: int | None  # None: the source does not say
    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f}({self.std:.2f})"


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
    """Contains the mean difference with 95 % confidence (Student's t); one pair has none."""
    ahead: int
    """The number of pairs in which the first had the smaller error."""

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes 0. Equal differences decide nothing: errors are counts, which often tie."""
        if self.interval is None:
            return False
        low, high = self.interval.low, self.interval.high
        return high - low > ROUNDING and low * high > 0


def paired_difference(errors: Mapping[int, float], against: Mapping[int, float]) -> Difference | None:
    """The difference by seed; None when the two have no seed in common."""
    differences = [errors[seed] - against[seed] for seed in errors if seed in against]
    if not differences:
        return None
    ahead = sum(difference < 0 for difference in differences)
    summary = summarise(differences)
    if summary.std is None:
        return Difference(1, summary.mean, None, ahead)
    n = len(differences)
    margin = t_quantile((1 + CONFIDENCE) / 2, n - 1) * summary.std / math.sqrt(n)
    return Difference(n, summary.mean, Interval(summary.mean - margin, summary.mean + margin), ahead)


def t_cdf(t: float, degrees: int) -> float:
    """Student's distribution for whole degrees of freedom, in closed form (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    is_odd = degrees % 2 == 1
    term, total = (math.cos(angle) if is_odd else 1.0), 0.0
    for power in range(is_odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    area = math.sin(angle) * total
    return 0.5 + (angle + area) / math.pi if is_odd else 0.5 + area / 2


def t_quantile(probability: float, degrees: int) -> float:
    """The inverse of ``t_cdf``, by bisection."""
    if not (0 < probability < 1 and degrees >= 1):
        raise ValueError(f"t_quantile: 0 < probability < 1 and degrees ≥ 1, not {probability} and {degrees}")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return high
