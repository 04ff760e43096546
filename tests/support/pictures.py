"""Folders and shards of real pictures, PNG and JPEG: of CIFAR where it is at hand, otherwise of the embedded data."""

import io
import tarfile
from functools import cache
from pathlib import Path

from PIL import Image

from codistill.data import embedded
from codistill.data.download import data_folder
from codistill.data.images import ImageData
from codistill.data.load import load

DAMAGES = ("text", "empty", "cut", "flipped")


HERE = data_folder()  # before any test changes where data are looked for
REAL = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


@cache
def real_pictures() -> ImageData:
    present = [name for name, folder in REAL.items() if (HERE / folder).is_dir()]
    return load(present[0], folder=HERE) if present else embedded.read()


def write_folder(root: Path, *, train: int, test: int, classes: int = 5) -> Path:
    """The first pictures of the first classes, every other one as JPEG, of many widths and heights."""
    source = real_pictures()
    for split, count in (("train", train), ("test", test)):
        images = source.splits[split]
        for label in range(classes):
            folder = root / split / source.class_names[label]
            folder.mkdir(parents=True, exist_ok=True)
            wanted = len(range(label, count, classes))
            for number, index in enumerate((images.labels == label).nonzero().flatten()[:wanted].tolist()):
                pixels = images.pixels[index].permute(1, 2, 0).numpy().squeeze()
                side = pixels.shape[0]
                picture = Image.fromarray(pixels).resize((side + 3 * number % 7, side + 5 * number % 11))
                picture.save(folder / f"{number:04}.{'jpg' if number % 2 else 'png'}")
    return root


def damaged(picture: bytes, how: str) -> bytes:
    match how:
        case "text":
            return b"no picture"
        case "empty":
            return b""
        case "cut":
            return picture[: len(picture) // 2]
    return bytes(255 - byte for byte in picture)


def write_damaged(root: Path, split: str, count: int) -> list[str]:
    """So many files more in the set's classes, each a picture that was damaged in one of four ways; their names."""
    folders = sorted((root / split).iterdir())
    originals = [(next(folder.glob("*.png")), next(folder.glob("*.jpg"))) for folder in folders]
    names = []
    for number in range(count):
        folder, original = folders[number % len(folders)], originals[number % len(folders)][number % 2]
        file = folder / f"bad-{number:04}{original.suffix}"
        file.write_bytes(damaged(original.read_bytes(), DAMAGES[number // 2 % len(DAMAGES)]))
        names.append(file.relative_to(root).as_posix())
    return sorted(names)


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write_shards(folder: Path, root: Path, *, per_shard: int = 20) -> Path:
    """The same images as in ``folder``, in the same order, as WebDataset would shard them."""
    for split in sorted(path for path in folder.iterdir() if path.is_dir()):
        (root / split.name).mkdir(parents=True)
        names = sorted(path.name for path in (folder / "train").iterdir())
        files = sorted(split.glob("*/*"))
        for first in range(0, len(files), per_shard):
            with tarfile.open(root / split.name / f"shard-{first // per_shard:06}.tar", "w") as tar:
                for number, file in enumerate(files[first : first + per_shard], first):
                    add(tar, f"{number:06}{file.suffix}", file.read_bytes())
                    add(tar, f"{number:06}.cls", str(names.index(file.parent.name)).encode())
    (root / "classes.txt").write_text("\n".join(names) + "\n")
    return root
