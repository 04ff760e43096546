"""The catalogue against the paper's settings, written down here a second time, in epochs rather than in shares."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from codistill import recipes
from codistill.recipes import paper
from codistill.recipes.schema import Recipe, learning_rate
from codistill.recipes.sections import Cosine, Sgd, Steps

# name: networks; batch, epochs, learning rate; epochs of the drops, their factor; weight decay, Nesterov
WRN = (128, 200, 0.1, [60, 120, 160], 1 / 5, 5e-4, False)
RESNET = (64, 200, 0.1, [60, 120, 180], 1 / 10, 1e-4, False)
DENSENET = (64, 300, 0.1, [150, 225], 1 / 10, 1e-4, True)
IMAGENET = (256, 100, 0.1, [30, 60, 90], 1 / 10, 1e-4, False)
PAPER = {
    "cifar100/resnet-164-twins": (["resnet-164", "resnet-164"], RESNET),
    "cifar100/wrn-28-10-twins": (["wrn-28-10", "wrn-28-10"], WRN),
    "cifar100/densenet-40-12-twins": (["densenet-40-12", "densenet-40-12"], DENSENET),
    "cifar100/wrn-28-10-resnet-110": (["wrn-28-10", "resnet-110"], WRN),
    "cifar100/wrn-28-10-wrn-28-4": (["wrn-28-10", "wrn-28-4"], WRN),
    "cifar100/wrn-28-10-mobilenet": (["wrn-28-10", "mobilenet"], WRN),
    "cifar100/wrn-28-10-dropout-twins": (["wrn-28-10-dropout-0.3", "wrn-28-10-dropout-0.3"], WRN),
    "cifar100/wrn-28-4-twins": (["wrn-28-4", "wrn-28-4"], WRN),
    "cifar100/resnet-110-twins": (["resnet-110", "resnet-110"], RESNET),
    "cifar100/mobilenet-twins": (["mobilenet", "mobilenet"], RESNET),
    "imagenet/resnet-18-twins": (["resnet-18", "resnet-18"], IMAGENET),
    "imagenet/resnet-50-resnet-18": (["resnet-50", "resnet-18"], IMAGENET),
    "imagenet/resnet-50-mobilenetv2": (["resnet-50", "mobilenetv2"], IMAGENET),
    "table3/independent": (["wrn-28-10", "wrn-28-10"], WRN),
    "table4/densenet-40-12-apfc": (["densenet-40-12", "densenet-40-12"], DENSENET),
    "table4/wrn-28-10-narrow": (["wrn-28-10", "wrn-28-10"], WRN),
    "table5/dml-ds": (["densenet-40-12", "densenet-40-12"], DENSENET),
    "table6/resnet-164": (["resnet-164"], RESNET),
    "table6/densenet-40-12": (["densenet-40-12"], DENSENET),
    "table6/wrn-28-10": (["wrn-28-10"], WRN),
    "table6/wrn-28-10-dropout": (["wrn-28-10-dropout-0.3"], WRN),
    "table6/resnet-110": (["resnet-110"], RESNET),
    "table6/mobilenet": (["mobilenet"], RESNET),
    "table7/wrong-labels-20": (["densenet-40-12", "densenet-40-12"], DENSENET),
    "table7/wrong-labels-50": (["densenet-40-12", "densenet-40-12"], DENSENET),
    "table7/wrong-labels-80": (["densenet-40-12", "densenet-40-12"], DENSENET),
    "kd/wrn-28-10-resnet-110": (["wrn-28-10", "resnet-110"], WRN),
}

# name: what it has that the pair it varies has not
VARIANTS = {
    "table3/independent": {"method": "independent"},
    "table3/c4": {"exits": ("stem",)},
    "table3/c3": {"exits": ("stage1",)},
    "table3/c2": {"exits": ("stage2",)},
    "table3/c2c3": {"exits": ("stage2", "stage1")},
    "table3/c2c3c4": {"exits": ("stage2", "stage1", "stem")},
    "table4/densenet-40-12-apfc": {"kind": "apfc"},
    "table4/densenet-40-12-narrow": {"kind": "narrow"},
    "table4/densenet-40-12-paper": {},
    "table4/wrn-28-10-apfc": {"kind": "apfc"},
    "table4/wrn-28-10-narrow": {"kind": "narrow"},
    "table4/wrn-28-10-paper": {},
    "table5/independent": {"method": "independent"},
    "table5/dml": {"method": "dml"},
    "table5/dml-ds": {"method": "dml_ds"},
    "table5/dcm-1": {"method": "dcm_1"},
    "table5/dcm-2": {"method": "dcm_2"},
    "table5/dcm": {},
    "table6/resnet-164": {"method": "ds"},
    "table6/densenet-40-12": {"method": "ds"},
    "table6/wrn-28-10": {"method": "ds"},
    "table6/wrn-28-10-dropout": {"method": "ds"},
    "table6/resnet-110": {"method": "ds"},
    "table6/mobilenet": {"method": "ds"},
    "table7/wrong-labels-20": {"data": "cifar10", "wrong_labels": 0.2},
    "table7/wrong-labels-50": {"data": "cifar10", "wrong_labels": 0.5},
    "table7/wrong-labels-80": {"data": "cifar10", "wrong_labels": 0.8},
    "kd/wrn-28-10-resnet-110": {"method": "kd"},
}

# As the authors' scripts train: what that changes is in tests/docs/test_differences.py.
AUTHORS = {f"cifar100/{pair}-authors" for pair in ("wrn-28-10-twins", "wrn-28-4-twins", "wrn-28-10-mobilenet")}

OWN = ("quickstart", "own-images", "finetune", "cifar100/wrn-28-10-fast")  # which are not the paper's

ENTRIES = {entry.name: entry for entry in recipes.describe()}


def test_the_catalogue_does_not_shrink() -> None:
    in_table_1 = 7
    added_twins = 3
    in_table_2 = 3 + 1  # what is added is commented out in the paper's source
    ablations = 6 + 6 + 6 + (4 + 2) + 3  # Tables 3 to 7
    kd = 1
    names = {*OWN, "imagenet/mobilenetv2-twins", *PAPER, *VARIANTS, *AUTHORS}
    assert len(names) == len(OWN) + in_table_1 + added_twins + len(AUTHORS) + in_table_2 + ablations + kd
    assert names <= set(recipes.NAMES)
    assert list(recipes.NAMES) == list(ENTRIES)
    assert all(re.fullmatch(r"[a-z0-9/.-]+", name) for name in recipes.NAMES), "a name must need no quotes in a shell"


@pytest.mark.parametrize("name", PAPER)
def test_hyper_parameters_are_the_papers(name: str) -> None:
    recipe = ENTRIES[name].recipe
    networks, (batch, epochs, lr, drops, factor, decay, nesterov) = PAPER[name]
    assert list(recipe.networks.values()) == networks
    assert recipe.batch_size == batch
    assert (recipe.length.epochs, recipe.length.scale) == (epochs, 1.0)
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert isinstance(optimizer, Sgd)
    assert isinstance(schedule, Steps)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.momentum, optimizer.nesterov) == (lr, decay, 0.9, nesterov)
    assert [round(share * epochs, 6) for share in schedule.milestones] == drops
    assert schedule.factor == pytest.approx(factor)
    _has_only_the_papers_extras(recipe)


def test_mobilenetv2_has_its_own_recipe() -> None:
    recipe = ENTRIES["imagenet/mobilenetv2-twins"].recipe
    assert list(recipe.networks.values()) == ["mobilenetv2", "mobilenetv2"]
    assert (recipe.batch_size, recipe.length.epochs, recipe.length.scale) == (256, 150, 1.0)
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (0.05, 4e-5)
    assert recipe.schedule == Cosine()
    assert learning_rate(recipe, 1.0) == pytest.approx(0.0)
    _has_only_the_papers_extras(recipe)


def _has_only_the_papers_extras(recipe: Recipe) -> None:
    augment = recipe.augment
    if recipe.name.startswith("imagenet/"):
        assert (recipe.data.image_size, augment.crop, augment.pad) == (256, 224, 0)
    else:
        assert (recipe.data.image_size, augment.crop, augment.pad) == (None, None, 4)
    assert (augment.flip, augment.padding) == (True, "zero")
    assert [augment.mixup, augment.cutmix, augment.randaugment, recipe.label_smoothing, recipe.ema] == [0] * 5
    assert (recipe.weights, recipe.edges, recipe.temperature, recipe.accumulate) == ({}, {}, 1.0, 1)
    assert (recipe.batchnorm_init, recipe.schedule.warmup) == ("ones", 0.0)


@pytest.mark.parametrize("name", [name for name in recipes.NAMES if name not in OWN])
def test_a_variant_differs_in_what_its_table_varies(name: str) -> None:
    recipe = ENTRIES[name].recipe
    standard = {"method": "dcm", "exits": None, "kind": "paper", "wrong_labels": 0.0}
    standard["data"] = "folder" if name.startswith("imagenet/") else "cifar100"
    found = {
        "method": recipe.method,
        "exits": recipe.heads.exits,
        "kind": recipe.heads.kind,
        "data": recipe.data.name,
        "wrong_labels": recipe.data.wrong_labels,
    }
    assert found == {**standard, **VARIANTS.get(name, {})}  # type: ignore[dict-item]


@pytest.mark.parametrize("name", recipes.NAMES)
def test_an_entry_says_what_to_expect_and_its_name_can_be_typed(name: str) -> None:
    summary = ENTRIES[name].summary
    assert name in OWN or re.search(r"\d\d?\.\d\d", summary), "an entry has the paper's number"
    needed = {"imagenet": ["data.folder=photos"], "kd": ["start.teacher=a.safetensors"]}
    assert recipes.resolve(name, ["seed=7", *needed.get(name.partition("/")[0], [])]).seed == 7


@pytest.mark.parametrize("name", recipes.NAMES)
def test_an_entry_survives_being_written_down(name: str) -> None:
    recipe = ENTRIES[name].recipe
    assert recipe.name == name
    assert recipes.loads(recipes.dumps(recipe)) == recipe
    assert recipes.loads(recipes.dumps(recipe, "json")) == recipe


def test_a_summary_has_all_numbers_of_its_row() -> None:
    tables = (paper.TABLE_1, paper.TABLE_2, paper.TABLE_3, paper.TABLE_4, paper.TABLE_5, paper.TABLE_7)
    cells = {name: cell for table in tables for name, cell in table.items()}
    cells |= {name: {method: row[method] for method in ("ds", "independent")} for name, row in paper.TABLE_6.items()}
    assert len(cells) == (7 + 2) + (3 + 1) + 6 + 6 + 6 + (4 + 2) + 3
    for name, row in cells.items():
        for number in " ".join([row] if isinstance(row, str) else row.values()).replace("better ", "").split():
            assert number in ENTRIES[name].summary
        assert ("†" in str(row)) == ("commented out in the paper's source" in ENTRIES[name].summary)


def test_tables_that_reprint_a_result_agree() -> None:
    """The paper prints DCM's and the independent results of a pair in several tables: a typing error would show."""
    wrn, densenet = paper.TABLE_1["cifar100/wrn-28-10-twins"], paper.TABLE_1["cifar100/densenet-40-12-twins"]
    assert (paper.TABLE_3["table3/independent"], paper.TABLE_3["table3/c2c3"]) == (wrn["independent"], wrn["dcm"])
    assert paper.TABLE_4["table4/wrn-28-10-paper"] == f"better {wrn['dcm'].split()[0]}"
    assert paper.TABLE_4["table4/densenet-40-12-paper"] == f"better {densenet['dcm'].split()[0]}"
    assert {method: paper.TABLE_5[f"table5/{method}"] for method in densenet} == densenet
    for name, row in paper.TABLE_6.items():
        twins = paper.TABLE_1[f"cifar100/{name.partition('/')[2]}-twins"]
        assert row["independent"] == twins["independent"]
        assert row["dcm"] == f"better {min(twins['dcm'].split())}"


def test_kd_cannot_be_had_without_a_teacher() -> None:
    with pytest.raises(recipes.RecipeError, match=r"start\.teacher=FILE"):
        recipes.get("kd/wrn-28-10-resnet-110")
    recipe = recipes.get("kd/wrn-28-10-resnet-110", ["start.teacher=a.safetensors"])
    assert recipe.start == {"teacher": "a.safetensors"}
    assert recipe.graph.frozen == ("teacher",)


def test_schedules_that_end_at_zero() -> None:
    """A linear one beside torch's own, a cosine beside numpy's."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-9, 1.0, 20)
    fall = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 80)
    theirs = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [20])
    linear = recipes.get("quickstart", ["schedule={kind: linear, warmup: 0.2}"])
    cosine = recipes.get("quickstart", ["schedule={kind: cosine}"])
    for step in range(101):
        assert learning_rate(linear, step / 100) == pytest.approx(theirs.get_last_lr()[0], abs=1e-6)
        assert learning_rate(cosine, step / 100) == pytest.approx((1 + np.cos(np.pi * step / 100)) / 2)
        optimizer.step()
        theirs.step()


def test_a_shorter_length_scales_the_recipe() -> None:
    recipe = recipes.get("cifar100/wrn-28-4-twins", ["length.epochs=100"])
    assert recipe.length.scale == 0.5
    rates = [round(0.1 * learning_rate(recipe, epoch / 100), 6) for epoch in (0, 29, 30, 59, 60, 79, 80, 99)]
    assert rates == [0.1, 0.1, 0.02, 0.02, 0.004, 0.004, 0.0008, 0.0008]
    assert recipes.get("quickstart").length.scale is None


@pytest.mark.parametrize(
    ("name", "meant"), [("quikstart", "quickstart"), ("wrn-28-4-twins", "cifar100/wrn-28-4-twins"), ("zzz", "list")]
)
def test_an_unknown_recipe_is_suggested_a_known_one(name: str, meant: str) -> None:
    with pytest.raises(recipes.RecipeError, match=meant):
        recipes.resolve(name)


def test_listings_and_errors_come_without_torch() -> None:
    program = """
import sys
from codistill import recipes
assert recipes.describe() and recipes.json_schema()
try:
    recipes.get("quickstart", ["method=dmc"])
except recipes.RecipeError as error:
    print(error)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "unknown method 'dmc'" in done.stdout
