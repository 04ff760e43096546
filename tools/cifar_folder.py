"""Write the first classes of CIFAR as PNG files, to train on them as on a folder of one's own images.

    python tools/cifar_folder.py cifar100 photos/cifar100 --classes 40
    codistill study budget-own-images data.folder=photos/cifar100

The files have CIFAR's 32×32 pixels; a recipe's ``data.image_size`` resizes them as it does any image.
"""

import argparse
from pathlib import Path

from PIL import Image

from codistill.data.images import Images
from codistill.data.load import load


def write(data_set: str, folder: Path, classes: int | None = None) -> int:
    """Write ``folder/SPLIT/CLASS/NUMBER.png`` and return the number of files; an existing split is an error."""
    data, written = load(data_set), 0
    for split in ("train", "test"):
        images = data.splits[split]
        assert isinstance(images, Images)
        for name in data.class_names[:classes]:
            (folder / split / name).mkdir(parents=True)
        for index, label in enumerate(images.labels.tolist()):
            if classes is None or label < classes:
                pixels_HWC = images.pixels[index].permute(1, 2, 0).numpy()
                file = folder / split / data.class_names[label] / f"{index:05}.png"
                Image.fromarray(pixels_HWC).save(file, compress_level=1)
                written += 1
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_set", choices=["cifar10", "cifar100"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, help="only the first N, in alphabetical order")
    options = parser.parse_args()
    print(f"{options.folder}: {write(options.data_set, options.folder, options.classes):,} files")


if __name__ == "__main__":
    main()
