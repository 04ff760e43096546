"""Saves beside the training: what is written is the moment it was taken, and failures are heard."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from codistill.engine import trainer
from codistill.errors import RunError
from codistill.runs.checkpoint import Saver, Snapshot, Store, snapshot
from codistill.runs.journal import read_journal
from support.checkpoints import assert_is, content, filled, listed
from support.tiny import tiny_recipe


class SlowStore(Store):
    """Writes when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()

    def write(self, step: int, taken: Snapshot, state: dict[str, Any]) -> Path:
        assert self.may_write.wait(20)
        return super().write(step, taken, state)


@pytest.mark.promise(
    "background-save",
    "A save holds up the training only while its state is copied; the copy cannot change while it is written.",
    repeated="see below",
)
def test_training_goes_on_while_it_is_written_and_cannot_change_it(tmp_path: Path) -> None:
    store, saver = SlowStore(tmp_path), Saver()
    tensors, state = content(1)
    saver.save(store, 1, tensors, state)
    for tensor in tensors.values():
        tensor.fill_(0)
    assert saver.is_busy
    assert listed(tmp_path) == []
    store.may_write.set()
    saver.wait()
    assert not saver.is_busy
    assert_is(store.newest(), 1)
    assert (saver.saves, saver.longest_hold_s > 0) == (1, True)
    saver.close()


def test_the_next_save_waits_for_the_last(tmp_path: Path) -> None:
    store, saver = SlowStore(tmp_path), Saver()
    saver.save(store, 1, *content(1))
    threading.Timer(0.2, store.may_write.set).start()
    saver.save(store, 2, *content(2))
    assert "step-00000001" in listed(tmp_path)
    saver.wait()
    assert_is(store.newest(), 2)
    saver.close()


class NotedStore(Store):
    """Keeps the addresses of what it writes."""

    def write(self, step: int, taken: Snapshot, state: dict[str, Any]) -> Path:
        self.places = {name: tensor.data_ptr() for name, tensor in taken.items() if tensor.numel()}
        return super().write(step, taken, state)


def test_memory_is_used_again_by_the_same_store_only(tmp_path: Path) -> None:
    """A save of fewer tensors in between, as at the end of an epoch, gives no memory back."""
    store, best, saver = NotedStore(tmp_path / "checkpoints"), NotedStore(tmp_path / "best"), Saver()
    for made in (store, best):
        made.folder.mkdir()
    first: dict[str, int] = {}
    for step in (1, 2, 3, 4):
        tensors, state = content(step)
        saver.save(store, step, tensors, state)
        saver.save(best, 7, *content(7))
        saver.wait()
        assert_is(store.newest(), step)
        assert_is(best.newest(), 7)
        first = first or store.places
        assert store.places == first
        assert not set(store.places.values()) & set(best.places.values())
        few = dict(list(tensors.items())[:1])
        saver.save(store, step, few, state)
    saver.wait()
    assert store.places.items() <= first.items()
    saver.close()


def test_what_has_another_shape_or_type_gets_memory_of_its_own() -> None:
    before = snapshot({"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(5)})
    tensors = {"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.int64), "c": torch.zeros(5), "d": torch.zeros(6)}
    after = snapshot(tensors, over=before)
    assert all(torch.equal(after[name], tensor) for name, tensor in tensors.items())
    assert all(after[name].dtype is tensor.dtype for name, tensor in tensors.items())
    assert (before["a"].sum(), before["b"].sum()) == (6, 4)  # type: ignore[comparison-overlap]
    assert after["c"] is before["c"]


def test_a_failed_save_is_reported_at_the_next_one(tmp_path: Path) -> None:
    saver, store = Saver(), Store(tmp_path / "gone" / "checkpoints")
    saver.save(store, 1, *content(1))
    with pytest.raises(RunError, match="cannot save"):
        saver.save(store, 2, *content(2))
    saver.wait()
    saver.close()


@pytest.mark.promise("disk")
def test_a_run_whose_folder_vanishes_ends_with_a_clear_word(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run/checkpoints: cannot save .*does not exist"):
        for _ in trainer.train(tiny_recipe(), tmp_path / "run", stop=lambda: not remove(tmp_path / "run")):
            pass


def remove(folder: Path) -> bool:
    """Under another name, as after tidying up."""
    if folder.exists():
        folder.rename(folder.with_name("elsewhere"))
    return True


@pytest.mark.parametrize(("keep", "left"), [(2, 1), (3, 3)])
def test_a_finished_run_keeps_what_is_read_again(keep: int, left: int, tmp_path: Path) -> None:
    recipe = tiny_recipe(checkpoints={"every_s": 0, "keep": keep})
    for _ in trainer.train(recipe, tmp_path / "run"):
        pass
    found = listed(tmp_path / "run" / "checkpoints")
    assert len(found) == left
    assert max(found).startswith("step-00000006")


@pytest.mark.parametrize("harm", ["damaged", "another run's"])
def test_older_checkpoints_stay_if_the_newest_is_of_no_use(harm: str, tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    if harm == "damaged":
        (tmp_path / "step-00000002" / "tensors.safetensors").write_bytes(b"")
    else:
        store.foreign = lambda state: "other images" if state["epoch"] == 2 else ""
    store.keep_newest()
    assert_is(store.newest(), 1)


def test_the_best_by_validation_error_is_kept(tmp_path: Path) -> None:
    data = {"name": "fashion", "train_limit": 96, "test_limit": 20, "validation": 0.005}
    recipe = tiny_recipe(data=data, length={"epochs": 4}, checkpoints={"every_s": 1000.0, "best": True})
    errors = []
    for _ in trainer.train(recipe, tmp_path / "run"):
        record = read_journal(tmp_path / "run" / "journal.jsonl")[-1]["validation"]
        errors.append((record["a/final"]["top1_error"] + record["b/final"]["top1_error"]) / 2)
    lowest = max(epoch for epoch, error in enumerate(errors, start=1) if error == min(errors))
    saved = Store(tmp_path / "run" / "best").newest()
    assert saved is not None
    assert saved.state["position"] == {"epoch": lowest, "step": 0}
    assert len(listed(tmp_path / "run" / "best")) == 1
    assert torch.is_tensor(saved.tensors["tally/sums"])


def test_the_best_may_go_by_a_folders_own_validation_set(tmp_path: Path) -> None:
    for split in ("train", "test", "val"):
        for number, animal in enumerate(("cat", "dog")):
            for copy in range(2):
                file = tmp_path / "pets" / split / animal / f"{copy}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (16, 16), (100 * number, 50 * copy, 200)).save(file)
    data = {"name": "folder", "folder": str(tmp_path / "pets"), "image_size": 16}
    recipe = tiny_recipe(data=data, checkpoints={"best": True})
    assert sum(1 for _ in trainer.train(recipe, tmp_path / "run")) == 2
    assert len(listed(tmp_path / "run" / "best")) == 1
    (tmp_path / "pets" / "val").rename(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=r"checkpoints\.best=true needs a validation set, .* type data\.validation=0\.1"
    ):
        next(trainer.train(recipe, tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_best_needs_a_validation_set() -> None:
    with pytest.raises(ValueError, match=r"checkpoints\.best: needs data\.validation above 0"):
        tiny_recipe(checkpoints={"best": True})
