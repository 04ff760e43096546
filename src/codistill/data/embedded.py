"""The data set that ships inside the package, so that a first training needs no network.

The first 600 training and the first 200 test images of each class of Fashion-MNIST (MIT licence, see fashion/LICENSE).
tools/make_embedded.py makes the file.
"""

from importlib import resources

import numpy as np
import torch

from codistill.data.images import ImageData, Images

CLASS_NAMES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
# Of the 60,000 training images of the whole data set.
MEAN, STD = (0.2860,), (0.3530,)


def read() -> ImageData:
    file = resources.files("codistill.data") / "fashion" / "fashion.npz"
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        train, test = (
            Images(
                torch.from_numpy(arrays[f"{split}_pixels"]).unsqueeze(1),
                torch.from_numpy(arrays[f"{split}_labels"]).long(),
            )
            for split in ("train", "test")
        )
    return ImageData("fashion", train, test, None, CLASS_NAMES, MEAN, STD, report={"source": "embedded"})
