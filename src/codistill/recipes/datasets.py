"""The data sets that a recipe can name, one row each. Imports no torch.

A new data set is one row here and one module in ``data/`` whose ``read`` returns its images (``data.load.READERS``).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Numbers(NamedTuple):
    """What is known of a data set before its files are read; images are square, ``side`` pixels wide."""

    classes: int
    channels: int
    side: int
    train_images: int
    test_images: int


@dataclass(frozen=True)
class DataSet:
    """One row: its name in recipes, where its files come from, and the line that ``codistill list data`` prints."""

    name: str
    reader: Literal["embedded", "cifar", "image_folder"]
    """The module of ``data/`` that reads it."""
    files: Literal["package", "archive", "folder"]
    """They ship with the package, are downloaded as an official archive, or are a folder of the user's own images."""
    help: str
    numbers: Numbers | None
    """None for a folder: its files tell."""

    @property
    def description(self) -> str:
        if self.numbers is None:
            return self.help
        classes, channels, side, train, test = self.numbers
        colour = "grey" if channels == 1 else "colour"
        where = "ships with codistill: " if self.files == "package" else ""
        return (
            f"{where}{classes} kinds of {self.help}, {side}×{side} {colour}, "
            f"{train:,} training and {test:,} test images"
        )


_ROWS = (
    DataSet("fashion", "embedded", "package", "clothes", Numbers(10, 1, 28, 6_000, 2_000)),
    DataSet("cifar10", "cifar", "archive", "things", Numbers(10, 3, 32, 50_000, 10_000)),
    DataSet("cifar100", "cifar", "archive", "things", Numbers(100, 3, 32, 50_000, 10_000)),
    DataSet(
        "folder",
        "image_folder",
        "folder",
        "your own images: DIR/CLASS/*.jpg, or DIR/train/CLASS/*.jpg and the same under DIR/test",
        None,
    ),
)
DATASETS = {row.name: row for row in _ROWS}
NUMBERS = {row.name: row.numbers for row in _ROWS if row.numbers is not None}
