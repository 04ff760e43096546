"""The ImageNet pairs of Table 2 (Yao & Sun, ECCV 2020).

Results are top-1/top-5 test error in %, network a, then network b; the paper says no n. ``data.folder=FOLDER`` names
the images: ``train/<class>/*.jpg`` and ``val/<class>/*.jpg``, or tar shards (docs/data.md). They are stretched to
256×256 as the paper says, trained on random 224×224 crops and tested on the central one. Elsewhere the proportions are
kept (``data.resize=short_side``), and the crop is of random size (``augment.random_resized_crop=0.08``, best with
``data.image_size=352`` or so, to have some detail to cut from).
"""

from collections.abc import Callable

from codistill.recipes.schema import Augment, Cosine, Data, Evaluation, Length, Recipe, Sgd, Steps


def _pair(a: str, b: str) -> Recipe:
    """What the paper trains ImageNet's ResNets with: ÷10 every 30 of 100 epochs."""
    return Recipe(
        networks={"a": a, "b": b},
        data=Data(name="folder", image_size=256),
        augment=Augment(pad=0, crop=224),
        length=Length(epochs=100, paper_epochs=100),
        batch_size=256,
        evaluation=Evaluation(batch_size=256),
        optimizer=Sgd(lr=0.1, weight_decay=1e-4, momentum=0.9),
        schedule=Steps(milestones=(0.3, 0.6, 0.9), factor=0.1),
    )


def resnet_18_twins() -> Recipe:
    """Two ResNet-18. Table 2: DCM 28.67/9.71 and 28.74/9.74, DML 29.13/9.89 and 29.25/10.00, independent 31.08/11.17.

    codistill train imagenet/resnet-18-twins data.folder=FOLDER method=dcm seed=1 --out runs/resnet-18-twins
    """
    return _pair("resnet-18", "resnet-18")


def mobilenetv2_twins() -> Recipe:
    """Two MobileNetV2. Table 2: DCM 25.62/8.16 and 25.74/8.21, DML 26.61/8.85 and 26.78/8.97, independent 27.80/9.50.

    codistill train imagenet/mobilenetv2-twins data.folder=FOLDER method=dcm seed=1 --out runs/mobilenetv2-twins
    """
    return _pair("mobilenetv2", "mobilenetv2").replace(
        length=Length(epochs=150, paper_epochs=150),
        optimizer=Sgd(lr=0.05, weight_decay=4e-5, momentum=0.9),
        schedule=Cosine(),
    )


def resnet_50_resnet_18() -> Recipe:
    """ResNet-50 & ResNet-18. Table 2: DCM 24.92/7.42 and 27.93/9.19, DML 25.24/7.56 and 28.65/9.49,
    independent 25.47/7.58 and 31.08/11.17.

    codistill train imagenet/resnet-50-resnet-18 data.folder=FOLDER method=dcm seed=1 --out runs/resnet-50-resnet-18
    """
    return _pair("resnet-50", "resnet-18")


RECIPES: dict[str, Callable[[], Recipe]] = {
    "imagenet/resnet-18-twins": resnet_18_twins,
    "imagenet/mobilenetv2-twins": mobilenetv2_twins,
    "imagenet/resnet-50-resnet-18": resnet_50_resnet_18,
}
