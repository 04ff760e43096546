"""Make src/codistill/data/fashion/fashion.npz from Debian's package dataset-fashion-mnist.

    apt install dataset-fashion-mnist && python tools/make_embedded.py

The first images of each class, in the original order: nothing is drawn, so anybody gets the same arrays.
"""

import gzip
from pathlib import Path

import numpy as np

SOURCE = Path("/usr/share/datasets/fashion-mnist")
TARGET = Path(__file__).parent.parent / "src/codistill/data/fashion/fashion.npz"
PER_CLASS = {"train": 600, "t10k": 200}


def read_idx(path: Path) -> np.ndarray:
    """An IDX file: two zero bytes, the type (8: uint8), the number of axes, their lengths, the values."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path}: not an IDX file of bytes")
    axes = raw[3]
    shape = np.frombuffer(raw, ">i4", count=axes, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def first_of_each_class(split: str) -> tuple[np.ndarray, np.ndarray]:
    pixels = read_idx(SOURCE / f"{split}-images-idx3-ubyte.gz")
    labels = read_idx(SOURCE / f"{split}-labels-idx1-ubyte.gz")
    kept = np.sort(np.concatenate([np.flatnonzero(labels == label)[: PER_CLASS[split]] for label in range(10)]))
    return pixels[kept], labels[kept]


def main() -> None:
    train_pixels, train_labels = first_of_each_class("train")
    test_pixels, test_labels = first_of_each_class("t10k")
    np.savez_compressed(
        TARGET,
        train_pixels=train_pixels,
        train_labels=train_labels,
        test_pixels=test_pixels,
        test_labels=test_labels,
    )
    print(f"{TARGET}: {len(train_labels)} training and {len(test_labels)} test images, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
