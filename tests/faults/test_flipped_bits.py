"""A flipped bit in any file of a run that is read again is named, or healed to the same bits."""

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from codistill.recipes import parse
from codistill.runs.seal import read_sealed, write_sealed
from support.cli import call
from support.runs import checksums, train
from support.stress import FLIPPED_BITS, Counted
from support.tiny import tiniest_recipe

DESCRIBED = ("recipe.yaml", "environment.json", "data.json", "journal.jsonl", "timing.jsonl")
FINISHED = (*DESCRIBED, "result.json")
WEIGHTS = ("weights/a.safetensors", "weights/b.safetensors")
PARTS = ("tensors.safetensors", "state.json", "manifest.json")
CHECKPOINT = tuple(f"checkpoints/{name}" for name in PARTS)
BEST = tuple(f"best/{name}" for name in PARTS)
TAKEN = ("recipe.yaml", "environment.json", "data.json", "journal.jsonl")

READ = {
    ("finished", "evaluate"): (*FINISHED, *WEIGHTS),
    ("finished", "report"): (*FINISHED, *WEIGHTS),
    ("finished", "compare"): FINISHED,
    ("finished", "train"): (*FINISHED, *WEIGHTS),
    ("finished", "export"): (*TAKEN, "result.json", WEIGHTS[0]),
    ("finished", "evaluate --best"): (*FINISHED, *BEST),
    ("finished", "export --best"): (*TAKEN, "result.json", WEIGHTS[0], *BEST),
    ("interrupted", "train"): (*DESCRIBED, *CHECKPOINT),
    ("interrupted", "report"): DESCRIBED,
    ("interrupted", "compare"): DESCRIBED,
    ("interrupted", "export"): (*TAKEN, *CHECKPOINT),
    ("interrupted", "export --best"): (*TAKEN, *BEST),
}
"""By the state of a run and the command, the files that the command reads."""
CASES = [(state, command, file) for (state, command), files in READ.items() for file in files]


@dataclass
class Runs:
    finished: Path
    interrupted: Path
    other: Path

    def copy(self, state: str, to: Path) -> Path:
        return Path(shutil.copytree(getattr(self, state), to))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of two epochs; the same one, stopped in its second epoch; one of another seed."""
    folder = tmp_path_factory.mktemp("flipped")
    recipe = tiniest_recipe(
        data={**tiniest_recipe().data.model_dump(), "train_limit": 90, "validation": 0.2},
        evaluation={"every_epochs": 1, "all_every_epochs": 2},
        checkpoints={"every_s": 0, "best": True},
    )
    return Runs(
        train(recipe, folder / "finished"),
        train(recipe, folder / "interrupted", steps=4),
        train(recipe.replace(seed=4), folder / "other", steps=4),
    )


def path_of(run: Path, file: str) -> Path:
    if file not in CHECKPOINT + BEST:
        return run / file
    folder, name = file.split("/")
    return max((run / folder).iterdir()) / name


def flip(path: Path, chance: random.Random) -> int:
    """Flips a random bit of the file; returns the number of the bit."""
    content = bytearray(path.read_bytes())
    bit = chance.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return bit


def do(command: str, run: Path, out: Path) -> Any:
    command, *options = command.split()
    arguments: dict[str, tuple[object, ...]] = {
        "evaluate": (run,),
        "report": (run, "-o", out / "page.html"),
        "compare": (run,),
        "train": (run / "recipe.yaml", "--out", run, "--quiet"),
        "export": (run, "--network", "a", "--out", out / "exported"),
    }
    return call(command, *arguments[command], *options)


def notices(done: Any, command: str, path: Path, out: Path) -> bool:
    """Whether the command names the file: on the terminal, or on the page that it writes."""
    # A checkpoint is named by its folder: a flipped bit in its manifest looks like one in what the manifest describes.
    name = f"{path.parents[1].name}/{path.parent.name}" if path.parent.name.startswith("step-") else path.name
    page = (out / "page.html").read_text() if command == "report" and done.exit_code == 0 else ""
    said = done.stderr + done.stdout if command != "report" else done.stderr + page
    is_named = name in said.replace(" or put it back", "") and any(
        word in said for word in ("damaged", "SHA-256", "incomplete", "not readable", "recipe.yaml:")
    )
    return is_named and "Traceback" not in done.stderr


def flips() -> Iterator[tuple[str, str, str, int]]:
    for number in range(FLIPPED_BITS):
        yield (*CASES[number % len(CASES)], number)


@pytest.mark.promise(
    "flipped-bits",
    "A flipped bit in any file of a run that is read again (weights, checkpoints, recipe, environment, data, journal, "
    "times, result) is named by the command that reads it, or healed to the same bits from a checkpoint: continue, "
    "evaluate, export, report, compare, of finished and interrupted runs, `--best` too.",
    repeated="{FLIPPED_BITS} flipped bits, all named or healed",
)
@pytest.mark.slow(reason="trains, exports and reports once for each flipped bit")
def test_a_flipped_bit_is_named_or_healed(runs: Runs, tmp_path: Path, counted: Counted) -> None:
    expected = {"weights": checksums(runs.finished)}
    outcomes: Counter[str] = Counter()
    for state, command, file, number in flips():
        out = tmp_path / str(number)
        run = runs.copy(state, out / "run")
        damaged = path_of(run, file)
        intact = damaged.read_bytes()
        bit = flip(damaged, random.Random(number))
        title = f"{command} of the {state} run, bit {bit} of {file} (case {number})"
        done = do(command, run, out)
        assert done.exit_code in (0, 2), (title, done.output, done.exception)
        named = notices(done, command, damaged, out)
        healed = command == "train" and done.exit_code == 0 and checksums(run) == expected["weights"]
        if healed and file in WEIGHTS:
            assert damaged.read_bytes() == intact, title
        if command == "train" and done.exit_code == 0:
            assert healed, title
            # What was healed is intact: nothing is left to say about it.
            assert do("evaluate", run, out).exit_code == 0, title
        assert named or healed, (title, done.exit_code, done.output)
        outcomes["healed" if healed else "named"] += 1
        shutil.rmtree(out)
    counted(f"flipped bits, {outcomes['named']} named and {outcomes['healed']} healed", outcomes.total())


def test_without_damage_nothing_is_named(runs: Runs, tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    for number, (state, command, file) in enumerate(CASES):
        if command == "train" or file not in ("recipe.yaml", "result.json"):
            continue
        out = tmp_path / str(number)
        run = runs.copy(state, out / "run")
        done = do(command, run, out)
        assert done.exit_code == 0, (command, done.output)
        assert "damaged" not in done.output
        assert command != "report" or "damaged" not in (out / "page.html").read_text()


@pytest.mark.parametrize("file", DESCRIBED)
@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_what_a_checkpoint_contains_is_restored_to_the_byte(runs: Runs, tmp_path: Path, state: str, file: str) -> None:
    run = runs.copy(state, tmp_path / "run")
    intact = (run / file).read_bytes()
    at = intact.rindex(b'"') - 5 if file.endswith("l") and file != "recipe.yaml" else len(intact) - 8
    (run / file).write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
    done = do("train", run, tmp_path)
    assert (done.exit_code, file in done.stderr) == (0, True), done.output
    assert (run / file).read_bytes().startswith(intact)
    assert checksums(run) == checksums(runs.finished)


def test_missing_weights_are_restored(runs: Runs, tmp_path: Path) -> None:
    run = runs.copy("finished", tmp_path / "run")
    (run / "weights" / "a.safetensors").unlink()
    done = do("train", run, tmp_path)
    assert (done.exit_code, "a.safetensors is missing" in done.stderr) == (0, True), done.output
    assert checksums(run) == checksums(runs.finished)


def test_what_no_checkpoint_restores_is_named_and_left_as_it_is(runs: Runs, tmp_path: Path) -> None:
    run = runs.copy("finished", tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    flip(run / "weights" / "b.safetensors", random.Random(0))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "train.log"}
    done = do("train", run, tmp_path)
    assert done.exit_code == 2
    assert "b.safetensors is damaged" in done.stderr
    assert "put it back from a copy" in done.stderr
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("state", ["journal too", "checkpoints only"])
def test_a_checkpoint_of_another_run_is_not_continued(runs: Runs, tmp_path: Path, state: str) -> None:
    run = runs.copy("interrupted", tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(runs.other / "checkpoints", run / "checkpoints")
    if state == "journal too":
        for name in ("journal.jsonl", "timing.jsonl"):
            shutil.copy(runs.other / name, run / name)
    for command in ("train", "export"):
        done = do(command, run, tmp_path)
        assert done.exit_code == 2, (command, done.output)
        assert "none of the" in done.stderr
        assert "this run's" in done.stderr


def test_a_checkpoint_of_other_images_is_not_continued(runs: Runs, tmp_path: Path) -> None:
    run = runs.copy("interrupted", tmp_path / "run")
    described = read_sealed(run / "data.json")
    described["sets"]["train"]["pixels_sha256"] = "0" * 64
    write_sealed(run / "data.json", described)
    done = do("export", run, tmp_path)
    assert (done.exit_code, "none of the" in done.stderr) == (2, True), done.output


def test_weights_that_start_another_run_are_checked(runs: Runs, tmp_path: Path) -> None:
    run = runs.copy("finished", tmp_path / "run")
    flip(run / "weights" / "a.safetensors", random.Random(1))
    teacher = f"start.a={run / 'weights' / 'a.safetensors'}"
    recipe = tiniest_recipe(method="kd", start={"a": "later"}, evaluation={"every_epochs": 1})
    file = tmp_path / "kd.yaml"
    file.write_text(parse.dumps(recipe))
    done = call("train", file, teacher, "--out", tmp_path / "kd", "--quiet")
    assert done.exit_code == 2
    assert "a.safetensors is damaged" in done.stderr
