"""Which networks are trained together, and which apart. Imports no torch."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from codistill.recipes.schema import Recipe
from codistill.wording import unknown


@dataclass(frozen=True)
class Split:
    """Networks by group; within it in the recipe's order, which the order of their forward passes follows."""

    groups: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return ",".join("+".join(names) for names in self.groups)

    def group_of(self, network: str) -> int:
        return next(group for group, names in enumerate(self.groups) if network in names)

    @classmethod
    def parse(cls, text: str, recipe: Recipe) -> "Split":
        """``"a+c,b"``: one group trains a and c, the next one b."""
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
                    f"split {text!r}: {', '.join(names)} only teaches, and a rank must have a network that learns; "
                    "put them together with one, as in a+c,b"
                )
        return cls.of(given, recipe)

    @classmethod
    def of(cls, groups: Iterable[Collection[str]], recipe: Recipe) -> "Split":
        return cls(tuple(tuple(name for name in recipe.networks if name in group) for group in groups))

    @classmethod
    def balanced(cls, costs: Mapping[str, float], recipe: Recipe, count: int) -> "Split":
        """Each network, the most expensive first, to the group with the least to do; those that learn go first."""
        learners = recipe.graph.learning_networks
        queue = sorted(recipe.networks, key=lambda name: (name not in learners, -costs[name]))
        groups: list[list[str]] = [[] for _ in range(count)]
        for name in queue:
            min(groups, key=lambda group: sum(costs[other] for other in group)).append(name)
        order = list(recipe.networks)
        return cls.of(sorted(groups, key=lambda group: min(map(order.index, group))), recipe)
