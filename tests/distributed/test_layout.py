"""How ranks are laid out as a mesh, and what is refused before anything starts."""

import pytest
from ranks import recipe_of

from codistill.data.batches import Share
from codistill.distributed.layout import Layout, Wish, chosen_layout, loads, refuse_misfit
from codistill.distributed.split import Split
from tiny import tiny_recipe

COSTS = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0}


@pytest.mark.parametrize(
    ("networks", "ranks", "wish", "words"),
    [
        (4, 4, Wish(), "4 ranks: a | b | c | d"),
        (4, 3, Wish(), "3 ranks: a | b | c, d"),
        (2, 4, Wish(), "4 ranks, 2 × 2: a | b"),
        (2, 8, Wish(), "8 ranks, 2 × 4: a | b"),
        (2, 3, Wish(), "3 ranks, 1 × 3: a, b"),
        (4, 6, Wish(), "6 ranks, 3 × 2: a | b | c, d"),
        (3, 4, Wish(), "4 ranks, 2 × 2: a | b, c"),
        (3, 6, Wish(shards=6), "6 ranks, 1 × 6: a, b, c"),
        (3, 6, Wish(split="b,a+c"), "6 ranks, 2 × 3: b | a, c"),
        (3, 4, Wish(split="a+b+c", shards=4), "4 ranks, 1 × 4: a, b, c"),
        (4, 2, Wish(shards=2), "2 ranks, 1 × 2: a, b, c, d"),
    ],
)
def test_the_mesh_that_is_chosen(networks: int, ranks: int, wish: Wish, words: str) -> None:
    recipe = recipe_of(networks)
    refuse_misfit(recipe, ranks, wish)
    layout = chosen_layout(COSTS, recipe, ranks, wish)
    assert layout.words == words
    assert layout.size == ranks
    assert sum(loads(layout, COSTS)) == pytest.approx(sum(COSTS[name] for name in recipe.networks))
    wished = Wish(str(layout.split), layout.shards)
    assert chosen_layout(COSTS, recipe, ranks, wished) == layout


def test_places_in_a_mesh() -> None:
    """Neighbours along the data have neighbouring numbers: their gradients stay on one host."""
    layout = Layout(Split((("a", "c"), ("b",))), shards=3)
    assert [layout.networks_of(rank) for rank in range(6)] == [("a", "c")] * 3 + [("b",)] * 3
    assert [layout.share_of(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [layout.rank_of("b", share) for share in range(3)] == [3, 4, 5]
    assert layout.sharers_of(4) == [3, 4, 5]
    assert layout.savers == [0, 3]
    assert layout.name(5) == "rank 5 (b, share 3 of 3)"


@pytest.mark.parametrize(
    ("ranks", "wish", "message"),
    [
        (3, Wish(shards=2), r"3 processes do not fit a mesh of groups of 2 .* start a multiple of 2"),
        (6, Wish(shards=1), r"6 processes for 3 networks .* each trained by 1; start at most 3, or raise --shards"),
        (8, Wish(shards=2), r"8 processes for 3 networks .* each trained by 2; start at most 6, or raise --shards"),
        (4, Wish("a,b,c"), r"split 'a,b,c' is for 3 processes or a multiple, and there are 4"),
        (4, Wish("a,b+c", 3), r"with 3 shards is for 6 processes, and there are 4"),
        (4, Wish(shards=0), "0 shards; give at least 1"),
        (97, Wish(), r"97 processes for 3 networks .* batches of 32 images: some would have no image"),
        (64, Wish(shards=64), r"64 processes for 3 networks .* batches of 32 images: some would have no image"),
    ],
)
def test_what_does_not_fit_is_refused(ranks: int, wish: Wish, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_misfit(recipe_of(3), ranks, wish)


def test_a_teacher_does_not_make_a_group() -> None:
    recipe = tiny_recipe(networks={"t": "wrn-10-1", "s": "resnet-8"}, method="kd", start={"t": "t.safetensors"})
    assert chosen_layout({"t": 3.0, "s": 1.0}, recipe, 4, Wish()).words == "4 ranks, 1 × 4: t, s"


def test_shares_are_all_of_a_batch_and_differ_by_one_image() -> None:
    cases = [(images, shards) for images in range(40) for shards in range(1, 9)]
    for images, shards in cases:
        parts = [Share(index, shards).range_of(images) for index in range(shards)]
        assert [place for part in parts for place in part] == list(range(images))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sizes[0] == max(sizes)
    assert len(cases) == 320
