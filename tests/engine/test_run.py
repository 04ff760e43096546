"""A run's folder: other files are not touched, and only the same training continues there."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from codistill.data.images import ImageData, from_datasets
from codistill.engine.trainer import train
from codistill.errors import RunError
from codistill.recipes import parse
from codistill.recipes.schema import Recipe
from codistill.runs.folder import RunFolder
from codistill.runs.journal import read_journal
from codistill.runs.result import read_result
from codistill.runs.seal import write_sealed
from support.tiny import tiny_recipe


def run(recipe: Recipe, out: Path) -> int:
    return sum(1 for _ in train(recipe, out))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert run(tiny_recipe(), out) == 2
    return out


def test_what_a_finished_run_leaves(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {
        *("recipe.yaml", "environment.json", "data.json", "journal.jsonl", "timing.jsonl", "train.log", "lock"),
        *("checkpoints", "weights", "result.json"),
    }
    assert parse.load(finished / "recipe.yaml") == tiny_recipe()
    result = json.loads((finished / "result.json").read_text())
    journal = read_journal(finished / "journal.jsonl")
    assert result["epochs"] == journal
    assert result["networks"]["a"]["last"] == journal[-1]["test"]["a/final"]
    # resnet-8: stem 144 + 32, blocks 4,672 + 13,952 + 55,552, classifier 650
    assert result["networks"]["b"]["parameters"] == 75_002
    assert result["path"] == "fp32, torch kernels, step by step"
    assert result["data"]["wrong_labels"]["count"] == 28
    assert "captured" not in (finished / "train.log").read_text()
    assert "step by step" in (finished / "train.log").read_text()


def test_every_classifier_and_the_ensemble_are_measured_in_the_last_epoch(finished: Path) -> None:
    first, last = (json.loads(line)["test"] for line in (finished / "journal.jsonl").read_text().splitlines())
    assert set(first) == {"a/final", "b/final"}
    assert set(last) == {"ensemble", *(f"{n}/{e}" for n in "ab" for e in ("final", "stage1", "stage2"))}


def test_the_journal_has_every_term_and_no_clock(finished: Path) -> None:
    record = read_journal(finished / "journal.jsonl")[0]
    assert set(record) == {"epoch", "terms", "train_error", "skipped", "test"}
    assert len(record["terms"]) == 6 + 18
    assert record["skipped"] == {"a": 0, "b": 0}


def test_a_finished_run_is_left_alone(finished: Path) -> None:
    before = (finished / "result.json").stat().st_mtime_ns
    assert run(tiny_recipe(), finished) == 0
    assert (finished / "result.json").stat().st_mtime_ns == before


def test_a_run_that_learned_nothing_may_begin_otherwise(tmp_path: Path) -> None:
    """A teacher's file that is not there fails before anything is written; what is written then is the right recipe."""
    for _ in train(tiny_recipe(length={"epochs": 1}), tmp_path / "run"):
        break
    (tmp_path / "other").mkdir()
    RunFolder(tmp_path / "other").write_recipe(tiny_recipe(method="dml"))
    assert run(tiny_recipe(length={"epochs": 1}), tmp_path / "other") == 1
    with pytest.raises(ValueError, match="there is no file"):
        run(tiny_recipe(method="kd", start={"a": "nowhere.safetensors"}), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["locksmith.txt", "lock.bak", "locks"])
def test_a_name_that_only_begins_like_ours_is_not_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(RunError, match="contains files that are not a run's"):
        run(tiny_recipe(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file; choose a folder"):
        run(tiny_recipe(), tmp_path / "file")


def test_a_closed_generator_has_saved(tmp_path: Path) -> None:
    recipe = tiny_recipe(checkpoints={"every_s": 1000.0})
    for _ in train(recipe, tmp_path / "run"):
        break
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    assert run(recipe, tmp_path / "run") == 1


def test_what_a_killed_process_left_unfinished_is_gone_in_the_end(tmp_path: Path) -> None:
    for _ in train(tiny_recipe(), tmp_path / "run"):
        break
    for place in (".", "weights", "checkpoints", "best"):
        (tmp_path / "run" / place).mkdir(exist_ok=True)
        (tmp_path / "run" / place / ".tmp-a.safetensors-1").write_bytes(b"half of")
    assert len(list((tmp_path / "run").rglob(".tmp-*"))) == 4
    run(tiny_recipe(), tmp_path / "run")
    assert not list((tmp_path / "run").rglob(".tmp-*"))


def images(seed: int) -> ImageData:
    drawn = torch.randint(256, (80, 1, 28, 28), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    items = [(image, number % 10) for number, image in enumerate(drawn)]
    return from_datasets(items, items[:20], classes=10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"name": "fashion", "image_size": 14}, "own: its images are 28×28, .* or type data.image_size=null"),
        ({"name": "folder", "image_size": 32}, "own: its images are 28×28, .* or type data.image_size=28"),
        ({"name": "folder", "image_size": 28, "resize": "short_side"}, "leave out data.resize=short_side"),
    ],
)
def test_own_images_are_not_resized_and_say_so(tmp_path: Path, settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        next(train(tiny_recipe(data=settings), tmp_path / "run", data=images(0)))
    assert not (tmp_path / "run").exists()
    fitting = tiny_recipe(data={"name": "folder", "image_size": 28}, length={"epochs": 1})
    assert len(list(train(fitting, tmp_path / "run", data=images(0)))) == 1


def test_own_images_are_prepared_as_the_recipe_says_and_cannot_change(tmp_path: Path) -> None:
    recipe = tiny_recipe(data={"name": "fashion", "wrong_labels": 0.5})
    for _ in train(recipe, tmp_path / "run", data=images(0), stop=lambda: True):
        pass
    described = json.loads((tmp_path / "run" / "data.json").read_text())
    assert described["wrong_labels"]["count"] == 40
    with pytest.raises(RunError, match="not those that the run began with"):
        list(train(recipe, tmp_path / "run", data=images(1)))
    assert len(list(train(recipe, tmp_path / "run", data=images(0)))) == 2


def test_the_validation_set_is_measured_too(tmp_path: Path) -> None:
    data = {"name": "fashion", "train_limit": 64, "test_limit": 20, "validation": 0.01}
    run(tiny_recipe(data=data, length={"epochs": 1}), tmp_path / "run")
    record = json.loads((tmp_path / "run" / "journal.jsonl").read_text())
    assert record["validation"].keys() == record["test"].keys()


def test_torch_is_left_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    switches = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    runtime = {"device": "cpu", "threads": 2, "deterministic": True, "precision": "bf16"}
    data = {"name": "fashion", "train_limit": 8, "test_limit": 8}  # bfloat16 is slow on most CPUs
    run(tiny_recipe(length={"epochs": 1}, data=data, runtime=runtime), tmp_path / "run")
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == switches
    assert torch.equal(torch.rand(3), expected)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["path"] == "bf16, torch kernels, step by step"


def test_another_recipe_is_refused_with_the_difference(finished: Path) -> None:
    with pytest.raises(RunError, match=r"another recipe:\n  method: dcm → dml\n  seed: 3 → 4\n"):
        run(tiny_recipe(method="dml", seed=4), finished)


def test_what_cannot_change_what_is_learned_may_change_on_the_way(finished: Path, tmp_path: Path) -> None:
    began = tiny_recipe(checkpoints={"every_s": 1000.0, "keep": 1})
    went_on = tiny_recipe(
        data={**tiny_recipe().data.model_dump(), "workers": 0, "timeout_s": 5.0},
        runtime={**tiny_recipe().runtime.model_dump(), "capture": False},
    )
    for _ in train(began, tmp_path / "run", stop=lambda: True):
        pass
    assert run(went_on, tmp_path / "run") == 2
    assert parse.load(tmp_path / "run" / "recipe.yaml") == went_on
    (line,) = [line for line in (tmp_path / "run" / "train.log").read_text().splitlines() if "continues with" in line]
    changes = [
        "data.workers: null → 0",
        "data.timeout_s: 120.0 → 5.0",
        "checkpoints.every_s: 1000.0 → 0.0",
        "checkpoints.keep: 1 → 2",
        "runtime.capture: true → false",
    ]
    assert line.endswith("; ".join(changes))
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == (finished / "journal.jsonl").read_bytes()


def test_a_run_may_move_to_another_machine(finished: Path) -> None:
    elsewhere = tiny_recipe(runtime={"device": "cuda", "threads": 2, "kernels": "triton", "precision": "fp32"})
    assert RunFolder(finished).changes_to(elsewhere) == [
        "runtime.device: cpu → cuda",
        "runtime.precision: auto → fp32",
        "runtime.kernels: auto → triton",
        "runtime.threads: 1 → 2",
    ]
    with pytest.raises(RunError, match=r"another recipe:\n  runtime\.precision: auto → bf16\nRepeat"):
        RunFolder(finished).changes_to(tiny_recipe(runtime={"device": "cuda", "precision": "bf16"}))


def test_a_run_keeps_the_precision_that_auto_was_when_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, auto = tmp_path / "run", tiny_recipe(length={"epochs": 1})
    stops = iter([False, True])
    for _ in train(auto, out, stop=lambda: next(stops)):
        pass
    assert json.loads((out / "environment.json").read_text())["precision"] == "fp32"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("codistill.engine.runtime.is_since_ampere", lambda device_type: True)
        elsewhere.setattr("codistill.engine.runtime.has_triton", lambda: False)
        elsewhere.setattr("torch.cuda.get_device_name", lambda: "NVIDIA TEST")
        with pytest.raises(
            RunError, match=r"began in fp32, and runtime.precision=auto is bf16 .*runtime.precision=fp32"
        ):
            run(auto, out)
        named = tiny_recipe(length={"epochs": 1}, runtime={"device": "cpu", "threads": 1, "precision": "fp32"})
        assert run(named, out) == 1
    assert parse.load(out / "recipe.yaml") == named
    result = read_result(out / "result.json")
    assert (result.precision, result.trained) == ("fp32", named)
    assert run(auto, out) == 0, "finished, and auto is not another recipe"


def test_a_run_of_an_earlier_version_keeps_its_precision_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose environment does not name it: its recipe does."""
    out = tmp_path / "run"
    named = tiny_recipe(length={"epochs": 1}, runtime={"device": "cpu", "threads": 1, "precision": "bf16"})
    stops = iter([False, True])
    for _ in train(named, out, stop=lambda: next(stops)):
        pass
    environment = json.loads((out / "environment.json").read_text())
    assert environment.pop("precision") == "bf16"
    write_sealed(out / "environment.json", environment, sort_keys=False)
    for _ in range(2):
        with pytest.raises(RunError, match=r"began in bf16, and .*auto is fp32 .*runtime.precision=bf16"):
            run(tiny_recipe(length={"epochs": 1}), out)
    assert run(named, out) == 1
    assert read_result(out / "result.json").precision == "bf16"


def test_a_finished_run_is_so_wherever_it_was_computed(finished: Path) -> None:
    before = (finished / "recipe.yaml").read_bytes()
    assert run(tiny_recipe(runtime={"threads": 2}, checkpoints={"every_s": 7.0}), finished) == 0
    assert (finished / "recipe.yaml").read_bytes() == before


def test_a_folder_of_images_may_be_moved(tmp_path: Path) -> None:
    for split, label, number in itertools.product(("train", "test"), ("cat", "dog"), range(4)):
        (tmp_path / "here" / split / label).mkdir(parents=True, exist_ok=True)
        picture = Image.new("RGB", (8, 8), (number, 100 * (label == "cat"), 50 * (split == "test")))
        picture.save(tmp_path / "here" / split / label / f"{number}.png")

    def recipe(folder: Path) -> Recipe:
        return tiny_recipe(data={"name": "folder", "folder": str(folder), "image_size": 8}, batch_size=4)

    for _ in train(recipe(tmp_path / "here"), tmp_path / "run", stop=lambda: True):
        pass
    (tmp_path / "here").rename(tmp_path / "there")
    assert run(recipe(tmp_path / "there"), tmp_path / "run") == 2


def test_somebody_elses_folder_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="files that are not a run's"):
        run(tiny_recipe(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_other_data_do_not_continue_a_run(tmp_path: Path) -> None:
    for _ in train(tiny_recipe(), tmp_path / "run", stop=lambda: True):
        pass
    described = json.loads((tmp_path / "run" / "data.json").read_text())
    described["sets"]["train"]["pixels_sha256"] = "0" * 64
    write_sealed(tmp_path / "run" / "data.json", described, sort_keys=False)
    with pytest.raises(RunError, match="not those that the run began with"):
        run(tiny_recipe(), tmp_path / "run")


@pytest.mark.parametrize("left", [["lock"], ["lock", ".tmp-recipe.yaml-17"], ["recipe.yaml"]])
def test_a_run_that_died_while_it_began_begins_again(left: list[str], tmp_path: Path) -> None:
    for name in left:
        (tmp_path / name).write_text(parse.dumps(tiny_recipe(length={"epochs": 1})) if name == "recipe.yaml" else "")
    assert run(tiny_recipe(length={"epochs": 1}), tmp_path) == 1


def test_the_written_recipe_is_plain_yaml(finished: Path) -> None:
    assert yaml.safe_load((finished / "recipe.yaml").read_text())["method"] == "dcm"


DEEP = {"networks": {"a": "resnet-18", "b": "resnet-8"}, "method": "dml"}  # of 28×28 resnet-18 leaves one pixel


@pytest.mark.parametrize(
    ("images", "batch_size", "remedy"),
    [
        (65, 64, "type batch_size=65"),
        (31, 3, "type batch_size=4"),
        (13, 3, "type batch_size=5"),
        (20, 1, "type batch_size=2"),
        (1, 64, "give more training images"),
    ],
)
def test_a_batch_of_one_image_is_refused_before_anything_is_written(
    tmp_path: Path, images: int, batch_size: int, remedy: str
) -> None:
    data = {"name": "fashion", "train_limit": images, "test_limit": 10}
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"a=resnet-18 cannot normalise one image of 28×28 by itself; .*{remedy}$"):
        run(tiny_recipe(**DEEP, data=data, batch_size=batch_size, ema=0.0), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert torch.equal(torch.get_rng_state(), before)


def test_one_image_alone_is_enough_where_pixels_are_left(tmp_path: Path) -> None:
    recipe = tiny_recipe(data={"name": "fashion", "train_limit": 5, "test_limit": 10}, batch_size=2)
    before = torch.get_rng_state()
    assert run(recipe, tmp_path / "run") == 2
    assert torch.equal(torch.get_rng_state(), before)
