"""Networks that teach each other while they learn. The names listed here are the public API.

    from codistill import Cohort, Objective, methods

Names are imported when they are first used, so ``import codistill`` alone does not import torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codistill import recipes
    from codistill.cohort import Cohort
    from codistill.data.images import from_datasets
    from codistill.engine.evaluate import evaluate_finished
    from codistill.engine.trainer import train
    from codistill.export.export import export_network
    from codistill.export.formats import read_weights
    from codistill.export.predict import predict
    from codistill.recipes.schema import Recipe
    from codistill.report.overview import read_overview
    from codistill.report.page import build_report
    from codistill.studies.costs import count_costs
    from codistill.trackers import TrackerSink
    from codistill.transfer import methods
    from codistill.transfer.graph import Outline, Ramp, Transfer, TransferGraph
    from codistill.transfer.objective import Objective

    __version__: str

__all__ = [
    "Cohort", "Objective", "Outline", "Ramp", "Recipe", "TrackerSink", "Transfer", "TransferGraph", "__version__",
    "build_report", "count_costs", "evaluate_finished", "export_network", "from_datasets", "methods", "predict",
    "read_overview", "read_weights", "recipes", "train",
]  # fmt: skip

_MODULES = {
    "Cohort": "codistill.cohort",
    "Objective": "codistill.transfer.objective",
    "Outline": "codistill.transfer.graph",
    "Ramp": "codistill.transfer.graph",
    "Recipe": "codistill.recipes.schema",
    "TrackerSink": "codistill.trackers",
    "Transfer": "codistill.transfer.graph",
    "TransferGraph": "codistill.transfer.graph",
    "build_report": "codistill.report.page",
    "count_costs": "codistill.studies.costs",
    "evaluate_finished": "codistill.engine.evaluate",
    "export_network": "codistill.export.export",
    "from_datasets": "codistill.data.images",
    "predict": "codistill.export.predict",
    "read_overview": "codistill.report.overview",
    "read_weights": "codistill.export.formats",
    "train": "codistill.engine.trainer",
}


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker would accept every misspelt name as a result of __getattr__

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _MODULES:
            return getattr(import_module(_MODULES[name]), name)
        match name:
            case "methods":
                return import_module("codistill.transfer.methods")
            case "recipes":
                return import_module("codistill.recipes")
            case "__version__":
                from importlib.metadata import PackageNotFoundError, version

                try:
                    return version("codistill")
                except PackageNotFoundError:
                    return "not installed"  # a checkout that is only on the path
        raise AttributeError(f"module 'codistill' has no attribute {name!r}")
