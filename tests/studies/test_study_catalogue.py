"""The studies that ship: all of the paper's tables, their rows, numbers and contradictions."""

import re
import shlex
import sys
from pathlib import Path
from subprocess import run

import pytest
from typer.main import get_command

from codistill import recipes
from codistill.cli.app import app
from codistill.networks.families import title
from codistill.studies import catalogue
from codistill.studies.catalogue import method_rows
from codistill.studies.plan import run_name
from codistill.studies.statistics import Summary
from codistill.studies.study import BETTER_TWIN, Study, StudyRow, paper_numbers, slug
from codistill.transfer import methods
from support.study_rows import ROWS


def test_every_method_can_be_a_row() -> None:
    rows = method_rows(recipes.get("quickstart", ["start.a=a.safetensors"]), methods.NAMES)
    assert [row.recipe.method for row in rows] == list(methods.NAMES)
    assert len({row.label for row in rows}) == len(methods.NAMES) == 12


def test_the_catalogue_is_complete() -> None:
    assert {name: len(catalogue.get(name).rows) for name in catalogue.NAMES} == ROWS
    for name in catalogue.NAMES:
        study = catalogue.get(name)
        assert study.name == name
        assert study.title
        assert study.contrasts


def test_every_number_of_the_paper_stands_beside_a_row() -> None:
    # Numbers printed in the paper's tables, a pair of networks counting two, as does a network alone beside twins.
    printed = {"table1": 42, "table2": 36, "table3": 12, "table4": 6, "table5": 12, "table6": 16, "table7": 12}
    commented_out = {"table1": 12, "table2": 12, "table6": 8}
    for name, count in printed.items():
        numbers = [number for row in catalogue.get(name).rows for number in row.paper.values()]
        assert sum(not number.mark for number in numbers) == count
        assert sum(number.mark == "†" for number in numbers) == commented_out.get(name, 0)


def test_what_is_commented_out_in_the_papers_source_is_marked() -> None:
    assert paper_numbers("25.37(0.29)† 25.18(0.15)†") == {
        ("a", "top1_error"): Summary(5, 25.37, 0.29, "†"),
        ("b", "top1_error"): Summary(5, 25.18, 0.15, "†"),
    }
    assert {number.mark for number in paper_numbers("25.47/7.58†").values()} == {"†"}
    (note,) = catalogue.get("table5").notes
    assert all(
        number in note for number in ("top-down 23.08(0.15)† 23.03(0.12)†", "bottom-up 23.88(0.13)† 23.98(0.20)†")
    )


def test_one_number_for_two_twins_is_the_better_ones() -> None:
    """As where Table 1 has both; of MobileNet, whose row is commented out in both tables, it is network b's."""
    assert paper_numbers("better 7.11(0.11)") == {(BETTER_TWIN, "top1_error"): Summary(5, 7.11, 0.11)}
    both = {
        slug(row.group).removesuffix("-same"): row.paper for row in catalogue.get("table1").rows if row.label == "DCM"
    }
    one = {slug(row.group): row.paper for row in catalogue.get("table6").rows if row.label == "DCM"}
    assert len(one) == 6
    for name, numbers in one.items():
        assert list(numbers.values()) == [min(both[name].values(), key=lambda number: number.mean)]
    assert one["mobilenet"][BETTER_TWIN, "top1_error"] == both["mobilenet"]["b", "top1_error"]


def test_every_study_names_what_it_is_for() -> None:
    """One contrast, or two where `complete` is another question; of one among many groups, one for each."""
    for name in catalogue.NAMES:
        study = catalogue.get(name)
        assert 1 <= len(study.primary) <= (2 if ("complete", "DCM") in study.primary else 1), name
        assert set(study.primary) < set(study.contrasts)
    with pytest.raises(ValueError, match=r"study s: .*'DCM', 'DML'.* primary, but not among its contrasts"):
        Study("s", "s", catalogue.get("demo").rows, contrasts=(("DCM", "independent"),), primary=(("DCM", "DML"),))
    half = catalogue.get("demo").select(methods=["dml", "dcm"])
    assert (half.contrasts, half.primary) == ((("DCM", "DML"),), ()), "a part is for no other contrast than the whole"


def test_numbers_are_read_as_the_paper_prints_them() -> None:
    assert paper_numbers("17.89(0.26) 17.95(0.07)") == {
        ("a", "top1_error"): Summary(5, 17.89, 0.26),
        ("b", "top1_error"): Summary(5, 17.95, 0.07),
    }
    assert paper_numbers("- 26.66") == {("b", "top1_error"): Summary(5, 26.66, None)}
    assert paper_numbers("29.13/9.89", runs=None) == {
        ("a", "top1_error"): Summary(None, 29.13, None),
        ("a", "top5_error"): Summary(None, 9.89, None),
    }
    assert paper_numbers("") == {}
    with pytest.raises(ValueError, match=r"18\.72\(0\.24\)"):
        paper_numbers("about 18")


@pytest.mark.parametrize(
    ("rows", "title"),
    [(["50-wrong"], ": 50% wrong"), (["80-wrong/dcm"], ": 80% wrong"), (["20-wrong", "50-wrong/dcm"], ""), (None, "")],
)
def test_one_group_of_several_is_named_in_the_title(rows: list[str] | None, title: str) -> None:
    study = catalogue.get("table7")
    assert study.select(rows=rows).title == study.title + title
    demo = catalogue.get("demo")
    assert demo.select(methods=["dcm"]).title == demo.title  # of one group


def test_some_rows_by_hand() -> None:
    def row(name: str, key: str) -> StudyRow:
        (found,) = [row for row in catalogue.get(name).rows if row.key == key]
        return found

    noisy = row("table7", "80-wrong/dcm")
    assert noisy.recipe.data.wrong_labels == 0.8
    assert noisy.recipe.data.name == "cifar10"
    assert noisy.paper == {(BETTER_TWIN, "top1_error"): Summary(5, 31.26, 0.94)}
    stem = row("table3", "wrn-28-10-same/c1-plus-c4")
    assert stem.recipe.heads.exits == ("stem",)
    assert stem.paper[("b", "top1_error")] == Summary(5, 17.25, 0.15)
    mixed = row("table1", "wrn-28-10-mobilenet/dml")
    assert mixed.recipe.networks == {"a": "wrn-28-10", "b": "mobilenet"}
    assert mixed.paper[("b", "top1_error")] == Summary(5, 23.91, 0.22)
    kd = row("kd", "wrn-28-10-resnet-110/kd")
    assert kd.recipe.graph.frozen == ("a",)
    assert kd.teachers["a"][0].recipe.method == "independent"


# Counted independently: forward GFLOP an image with both heads and without.
@pytest.mark.parametrize(
    ("name", "epochs", "with_heads", "without"),
    [("efficiency", 560, 4.728, 1.691), ("wrn-16-2-efficiency", 540, 0.5462, 0.2022)],
)
def test_independent_training_of_an_efficiency_study_has_the_compute_of_dcm(
    name: str, epochs: int, with_heads: float, without: float
) -> None:
    study = catalogue.get(name)
    (longer,) = [row for row in study.rows if row.length_factor != 1]
    assert longer.resolve().length.epochs == epochs
    assert longer.resolve(["length.epochs=100"]).length.epochs == epochs / 2
    assert longer.length_factor == pytest.approx(with_heads / without, abs=0.01)


def test_mixup_is_the_only_difference_of_its_row() -> None:
    study = catalogue.get("wrn-16-4-noise")
    rows = {row.key: row.recipe for row in study.rows}
    for share in ("20", "50", "80"):
        found = recipes.difference(rows[f"{share}-wrong/independent"], rows[f"{share}-wrong/independent-mixup"])
        assert found == ["augment.mixup: 0.0 → 1.0"]


def test_tables_share_runs_by_recipe() -> None:
    def names(study: str) -> set[str]:
        return {run_name(row.resolve().replace(seed=1)) for row in catalogue.get(study).rows}

    assert names("curves") <= names("table1")
    assert len(names("table1") & names("table5")) == 3  # independent, DML and DCM on DenseNet-40-12 twins
    assert len(names("table1") & names("table3")) == 2  # independent and C1+C2C3
    assert len(names("table1") & names("table4")) == 2
    assert len(names("table1") & names("table6")) == 12
    assert len(names("wrn-28-4-twins") & names("efficiency")) == 4
    assert len(names("wrn-28-4-twins") & names("wrn-28-4-edges")) == 3
    assert len(names("wrn-16-2-edges") & names("wrn-16-2-efficiency")) == 3
    for name, count in ROWS.items():
        assert len(names(name)) == count, f"{name}: two rows train the same"


def test_titles_and_slugs() -> None:
    assert title("wrn-28-10-dropout-0.3") == "WRN-28-10(+)"
    assert title("mobilenetv2") == "MobileNetV2"
    assert slug("WRN-28-10(+) & same") == "wrn-28-10-plus-same"


def test_unknown_names_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="unknown study 'tabel1'; did you mean 'table1'"):
        catalogue.get("tabel1")
    study = catalogue.get("table1")
    with pytest.raises(
        ValueError, match=r"unknown method in study table1 'dmc'; did you mean 'dml'.*Allowed: independent"
    ):
        study.select(methods=["dcm", "dmc"])
    with pytest.raises(ValueError, match=r"unknown row of study table1 'wrn-28-10-sam'; did you mean"):
        study.select(rows=["wrn-28-10-sam"])
    with pytest.raises(ValueError, match="--methods and --rows"):
        catalogue.get("table6").select(methods=["ds"], rows=["resnet-164/dcm"])
    with pytest.raises(ValueError, match="unknown row of study s 'DCN'"):
        Study("s", "s", study.rows[:3], contrasts=(("DCN", "DML"),))
    with pytest.raises(ValueError, match="same key"):
        Study("s", "s", (study.rows[0], study.rows[0]), contrasts=())


def test_a_part_of_a_study() -> None:
    study = catalogue.get("table1").select(
        methods=["independent", "dcm"], rows=["wrn-28-10-same", "resnet-164-same/dcm"]
    )
    assert [row.key for row in study.rows] == [
        "resnet-164-same/dcm",
        "wrn-28-10-same/independent",
        "wrn-28-10-same/dcm",
    ]
    assert study.contrasts == (("DCM", "independent"),)


@pytest.mark.parametrize(
    ("name", "override", "what_to_type"),
    [
        ("demo", "method=dml", "--methods dcm"),
        ("demo", "seed=3", "--seeds N"),
        ("wrn-16-4-noise", "augment.mixup=0.2", "--rows 80-wrong/dcm"),
        ("table1", "networks.a=wrn-28-4", "--rows"),
        ("table1", "networks={a: wrn-28-4}", "resnet-164=wrn-16-2"),
        ("table1", "wrn-16-4=wrn-10-1", "Allowed: resnet-164, wrn-28-10"),
        ("table3", "heads.exits=[stem]", "--rows"),
        ("table4", "heads.kind=apfc", "--rows"),
        ("table7", "data.wrong_labels=0.4", "--rows"),
        ("kd", "start.a=file", "--rows"),
    ],
)
def test_overriding_what_the_rows_are_about_is_refused(name: str, override: str, what_to_type: str) -> None:
    with pytest.raises(ValueError, match=what_to_type) as caught:
        catalogue.get(name).check_overrides(["batch_size=32", override])
    assert override.partition("=")[0] in str(caught.value)


def test_other_overrides_are_not_contradictions() -> None:
    for name in catalogue.NAMES:
        catalogue.get(name).check_overrides(["length.epochs=3", "runtime.precision=bf16", "data.train_limit=100"])


def test_a_network_is_replaced_in_every_row_that_has_it() -> None:
    study = catalogue.get("table1")
    changes = ["wrn-28-10=wrn-16-2", "length.epochs=3"]
    study.check_overrides(changes)
    before = [tuple(row.recipe.networks.values()) for row in study.rows]
    after = [tuple(row.resolve(changes).networks.values()) for row in study.rows]
    assert after == [tuple("wrn-16-2" if name == "wrn-28-10" else name for name in pair) for pair in before]
    assert sum(pair.count("wrn-16-2") for pair in after) == (2 + 1 + 1 + 1) * 3  # not WRN-28-10(+), another network


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["wrn-28-10=wrn-16-2", "wrn-28-10=wrn-10-1"], r"networks\.a: given twice"),
        (["wrn-28-10=wrn-16-2", "networks.a=wrn-10-1"], r"networks\.a: given twice"),
        (["wrn-28-10=wnr-16-2"], "unknown network 'wnr-16-2'; did you mean 'wrn-16-2'"),
        (["wrn-28-10="], r"networks\.a"),
        (["wrn-28-10"], "'wrn-28-10' is not a change; type key=value"),
    ],
)
def test_a_replacement_that_makes_no_sense_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(recipes.RecipeError, match=message):
        catalogue.get("curves").rows[0].resolve(changes)


def test_seeds_begin_where_none_was_looked_at() -> None:
    assert list(catalogue.get("table1").seed_range()) == [1, 2, 3, 4, 5]
    assert list(catalogue.get("table1").seed_range("2")) == [1, 2]
    # The setting was chosen on seeds 101 … 103, another rejected on 1 … 3; 4 … 33 show how often its order holds.
    looked_at = {*range(1, 34), *range(101, 104)}
    assert list(catalogue.get("demo").seed_range()) == [41, 42, 43]
    assert not looked_at & set(catalogue.get("demo").seed_range("50"))


def test_a_contradiction_among_overrides_is_the_recipes_to_refuse() -> None:
    row = catalogue.get("demo").rows[0]
    with pytest.raises(recipes.RecipeError, match="given twice"):
        row.resolve(["batch_size=3", "batch_size=4"])


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from codistill.cli import study; from codistill.studies import catalogue; "
        "[catalogue.get(name) for name in catalogue.NAMES]; assert 'torch' not in sys.modules"
    )
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_documented_commands_are_understood() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    commands = re.findall(r"^codistill study .*$", text, re.MULTILINE)
    assert len(commands) == 9
    study_command = vars(get_command(app))["commands"]["study"]
    for line in commands:
        given = study_command.make_context("study", shlex.split(line)[2:]).params
        study = catalogue.get(given["name"]).select(given["methods"] and given["methods"].split(","))
        study.check_overrides(given["changes"])
