"""The recipes that ship, one row each: what it trains, and how it is built.

Sources are the tables of Yao & Sun (ECCV 2020); ``paper.py`` has their numbers. Milestones are shares of the training,
so that a shorter one drops the learning rate as early in proportion. The ImageNet pairs are trained on
``data.folder=FOLDER`` with ``train/<class>/*.jpg`` and ``val/<class>/*.jpg``, or tar shards (docs/data.md). Their
images are stretched to 256×256 as the paper says, trained on as random 224×224 crops and tested on the central one. The
usual alternative keeps proportions (``data.resize=short_side``) and draws the crop's size
(``augment.random_resized_crop=0.08``, best with ``data.image_size=352`` or so, to have some detail to cut from).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from codistill.recipes import paper
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import (
    AdamW,
    Augment,
    Cosine,
    Data,
    Evaluation,
    Heads,
    Length,
    Linear,
    Processes,
    Sgd,
    Steps,
)

# A placeholder for a file that only the user can name; a recipe that still has it is incomplete.
TO_BE_GIVEN = "FILE"


@dataclass(frozen=True)
class ListedRecipe:
    """One recipe of the catalogue. What only the user can name (a teacher's weights) reads ``FILE``."""

    name: str
    title: str
    build: Callable[[], Recipe]

    @cached_property
    def recipe(self) -> Recipe:
        return self.build().replace(name=self.name)

    @property
    def summary(self) -> str:
        """What it trains, and the expected test error."""
        return self.title + paper.sentence(self.name.removesuffix("-authors"))


def quickstart() -> Recipe:
    """The demonstration on the embedded data: minutes on two cores.

    It is not the paper's, whose Table 7 has the same setting at full size; on clean data of this size the effect does
    not show. Its numbers were chosen on seeds 101 to 103; docs/demo.md tells how often its order holds on others.
    """
    return Recipe(
        networks={"a": "wrn-10-1", "b": "wrn-10-1"},
        data=Data(name="fashion", image_size=14, wrong_labels=0.5, train_limit=1500, test_limit=2000),
        augment=Augment(pad=2),
        length=Length(epochs=40),
        batch_size=64,
        optimizer=Sgd(lr=0.1, weight_decay=5e-4, momentum=0.9),
        schedule=Steps(milestones=(0.3, 0.6, 0.8), factor=0.2),
        evaluation=Evaluation(every_epochs=5, all_every_epochs=20),
    )


def own_images() -> Recipe:
    """Two ResNet-18 from scratch on a folder of some hundred to some ten thousand photographs, in one command.

    Not the paper's. 64 pixels, so that a CPU can train it; docs/own-images.md says what to change on a GPU.
    """
    return Recipe(
        networks={"a": "resnet-18", "b": "resnet-18"},
        data=Data(name="folder", image_size=72, resize="short_side"),
        augment=Augment(pad=0, crop=64, random_resized_crop=0.35),
        length=Length(epochs=30),
        batch_size=32,
        optimizer=Sgd(lr=0.05, weight_decay=5e-4, momentum=0.9, nesterov=True),
        schedule=Cosine(warmup=0.1),
        evaluation=Evaluation(batch_size=256),
    )


def finetune() -> Recipe:
    """Two pretrained networks, fine-tuned on a folder of images; docs/finetune.md says how to change it.

    Not the paper's. The rates are usual ones for AdamW: 1e-3 for what is new, a tenth of it for what is pretrained.
    """
    return Recipe(
        networks={"a": "timm:resnet18.a1_in1k", "b": "timm:resnet34.a1_in1k"},
        data=Data(name="folder", image_size=256, resize="short_side", normalisation="pretrained"),
        augment=Augment(pad=0, crop=224, random_resized_crop=0.25),
        length=Length(epochs=20),
        batch_size=64,
        optimizer=AdamW(lr=1e-3, weight_decay=0.01, lr_factor={"backbone": 0.1}),
        schedule=Cosine(warmup=0.1),
        evaluation=Evaluation(batch_size=256),
    )


def wrn_pair(a: str, b: str) -> Recipe:
    """The paper's recipe for wide ResNets and for mixed pairs, in which WRN-28-10 has the higher capacity."""
    return Recipe(
        networks={"a": a, "b": b},
        method="dcm",
        data=Data(name="cifar100"),
        length=Length(epochs=200, paper_epochs=200),
        batch_size=128,
        optimizer=Sgd(lr=0.1, weight_decay=5e-4, momentum=0.9),
        schedule=Steps(milestones=(0.3, 0.6, 0.8), factor=0.2),
    )


def resnet_twins(network: str) -> Recipe:
    """The paper's recipe for ResNets and MobileNet: ÷10 every 60 of 200 epochs."""
    return wrn_pair(network, network).replace(
        batch_size=64,
        optimizer=Sgd(lr=0.1, weight_decay=1e-4, momentum=0.9),
        schedule=Steps(milestones=(0.3, 0.6, 0.9), factor=0.1),
    )


def densenet_twins() -> Recipe:
    """The paper's recipe for DenseNet-40-12: ÷10 at 150 and 225 of 300 epochs, Nesterov momentum."""
    return resnet_twins("densenet-40-12").replace(
        length=Length(epochs=300, paper_epochs=300),
        optimizer=Sgd(lr=0.1, weight_decay=1e-4, momentum=0.9, nesterov=True),
        schedule=Steps(milestones=(0.5, 0.75), factor=0.1),
    )


def wrn_twins(network: str = "wrn-28-10") -> Recipe:
    return wrn_pair(network, network)


def wrn_28_10_fast() -> Recipe:
    """Two WRN-28-10 in 13 minutes, by an estimate: no full run of it is published, so its error is not known either.

    Twins with the paper's heads train 3,729 images/s on an H200 (benchmarks/RESULTS.md), 13.4 s an epoch. Narrow heads
    leave 52 % of the FLOPs, so 80 epochs take 9 to 11 minutes, 20 at 16×16 pixels half a minute, a first start and the
    tests one more. Its parts are what shortened trainings elsewhere: one decay to 0, Nesterov momentum, half the side
    at first, cutout, smoothed labels. To be warned if a device is slower:

        codistill train cifar100/wrn-28-10-fast seed=1 --within 13
    """
    return wrn_twins().replace(
        method="mutual",
        heads=Heads(kind="narrow"),
        augment=Augment(cutout=8, half_until=0.2),
        length=Length(epochs=100),
        optimizer=Sgd(lr=0.1, weight_decay=5e-4, momentum=0.9, nesterov=True),
        schedule=Linear(warmup=0.05),
        label_smoothing=0.1,
        evaluation=Evaluation(every_epochs=10),
    )


def imagenet_pair(a: str, b: str) -> Recipe:
    """The paper's recipe for ImageNet's ResNets: ÷10 every 30 of 100 epochs."""
    return Recipe(
        networks={"a": a, "b": b},
        method="dcm",
        data=Data(name="folder", image_size=256),
        augment=Augment(pad=0, crop=224),
        length=Length(epochs=100, paper_epochs=100),
        batch_size=256,
        evaluation=Evaluation(batch_size=256),
        optimizer=Sgd(lr=0.1, weight_decay=1e-4, momentum=0.9),
        schedule=Steps(milestones=(0.3, 0.6, 0.9), factor=0.1),
    )


def mobilenetv2_twins() -> Recipe:
    """The paper's recipe for MobileNetV2: a cosine over 150 epochs."""
    return imagenet_pair("mobilenetv2", "mobilenetv2").replace(
        length=Length(epochs=150, paper_epochs=150),
        optimizer=Sgd(lr=0.05, weight_decay=4e-5, momentum=0.9),
        schedule=Cosine(),
    )


def _wrn(**changes: Any) -> Callable[[], Recipe]:
    return lambda: wrn_twins().replace(**changes)


def _densenet(**changes: Any) -> Callable[[], Recipe]:
    return lambda: densenet_twins().replace(**changes)


def _noisy(wrong_labels: float) -> Callable[[], Recipe]:
    return _densenet(data=Data(name="cifar10", wrong_labels=wrong_labels))


def _supervised(twins: Recipe) -> Recipe:
    return twins.replace(networks={"a": twins.networks["a"]}, method="ds")


def as_authors(recipe: Recipe) -> Recipe:
    """A recipe of WRN's with everything that the authors' scripts do otherwise: the switches of docs/differences.md."""
    return recipe.replace(
        init="authors",
        batchnorm_init="authors",
        kl_epsilon=1e-8,
        data=Data(name="cifar100", normalisation="authors"),
        augment=Augment(padding="reflect"),
        optimizer=Sgd(lr=0.1, weight_decay=5e-4, momentum=0.9, reset_momentum_at_drops=True),
        schedule=Steps(milestones=(0.295, 0.595, 0.795), factor=0.2),
        processes=Processes(sync_batchnorm=False),
    )


def kd_wrn_28_10_resnet_110() -> Recipe:
    networks = {"teacher": "wrn-28-10", "student": "resnet-110"}
    return wrn_pair("wrn-28-10", "resnet-110").replace(networks=networks, method="kd", start={"teacher": TO_BE_GIVEN})


AS_THEIRS = "trained as by the authors' code"
DROPOUT = "wrn-28-10-dropout-0.3"

_ROWS: dict[str, tuple[str, Callable[[], Recipe]]] = {
    "quickstart": (
        "Two tiny WRN on 1,500 small Fashion-MNIST images of which half have a wrong label.",
        quickstart,
    ),
    "own-images": ("Two ResNet-18 from scratch on a folder of your images", own_images),
    "finetune": ("Two ResNets with ImageNet's weights, fine-tuned on a folder of your images", finetune),
    # Table 1: pairs on CIFAR-100; the last three pairs of twins are not in the printed paper.
    "cifar100/resnet-164-twins": ("Two ResNet-164", lambda: resnet_twins("resnet-164")),
    "cifar100/wrn-28-10-twins": ("Two WRN-28-10", wrn_twins),
    "cifar100/densenet-40-12-twins": ("Two DenseNet-40-12", densenet_twins),
    "cifar100/wrn-28-10-resnet-110": ("WRN-28-10 & ResNet-110", lambda: wrn_pair("wrn-28-10", "resnet-110")),
    "cifar100/wrn-28-10-wrn-28-4": ("WRN-28-10 & WRN-28-4", lambda: wrn_pair("wrn-28-10", "wrn-28-4")),
    "cifar100/wrn-28-10-mobilenet": ("WRN-28-10 & MobileNet", lambda: wrn_pair("wrn-28-10", "mobilenet")),
    "cifar100/wrn-28-10-dropout-twins": ("Two WRN-28-10(+), dropout 0.3", lambda: wrn_twins(DROPOUT)),
    "cifar100/wrn-28-4-twins": ("Two WRN-28-4", lambda: wrn_twins("wrn-28-4")),
    "cifar100/resnet-110-twins": ("Two ResNet-110", lambda: resnet_twins("resnet-110")),
    "cifar100/mobilenet-twins": ("Two MobileNet", lambda: resnet_twins("mobilenet")),
    "cifar100/wrn-28-10-fast": (
        "Two WRN-28-10 in half of the epochs, with narrow heads, made for 13 minutes on an H200; not measured yet",
        wrn_28_10_fast,
    ),
    # As the authors' scripts train them: the first and the last of these are their two pairs.
    "cifar100/wrn-28-10-twins-authors": (f"Two WRN-28-10, {AS_THEIRS}", lambda: as_authors(wrn_twins())),
    "cifar100/wrn-28-4-twins-authors": (f"Two WRN-28-4, {AS_THEIRS}", lambda: as_authors(wrn_twins("wrn-28-4"))),
    "cifar100/wrn-28-10-mobilenet-authors": (
        f"WRN-28-10 & MobileNet, {AS_THEIRS}",
        lambda: as_authors(wrn_pair("wrn-28-10", "mobilenet")),
    ),
    # Table 2: pairs on ImageNet.
    "imagenet/resnet-18-twins": ("Two ResNet-18", lambda: imagenet_pair("resnet-18", "resnet-18")),
    "imagenet/mobilenetv2-twins": ("Two MobileNetV2", mobilenetv2_twins),
    "imagenet/resnet-50-resnet-18": ("ResNet-50 & ResNet-18", lambda: imagenet_pair("resnet-50", "resnet-18")),
    "imagenet/resnet-50-mobilenetv2": ("ResNet-50 & MobileNetV2", lambda: imagenet_pair("resnet-50", "mobilenetv2")),
    # Table 3: where the auxiliary classifiers are.
    "table3/independent": ("WRN-28-10 twins, no auxiliary classifier and no transfer", _wrn(method="independent")),
    "table3/c4": ("WRN-28-10 twins, DCM with C1 and C4 (after the stem)", _wrn(heads=Heads(exits=("stem",)))),
    "table3/c3": ("WRN-28-10 twins, DCM with C1 and C3 (after stage 1)", _wrn(heads=Heads(exits=("stage1",)))),
    "table3/c2": ("WRN-28-10 twins, DCM with C1 and C2 (after stage 2)", _wrn(heads=Heads(exits=("stage2",)))),
    "table3/c2c3": (
        "WRN-28-10 twins, DCM with C1, C2 and C3, the paper's choice",
        _wrn(heads=Heads(exits=("stage2", "stage1"))),
    ),
    "table3/c2c3c4": (
        "WRN-28-10 twins, DCM with C1, C2, C3 and C4",
        _wrn(heads=Heads(exits=("stage2", "stage1", "stem"))),
    ),
    # Table 4: the kind of auxiliary classifier.
    "table4/densenet-40-12-apfc": (
        "DenseNet-40-12 twins, heads that only pool and classify",
        _densenet(heads=Heads(kind="apfc")),
    ),
    "table4/densenet-40-12-narrow": (
        "DenseNet-40-12 twins, heads of half the growth",
        _densenet(heads=Heads(kind="narrow")),
    ),
    "table4/densenet-40-12-paper": ("DenseNet-40-12 twins, the paper's default heads", densenet_twins),
    "table4/wrn-28-10-apfc": ("WRN-28-10 twins, heads that only pool and classify", _wrn(heads=Heads(kind="apfc"))),
    "table4/wrn-28-10-narrow": ("WRN-28-10 twins, heads of half the width", _wrn(heads=Heads(kind="narrow"))),
    "table4/wrn-28-10-paper": ("WRN-28-10 twins, the paper's default heads", wrn_twins),
    # Table 5: which transfers matter.
    "table5/independent": ("DenseNet-40-12 twins, each alone", _densenet(method="independent")),
    "table5/dml": ("DenseNet-40-12 twins, finals teach each other", _densenet(method="dml")),
    "table5/dml-ds": ("DenseNet-40-12 twins, DML with deep supervision", _densenet(method="dml_ds")),
    "table5/dcm-1": ("DenseNet-40-12 twins, same stages teach each other", _densenet(method="dcm_1")),
    "table5/dcm-2": ("DenseNet-40-12 twins, different stages teach each other", _densenet(method="dcm_2")),
    "table5/dcm": ("DenseNet-40-12 twins, all stages teach each other", densenet_twins),
    # Table 6: deep supervision of one network.
    "table6/resnet-164": (
        "One ResNet-164 under deep supervision alone",
        lambda: _supervised(resnet_twins("resnet-164")),
    ),
    "table6/densenet-40-12": ("One DenseNet-40-12 under deep supervision alone", lambda: _supervised(densenet_twins())),
    "table6/wrn-28-10": ("One WRN-28-10 under deep supervision alone", lambda: _supervised(wrn_twins())),
    "table6/wrn-28-10-dropout": (
        "One WRN-28-10(+), dropout 0.3, under deep supervision alone",
        lambda: _supervised(wrn_twins(DROPOUT)),
    ),
    "table6/resnet-110": (
        "One ResNet-110 under deep supervision alone",
        lambda: _supervised(resnet_twins("resnet-110")),
    ),
    "table6/mobilenet": (
        "One MobileNet under deep supervision alone",
        lambda: _supervised(resnet_twins("mobilenet")),
    ),
    # Table 7: wrong training labels.
    "table7/wrong-labels-20": ("DenseNet-40-12 twins, CIFAR-10, 20 % wrong labels", _noisy(0.2)),
    "table7/wrong-labels-50": ("DenseNet-40-12 twins, CIFAR-10, 50 % wrong labels", _noisy(0.5)),
    "table7/wrong-labels-80": ("DenseNet-40-12 twins, CIFAR-10, 80 % wrong labels", _noisy(0.8)),
    "kd/wrn-28-10-resnet-110": ("A trained, frozen WRN-28-10 teaches ResNet-110", kd_wrn_28_10_resnet_110),
}
RECIPES = {name: ListedRecipe(name, *row) for name, row in _ROWS.items()}
NAMES = tuple(RECIPES)


def describe() -> list[ListedRecipe]:
    """All entries, in the paper's order."""
    return list(RECIPES.values())
