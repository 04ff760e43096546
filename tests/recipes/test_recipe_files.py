"""Recipe files: what YAML means here, what is refused with which line, and that what is written reads back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codistill import recipes
from codistill.recipes import parse

WHOLE = """\
name: mine
networks:
  a: wrn-10-1
  b: mobilenet
data: {name: cifar10}
length:
  epochs: 3
batch_size: 32
optimizer:
  kind: sgd
  lr: 1e-3
  weight_decay: 5e-4
schedule: {kind: constant}
"""


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("1e-3", 0.001),
        ("-1.5E+2", -150.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("12", 12),
        ("-7", -7),
        ("010", 10),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("y", "y"),
        ("12:30", "12:30"),
        ("2020-01-01", "2020-01-01"),
        ("1_000", "1_000"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("١", "١"),
    ],
)
def test_a_word_means_what_yaml_1_2_says(word: str, meaning: object) -> None:
    value = parse.parse_yaml(f"key: {word}", "test").value
    assert value == {"key": meaning}
    assert type(value["key"]) is type(meaning)
    assert parse.parse_yaml(parse.to_yaml(value), "test").value == value


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_value_survives_yaml_and_json(value: Any) -> None:
    assert parse.parse_yaml(parse.to_yaml({"key": value}), "test").value == {"key": value}


def test_an_unusual_line_break_is_kept() -> None:
    assert parse.parse_yaml(parse.to_yaml({"a\x85": "\u2028"}), "test").value == {"a\x85": "\u2028"}


def test_a_file_is_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(WHOLE)
    recipe = recipes.load(file)
    assert (recipe.name, recipe.optimizer.lr, recipe.length.epochs) == ("mine", 0.001, 3)
    assert recipes.resolve(str(file), ["length.epochs=5", "method=dml"]).length.epochs == 5


def test_json_is_read_with_tabs_and_without_spaces(tmp_path: Path) -> None:
    recipe = recipes.loads(WHOLE)
    file = tmp_path / "mine.json"
    for written in (
        json.dumps(recipe.model_dump(mode="json"), indent="\t"),
        recipes.dumps(recipe, "json"),
        json.dumps(recipe.model_dump(mode="json"), separators=(",", ":")),
    ):
        file.write_text(written)
        assert recipes.load(file) == recipe


def test_a_file_may_change_a_catalogue_entry() -> None:
    recipe = recipes.loads(
        "base: cifar100/wrn-28-4-twins\nmethod: dml\noptimizer:\n  lr: 0.05\nschedule: {kind: cosine}\n"
    )
    paper = recipes.get("cifar100/wrn-28-4-twins")
    assert recipes.difference(paper, recipe) == [
        "method: dcm → dml",
        "optimizer.lr: 0.1 → 0.05",
        "schedule.kind: steps → cosine",
        "schedule.milestones: [0.3, 0.6, 0.8] → (none)",
        "schedule.factor: 0.2 → (none)",
    ]
    networks = recipes.loads("base: cifar100/wrn-28-4-twins\nnetworks: {x: wrn-10-1}\nmethod: ds\n").networks
    assert networks == {"x": "wrn-10-1"}, "a free mapping is replaced, not merged"


def altered(old: str, new: str) -> str:
    assert WHOLE.count(old) == 1
    return WHOLE.replace(old, new)


BAD = {
    "unknown key": (altered("batch_size", "batchsize"), "line 8: batchsize: unknown key; did you mean 'batch_size'?"),
    "unknown key deeper": (altered("  epochs", "  epoch"), "line 7: length.epoch: unknown key; did you mean 'epochs'?"),
    "a key of another section": (WHOLE + "lr: 1\n", "line 14: lr: unknown key; did you mean 'optimizer.lr'?"),
    "a key of another kind": (altered("{kind: constant}", "{kind: constant, factor: 1}"), "schedule.kind=steps"),
    "missing key": (altered("batch_size: 32\n", ""), "batch_size: missing; give batch_size=VALUE"),
    "missing in a section": (altered("  lr: 1e-3\n", ""), "line 9: optimizer.lr: missing"),
    "missing section": (altered("length:\n  epochs: 3\n", ""), "length: missing; give length.epochs=VALUE"),
    "missing kind": (
        altered("  kind: sgd\n", ""),
        "optimizer.kind: missing; give optimizer.kind=KIND, one of sgd, adamw",
    ),
    "unknown kind": (
        altered("kind: sgd", "kind: sdg"),
        "line 10: optimizer.kind: unknown kind 'sdg'; did you mean 'sgd'?",
    ),
    "mistyped number": (altered("lr: 1e-3", "lr: fast"), "line 11: optimizer.lr: must be a number, not 'fast'"),
    "number as text": (altered("batch_size: 32", "batch_size: '32'"), "batch_size: must be a whole number, not '32'"),
    "boolean as number": (altered("batch_size: 32", "batch_size: true"), "must be a whole number, not true"),
    "word as boolean": (WHOLE + "t_squared: on\n", "line 14: t_squared: must be true or false, not 'on'"),
    "section as value": (altered("data: {name: cifar10}", "data: cifar10"), "line 5: data: must be a section"),
    "list as word": (WHOLE + "heads: {exits: stage2}\n", "heads.exits: must be a list, [a, b], not 'stage2'"),
    "out of range": (altered("epochs: 3", "epochs: 0"), "line 7: length.epochs: must be greater than or equal to 1"),
    "not finite": (altered("lr: 1e-3", "lr: .inf"), "optimizer.lr: must be a finite number"),
    "not a number": (altered("lr: 1e-3", "lr: .nan"), "optimizer.lr: must be a finite number"),
    "unknown value": (altered("cifar10}", "cifar11}"), "data.name: unknown value 'cifar11'; did you mean 'cifar10'?"),
    "unknown network": (
        altered("mobilenet", "mobilnet"),
        "line 4: networks.b: unknown network 'mobilnet'; did you mean",
    ),
    "depth that does not fit": (altered("wrn-10-1", "wrn-11-1"), "line 3: networks.a: wrn-11-1: depth 11 does not fit"),
    "unfit member name": (altered("  b:", "  ../b:"), "'../b' is not a name for a network"),
    "no networks": (
        altered("networks:\n  a: wrn-10-1\n  b: mobilenet\n", "networks: {}\n"),
        "networks: must not be empty",
    ),
    "unknown method": (WHOLE + "method: dmc\n", "line 14: method: unknown method 'dmc'; did you mean"),
    "unknown setting": (
        WHOLE + "method: dcm\nweights: {gama: 1}\n",
        "weights.gama: unknown setting of dcm 'gama'; did you mean 'gamma'?",
    ),
    "setting that is no weight": (
        WHOLE + "method: kd\nweights: {teacher: 1}\n",
        "weights.teacher: unknown setting of kd",
    ),
    "negative weight": (WHOLE + "weights: {beta: -1}\n", "weights.beta: must be greater than or equal to 0, not -1"),
    "unknown edge": (
        WHOLE + "edges: {a/final->b/fnal: 1}\n",
        "unknown edge 'a/final->b/fnal'; did you mean 'a/final->b/final'",
    ),
    "unknown exit": (WHOLE + "heads: {exits: [stage7]}\n", "line 14: heads.exits: unknown exit"),
    "too few networks": (altered("  b: mobilenet\n", ""), "method: mutual needs"),
    "network not in the cohort": (
        altered("  kind: sgd\n", "  kind: sgd\n  lr_of: {c: 1}\n"),
        "lr_of.c: unknown network 'c'",
    ),
    "teacher without weights": (WHOLE + "method: kd\n", "start.a: missing; kd's teacher is the first network, a,"),
    "teachers of a method without": (WHOLE + "method: dml\nteachers: [a]\n", "teachers: dml has none, only kd and cml"),
    "unknown teacher": (WHOLE + "method: cml\nteachers: [c]\n", "teachers: unknown teacher 'c'; Allowed: a, b"),
    "only teachers": (WHOLE + "method: kd\nteachers: [a, b]\n", "every network is a teacher, a, b; leave at least"),
    "named teacher without weights": (
        WHOLE + "method: kd\nteachers: [b]\n",
        "start.b: missing; with kd this network only teaches, so give its weights: start.b=FILE",
    ),
    "graph of its own without edges": (WHOLE + "method: custom\n", "edges: custom is its edges, and there are none"),
    "learner that its graph does not know": (
        WHOLE + "method: custom\nedges: {labels->a/final: 1, a/final->x/final: 1}\n",
        "edges.a/final->x/final: unknown classifier 'x/final'; did you mean 'b/final'",
    ),
    "initial edges of a method": (
        WHOLE + "transfer: {initial_edges: {labels->a/final: 1}}\n",
        "transfer.initial_edges: only method=custom has them",
    ),
    "both mixings": (WHOLE + "augment: {mixup: 1, cutmix: 1}\n", "augment.cutmix: mixup and cutmix are both on"),
    "folder without size": (altered("cifar10", "folder"), "data.image_size: missing; the images of a folder"),
    "crop too large": (
        altered("{name: cifar10}", "{name: folder, image_size: 32}") + "augment: {crop: 64}\n",
        "line 14: augment.crop: 64 is more than the 32 pixels of an image",
    ),
    "crop that only padding has": (
        WHOLE + "augment: {pad: 4, crop: 33}\n",
        "line 14: augment.crop: 33 is more than the 32 pixels of an image",
    ),
    "milestones that fall": (
        altered("{kind: constant}", "{kind: steps, milestones: [0.5, 0.2]}"),
        "milestones must rise",
    ),
    "unknown base": (
        "base: cifar100/wrn-28-4-twin\n",
        "line 1: base: unknown recipe 'cifar100/wrn-28-4-twin'; did you mean",
    ),
    "base that is no name": ("base: [1]\n", "line 1: base: unknown recipe"),
    "base without its file": ("base: kd/wrn-28-10-resnet-110\n", "start.teacher=FILE"),
    "key twice": (WHOLE + "name: other\n", "line 14: the key 'name' is given twice, first in line 1"),
    "key twice, deeper": (
        altered("  b: mobilenet", "  a: mobilenet"),
        "line 4: the key 'a' is given twice, first in line 3",
    ),
    "broken YAML": (altered("{name: cifar10}", "{name: cifar10"), "line 6: while parsing a flow mapping"),
    "tab": ("networks:\n\ta: wrn-10-1\n", "line 2: "),
    "alias bomb": ("a: &a [x, x]\nb: &b [*a, *a]\n", "line 1: anchors and aliases"),
    "merge key": ("base: quickstart\n<<: {seed: 1}\n", "line 2: <<: unknown key"),
    "Python object": ("a: !!python/object/apply:os.system [ls]\n", "line 1: tags"),
    "standard tag": ("a: !!int 3\n", "line 1: tags"),
    "list as key": ("? [a]\n: b\n", "line 1: a key must be a word"),
    "tower of brackets": ("a: " + "[" * 5000, "line 1: nested more than 12 deep"),
    "two documents": (WHOLE + "---\n" + WHOLE, "line 14: expected a single document"),
    "empty": ("", "this has nothing"),
    "only a comment": ("# nothing\n", "this has nothing"),
    "list": ("- a\n", "a recipe is written as key: value lines"),
    "control character": ("name: a\x07b\n", "special characters are not allowed"),
    "escape sequence in a key": ('"\\e[31mred": 1\n' + WHOLE, "line 1: ?[31mred: unknown key"),
    "half a character": ('name: "\\ud800"\n', "line 1: half a character"),
    "a crowd": (altered("  b:", "".join(f"  n{i}: wrn-10-1\n" for i in range(40)) + "  b:"), "at most 32"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_words(case: str, tmp_path: Path) -> None:
    written, words = BAD[case]
    file = tmp_path / "mine.yaml"
    file.write_text(written, encoding="utf-8")
    with pytest.raises(recipes.RecipeError) as caught:
        recipes.load(file)
    message = str(caught.value)
    assert words in message
    assert message.startswith(f"{file}: ")
    assert not any(leak in message for leak in ("Traceback", "pydantic", "http", "Input should", "validation error"))
    assert list(tmp_path.iterdir()) == [file]


def test_bad_cases_are_bad_in_one_way() -> None:
    assert recipes.loads(WHOLE).name == "mine"
    assert len(BAD) >= 55


def test_all_problems_are_told_at_once() -> None:
    written = altered("  lr: 1e-3", "  lr: fast\n  lr_off: 1").replace("batch_size: 32\n", "")
    written += "augment: {mixup: 1, cutmix: 1}\nweights: {gama: 1}\nstart: {c: x}\nsede: 1\n"
    with pytest.raises(recipes.RecipeError) as caught:
        recipes.loads(written)
    assert [(problem.where, problem.path) for problem in caught.value.problems] == [
        ("line 14", "augment.cutmix"),
        ("", "batch_size"),
        ("line 10", "optimizer.lr"),
        ("line 11", "optimizer.lr_off"),
        ("line 17", "sede"),
        ("line 16", "start.c"),
        ("line 15", "weights.gama"),
    ]


def test_a_broken_key_does_not_make_others_look_wrong() -> None:
    """``lam`` suits DML, which ``dlm`` may well have meant: judging it by the default method would mislead."""
    with pytest.raises(recipes.RecipeError) as caught:
        recipes.loads(WHOLE + "method: dlm\nweights: {lam: 1}\n")
    assert [problem.path for problem in caught.value.problems] == ["method"]


def test_many_problems_fit_a_screen() -> None:
    with pytest.raises(recipes.RecipeError) as caught:
        recipes.loads(WHOLE + "".join(f"unknown{i}: {'x' * 5000}\n" for i in range(24)) + f"{'k' * 900}: 1\n")
    lines = str(caught.value).splitlines()
    assert lines[0] == "recipe: 25 problems"
    assert lines[-1] == "  … and 13 more"
    assert len(lines) == 14
    assert max(map(len, lines)) < 410
    assert len(caught.value.problems) == 25


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), (b"a" * (parse.MAX_BYTES + 1), "larger than 256 KiB"), (b"name: \xff\n", "not UTF-8")],
)
def test_an_unreadable_file_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(recipes.RecipeError, match=words):
        recipes.load(file)


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(recipes.RecipeError, match="is a folder"):
        recipes.load(tmp_path)


def test_the_json_schema_knows_every_key() -> None:
    schema = recipes.json_schema()
    assert set(schema["properties"]) == set(recipes.Recipe.model_fields)
    assert schema["additionalProperties"] is False
    assert {"networks", "data", "length", "batch_size", "optimizer", "schedule"} == set(schema["required"])


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["sgd", "cosine", "kd", "apfc"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "kind", "lr", "name", "gamma"]), inner)
    ),
    max_leaves=5,
)
KEYS = [*recipes.Recipe.model_fields, "base", "sede", "", "optimizer"]


def is_refused_or_round_trips(written: str) -> None:
    try:
        recipe = recipes.loads(written)
    except recipes.RecipeError:
        return
    assert recipes.loads(recipes.dumps(recipe)) == recipe
    assert recipes.loads(recipes.dumps(recipe, "json")) == recipe


@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=3))
@settings(max_examples=300, deadline=None)
def test_any_change_of_a_file_is_refused_or_round_trips(changes: dict[str, Any]) -> None:
    values = {**recipes.get("quickstart").model_dump(mode="json"), **changes}
    is_refused_or_round_trips(parse.to_yaml(values))


@given(
    st.text()
    | st.lists(
        st.sampled_from(["a: ", "base: quickstart\n", "\n", "  ", "[", "{", "}", "- ", "&x ", "*x", "'", "seed: 1\n"])
    ).map("".join)
)
@settings(max_examples=300, deadline=None)
def test_any_text_is_refused_or_round_trips(written: str) -> None:
    is_refused_or_round_trips(written)
