"""The benchmark counts what it says it counts; how fast anything is, is not for a test."""

import pytest
import torch

from codistill.engine.bench import bench, matmul_flops_per_s, random_data
from codistill.engine.compiling import compiled_whole
from codistill.engine.parts import PARTS
from codistill.networks.build import architecture
from codistill.networks.counting import cost
from codistill.recipes.schema import Runtime
from tiny import tiny_recipe


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


def test_torch_is_left_as_it_was() -> None:
    threads = torch.get_num_threads()
    bench(tiny_recipe(runtime=Runtime(device="cpu", threads=1).model_dump()), channels=1, side=8, classes=10, steps=1)
    assert torch.get_num_threads() == threads


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

    with pytest.raises(ValueError, match=r"torch.compile refuses Broken: .*; set runtime.compile=false"):
        compiled_whole(Broken())(torch.ones(2))
