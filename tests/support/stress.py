"""How often the tests in tests/faults do each thing: as published under `make stress`, otherwise a share of it."""

import os
from collections.abc import Callable

STRESS = os.environ.get("CODISTILL_STRESS") == "1"

Counted = Callable[[str, int], None]
"""The fixture ``counted``: says how often a test did what it promises."""


def times(published: int, share: int) -> int:
    return published if STRESS else share


DAMAGES = times(5000, 420)
FAULT_ROUNDS = times(20, 1)
KILLED_SAVES = times(1000, 40)
KILLED_TRAININGS = times(200, 12)
SIGNALS_SENT = times(60, 9)
NON_FINITE_KILLS = times(100, 4)
NON_FINITE_SIGNALS = times(60, 4)
INJECTIONS = 100
FUZZED = times(10_000, 400)
FUZZED_FILES = times(1000, 200)
FLIPPED_BITS = times(500, 96)
