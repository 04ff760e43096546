"""Which process trains which networks."""

import itertools

import pytest

from codistill.data.load import load
from codistill.distributed.layout import Layout, LayoutRequest, Split, check_request
from codistill.distributed.trainer import count_flops
from codistill.recipes.schema import Recipe
from support.ranks import recipe_of
from support.tiny import tiny_recipe


def taught() -> Recipe:
    return tiny_recipe(networks={"t": "wrn-10-1", "s": "resnet-8"}, method="kd", start={"t": "t.safetensors"})


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_heaviest_rank_is_as_light_as_can_be(ranks: int) -> None:
    """Against every possible split of four networks with costs for which the greedy choice is the best."""
    recipe, costs = recipe_of(4), {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0}
    heaviest = [
        max(sum(costs[name] for name, rank in zip("abcd", to, strict=True) if rank == each) for each in range(ranks))
        for to in itertools.product(range(ranks), repeat=4)
    ]
    split = Split.balanced(costs, recipe, ranks)
    assert max(sum(costs[name] for name in names) for names in split.groups) == min(heaviest)
    assert len(heaviest) == ranks**4
    assert sorted(itertools.chain(*split.groups)) == ["a", "b", "c", "d"]
    assert all(split.groups)
    assert Split.parse(str(split), recipe) == split


def test_flops_follow_depth_and_heads() -> None:
    """resnet-56 has nine blocks a stage where resnet-8 has one, which halves the resolution in two of three stages."""
    data = load("fashion", seed=0)
    flops = count_flops(tiny_recipe(networks={"a": "resnet-8", "b": "resnet-56"}, method="dml"), data)
    assert 9 < flops["b"] / flops["a"] < 12
    assert count_flops(tiny_recipe(networks={"a": "resnet-8", "b": "resnet-56"}), data)["a"] > flops["a"]


def test_a_teacher_shares_a_group_with_a_learner() -> None:
    assert str(Split.balanced({"t": 100.0, "s": 1.0}, taught(), 1)) == "t+s"


def test_groups_are_printed_and_found() -> None:
    split = Split.parse("c + a,b", recipe_of(3))
    assert str(Layout(split)) == "2 ranks: a, c | b"
    assert [Layout(split).rank_of(name, 0) for name in "abc"] == [0, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b", "leaves out c"),
        ("a,b,c+a", "names 'a' 2 times"),
        ("a,b,cc", "unknown network in the split 'cc'"),
        ("a,b,", "unknown network in the split ''"),
        ("a,b+c", "needs 2 processes or a multiple; there are 3"),
    ],
)
def test_wrong_splits_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(recipe_of(3), 3, LayoutRequest(text))


def test_a_rank_of_teachers_only_is_refused() -> None:
    with pytest.raises(ValueError, match="t only teaches, and every group needs a network that learns"):
        Split.parse("t,s", taught())


@pytest.mark.parametrize(
    ("ranks", "message"), [(4, r"4 processes for 3 networks .* at most 3, or raise --shards"), (0, "at least 1")]
)
def test_too_many_processes(ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(recipe_of(3), ranks, LayoutRequest(shards=1))
