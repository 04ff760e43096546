"""Networks that teach each other while they learn. What is listed here is the public surface.

    from codistill import Cohort, Objective, methods

Names are imported when they are first used: ``import codistill`` by itself imports no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codistill import recipes
    from codistill.cohort import Cohort
    from codistill.engine.trainer import train
    from codistill.recipes.schema import Recipe
    from codistill.transfer import methods
    from codistill.transfer.graph import Outline, Transfer, TransferGraph
    from codistill.transfer.objective import Objective

    __version__: str

__all__ = [
    "Cohort",
    "Objective",
    "Outline",
    "Recipe",
    "Transfer",
    "TransferGraph",
    "__version__",
    "methods",
    "recipes",
    "train",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker would take every misspelt name for something that __getattr__ returns

    def __getattr__(name: str) -> object:
        match name:
            case "Cohort":
                from codistill.cohort import Cohort

                return Cohort
            case "Objective":
                from codistill.transfer.objective import Objective

                return Objective
            case "Outline" | "Transfer" | "TransferGraph":
                from codistill.transfer import graph

                return getattr(graph, name)
            case "Recipe":
                from codistill.recipes.schema import Recipe

                return Recipe
            case "methods":
                from codistill.transfer import methods

                return methods
            case "recipes":
                # Not "from codistill import recipes": that would ask this function again.
                import codistill.recipes as recipes

                return recipes
            case "train":
                from codistill.engine.trainer import train

                return train
            case "__version__":
                from importlib.metadata import PackageNotFoundError, version

                try:
                    return version("codistill")
                except PackageNotFoundError:
                    return "not installed"  # a checkout that is only on the path
        raise AttributeError(f"module 'codistill' has no attribute {name!r}")
