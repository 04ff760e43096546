"""The data set that ships inside the package, so that a first training needs no network.

The first 600 training and the first 200 test images of each class of Fashion-MNIST (MIT licence, see fashion/LICENSE).
tools/make_embedded.py makes the file.
"""

from importlib import resources

import numpy as np
import torch

from codistill.data.images import ImageData, Images, shrink
from codistill.recipes.sections import Data

CLASS_NAMES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
# Statistics of the 60,000 training images of the complete data set.
MEAN, STD = (0.2860,), (0.3530,)


def read(data: Data | None = None) -> ImageData:
    """Read the images, shrunk to ``data.image_size`` if given."""
    data = data or Data(name="fashion")
    if data.folder is not None:
        raise ValueError(
            f"fashion: folder={data.folder} has no effect, because the images are inside the package; leave it out"
        )
    file = resources.files("codistill.data") / "fashion" / "fashion.npz"
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        train, test = (
            Images(
                torch.from_numpy(arrays[f"{split}_pixels"]).unsqueeze(1),
                torch.from_numpy(arrays[f"{split}_labels"]).long(),
            )
            for split in ("train", "test")
        )
    images = ImageData("fashion", train, test, None, CLASS_NAMES, MEAN, STD, report={"source": "embedded"})
    return shrink(images, data.image_size)
