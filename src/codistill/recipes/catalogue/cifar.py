"""The CIFAR-100 pairs of Table 1 (Yao & Sun, ECCV 2020) and three pairs of twins that the paper has no row for.

Results are test error in %, mean(std) of n = 5 runs: network a, then network b.
Milestones are shares of the training, so that a shorter one drops the learning rate as early in proportion.
"""

from collections.abc import Callable

from codistill.recipes.schema import Data, Length, Recipe, Sgd, Steps


def _wrn(a: str, b: str) -> Recipe:
    """What the paper trains wide ResNets with, and mixed pairs: in each of them WRN-28-10 has the higher capacity."""
    return Recipe(
        networks={"a": a, "b": b},
        data=Data(name="cifar100"),
        length=Length(epochs=200, paper_epochs=200),
        batch_size=128,
        optimizer=Sgd(lr=0.1, weight_decay=5e-4, momentum=0.9),
        schedule=Steps(milestones=(0.3, 0.6, 0.8), factor=0.2),
    )


def _resnet(network: str) -> Recipe:
    """What the paper trains ResNets and MobileNet with: ÷10 every 60 of 200 epochs."""
    return _wrn(network, network).replace(
        batch_size=64,
        optimizer=Sgd(lr=0.1, weight_decay=1e-4, momentum=0.9),
        schedule=Steps(milestones=(0.3, 0.6, 0.9), factor=0.1),
    )


def resnet_164_twins() -> Recipe:
    """Two ResNet-164. Table 1: DCM 19.57(0.20) / 19.59(0.15), DML 20.69(0.25) / 20.72(0.14), independent 22.56(0.20).

    codistill train cifar100/resnet-164-twins method=dcm seed=1 --out runs/resnet-164-twins
    """
    return _resnet("resnet-164")


def wrn_28_10_twins() -> Recipe:
    """Two WRN-28-10. Table 1: DCM 16.61(0.24) / 16.65(0.22), DML 17.89(0.26) / 17.95(0.07), independent 18.72(0.24).

    codistill train cifar100/wrn-28-10-twins method=dcm seed=1 --out runs/wrn-28-10-twins
    """
    return _wrn("wrn-28-10", "wrn-28-10")


def densenet_40_12_twins() -> Recipe:
    """Two DenseNet-40-12. Table 1: DCM 22.35(0.12) / 22.41(0.17), DML 23.18(0.18) / 23.15(0.20),
    independent 24.91(0.18).

    codistill train cifar100/densenet-40-12-twins method=dcm seed=1 --out runs/densenet-40-12-twins
    """
    return _resnet("densenet-40-12").replace(
        length=Length(epochs=300, paper_epochs=300),
        optimizer=Sgd(lr=0.1, weight_decay=1e-4, momentum=0.9, nesterov=True),
        schedule=Steps(milestones=(0.5, 0.75), factor=0.1),
    )


def wrn_28_10_resnet_110() -> Recipe:
    """WRN-28-10 & ResNet-110. Table 1: DCM 17.82(0.14) / 22.99(0.30), DML 17.99(0.24) / 24.42(0.19),
    independent 18.72(0.24) / 26.55(0.26).

    codistill train cifar100/wrn-28-10-resnet-110 method=dcm seed=1 --out runs/wrn-28-10-resnet-110
    """
    return _wrn("wrn-28-10", "resnet-110")


def wrn_28_10_wrn_28_4() -> Recipe:
    """WRN-28-10 & WRN-28-4. Table 1: DCM 16.84(0.08) / 18.76(0.14), DML 17.80(0.11) / 20.21(0.16),
    independent 18.72(0.24) / 21.39(0.30).

    codistill train cifar100/wrn-28-10-wrn-28-4 method=dcm seed=1 --out runs/wrn-28-10-wrn-28-4
    """
    return _wrn("wrn-28-10", "wrn-28-4")


def wrn_28_10_mobilenet() -> Recipe:
    """WRN-28-10 & MobileNet. Table 1: DCM 16.83(0.07) / 21.43(0.20), DML 17.24(0.13) / 23.91(0.22),
    independent 18.72(0.24) / 26.30(0.35).

    codistill train cifar100/wrn-28-10-mobilenet method=dcm seed=1 --out runs/wrn-28-10-mobilenet
    """
    return _wrn("wrn-28-10", "mobilenet")


def wrn_28_10_dropout_twins() -> Recipe:
    """Two WRN-28-10(+), dropout 0.3. Table 1: DCM 16.57(0.12) / 16.59(0.15), DML 17.62(0.12) / 17.61(0.13),
    independent 18.64(0.19).

    codistill train cifar100/wrn-28-10-dropout-twins method=dcm seed=1 --out runs/wrn-28-10-dropout-twins
    """
    return _wrn("wrn-28-10-dropout-0.3", "wrn-28-10-dropout-0.3")


def wrn_28_4_twins() -> Recipe:
    """Two WRN-28-4. Not in the paper, whose WRN-28-4 has 21.39(0.30) alone (Table 1).

    codistill train cifar100/wrn-28-4-twins method=dcm seed=1 --out runs/wrn-28-4-twins
    """
    return _wrn("wrn-28-4", "wrn-28-4")


def resnet_110_twins() -> Recipe:
    """Two ResNet-110. Not in the paper; its source has 27.66(0.60) alone under this recipe, commented out.

    codistill train cifar100/resnet-110-twins method=dcm seed=1 --out runs/resnet-110-twins
    """
    return _resnet("resnet-110")


def mobilenet_twins() -> Recipe:
    """Two MobileNet. Not in the paper; its source has 23.60(0.22) alone under this recipe, commented out.

    codistill train cifar100/mobilenet-twins method=dcm seed=1 --out runs/mobilenet-twins
    """
    return _resnet("mobilenet")


RECIPES: dict[str, Callable[[], Recipe]] = {
    "cifar100/resnet-164-twins": resnet_164_twins,
    "cifar100/wrn-28-10-twins": wrn_28_10_twins,
    "cifar100/densenet-40-12-twins": densenet_40_12_twins,
    "cifar100/wrn-28-10-resnet-110": wrn_28_10_resnet_110,
    "cifar100/wrn-28-10-wrn-28-4": wrn_28_10_wrn_28_4,
    "cifar100/wrn-28-10-mobilenet": wrn_28_10_mobilenet,
    "cifar100/wrn-28-10-dropout-twins": wrn_28_10_dropout_twins,
    "cifar100/wrn-28-4-twins": wrn_28_4_twins,
    "cifar100/resnet-110-twins": resnet_110_twins,
    "cifar100/mobilenet-twins": mobilenet_twins,
}
