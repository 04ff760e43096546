"""The runs of a study and the names of their folders."""

from pathlib import Path

import pytest

from codistill import recipes
from codistill.recipes.sections import AdamW, Sgd
from codistill.runs.folder import RunFolder
from codistill.studies import catalogue
from codistill.studies.plan import plan_runs, require_data, run_name
from support.study_call import ON_CPU, StudyCall
from support.synthetic import FINISH, fill, made_up_result, pretend

OUT = Path("out")


def test_a_run_for_every_row_and_seed_seed_by_seed() -> None:
    study = catalogue.get("demo")
    plan = plan_runs(study, [1, 2], [], OUT, threads=1)
    assert [run.title for run in plan.runs] == [
        f"{study.groups[0]}, {label}, seed {seed}" for seed in (1, 2) for label in ("independent", "DML", "DCM")
    ]
    assert {run.recipe.runtime.threads for run in plan.runs} == {1}
    assert [run.recipe.seed for run in plan.runs] == [1, 1, 1, 2, 2, 2]
    assert all(run.folder.parent == OUT / "runs" for run in plan.runs)


def test_overrides_reach_every_run() -> None:
    plan = plan_runs(catalogue.get("demo"), [1], ["length.epochs=7", "runtime.threads=3"], OUT, threads=1)
    assert {(run.recipe.length.epochs, run.recipe.runtime.threads) for run in plan.runs} == {(7, 3)}


def test_names_say_what_is_trained_and_not_how() -> None:
    recipe = recipes.get("cifar100/wrn-28-4-twins", ["seed=1"])
    name = run_name(recipe)
    assert name.startswith("cifar100-wrn-28-4-twins-dcm-seed1-")
    same = ["name=other", "runtime.threads=4", "checkpoints.every_s=5", "data.folder=elsewhere"]
    for change in same:
        assert run_name(recipes.apply(recipe, [change])) == name
    others = [
        "seed=2",
        "method=dml",
        "length.epochs=100",
        "heads.kind=narrow",
        "runtime.precision=bf16",
        "batch_size=64",
    ]
    others += ["optimizer.lr=0.2", "data.wrong_labels=0.2", "data.train_limit=100", "networks.b=wrn-28-10"]
    names = {run_name(recipes.apply(recipe, [change])) for change in others}
    assert len(names | {name}) == len(others) + 1


def test_kinds_that_are_their_own_default_still_count() -> None:
    recipe = recipes.get("quickstart")
    sgd, adamw = (recipe.replace(optimizer=kind(lr=0.1, weight_decay=0.0)) for kind in (Sgd, AdamW))
    assert run_name(sgd) != run_name(adamw)
    schedules = [recipe.replace(schedule={"kind": kind}) for kind in ("cosine", "constant")]
    assert run_name(schedules[0]) != run_name(schedules[1])


def test_folders_of_images_are_told_apart() -> None:
    here, there = (recipes.get("imagenet/resnet-18-twins", [f"data.folder={folder}"]) for folder in ("here", "there"))
    assert run_name(here) != run_name(there)


def test_a_student_comes_after_its_teacher_and_starts_from_its_weights() -> None:
    study = catalogue.get("kd").select(methods=["kd"])
    plan = plan_runs(study, [1, 2], [], OUT, None)
    assert [run.recipe.method for run in plan.runs] == ["independent", "kd", "independent", "kd"]
    for teacher, student in (plan.runs[:2], plan.runs[2:]):
        assert student.needs == (teacher,)
        assert student.recipe.start == {"a": str(teacher.folder / "weights" / "a.safetensors")}
        assert student.recipe.seed == teacher.recipe.seed
    moved = plan_runs(study, [1], [], Path("/elsewhere"), None)
    assert moved.runs[1].name == plan.runs[1].name, "paths do not matter"


def test_images_that_only_the_user_has_must_be_named() -> None:
    study = catalogue.get("table2")
    with pytest.raises(ValueError, match=r"ResNet-18 & same, independent: .* data\.folder=FOLDER"):
        plan_runs(study, [1], [], OUT, None)
    assert len(plan_runs(study, [1], ["data.folder=images"], OUT, None).runs) == 12


def test_a_folder_whose_recipe_was_edited_is_refused(tmp_path: Path) -> None:
    study = catalogue.get("demo")
    first, *_ = plan_runs(study, [1], [], tmp_path, None).runs
    fill(first.folder, first.recipe)
    plan_runs(study, [1], [], tmp_path, threads=2)  # threads are no reason
    edited = first.recipe.replace(batch_size=first.recipe.batch_size + 1)
    RunFolder(first.folder).write_recipe(edited)
    with pytest.raises(ValueError, match=r"another recipe:\s+batch_size: .*\s+Move that folder away") as caught:
        plan_runs(study, [1], [], tmp_path, None)
    assert str(first.folder) in str(caught.value)
    assert first.is_finished, "nothing was touched"


def test_missing_data_are_named_once_and_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODISTILL_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"cifar100: not found in .*codistill data cifar100 --download"):
        StudyCall(tmp_path / "out", "wrn-28-4-twins")
    assert not (tmp_path / "out").exists()
    finished = plan_runs(catalogue.get("curves"), [1], [], tmp_path / "out", None).runs
    for run in finished:
        fill(run.folder, run.recipe)
    require_data(finished)  # nothing is left to train


def test_a_missing_folder_of_images_is_named_once_and_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such folder; it must contain <class>/"):
        StudyCall(tmp_path / "out", "table2", overrides=[f"data.folder={tmp_path / 'nowhere'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["", "runs", "logs", "recipes", "runs/RUN"])
def test_a_file_where_a_folder_should_be_is_named(tmp_path: Path, place: str) -> None:
    study, out = catalogue.get("demo"), tmp_path / "out"
    first, *_ = plan_runs(study, [41], [], out, None).runs
    file = out / place.replace("RUN", first.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    with pytest.raises(ValueError, match=rf"^{file} is a file.*--out"):
        plan_runs(study, [41], [], out, None)


@pytest.mark.parametrize("file", ["recipe.yaml", "result.json"])
@pytest.mark.parametrize("damage", ["", ": [", "{}", '{"format": 2}'])
def test_a_damaged_run_is_named_with_what_to_do(tmp_path: Path, file: str, damage: str) -> None:
    study = catalogue.get("demo")
    first, *_ = plan_runs(study, [41], [], tmp_path, None).runs
    fill(first.folder, first.recipe)
    (first.folder / file).write_text(damage)
    with pytest.raises(ValueError, match=rf"{first.folder / file}(.|\n)*\nMove {first.folder} away"):
        plan_runs(study, [41], [], tmp_path, None)
    assert (first.folder / file).read_text() == damage, "nothing was touched"


@pytest.mark.parametrize("change", ["networks.c=wrn-10-1", "networks={a: wrn-10-1}"])
def test_a_row_keeps_its_networks_names(change: str) -> None:
    """A table has a column per network of its rows: one more would not be shown, one less would be missing."""
    with pytest.raises(ValueError, match=r"networks: .*, independent has a, b, .*as in networks\.a="):
        plan_runs(catalogue.get("demo"), [41], [change], OUT, None)


def test_a_result_of_another_recipe_is_not_believed(tmp_path: Path) -> None:
    study = catalogue.get("demo")
    first, second, *_ = plan_runs(study, [41], [], tmp_path, None).runs
    fill(first.folder, first.recipe, made_up_result(second.recipe))
    with pytest.raises(ValueError, match=r"another recipe:\s+method: dml → independent\s+Move that folder away"):
        plan_runs(study, [41], [], tmp_path, None)


@pytest.mark.parametrize("name", ["logs", "recipes"])
def test_a_studys_folder_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / name).symlink_to("elsewhere")
    with pytest.raises(ValueError, match=f"{tmp_path}/{name} is a symbolic link, not a folder"):
        plan_runs(catalogue.get("demo"), [1], [], tmp_path, threads=1)


def test_a_run_with_a_link_in_it_is_named_with_what_to_do(tmp_path: Path) -> None:
    run = plan_runs(catalogue.get("demo"), [1], [], tmp_path, threads=1).runs[0]
    run.folder.mkdir(parents=True)
    RunFolder(run.folder).write_recipe(run.recipe)
    (run.folder / "timing.jsonl").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"timing\.jsonl is a symbolic link(.|\n)*Move .* away to train it again"):
        plan_runs(catalogue.get("demo"), [1], [], tmp_path, threads=1)


@pytest.mark.usefixtures("quick")
def test_a_childs_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    out = tmp_path / "out"
    study = catalogue.get("demo")
    run = plan_runs(study, [study.first_seed], ["runtime.device=cpu"], out, threads=1).runs[0]
    (out / "logs").mkdir(parents=True)
    (tmp_path / "victim").write_text("precious")
    (out / "logs" / f"{run.name}.log").symlink_to(tmp_path / "victim")
    with pytest.raises(ValueError, match=rf"logs/{run.name}\.log is a symbolic link, not a regular file"):
        StudyCall(out, seeds=1)
    assert (tmp_path / "victim").read_text() == "precious"


def test_damage_of_finished_runs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = StudyCall(tmp_path / "out")
    assert (call.code, capsys.readouterr().err) == (0, "")
    journal = RunFolder(call.runs[1]).journal
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    again = StudyCall(tmp_path / "out")
    assert again.code == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {call.runs[1]}: journal.jsonl and timing.jsonl have different epochs;")


def test_a_damaged_recipe_is_left_to_the_training(tmp_path: Path) -> None:
    """Stored again by the study, it would look intact."""
    plan = plan_runs(catalogue.get("demo"), [41], [ON_CPU], tmp_path / "out", threads=1)
    damaged = RunFolder(plan.runs[0].folder)
    (damaged.checkpoints / "step-00000001").mkdir(parents=True)
    damaged.write_recipe(plan.runs[0].recipe)
    content = damaged.recipe.read_text()
    assert "momentum: 0.9" in content
    damaged.recipe.write_text(content.replace("momentum: 0.9", "momentum: 0.8"))
    script = f'import shutil; shutil.rmtree("{damaged.checkpoints}", ignore_errors=True){FINISH}'
    call = StudyCall(tmp_path / "out", seeds=1, command=pretend(tmp_path / "scratch", lambda *_: script))
    assert call.code == 0, call.printed
    given = recipes.load(tmp_path / "out" / "recipes" / f"{damaged.path.name}.yaml")
    assert given.optimizer.momentum == 0.9
