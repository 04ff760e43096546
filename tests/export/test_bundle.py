"""Where an export may go, what is left of what was there, and what the model card says."""

import errno
import json
import os
import re
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from safetensors import SafetensorError

from codistill.export import bundle
from codistill.export.export import Exported, code, export_network
from codistill.recipes.sections import Length
from codistill.runs.seal import sealed_json, write_sealed
from support.runs import accept_descriptions, train
from support.tiny import tiny_recipe

VERSIONS: tuple[tuple[int, str | list[str]], ...] = (1, "model.onnx"), (2, "../x"), (2, [])
FILES = {"labels.json", "preprocessing.json", "MODEL_CARD.md", "export.json"}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def found(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_of_an_export(exported: dict[str, Exported]) -> None:
    for name, one in exported.items():
        assert one.model.name == f"model.{name}"
        assert found(one.model.parent) == FILES | {one.model.name}
        manifest = json.loads((one.model.parent / "export.json").read_text())
        read_again = one.model.name, "labels.json", "preprocessing.json"
        assert (manifest["codistill_export"], manifest["model"]) == (2, one.model.name)
        assert manifest["files"] == {
            name: sha256((one.model.parent / name).read_bytes()).hexdigest() for name in read_again
        }


def test_an_earlier_export_is_replaced_whole(finished: Path, tmp_path: Path) -> None:
    export_network(finished, "a", "pt2", tmp_path / "out")
    (tmp_path / "new").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "new").stat().st_mode
    export_network(finished, "b", "safetensors", tmp_path / "out")
    assert found(tmp_path / "out") == FILES | {"model.safetensors"}
    assert "`resnet-8`, called `b`" in (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert bundle.read(tmp_path / "out").format == "safetensors"
    assert found(tmp_path) == {"out", "new"}


def test_other_files_beside_an_earlier_export_are_refused_by_name(finished: Path, tmp_path: Path) -> None:
    export_network(finished, "a", "pt2", tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=r"not part of an export, such as notes\.txt"):
        export_network(finished, "b", "safetensors", tmp_path / "out")
    assert contents(tmp_path / "out") == before
    export_network(finished, "b", "safetensors", tmp_path / "out", force=True)
    assert found(tmp_path / "out") == FILES | {"model.safetensors", "notes.txt"}
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert bundle.read(tmp_path / "out").format == "safetensors"


def test_the_current_folder_stays_the_one_it_is(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for network in ("a", "b"):
        export_network(finished, network, "safetensors", Path())
        assert found(tmp_path) == FILES | {"model.safetensors"} == found(Path())
        assert f"called `{network}`" in Path("MODEL_CARD.md").read_text()


@pytest.mark.promise(
    "export-replaced-whole",
    "An export replaces an earlier one whole or not at all: after a full disk, or a failure or an interruption at "
    "either rename, the earlier one is there to the byte and nothing else; everything is fsynced before the first. "
    "Other files are refused by name.",
    repeated="2 renames and a full disk, as an error and as an interruption",
)
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_failure_at_any_rename_leaves_the_earlier_export(
    error: BaseException, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_network(finished, "a", "safetensors", tmp_path / "out")
    before = contents(tmp_path / "out")
    rename, renames = Path.rename, 0
    for fail_at in (1, 2, 3):
        done: list[str] = []

        def failing(path: Path, target: Path, fail_at: int = fail_at, done: list[str] = done) -> Path:
            done.append(path.name)
            if len(done) == fail_at:
                raise error
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", failing)
            try:
                export_network(finished, "b", "safetensors", tmp_path / "out")
            except (ValueError, KeyboardInterrupt):
                renames += 1
                assert contents(tmp_path / "out") == before
                bundle.read(tmp_path / "out")
        assert found(tmp_path) == {"out"}
    assert renames == 2
    assert "called `b`" in (tmp_path / "out" / "MODEL_CARD.md").read_text()


def test_everything_is_on_the_disk_before_it_replaces_anything(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, fsync, synced = Path.rename, os.fsync, set()

    def watched_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def watched_rename(path: Path, target: Path) -> Path:
        if path.name == "export":
            assert {file.stat().st_ino for file in (path, *path.iterdir())} <= synced
            assert found(path) == FILES | {"model.safetensors"}
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    export_network(finished, "a", "safetensors", tmp_path / "out")
    assert (tmp_path / "out").parent.stat().st_ino in synced


def test_a_full_disk_keeps_the_earlier_export(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As safetensors says it, with an error of its own that is not an OSError."""

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    export_network(finished, "a", "safetensors", tmp_path / "out")
    before = contents(tmp_path / "out")
    monkeypatch.setattr("safetensors.torch.save_file", full)
    for name in ("out", "new"):
        with pytest.raises(ValueError, match=rf"{name}: cannot write the export \(No space .*\): no space left; free"):
            export_network(finished, "b", "safetensors", tmp_path / name)
    assert contents(tmp_path / "out") == before
    assert found(tmp_path) == {"out"}


def test_other_files_are_refused_and_stay_when_forced(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"the user's own")
    (tmp_path / "labels.json").write_text("[]")
    with pytest.raises(ValueError, match=r"not part of an export, such as labels.json; .* --force"):
        export_network(finished, "a", "safetensors", tmp_path)
    assert found(tmp_path) == {"model.onnx", "labels.json"}
    export_network(finished, "a", "safetensors", tmp_path, force=True)
    assert (tmp_path / "model.onnx").read_bytes() == b"the user's own"
    assert found(tmp_path) == FILES | {"model.onnx", "model.safetensors"}
    assert len(bundle.read(tmp_path).labels) == 10


def test_the_run_itself_is_no_place_for_an_export(copied: Path) -> None:
    before = found(copied)
    with pytest.raises(ValueError, match="contains files that are not part of an export"):
        export_network(copied, "a", "safetensors", copied)
    assert found(copied) == before


@pytest.mark.parametrize(
    "manifest",
    [b"{}", b"[", b'{"codistill_export": 1, "model": "model.onnx", "sha256": "0"}']
    + [sealed_json({"codistill_export": version, "model": model, "files": {}}) for version, model in VERSIONS],
)
def test_an_export_json_of_somebody_else_makes_no_export(manifest: bytes, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "export.json").write_bytes(manifest)
    with pytest.raises(ValueError, match=r"such as export\.json"):
        export_network(finished, "a", "safetensors", tmp_path)
    with pytest.raises(ValueError, match=r"is not an export: it has no intact export\.json"):
        bundle.read(tmp_path)


def test_a_target_that_cannot_be_a_folder(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; choose a folder with --out"):
        export_network(finished, "a", "safetensors", tmp_path / "file")
    with pytest.raises(ValueError, match="file is a file; choose a folder with --out"):
        export_network(finished, "a", "safetensors", tmp_path / "file" / "below")


def test_a_target_that_may_not_be_written(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(bundle, "TemporaryDirectory", refused)  # the tests may run as root
    with pytest.raises(ValueError, match=r"out: cannot write the export \(Permission denied\): it is read-only or not"):
        export_network(finished, "a", "safetensors", tmp_path / "out")


def test_an_export_that_fails_leaves_nothing(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    export_network(finished, "a", "safetensors", tmp_path / "old")
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    monkeypatch.setattr("codistill.export.export.prove", interrupt)
    for name in ("old", "new"):
        with pytest.raises(KeyboardInterrupt):
            export_network(finished, "b", "safetensors", tmp_path / name)
    assert not (tmp_path / "new").exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before


def test_an_unknown_format(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown format 'onyx'; did you mean 'onnx'\? Allowed: safetensors, pt2"):
        export_network(finished, "a", "onyx", tmp_path / "out")


@pytest.mark.parametrize("library", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_library(library: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=rf"onnx needs {library}, .* type: pip install '\.\[export\]'"):
        export_network(finished, "a", "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_card_says_what_the_result_says(exported: dict[str, Exported], finished: Path) -> None:
    card = (exported["onnx"].model.parent / "MODEL_CARD.md").read_text()
    last = json.loads((finished / "result.json").read_text())["networks"]["a"]["last"]
    for line in (
        "# `wrn-10-1-dropout-0.3` for `fashion`",
        "| file | `model.onnx` |",
        f"| top-1 error | {last['top1_error']:.2f} % |",
        f"| top-5 error | {last['top5_error']:.2f} % |",
        f"| NLL | {last['nll']:.4f} nats per image |",
        f"| ECE | {last['ece']:.2f} % |",
        "| when | after epoch 1 of 1, the last; not the best epoch |",
        "| runs | n = 1, seed 3; one run says nothing about the variation between seeds |",
        "`fashion`: 70 training and 50 test images.",
        "Of the training labels, 40.0 % were replaced by wrong ones on purpose.",
        "| method | `dcm` |",
        "| trained with | `b`, a `resnet-8` |",
        "| seed | 3 |",
        "| images | 50 |",
        "## Licence",
    ):
        assert f"{line}\n" in card
    assert "not finished" not in card
    assert re.search(r"^\| command \| `.+` \|$", card, re.MULTILINE)
    assert "{{" not in card
    assert "{%" not in card
    parameters = sum(parameter.numel() for parameter in exported["onnx"].shipped.network.parameters())
    assert f"with {parameters:,} parameters" in card


def test_the_card_of_a_network_that_learned_alone(tmp_path: Path) -> None:
    recipe = tiny_recipe(method="independent", ema=0.0, length=Length(epochs=1).model_dump())
    exported = export_network(train(recipe, tmp_path / "run"), "a", "safetensors", tmp_path / "out")
    card = (exported.model.parent / "MODEL_CARD.md").read_text()
    assert "| trained with | no other network |\n" in card
    assert "auxiliary classifiers" not in card
    assert "- The plain network gives the same logits, bit for bit, as in the cohort, on 50 test images.\n" in card


def test_the_card_counts_images_that_were_left_out(copied: Path, tmp_path: Path) -> None:
    about = json.loads((copied / "data.json").read_text())
    skipped = [{"file": f"train/cat/{number}.png", "why": "truncated"} for number in range(1200)]
    write_sealed(copied / "data.json", {**about, "skipped": skipped}, sort_keys=False)
    accept_descriptions(copied)
    export_network(copied, "a", "safetensors", tmp_path / "out")
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "Unreadable images that were left out: 1,200.\n" in card


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a", "`a`"),
        ("a\n# heading | <script>", r"`a # heading \| <script>`"),
        ("a ``b`` c", "``` a ``b`` c ```"),
    ],
)
def test_names_mean_nothing_to_markdown(text: str, shown: str) -> None:
    assert code(text) == shown
