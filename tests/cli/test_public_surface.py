"""``import codistill``: its names are there, and cost nothing until they are used."""

import subprocess
import sys

import pytest

import codistill

SURFACE = """
import sys
import codistill
assert not {"torch", "numpy", "pydantic"} & sys.modules.keys()
from codistill import Outline, Recipe, Transfer, TransferGraph, methods, recipes
from codistill import build_report, count_costs, read_overview
assert not {"torch", "numpy"} & sys.modules.keys()
assert codistill.recipes is recipes and recipes.get("quickstart").method == "mutual"
assert codistill.__version__
print("fine")
"""


def test_importing_imports_no_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", SURFACE], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "fine\n"), ended.stderr


def test_every_public_name_is_what_it_says() -> None:
    assert len(codistill.__all__) == 20
    assert dir(codistill) == sorted(codistill.__all__)
    places = {
        "Cohort": "codistill.cohort",
        "TrackerSink": "codistill.trackers",
        "Objective": "codistill.transfer.objective",
        "Outline": "codistill.transfer.graph",
        "Ramp": "codistill.transfer.graph",
        "Recipe": "codistill.recipes.schema",
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
    for name, module in places.items():
        thing = getattr(codistill, name)
        assert (thing.__name__, thing.__module__) == (name, module)
    assert codistill.methods.__name__ == "codistill.transfer.methods"
    assert codistill.recipes.__name__ == "codistill.recipes"
    assert places.keys() | {"methods", "recipes", "__version__"} == set(codistill.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'codistill' has no attribute 'Trainer'"):
        vars(codistill)["__getattr__"]("Trainer")
