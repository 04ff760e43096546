"""Which mesh is chosen for a number of ranks, and which requests are refused."""

import pytest

from codistill.data.batches import Share
from codistill.distributed.layout import Layout, LayoutRequest, Split, check_request, choose_layout, rank_loads
from support.ranks import recipe_of
from support.tiny import tiny_recipe

COSTS = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0}


@pytest.mark.parametrize(
    ("networks", "ranks", "asked", "words"),
    [
        (4, 4, LayoutRequest(), "4 ranks: a | b | c | d"),
        (4, 3, LayoutRequest(), "3 ranks: a | b | c, d"),
        (2, 4, LayoutRequest(), "4 ranks, 2 × 2: a | b"),
        (2, 8, LayoutRequest(), "8 ranks, 2 × 4: a | b"),
        (2, 3, LayoutRequest(), "3 ranks, 1 × 3: a, b"),
        (4, 6, LayoutRequest(), "6 ranks, 3 × 2: a | b | c, d"),
        (3, 4, LayoutRequest(), "4 ranks, 2 × 2: a | b, c"),
        (3, 6, LayoutRequest(shards=6), "6 ranks, 1 × 6: a, b, c"),
        (3, 6, LayoutRequest(split="b,a+c"), "6 ranks, 2 × 3: b | a, c"),
        (3, 4, LayoutRequest(split="a+b+c", shards=4), "4 ranks, 1 × 4: a, b, c"),
        (4, 2, LayoutRequest(shards=2), "2 ranks, 1 × 2: a, b, c, d"),
    ],
)
def test_the_mesh_that_is_chosen(networks: int, ranks: int, asked: LayoutRequest, words: str) -> None:
    recipe = recipe_of(networks)
    check_request(recipe, ranks, asked)
    layout = choose_layout(COSTS, recipe, ranks, asked)
    assert str(layout) == words
    assert layout.size == ranks
    assert sum(rank_loads(layout, COSTS)) == pytest.approx(sum(COSTS[name] for name in recipe.networks))
    same = LayoutRequest(str(layout.split), layout.shards)
    assert choose_layout(COSTS, recipe, ranks, same) == layout


def test_ranks_in_a_mesh() -> None:
    """Ranks of a group are neighbours: their gradients stay on one host."""
    layout = Layout(Split((("a", "c"), ("b",))), shards=3)
    assert [layout.networks_of(rank) for rank in range(6)] == [("a", "c")] * 3 + [("b",)] * 3
    assert [layout.shard_of(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [layout.rank_of("b", share) for share in range(3)] == [3, 4, 5]
    assert layout.group_ranks(4) == [3, 4, 5]
    assert layout.first_ranks == [0, 3]
    assert layout.describe(5) == "rank 5 (b, shard 3 of 3)"


@pytest.mark.parametrize(
    ("ranks", "asked", "message"),
    [
        (3, LayoutRequest(shards=2), r"3 processes cannot be divided into groups of 2; start a multiple of 2"),
        (
            6,
            LayoutRequest(shards=1),
            r"6 processes for 3 networks .* with 1 per network; start at most 3, or raise --shards",
        ),
        (
            8,
            LayoutRequest(shards=2),
            r"8 processes for 3 networks .* with 2 per network; start at most 6, or raise --shards",
        ),
        (4, LayoutRequest("a,b,c"), r"split 'a,b,c' needs 3 processes or a multiple; there are 4"),
        (4, LayoutRequest("a,b+c", 3), r"with 3 shards needs 6 processes; there are 4"),
        (4, LayoutRequest(shards=0), "0 shards; give at least 1"),
        (97, LayoutRequest(), r"97 processes for 3 networks .* batches of 32 images: some would have no image"),
        (
            64,
            LayoutRequest(shards=64),
            r"64 processes for 3 networks .* batches of 32 images: some would have no image",
        ),
    ],
)
def test_what_does_not_fit_is_refused(ranks: int, asked: LayoutRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(recipe_of(3), ranks, asked)


def test_a_teacher_does_not_make_a_group() -> None:
    recipe = tiny_recipe(networks={"t": "wrn-10-1", "s": "resnet-8"}, method="kd", start={"t": "t.safetensors"})
    assert str(choose_layout({"t": 3.0, "s": 1.0}, recipe, 4, LayoutRequest())) == "4 ranks, 1 × 4: t, s"


def test_shards_cover_a_batch_and_differ_by_one_image() -> None:
    cases = [(images, shards) for images in range(40) for shards in range(1, 9)]
    for images, shards in cases:
        parts = [Share(index, shards).range_of(images) for index in range(shards)]
        assert [place for part in parts for place in part] == list(range(images))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sizes[0] == max(sizes)
    assert len(cases) == 320
