"""On a GPU: streamed batches through the recorded step, and a host that does not wait for the device."""

from pathlib import Path

import pytest
import torch

from codistill.data.load import load
from codistill.data.stream import StreamedImages
from codistill.engine.trainer import train
from codistill.recipes.sections import Data, Runtime
from support.pictures import write_folder
from support.tiny import tiny_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("cache"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photos"), train=700, test=100)


@pytest.mark.parametrize("capture", [True, False])
def test_streaming_equals_memory_bit_for_bit(photos: Path, capture: bool, tmp_path: Path) -> None:
    runtime = Runtime(device="cuda", deterministic=True, capture=capture).model_dump()

    def weights(resident: bool) -> dict[str, bytes]:
        data = Data(name="folder", folder=str(photos), image_size=16, resident=resident, workers=4)
        out = tmp_path / f"resident-{resident}"
        for _ in train(tiny_recipe(data=data.model_dump(), runtime=runtime), out):
            pass
        return {file.name: file.read_bytes() for file in (*(out / "weights").glob("*"), out / "journal.jsonl")}

    streamed = weights(False)
    assert streamed == weights(True)
    assert len(streamed) == 3


def test_batches_arrive_whole_while_the_device_is_busy_and_the_host_goes_on(photos: Path) -> None:
    data = load("folder", folder=photos, image_size=16, resident=False, workers=4)
    truth = data.train.pixels[:]
    train_set = data.train.to("cuda")
    assert isinstance(train_set, StreamedImages)
    heavy = torch.randn(4096, 4096, device="cuda")
    seen = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for pixels, _ in train_set.in_batches(32):
            for _ in range(20):
                heavy = (heavy @ heavy).clamp(-1, 1)
            seen.append(pixels.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cat(seen).cpu(), truth)
    assert train_set.pixels.pool.memory is not None
    assert train_set.pixels.pool.memory.tensor.is_pinned()
