"""``key=value`` changes, and the difference between two recipes."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codistill import recipes
from codistill.recipes import errors

BASE = recipes.get("quickstart", ["method=dcm"])
PHOTOS = ["data.name=folder", "data.folder=photos"]


def test_other_images_keep_their_labels_and_all_of_them() -> None:
    """Half of the embedded labels are wrong to make a demonstration, which users' own photos do not need."""
    own = recipes.get("quickstart", PHOTOS).data
    assert (own.wrong_labels, own.train_limit, own.test_limit) == (0.0, None, None)
    asked = recipes.get("quickstart", [*PHOTOS, "data.wrong_labels=0.2", "data.test_limit=50"]).data
    assert (asked.wrong_labels, asked.train_limit, asked.test_limit) == (0.2, None, 50)
    written = recipes.loads("base: quickstart\ndata: {train_limit: 9, name: folder, folder: photos}\n").data
    assert (written.wrong_labels, written.train_limit, written.test_limit) == (0.0, 9, None)
    assert recipes.get("quickstart", ["data.name=fashion", "data.image_size=28"]).data.wrong_labels == 0.5
    assert recipes.get("table7/wrong-labels-20", ["data.name=cifar100"]).data.wrong_labels == 0.2


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ("method=dml", ["method: dcm → dml"]),
        ("length.epochs=1", ["length.epochs: 40 → 1"]),
        ("seed=3", ["seed: 0 → 3"]),
        ("networks.b=mobilenet", ["networks.b: wrn-10-1 → mobilenet"]),
        ("networks.c=mobilenet", ["networks.c: (none) → mobilenet"]),
        ("optimizer.lr_of.b=0.05", ["optimizer.lr_of.b: (none) → 0.05"]),
        ("optimizer.lr=1e-3", ["optimizer.lr: 0.1 → 0.001"]),
        ("optimizer={lr: 1, nesterov: true}", ["optimizer.lr: 0.1 → 1.0", "optimizer.nesterov: false → true"]),
        ("heads.exits=[stage2]", ['heads.exits: null → ["stage2"]']),
        ("heads={kind: narrow}", ["heads.kind: paper → narrow"]),
        ("weights.gamma=0.5", ["weights.gamma: (none) → 0.5"]),
        ("edges.a/final->b/stage2=0.5", ["edges.a/final->b/stage2: (none) → 0.5"]),
        ("transfer.share=0.5", ["transfer.share: null → 0.5"]),
        ("transfer={initial_share: 0, end: 0.3}", ["transfer.initial_share: null → 0.0", "transfer.end: null → 0.3"]),
        ("data.train_limit=null", ["data.train_limit: 1500 → null"]),
        ("start.a=C:\\my nets\\a: #1.safetensors", ["start.a: (none) → C:\\my nets\\a: #1.safetensors"]),
        ('name="7"', ["name: quickstart → 7"]),
        (" seed = 3 ", ["seed: 0 → 3"]),
        (
            "schedule.kind=cosine",
            [
                "schedule.kind: steps → cosine",
                "schedule.milestones: [0.3, 0.6, 0.8] → (none)",
                "schedule.factor: 0.2 → (none)",
            ],
        ),
    ],
)
def test_a_change_changes_what_it_names_and_nothing_else(change: str, differences: list[str]) -> None:
    assert recipes.difference(BASE, recipes.apply(BASE, [change])) == differences


def test_changes_work_on_plain_values_and_leave_them_alone() -> None:
    values = BASE.model_dump(mode="json")
    assert recipes.apply(values, ["optimizer.lr=0.2"]) == recipes.apply(BASE, ["optimizer.lr=0.2"])
    assert values == BASE.model_dump(mode="json")
    assert recipes.apply(BASE, []) == BASE


def test_a_new_kind_keeps_what_both_have_and_asks_for_its_own() -> None:
    warm = recipes.apply(BASE, ["schedule.warmup=0.1", "schedule.kind=cosine"])
    assert recipes.apply(warm, ["schedule.kind=constant"]).schedule.warmup == 0.1
    with pytest.raises(recipes.RecipeError) as caught:
        recipes.apply(BASE, ["optimizer.kind=adamw"])
    assert [problem.path for problem in caught.value.problems] == ["optimizer.lr", "optimizer.weight_decay"]
    assert "optimizer.kind=adamw needs its own: optimizer.lr=VALUE" in str(caught.value)
    changes = ["optimizer.lr=1e-3", "optimizer.weight_decay=0.05", "optimizer.kind=adamw"]
    assert recipes.apply(BASE, changes).optimizer.kind == "adamw"
    assert recipes.apply(BASE, changes[::-1]) == recipes.apply(BASE, changes)


def test_a_recipe_has_the_share_and_the_ramp_that_it_names() -> None:
    dcm = BASE.graph
    assert recipes.apply(BASE, ["transfer.share=0.5", "transfer.scale=2"]).graph == dcm.with_share(0.5, scale=2)
    changes = ["transfer.initial_scale=1", "transfer.initial_share=0", "transfer.begin=0.1", "transfer.end=0.6"]
    ramped = recipes.apply(BASE, ["transfer.share=0.4", *changes, "temperature=3", "edges.a/final->b/final=2"]).graph
    edited = dcm.replace(temperature=3.0).reweighted({"a/final->b/final": 2})
    assert ramped == edited.with_share(0.4, initial_share=0.0, initial_scale=1.0, begin=0.1, end=0.6)
    alone = recipes.apply(BASE, ["method=independent", "transfer.share=0.5"])
    assert set(alone.graph.shares.values()) == {0.0}


def test_replacing_a_field_is_checked_like_everything_else() -> None:
    assert BASE.replace(method="dml") == recipes.apply(BASE, ["method=dml"])
    with pytest.raises(recipes.RecipeError, match="did you mean 'narrow'"):
        BASE.replace(heads={"kind": "narow"})


BAD = {
    "no equals sign": (["method"], "command line: 'method' is not a change; type key=value"),
    "no key": (["=3"], "'=3' is not a change; type key=value"),
    "empty step": (["optimizer..lr=3"], "'optimizer..lr=3' is not a change"),
    "twice, two values": (["seed=1", "seed=2"], "command line: seed: given twice, 1 and 2"),
    "key and its section": (
        ["optimizer.lr=1", "optimizer={lr: 2}"],
        "optimizer.lr: conflicts with optimizer, which contains it",
    ),
    "section and its key": (["networks={a: wrn-10-1}", "networks.b=mobilenet"], "networks.b: conflicts with networks"),
    "unclosed list": (["heads.exits=[stage2"], "command line: heads.exits: while parsing a flow sequence"),
    "misspelt key": (["lenght.epochs=1"], "lenght: unknown key; did you mean 'length'?"),
    "key without its section": (["epochs=1"], "command line: epochs: unknown key; did you mean 'length.epochs'?"),
    "key of the old kind": (["schedule.kind=cosine", "schedule.factor=1"], "only schedule.kind=steps has this key"),
    "unknown kind": (["schedule.kind=cosin"], "schedule.kind: unknown kind 'cosin'; did you mean 'cosine'?"),
    "below a plain value": (["seed.x=1"], "seed: must be a whole number, not {'x': 1}"),
    "no value": (["seed="], "seed: must be a whole number, not null"),
    "a section emptied": (["length=null"], "length: must be a section, {key: value}, not null"),
    "share above 1": (["transfer.share=1.5"], "line: transfer.share: must be less than or equal to 1, not 1.5"),
    "share below 0": (["transfer.initial_share=-1"], "transfer.initial_share: must be greater than or equal to 0"),
    "no scale": (["transfer.initial_scale=0"], "transfer.initial_scale: must be greater than 0, not 0"),
    "ends before it begins": (
        ["transfer.initial_share=0", "transfer.begin=0.5", "transfer.end=0.3"],
        "command line: transfer.end: ramp from begin=0.5 to end=0.3: must be fractions of the training, 0 <= begin",
    ),
    "begins with nothing": (
        ["transfer.share=0.5", "transfer.begin=0.5"],
        "command line: transfer.begin: begin and end are those of a ramp; give an initial share too",
    ),
    "half of an odd side": (["data.image_size=13", "augment.half_until=0.2"], "augment.half_until: halves the side of"),
    "a hole larger than images": (["augment.cutout=15"], "augment.cutout: 15 is more than the 14 pixels"),
    "alias": (["heads.exits=[*a]"], "heads.exits: anchors and aliases"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_change_is_refused_in_words(case: str) -> None:
    changes, words = BAD[case]
    with pytest.raises(recipes.RecipeError) as caught:
        recipes.apply(BASE, changes)
    assert words in str(caught.value)


def test_the_same_change_twice_is_one_change() -> None:
    assert recipes.apply(BASE, ["seed=2", "seed=2"]).seed == 2


def test_bad_changes_and_what_they_lead_to_are_told_together() -> None:
    with pytest.raises(recipes.RecipeError) as caught:
        recipes.apply(BASE, ["method", "seed=1", "seed=2", "batch_size=x", "weights.gama=1"])
    assert [problem.path for problem in caught.value.problems] == ["", "seed", "batch_size", "weights.gama"]
    assert {problem.where for problem in caught.value.problems} == {"command line"}


def test_an_error_points_at_the_command_line_and_not_at_the_line_it_replaced(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: quickstart\noptimizer:\n  lr: 0.1\n  weight_decay: -1\n")
    with pytest.raises(recipes.RecipeError) as caught:
        recipes.load(file, ["optimizer.lr=-1"])
    assert [str(problem) for problem in caught.value.problems] == [
        "command line: optimizer.lr: must be greater than 0, not -1",
        "line 4: optimizer.weight_decay: must be greater than or equal to 0, not -1",
    ]


def test_a_mapping_given_whole_leaves_no_line_of_the_file_behind(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: quickstart\nnetworks:\n  a: wrn-10-1\n  b: wrn-10-1\n")
    with pytest.raises(recipes.RecipeError) as caught:
        recipes.load(file, ["networks={a: wrn-11-1, b: wrn-10-1}"])
    assert [(problem.where, problem.path) for problem in caught.value.problems] == [("command line", "networks.a")]


VALUES = [
    "0",
    "1",
    "-1",
    "0.5",
    "1e-3",
    "true",
    "null",
    "",
    "a",
    "[stage2]",
    "[0.1, 0.5]",
    "{a: wrn-10-1}",
    "{}",
    "[",
    "cosine",
    "adamw",
    "kd",
]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*errors.keys(recipes.Recipe), "weights.gamma", "networks.b", "start.a", "x.y"])
            | st.text(max_size=9),
            st.sampled_from(VALUES) | st.text(max_size=9),
        ).map("=".join),
        max_size=4,
    )
)
@settings(max_examples=300, deadline=None)
def test_any_changes_are_refused_or_round_trip(changes: list[str]) -> None:
    try:
        recipe = recipes.apply(BASE, changes)
    except recipes.RecipeError:
        return
    assert recipes.loads(recipes.dumps(recipe)) == recipe
    assert bool(recipes.difference(BASE, recipe)) == (recipe != BASE)
