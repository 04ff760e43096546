"""What is saved comes back, bit for bit; what cannot be saved is refused."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from codistill.runs import checkpoint
from codistill.runs.checkpoint import DTYPES, Store, snapshot
from support.checkpoints import NAMES, assert_is, content, filled, listed, same, seal


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    assert store.newest() is None
    path = store.save(123, *content(123))
    assert path == tmp_path / "checkpoints" / "step-00000123"
    assert listed(path) == sorted(NAMES)
    assert_is(store.newest(), 123)
    assert_is(Store(tmp_path / "checkpoints").newest(), 123)


def test_the_manifest_holds_sizes_and_hashes(tmp_path: Path) -> None:
    path = Store(tmp_path).save(7, *content(7))
    written = (path / "manifest.json").read_bytes()
    seal(path, 7)
    assert (path / "manifest.json").read_bytes() == written


def test_the_same_content_has_the_same_bytes(tmp_path: Path) -> None:
    first, second = (Store(tmp_path / name).save(7, *content(7)) for name in "ab")
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in NAMES)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    shapes = [(), (0,), (0, 3), (1,), (5,), (2, 3)]
    tensors = {}
    for dtype in (getattr(torch, name) for name in DTYPES):
        for shape in shapes:
            size = torch.empty(shape, dtype=dtype).nbytes
            raw = torch.arange(size, dtype=torch.uint8) * 37 + 201
            raw = raw % 2 if dtype == torch.bool else raw
            tensors[f"{dtype}{shape}"] = (
                torch.frombuffer(raw.numpy(), dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
            )
    tensors["nan"] = torch.tensor([0x7FC00001, 0x7F800002, -1], dtype=torch.int32).view(torch.float32)
    assert len(tensors) == len(DTYPES) * len(shapes) + 1 == 97
    saved = filled_with(tmp_path, tensors)
    assert saved.keys() == tensors.keys()
    assert all(same(saved[name], tensor) for name, tensor in tensors.items())


def filled_with(folder: Path, tensors: Mapping[str, Tensor]) -> Any:
    Store(folder).save(1, tensors, {})
    return Store(folder).newest().tensors


def test_tensors_of_any_memory_format_come_back(tmp_path: Path) -> None:
    image, volume = torch.randn(4, 3, 5, 6), torch.randn(2, 3, 4, 5, 6)
    tensors = {
        "channels_last": image.to(memory_format=torch.channels_last),
        "channels_last_3d": volume.to(memory_format=torch.channels_last_3d),
        "depthwise": torch.randn(8, 1, 3, 3).to(memory_format=torch.channels_last),
        "pointwise": torch.randn(8, 6, 1, 1).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 5).t(),
        "bfloat16": image.bfloat16().to(memory_format=torch.channels_last),
        "plain": image,
    }
    saved = filled_with(tmp_path, tensors)
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())


def test_views_and_shared_memory_come_back_as_tensors_of_their_own(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"base": base, "tied": base, "row": base[1], "gaps": base[:, ::2], "wide": torch.ones(1).expand(5)}
    saved = filled_with(tmp_path, tensors)
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    saved["base"].zero_()
    assert torch.equal(saved["tied"], base)
    assert saved["gaps"].is_contiguous()


def test_parameters_are_saved_and_come_back_without_a_gradient(tmp_path: Path) -> None:
    saved = filled_with(tmp_path, nn.Linear(2, 3).state_dict(keep_vars=True))
    assert [tensor.requires_grad for tensor in saved.values()] == [False, False]


def test_a_snapshot_is_what_was_at_that_moment(tmp_path: Path) -> None:
    tensors, state = content(3)
    taken = snapshot(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    Store(tmp_path).write(3, taken, state)
    assert_is(Store(tmp_path).newest(), 3)


def test_what_was_read_does_not_depend_on_the_file(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    saved = Store(tmp_path).newest()
    path = tmp_path / "step-00000003" / "tensors.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert_is(saved, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_come_back_on_the_cpu(tmp_path: Path) -> None:
    tensors, state = content(3)
    Store(tmp_path).save(3, {name: tensor.cuda() for name, tensor in tensors.items()}, state)
    assert_is(Store(tmp_path).newest(), 3)


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_the_last_ones_are_kept(tmp_path: Path, keep: int, left: list[str]) -> None:
    filled(tmp_path, 1, 2, 3, 4, 5, keep=keep)
    assert listed(tmp_path) == [f"step-{step:08d}" for step in left]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    filled(tmp_path, 99_999_999, 100_000_000, keep=1)
    assert listed(tmp_path) == ["step-100000000"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_step_saved_again_replaces_the_first(tmp_path: Path, keep: int) -> None:
    store = filled(tmp_path, 4, 5, keep=keep)
    for seed in (50, 51, 52):
        store.save(5, *content(seed))
        assert_is(store.newest(), 5, seed)
    assert len(listed(tmp_path)) == keep


def test_a_damaged_later_step_does_not_push_out_what_is_saved_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path, 1, 9, keep=2)
    (tmp_path / "step-00000009" / "state.json").write_text("{}")
    assert_is(store.newest(), 1)
    for step in (5, 6):
        store.save(step, *content(step))
        caplog.clear()
        assert_is(store.newest(), step)
        assert not caplog.records
    assert listed(tmp_path) == ["step-00000005", "step-00000006"]


def test_leftovers_are_swept(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    for name in (".tmp-step-00000002", ".tmp-step-00000001"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    assert_is(store.newest(), 1)
    store.sweep()
    assert listed(tmp_path) == ["step-00000001"]
    (tmp_path / ".tmp-step-00000002").mkdir()
    store.save(2, *content(2))
    assert listed(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("sparse", torch.eye(3).to_sparse()),
        ("meta", torch.empty(3, device="meta")),
        ("complex128", torch.zeros(3, dtype=torch.complex128)),
        ("__metadata__", torch.zeros(3)),
    ],
)
def test_a_tensor_that_cannot_be_saved_is_named(tmp_path: Path, name: str, tensor: Any) -> None:
    with pytest.raises(ValueError, match=f"'{name}'"):
        Store(tmp_path).save(1, {name: tensor}, {})
    assert listed(tmp_path) == []


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": float("inf")}])
def test_a_state_that_json_would_change_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(ValueError, match="does not survive JSON"):
        Store(tmp_path).save(1, {}, state)
    assert listed(tmp_path) == []


def test_a_state_that_could_not_be_read_back_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "STATE_MAX_BYTES", 100)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        Store(tmp_path).save(1, {}, {"a": "x" * 100})
    assert listed(tmp_path) == []


def test_numbers_out_of_range_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        Store(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step=-1"):
        Store(tmp_path).save(-1, {}, {})
