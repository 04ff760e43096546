"""Nothing that decides a training's first loss has changed: networks, heads, initial weights, methods, objective."""

import json

import pytest

from golden.first_step import FILE, all_losses, catalogue

# 7 + 4 pairs of Tables 1 and 2, 3 more twins, 3 as the authors', quickstart, own-images, the fast one, 27 of
# Tables 3-7, KD, 4 networks
RECIPES = 49
OF_ONE_NETWORK = 6  # Table 6, where the 8 methods that need a peer do not apply


@pytest.mark.slow(reason="builds every network of the catalogue")
def test_first_losses_are_the_recorded_ones() -> None:
    """To a relative 1e-4: float32 sums differ between processors, a changed layer or weight shows far above that."""
    recorded = json.loads(FILE.read_text())
    assert recorded.keys() == catalogue().keys()
    assert len(recorded) >= RECIPES
    assert sum(map(len, recorded.values())) == len(recorded) * 12 - OF_ONE_NETWORK * 8
    assert all_losses() == {name: pytest.approx(losses, rel=1e-4) for name, losses in recorded.items()}
