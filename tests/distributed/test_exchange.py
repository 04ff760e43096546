"""Predictions are sent as soon as they are ready, and no bit of them changes."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from codistill.cohort import Cohort
from codistill.distributed.exchange import run_with_early_heads
from codistill.engine.fast.sections import Sections, arranged, as_it_is
from support.ranks import recipe_of, together

FAMILIES = ["wrn-10-1", "resnet-8", "densenet-10-4", "mobilenetv2", "wrn-10-1-dropout-0.3"]


def forward_and_back(member: Any, early: bool, told: list[str]) -> tuple[Mapping[str, Tensor], list[Tensor]]:
    network, images = arranged(member, as_it_is), torch.linspace(-1, 1, 4 * 3 * 32 * 32).view(4, 3, 32, 32).sin()
    assert isinstance(network, Sections)
    trunk = [(logged(part, f"trunk to {exit_name}", told), exit_name) for part, exit_name in network.trunk]
    network.trunk = trunk
    torch.manual_seed(5)
    if early:
        logits = run_with_early_heads(member, network, images, lambda exit_name, _: told.append(exit_name))
    else:
        logits = network(images, nullcontext)
    member.zero_grad()
    torch.stack([logits[name].square().mean() for name in ("final", *member.heads)]).sum().backward()
    return logits, [parameter.grad.clone() for parameter in member.parameters()]


def logged(part: Any, name: str, told: list[str]) -> Any:
    def run(x: Tensor) -> Tensor:
        told.append(name)
        return part(x)

    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_early_heads_change_no_bit(family: str) -> None:
    """Neither in the logits nor in any gradient, whose sums depend on their order."""
    torch.set_num_threads(1)
    (member,) = Cohort({"a": family}, num_classes=10).members.values()
    told: list[str] = []
    late, late_gradients = forward_and_back(member, False, [])
    early, early_gradients = forward_and_back(member, True, told)
    assert early.keys() == late.keys()
    assert all(torch.equal(early[name], late[name]) for name in late)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(early_gradients, late_gradients, strict=True))
    exits = [name.removeprefix("trunk to ") for name in told if name.startswith("trunk")]
    assert len(exits) == 3
    if "dropout" in family:  # whose random numbers follow the order of a single process
        assert told == [*(f"trunk to {name}" for name in exits), "final", *member.heads]
    else:
        assert told == [event for name in exits for event in (f"trunk to {name}", name)]


def wait_for_half(world: Any) -> None:
    """Rank 0 continues when rank 1 has received the first prediction; otherwise both would time out."""
    import torch.distributed as dist

    from codistill.distributed.exchange import LogitsAllGather

    owners = {"a/stage1": 0, "a/final": 0, "b/stage1": 1, "b/final": 1}
    exchange = LogitsAllGather(world, owners)
    mine = {name: torch.full((5, 3), float(index)) for index, name in enumerate(owners) if index // 2 == world.rank}
    first, final = mine
    exchange.send(first, mine[first])
    if world.rank == 0:
        dist.recv(torch.zeros(1), 1, tag=99)
    else:
        rank, work, arrived = exchange.pending.receives["a/stage1"]
        assert work is not None
        work.wait()
        exchange.pending.receives["a/stage1"] = rank, None, arrived  # gloo would wait for another one
        assert torch.equal(arrived, torch.zeros(5, 3))
        dist.send(torch.zeros(1), 0, tag=99)
    exchange.send(final, mine[final])
    known = exchange.wait(mine, list(owners))
    assert [float(logits.mean()) for logits in known.values()] == [0.0, 1.0, 2.0, 3.0]
    assert (world.traffic.exchanges, world.traffic.bytes_sent) == (1, 2 * 5 * 3 * 4)
    assert world.traffic.waited_s > 0


def test_a_prediction_arrives_before_the_next_is_made() -> None:
    assert together(2, wait_for_half) == [0, 0]


def test_recipes_say_how_old_predictions_are() -> None:
    assert recipe_of(2).processes.predictions == "fresh"
    with pytest.raises(ValueError, match=r"processes\.predictions"):
        recipe_of(2, processes={"predictions": "stale"})
