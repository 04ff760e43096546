"""Who trains what: a mesh of groups that each have some of the networks, and in each group shares of every batch.

The first axis is ``cohort``: its groups exchange predictions. The second is ``data``: the ranks of a group have the
same networks, each trains them on its share of every batch, and their gradients are added. Neighbours along ``data``
have neighbouring numbers, so that gradients, of which there is much more, stay on one host. Imports no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from codistill.distributed.split import Split
from codistill.recipes.schema import Recipe

TOLERATED_LOAD = 1.25
"""What a busiest rank may have to do, over that of the mesh with the least, for fewer gradients to travel."""


@dataclass(frozen=True)
class Layout:
    split: Split
    shards: int = 1
    """How many ranks share each batch of a group."""

    @property
    def size(self) -> int:
        return len(self.split.groups) * self.shards

    @property
    def words(self) -> str:
        groups = " | ".join(", ".join(names) for names in self.split.groups)
        mesh = f", {len(self.split.groups)} × {self.shards}" if self.shards > 1 else ""
        return f"{self.size} ranks{mesh}: {groups}"

    @property
    def savers(self) -> list[int]:
        """One rank of each group: the others have the same state."""
        return list(range(0, self.size, self.shards))

    def share_of(self, rank: int) -> int:
        return rank % self.shards

    def networks_of(self, rank: int) -> tuple[str, ...]:
        return self.split.groups[rank // self.shards]

    def rank_of(self, network: str, share: int) -> int:
        return self.split.group_of(network) * self.shards + share

    def sharers_of(self, rank: int) -> list[int]:
        """Who trains the same networks, each on its share."""
        first = rank - self.share_of(rank)
        return list(range(first, first + self.shards))

    def name(self, rank: int) -> str:
        share = f", share {self.share_of(rank) + 1} of {self.shards}" if self.shards > 1 else ""
        return f"rank {rank} ({', '.join(self.networks_of(rank))}{share})"


@dataclass(frozen=True)
class Wish:
    """What somebody has said of the layout: the groups, as in ``"a+c,b"``, how many ranks share a batch, or nothing."""

    split: str | None = None
    shards: int | None = None

    @property
    def words(self) -> str:
        return f"split {self.split or 'by cost'}, shards {self.shards or 'by cost'}"

    @property
    def typed(self) -> list[str]:
        split = [f"--split={self.split}"] if self.split else []
        return [*split, *([f"--shards={self.shards}"] if self.shards else [])]


def refuse_misfit(recipe: Recipe, ranks: int, wish: Wish) -> None:
    """What can be said before a process starts."""
    if ranks < 1:
        raise ValueError(f"{ranks} processes; give at least 1")
    if wish.shards is not None and wish.shards < 1:
        raise ValueError(f"{wish.shards} shards; give at least 1, or leave it out")
    if wish.split is not None:
        _refuse_other_size(ranks, wish.split, len(Split.parse(wish.split, recipe).groups), wish.shards)
    learners = recipe.graph.learning_networks
    if wish.shards is not None and ranks % wish.shards:
        raise ValueError(
            f"{ranks} processes do not fit a mesh of groups of {wish.shards} that share a batch; start a multiple of "
            f"{wish.shards}, or change --shards"
        )
    if wish.shards is not None and ranks > len(learners) * wish.shards:
        raise ValueError(
            f"{ranks} processes for {len(learners)} networks that learn ({', '.join(learners)}), each trained by "
            f"{wish.shards}; start at most {len(learners) * wish.shards}, or raise --shards"
        )
    if not list(_meshes(recipe, ranks, wish)):
        most = len(learners) * recipe.batch_size
        raise ValueError(
            f"{ranks} processes for {len(learners)} networks that learn and batches of {recipe.batch_size} images: "
            f"some would have no image; start at most {most}, or raise batch_size"
        )


def _refuse_other_size(ranks: int, split: str, groups: int, shards: int | None) -> None:
    if shards is not None and groups * shards != ranks:
        raise ValueError(
            f"split {split!r} with {shards} shards is for {groups * shards} processes, and there are {ranks}; make "
            "them equal"
        )
    if ranks % groups:
        raise ValueError(
            f"split {split!r} is for {groups} processes or a multiple, and there are {ranks}; make them fit"
        )


def _meshes(recipe: Recipe, ranks: int, wish: Wish) -> Iterator[tuple[int, int]]:
    """Every (groups, shards) that the wish leaves, most groups first."""
    groups = len(Split.parse(wish.split, recipe).groups) if wish.split else None
    for shards in range(1, ranks + 1):
        fits = (
            ranks % shards == 0
            and ranks // shards <= len(recipe.graph.learning_networks)
            and shards <= recipe.batch_size
        )
        if fits and wish.shards in (None, shards) and groups in (None, ranks // shards):
            yield ranks // shards, shards


def chosen_layout(costs: Mapping[str, float], recipe: Recipe, ranks: int, wish: Wish) -> Layout:
    """What was wished, and otherwise along ``cohort`` as far as there are networks, for predictions are almost free.

    With more ranks than networks: as many groups as do not leave some rank much more to do than another mesh would.
    """

    def layout(groups: int, shards: int) -> Layout:
        split = Split.parse(wish.split, recipe) if wish.split else Split.balanced(costs, recipe, groups)
        return Layout(split, shards)

    layouts = [layout(*mesh) for mesh in _meshes(recipe, ranks, wish)]
    if layouts[0].shards == 1:
        return layouts[0]
    busiest = [max(loads(layout, costs)) for layout in layouts]
    return next(layout for layout, load in zip(layouts, busiest, strict=True) if load <= TOLERATED_LOAD * min(busiest))


def loads(layout: Layout, costs: Mapping[str, float]) -> list[float]:
    """By rank, in the costs' unit."""
    return [sum(costs[name] for name in layout.networks_of(rank)) / layout.shards for rank in range(layout.size)]
