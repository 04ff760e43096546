"""The benchmark counts what it says it counts; how fast anything is, is not for a test."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from codistill.data.augmentation import OnDevice
from codistill.engine.bench import EPOCH_STEPS, Runner, bench, matmul_flops_per_s, random_data
from codistill.engine.fast.compiler import compile_function
from codistill.engine.runtime import prepared
from codistill.engine.state import prepare_training
from codistill.engine.step import PARTS, Executor, Programs
from codistill.networks.cost import cost
from codistill.networks.families import architecture
from codistill.recipes.sections import Augment, Runtime
from support.tiny import tiny_recipe


def test_a_bench_of_the_plain_step() -> None:
    recipe = tiny_recipe(method="independent", networks={"a": "resnet-8", "b": "wrn-10-1"})
    measured = bench(recipe, channels=1, side=8, classes=10, steps=2)
    backbones = [architecture(name).backbone(10, in_channels=1) for name in recipe.networks.values()]
    assert measured.flops_per_image == 3 * sum(cost(backbone, (1, 8, 8)).flops for backbone in backbones)
    assert list(measured.parts_ms) == list(PARTS)
    assert min(measured.parts_ms.values()) > 0
    assert measured.peak_device_bytes is None
    work = measured.images_per_s * measured.flops_per_image
    assert measured.share_of_matmul == pytest.approx(work / measured.matmul_flops_per_s)
    assert "step by step" in measured.path


def test_the_parts_are_of_all_steps_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four batches for one update, one in four has an update to measure."""
    updates = []
    monkeypatch.setattr(Executor, "update", lambda executor: updates.append(executor))
    with prepared(Runtime(device="cpu", threads=1)) as machine:
        data = random_data(1, 8, 10, images=32 * EPOCH_STEPS)
        training = prepare_training(tiny_recipe(accumulate=4), data, machine)
        Runner(training).parts_ms(8)
    assert len(updates) == 2


def test_a_frozen_teacher_counts_once(tmp_path: Path) -> None:
    teacher = architecture("resnet-8").backbone(10, in_channels=1)
    save_file(teacher.state_dict(), tmp_path / "teacher.safetensors")
    start = {"a": str(tmp_path / "teacher.safetensors")}
    recipe = tiny_recipe(method="kd", networks={"a": "resnet-8", "b": "resnet-8"}, start=start)
    measured = bench(recipe, channels=1, side=8, classes=10, steps=1)
    assert measured.flops_per_image == (1 + 3) * cost(teacher, (1, 8, 8)).flops


def test_data_smaller_than_a_batch_are_a_full_batch() -> None:
    """Which is compiled, as the log says."""
    with prepared(Runtime(device="cpu", threads=1)) as machine:
        training = prepare_training(tiny_recipe(batch_size=64), random_data(1, 8, 10, images=40), machine)
        assert Programs(training, training.cohort).full_size == 40


@pytest.mark.parametrize(
    ("has_triton", "augmentation", "has_kernel"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"mixup": 0.2}, False),
        (True, {"cutmix": 0.2}, False),
        (True, {"randaugment": 9}, False),
        (True, {"random_resized_crop": 0.5, "pad": 0}, False),
    ],
)
def test_where_a_kernel_makes_images(has_triton: bool, augmentation: dict[str, Any], has_kernel: bool) -> None:
    """Only with the Triton kernels: kernels=torch is the way out where those do not run."""
    data = random_data(1, 8, 10, images=4)
    on_device = OnDevice.of(data, torch.device("cpu"), Augment(**augmentation), has_triton=has_triton)
    assert on_device.has_kernel is has_kernel


def test_random_images_stand_in_for_as_many_as_a_training_has() -> None:
    """By which it is long or not: the benchmark's is as long as the recipe's."""
    data = random_data(1, 8, 10, images=40)
    with prepared(Runtime(device="cpu", threads=1)) as machine:
        assert prepare_training(tiny_recipe(), data, machine).images == 40
        assert prepare_training(tiny_recipe(), data, machine, images=50_000).images == 50_000


def test_torch_is_left_as_it_was() -> None:
    threads = torch.get_num_threads()
    torch.set_float32_matmul_precision("high")
    try:
        runtime = Runtime(device="cpu", threads=1)
        with prepared(runtime):
            assert torch.get_float32_matmul_precision() == "highest"  # what fp32 means
        bench(tiny_recipe(runtime=runtime.model_dump()), channels=1, side=8, classes=10, steps=1)
        assert torch.get_num_threads() == threads
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_matrix_product_is_faster_than_nothing() -> None:
    assert 1e8 < matmul_flops_per_s(torch.device("cpu")) < 1e15


def test_random_data_have_the_shape_that_is_asked_for() -> None:
    data = random_data(channels=2, side=5, classes=7, images=40)
    assert data.train.pixels.shape == (40, 2, 5, 5)
    assert (data.num_classes, data.channels) == (7, 2)
    assert int(data.train.labels.max()) < 7


def test_what_cannot_be_one_graph_is_refused_with_what_to_type() -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("a graph break")
            return x + 1

    with pytest.raises(ValueError, match=r"torch.compile refuses Broken: .*; set runtime.kernels=torch"):
        compile_function(Broken())(torch.ones(2))
