"""Predictions on image files are those of the network on the same pixels, in every format."""

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from scipy.special import softmax
from torch import Tensor

from codistill.data import embedded
from codistill.data.decoder import Decoder, Request
from codistill.export.bundle import Preprocessing
from codistill.export.export import Exported
from codistill.export.predict import LoadedExport, Prediction, Unreadable, find_images, predict
from support.exports import accept_files

IMAGES = 70  # more than one batch


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number, pixels in enumerate(embedded.read().test.pixels[:IMAGES, 0]):  # type: ignore[index]
        Image.fromarray(pixels.numpy()).save(folder / f"{number:02}.png")
    return folder


@pytest.fixture
def export_copy(exported: dict[str, Exported], tmp_path: Path) -> Path:
    """An export to be damaged."""
    return shutil.copytree(exported["safetensors"].model.parent, tmp_path / "export")


@pytest.mark.parametrize("name", ["safetensors", "onnx"])
def test_the_likeliest_classes(name: str, exported: dict[str, Exported], photos: Path, thousand: Tensor) -> None:
    logits = exported[name].shipped.network(thousand[:IMAGES]).double().numpy()
    outcomes = list(predict(exported[name].model.parent, [photos], top=3))
    assert len(outcomes) == IMAGES
    for number, (outcome, row) in enumerate(zip(outcomes, softmax(logits, axis=-1), strict=True)):
        assert isinstance(outcome, Prediction)
        assert outcome.file == photos / f"{number:02}.png"
        best = np.argsort(-row)[:3]
        assert [label for label, _ in outcome.top] == [embedded.CLASS_NAMES[index] for index in best]
        assert [value for _, value in outcome.top] == pytest.approx(row[best].tolist(), abs=1e-5)


def test_the_models_file_will_do_and_top_is_bounded_by_the_classes(exported: dict[str, Exported], photos: Path) -> None:
    (one,) = predict(exported["onnx"].model, [photos / "00.png"], top=50)
    assert isinstance(one, Prediction)
    assert sorted(label for label, _ in one.top) == sorted(embedded.CLASS_NAMES)
    assert sum(value for _, value in one.top) == pytest.approx(1)


def test_other_formats_are_called_unsupported(exported: dict[str, Exported], photos: Path, tmp_path: Path) -> None:
    image = Image.open(photos / "00.png")
    files = [tmp_path / name for name in ("photo.gif", "photo.avif", "no suffix")]
    for file in files:
        image.save(file, format="GIF")
    shutil.copy(files[0], tmp_path / "renamed.png")
    outcomes = predict(exported["safetensors"].model, [*files, tmp_path / "renamed.png"], top=1)
    why = [outcome.why for outcome in outcomes if isinstance(outcome, Unreadable)]
    assert why == [
        "the format .gif is not supported; convert it to PNG, JPEG, WebP, BMP or TIFF",
        "the format .avif is not supported; convert it to PNG, JPEG, WebP, BMP or TIFF",
        "the format of this file is not supported; convert it to PNG, JPEG, WebP, BMP or TIFF",
        "its content is not PNG, JPEG, WebP, BMP or TIFF; convert it",
    ]


def test_unreadable_images_are_named_and_the_others_go_on(
    exported: dict[str, Exported], photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "damaged.png").write_bytes((photos / "00.png").read_bytes()[:40])
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.png").touch()
    Image.new("I;16", (28, 28)).save(tmp_path / "deep.png")
    outcomes = list(predict(exported["safetensors"].model, [tmp_path, photos / "00.png"]))
    assert [outcome.file.name for outcome in outcomes] == ["damaged.png", "deep.png", "empty.png", "text.jpg", "00.png"]
    assert all(isinstance(outcome, Unreadable) and outcome.why for outcome in outcomes[:4])
    assert isinstance(outcomes[4], Prediction)


def test_too_little_memory_says_nothing_about_an_image(
    exported: dict[str, Exported], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("codistill.export.predict.decode", fail)
    with pytest.raises(MemoryError):
        list(predict(exported["safetensors"].model, [photos / "00.png"]))
    monkeypatch.setattr("codistill.data.decoder.decode", fail)
    file = photos / "00.png"
    with pytest.raises(MemoryError):
        Decoder(8, "stretch", None).answer(Request(str(file), 0, file.stat().st_size, None))


def test_an_error_of_onnxruntime_names_the_file(exported: dict[str, Exported], photos: Path, tmp_path: Path) -> None:
    """A graph that onnx reads and onnxruntime cannot run: an operator that does not exist."""
    copy = shutil.copytree(exported["onnx"].model.parent, tmp_path / "export")
    model = onnx.load(copy / "model.onnx")
    model.graph.node[0].op_type = "Unheard"
    onnx.save(model, copy / "model.onnx")
    accept_files(copy)
    with pytest.raises(ValueError, match=r"model\.onnx: .*Unheard"):
        list(predict(copy, [photos]))


def test_a_pipe_is_not_waited_for(exported: dict[str, Exported], photos: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    outcomes: list[Prediction | Unreadable] = []
    images = [tmp_path / "pipe.png", photos / "00.png"]
    predicting = threading.Thread(
        target=lambda: outcomes.extend(predict(exported["safetensors"].model, images)), daemon=True
    )
    predicting.start()
    predicting.join(timeout=60)
    assert outcomes[:1] == [Unreadable(tmp_path / "pipe.png", "not a regular file")]
    assert [type(outcome) for outcome in outcomes] == [Unreadable, Prediction]


def ready(channels: str, size: int, crop: int, mean: tuple[float, ...]) -> LoadedExport:
    how = Preprocessing(
        channels=channels,
        resize=(size, size),
        centre_crop=(crop, crop),
        mean=mean,
        std=(0.5,) * len(mean),
    )
    return LoadedExport(lambda images: images.flatten(1)[:, :2], ("no", "yes"), how)


def test_colours_become_what_the_network_has(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20), (255, 0, 0)).save(tmp_path / "red.png")
    gray, colour = (ready(kind, 8, 8, (0.5,) * n).read(tmp_path / "red.png") for kind, n in (("L", 1), ("RGB", 3)))
    assert isinstance(gray, Tensor)
    assert isinstance(colour, Tensor)
    assert gray.shape == (1, 8, 8)
    assert gray.unique().tolist() == [76]  # ITU-R 601: 0.299 × 255
    assert colour.shape == (3, 8, 8)
    assert colour[:, 0, 0].tolist() == [255, 0, 0]


def test_the_middle_is_cut_out_and_normalised() -> None:
    pixels = torch.zeros(1, 1, 6, 6, dtype=torch.uint8)
    pixels[0, 0, 2, 2] = 255  # the first pixel of the 2×2 in the middle
    ((first, second),) = ready("L", 6, 2, (0.25,)).likeliest(pixels, top=2)
    expected = softmax(np.array([(1 - 0.25) / 0.5, (0 - 0.25) / 0.5]))
    assert (first[0], second[0]) == ("no", "yes")
    assert [first[1], second[1]] == pytest.approx(expected.tolist())


def test_folders_are_searched_and_images_counted_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/b/1.JPG", "a/2.jpeg", "3.png", "a/readme.txt"):
        (tmp_path / name).touch()
    files = [path.relative_to(tmp_path).as_posix() for path in find_images([tmp_path, tmp_path / "3.png"])]
    assert files == ["3.png", "a/2.jpeg", "a/b/1.JPG"]


def test_images_that_are_not_there(exported: dict[str, Exported], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.png: no such file or folder; give images"):
        list(predict(exported["onnx"].model, [tmp_path / "nowhere.png"]))
    with pytest.raises(ValueError, match="no images in this folder"):
        list(predict(exported["onnx"].model, [tmp_path]))


def test_models_that_are_none(finished: Path, photos: Path, tmp_path: Path) -> None:
    for model, said in (
        (tmp_path / "nowhere", "no such file or folder; give the folder that `codistill export --out` wrote"),
        (photos, "is not an export: it has no intact export.json"),
        (finished, "it is a run; export it first: codistill export "),
        (photos / "00.png", "is not an export"),
    ):
        with pytest.raises(ValueError, match=said):
            list(predict(model, [photos]))


@pytest.mark.parametrize("name", ["model.safetensors", "labels.json", "preprocessing.json"])
def test_a_damaged_file(name: str, export_copy: Path, photos: Path) -> None:
    file = export_copy / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} is not the file that was exported \(damaged"):
        list(predict(export_copy, [photos]))
    file.unlink()
    with pytest.raises(ValueError, match="is not the file that was exported"):
        list(predict(export_copy, [photos]))


def test_a_file_beside_the_model(export_copy: Path, photos: Path) -> None:
    with pytest.raises(ValueError, match=r"labels.json is not the model file of this export; give model.safetensors"):
        list(predict(export_copy / "labels.json", [photos]))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("labels.json", '["a"]', "labels.json has 1 names, but the network has 10 classes"),
        ("labels.json", "[1]", "labels.json or preprocessing.json is invalid"),
        ("preprocessing.json", "{}", "labels.json or preprocessing.json is invalid"),
        ("preprocessing.json", "[", "is not readable as JSON"),
    ],
)
def test_labels_and_preprocessing_that_do_not_fit(
    export_copy: Path, photos: Path, file: str, content: str, said: str
) -> None:
    (export_copy / file).write_text(content)
    accept_files(export_copy)
    with pytest.raises(ValueError, match=said):
        list(predict(export_copy, [photos]))


@pytest.mark.parametrize("change", [{"channels": None}, {"resize": [28, 14]}])
def test_images_that_cannot_come_from_files(export_copy: Path, photos: Path, change: dict[str, object]) -> None:
    how = json.loads((export_copy / "preprocessing.json").read_text())
    (export_copy / "preprocessing.json").write_text(json.dumps({**how, **change}))
    accept_files(export_copy)
    with pytest.raises(ValueError, match="predict reads only square gray or RGB images"):
        list(predict(export_copy, [photos]))


@pytest.mark.parametrize(("fit", "left_half"), [("stretch", 255), ("short_side", 0)])
def test_an_image_of_another_shape_is_fitted_as_in_training(fit: str, left_half: int, tmp_path: Path) -> None:
    """Black, but for the leftmost quarter of a picture twice as wide as high: the middle square does not see it."""
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :4] = 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    how = Preprocessing(
        channels="RGB",
        resize=(8, 8),
        fit=fit,
        centre_crop=(8, 8),
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
    )
    read = LoadedExport(classify=lambda images: images, labels=("a", "b"), preprocessing=how).read(
        tmp_path / "wide.png"
    )
    assert isinstance(read, Tensor)
    assert int(read[0, 4, 0]) == left_half
