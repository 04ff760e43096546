"""Which rank trains which networks, on which shard of a batch: a mesh with the axes ``cohort`` and ``data``.

Along ``cohort``, groups of ranks hold different networks and exchange predictions. Along ``data``, the ranks of a group
hold the same networks, train them on one shard of every batch each, and all-reduce their gradients. Ranks of a group
are neighbours, so that gradients, which are much larger than predictions, stay on one host. Imports no torch.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from codistill.errors import unknown
from codistill.recipes.schema import Recipe

TOLERATED_LOAD = 1.25
"""Accept up to 25 % more load on the slowest rank in exchange for less gradient traffic."""


@dataclass(frozen=True)
class Split:
    """The networks of each group, in the recipe's order, which is the order of their forward passes."""

    groups: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return ",".join("+".join(names) for names in self.groups)

    @classmethod
    def parse(cls, text: str, recipe: Recipe) -> "Split":
        """Reads ``"a+c,b"``: one group trains a and c, the next one b."""
        given = [[name.strip() for name in part.split("+")] for part in text.split(",")]
        named = list(chain.from_iterable(given))
        for name in named:
            if name not in recipe.networks:
                raise unknown("network in the split", name, recipe.networks)
            if named.count(name) > 1:
                raise ValueError(f"split {text!r} names {name!r} {named.count(name)} times; name every network once")
        if missing := [name for name in recipe.networks if name not in named]:
            raise ValueError(f"split {text!r} leaves out {', '.join(missing)}; name every network once, as in a+c,b")
        for names in given:
            if not any(name in recipe.graph.learning_networks for name in names):
                raise ValueError(
                    f"split {text!r}: {', '.join(names)} only teaches, and every group needs a network that learns; "
                    "put them into one group, as in a+c,b"
                )
        return cls.of(given, recipe)

    @classmethod
    def of(cls, groups: Iterable[Collection[str]], recipe: Recipe) -> "Split":
        return cls(tuple(tuple(name for name in recipe.networks if name in group) for group in groups))

    @classmethod
    def balanced(cls, costs: Mapping[str, float], recipe: Recipe, count: int) -> "Split":
        """Adds each network, learners and expensive ones first, to the group with the lowest cost so far."""
        learning = recipe.graph.learning_networks
        queue = sorted(recipe.networks, key=lambda name: (name not in learning, -costs[name]))
        groups: list[list[str]] = [[] for _ in range(count)]
        for name in queue:
            min(groups, key=lambda group: sum(costs[other] for other in group)).append(name)
        order = list(recipe.networks)
        return cls.of(sorted(groups, key=lambda group: min(map(order.index, group))), recipe)


@dataclass(frozen=True)
class Layout:
    """``shards`` is the number of ranks in each group, and so the number of shards of every batch."""

    split: Split
    shards: int = 1

    @property
    def size(self) -> int:
        return len(self.split.groups) * self.shards

    def __str__(self) -> str:
        groups = " | ".join(", ".join(names) for names in self.split.groups)
        mesh = f", {len(self.split.groups)} × {self.shards}" if self.shards > 1 else ""
        return f"{self.size} ranks{mesh}: {groups}"

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each group; the others of the group have the same state."""
        return list(range(0, self.size, self.shards))

    def shard_of(self, rank: int) -> int:
        return rank % self.shards

    def networks_of(self, rank: int) -> tuple[str, ...]:
        return self.split.groups[rank // self.shards]

    def rank_of(self, network: str, shard: int) -> int:
        group = next(group for group, names in enumerate(self.split.groups) if network in names)
        return group * self.shards + shard

    def group_ranks(self, rank: int) -> list[int]:
        """Returns the ranks that train the same networks as ``rank``, itself included."""
        first = rank - self.shard_of(rank)
        return list(range(first, first + self.shards))

    def describe(self, rank: int) -> str:
        shard = f", shard {self.shard_of(rank) + 1} of {self.shards}" if self.shards > 1 else ""
        return f"rank {rank} ({', '.join(self.networks_of(rank))}{shard})"


@dataclass(frozen=True)
class LayoutRequest:
    """What ``--split`` and ``--shards`` ask for; what is None is chosen by FLOPs."""

    split: str | None = None
    shards: int | None = None

    def __str__(self) -> str:
        return f"split {self.split or 'by FLOPs'}, shards {self.shards or 'by FLOPs'}"

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments that make this request."""
        split = [f"--split={self.split}"] if self.split else []
        return [*split, *([f"--shards={self.shards}"] if self.shards else [])]


def check_request(recipe: Recipe, ranks: int, request: LayoutRequest) -> None:
    """Raises where no layout of this many ranks fits the recipe and the request."""
    shards = request.shards
    if ranks < 1:
        raise ValueError(f"{ranks} processes; give at least 1")
    if shards is not None and shards < 1:
        raise ValueError(f"{shards} shards; give at least 1, or leave it out")
    if (split := request.split) is not None:
        groups = len(Split.parse(split, recipe).groups)
        needed = groups * (shards or 1)
        if shards is not None and needed != ranks:
            raise ValueError(f"split {split!r} with {shards} shards needs {needed} processes; there are {ranks}")
        if ranks % groups:
            raise ValueError(f"split {split!r} needs {groups} processes or a multiple; there are {ranks}")
    learning = recipe.graph.learning_networks
    if shards is not None and ranks % shards:
        raise ValueError(
            f"{ranks} processes cannot be divided into groups of {shards}; start a multiple of {shards}, or change "
            "--shards"
        )
    if shards is not None and ranks > len(learning) * shards:
        raise ValueError(
            f"{ranks} processes for {len(learning)} networks that learn ({', '.join(learning)}), with {shards} per "
            f"network; start at most {len(learning) * shards}, or raise --shards"
        )
    if not list(_mesh_shapes(recipe, ranks, request)):
        most = len(learning) * recipe.batch_size
        raise ValueError(
            f"{ranks} processes for {len(learning)} networks that learn and batches of {recipe.batch_size} images: "
            f"some would have no image; start at most {most}, or raise batch_size"
        )


def _mesh_shapes(recipe: Recipe, ranks: int, request: LayoutRequest) -> Iterator[tuple[int, int]]:
    """Yields every (groups, shards) that satisfies the request, most groups first."""
    groups = len(Split.parse(request.split, recipe).groups) if request.split else None
    for shards in range(1, ranks + 1):
        fits = (
            ranks % shards == 0
            and ranks // shards <= len(recipe.graph.learning_networks)
            and shards <= recipe.batch_size
        )
        if fits and request.shards in (None, shards) and groups in (None, ranks // shards):
            yield ranks // shards, shards


def choose_layout(costs: Mapping[str, float], recipe: Recipe, ranks: int, request: LayoutRequest) -> Layout:
    """Returns the requested layout, along ``cohort`` first where it is left open, since predictions are almost free.

    With more ranks than networks it has as many groups as possible without a rank whose load is much higher than the
    highest load of another mesh.
    """

    def build(groups: int, shards: int) -> Layout:
        split = Split.parse(request.split, recipe) if request.split else Split.balanced(costs, recipe, groups)
        return Layout(split, shards)

    layouts = [build(*shape) for shape in _mesh_shapes(recipe, ranks, request)]
    if layouts[0].shards == 1:
        return layouts[0]
    highest = [max(rank_loads(layout, costs)) for layout in layouts]
    return next(layout for layout, load in zip(layouts, highest, strict=True) if load <= TOLERATED_LOAD * min(highest))


def rank_loads(layout: Layout, costs: Mapping[str, float]) -> list[float]:
    """Returns each rank's load, in the costs' unit."""
    return [sum(costs[name] for name in layout.networks_of(rank)) / layout.shards for rank in range(layout.size)]
