"""Every rank gets the logits of all classifiers: its own as they are, the others' to the bit, as constants."""

from typing import Any

import torch

from support.ranks import together


def exchange_twice(world: Any) -> None:
    from codistill.distributed.mesh import LogitsAllGather

    owners = {"a/stage1": 0, "a/final": 0, "b/stage1": 1, "b/final": 1}
    all_gather = LogitsAllGather(world, owners)
    for batch in (5, 2):  # an epoch's last batch is shorter
        mine = {
            name: torch.full((batch, 3), float(index) + batch, dtype=torch.bfloat16, requires_grad=True)
            for index, name in enumerate(owners)
            if index // 2 == world.rank
        }
        known = all_gather(mine, list(owners))
        assert list(known) == list(owners)
        for index, (name, logits) in enumerate(known.items()):
            assert logits.shape == (batch, 3)
            assert logits.eq(index + batch).all()
            assert logits is mine[name] if name in mine else not logits.requires_grad
    assert (world.traffic.exchanges, world.traffic.bytes_sent) == (2, 2 * (5 + 2) * 3 * 4)
    assert world.traffic.waited_s > 0


def test_every_rank_gets_all_logits() -> None:
    assert together(2, exchange_twice) == [0, 0]


def ask_for_finals_only(world: Any) -> None:
    """As an evaluation without heads does."""
    from codistill.distributed.mesh import LogitsAllGather

    all_gather = LogitsAllGather(world, {"a/final": 0, "a/stage1": 0, "b/final": 1})
    mine = {f"{'ab'[world.rank]}/final": torch.full((4, 2), float(world.rank))}
    known = all_gather(mine, ["a/final", "b/final"])
    assert [float(logits.mean()) for logits in known.values()] == [0.0, 1.0]


def test_only_the_classifiers_that_are_asked_for_are_exchanged() -> None:
    assert together(2, ask_for_finals_only) == [0, 0]
