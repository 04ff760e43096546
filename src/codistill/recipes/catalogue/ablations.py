"""The ablations of Tables 3–7 (Yao & Sun, ECCV 2020) and its KD baseline: each one replacement in a pair of Table 1.

Results are test error in %, mean(std) of n = 5 runs, on CIFAR-100 unless said: network a, then network b.
"""

from collections.abc import Callable

from codistill.recipes.catalogue import cifar
from codistill.recipes.schema import Data, Heads, Recipe

# Stands for a file that only the person who trains can name; a recipe that still has it is incomplete.
TO_BE_GIVEN = "FILE"


def _table_3(*exits: str) -> Recipe:
    return cifar.wrn_28_10_twins().replace(heads=Heads(exits=exits))


def table_3_independent() -> Recipe:
    """WRN-28-10 twins, no auxiliary classifier and no transfer: 18.72(0.24).

    codistill train table3/independent seed=1 --out runs/table3-independent
    """
    return cifar.wrn_28_10_twins().replace(method="independent")


def table_3_c4() -> Recipe:
    """WRN-28-10 twins, DCM with C1 and C4 (after the stem): 17.16(0.14) / 17.25(0.15).

    codistill train table3/c4 seed=1 --out runs/table3-c4
    """
    return _table_3("stem")


def table_3_c3() -> Recipe:
    """WRN-28-10 twins, DCM with C1 and C3 (after stage 1): 16.89(0.21) / 17.04(0.06).

    codistill train table3/c3 seed=1 --out runs/table3-c3
    """
    return _table_3("stage1")


def table_3_c2() -> Recipe:
    """WRN-28-10 twins, DCM with C1 and C2 (after stage 2): 17.40(0.20) / 17.38(0.17).

    codistill train table3/c2 seed=1 --out runs/table3-c2
    """
    return _table_3("stage2")


def table_3_c2c3() -> Recipe:
    """WRN-28-10 twins, DCM with C1, C2 and C3, the paper's choice: 16.61(0.24) / 16.65(0.22).

    codistill train table3/c2c3 seed=1 --out runs/table3-c2c3
    """
    return _table_3("stage2", "stage1")


def table_3_c2c3c4() -> Recipe:
    """WRN-28-10 twins, DCM with C1, C2, C3 and C4: 16.59(0.12) / 16.73(0.17).

    codistill train table3/c2c3c4 seed=1 --out runs/table3-c2c3c4
    """
    return _table_3("stage2", "stage1", "stem")


def table_4_densenet_apfc() -> Recipe:
    """DenseNet-40-12 twins, heads that only pool and classify: 25.10(0.25) for network a.

    codistill train table4/densenet-40-12-apfc seed=1 --out runs/table4-densenet-40-12-apfc
    """
    return cifar.densenet_40_12_twins().replace(heads=Heads(kind="apfc"))


def table_4_densenet_narrow() -> Recipe:
    """DenseNet-40-12 twins, heads of half the growth: 22.45(0.25) for network a.

    codistill train table4/densenet-40-12-narrow seed=1 --out runs/table4-densenet-40-12-narrow
    """
    return cifar.densenet_40_12_twins().replace(heads=Heads(kind="narrow"))


def table_4_densenet_paper() -> Recipe:
    """DenseNet-40-12 twins, the paper's default heads: 22.35(0.12) for network a.

    codistill train table4/densenet-40-12-paper seed=1 --out runs/table4-densenet-40-12-paper
    """
    return cifar.densenet_40_12_twins()


def table_4_wrn_apfc() -> Recipe:
    """WRN-28-10 twins, heads that only pool and classify: 18.23(0.10) for network a.

    codistill train table4/wrn-28-10-apfc seed=1 --out runs/table4-wrn-28-10-apfc
    """
    return cifar.wrn_28_10_twins().replace(heads=Heads(kind="apfc"))


def table_4_wrn_narrow() -> Recipe:
    """WRN-28-10 twins, heads of half the width: 16.88(0.17) for network a.

    codistill train table4/wrn-28-10-narrow seed=1 --out runs/table4-wrn-28-10-narrow
    """
    return cifar.wrn_28_10_twins().replace(heads=Heads(kind="narrow"))


def table_4_wrn_paper() -> Recipe:
    """WRN-28-10 twins, the paper's default heads: 16.61(0.24) for network a.

    codistill train table4/wrn-28-10-paper seed=1 --out runs/table4-wrn-28-10-paper
    """
    return cifar.wrn_28_10_twins()


def table_5_independent() -> Recipe:
    """DenseNet-40-12 twins, each alone: 24.91(0.18).

    codistill train table5/independent seed=1 --out runs/table5-independent
    """
    return cifar.densenet_40_12_twins().replace(method="independent")


def table_5_dml() -> Recipe:
    """DenseNet-40-12 twins, finals teach each other: 23.18(0.18) / 23.15(0.20).

    codistill train table5/dml seed=1 --out runs/table5-dml
    """
    return cifar.densenet_40_12_twins().replace(method="dml")


def table_5_dml_ds() -> Recipe:
    """DenseNet-40-12 twins, DML with deep supervision: 23.18(0.33) / 23.08(0.28).

    codistill train table5/dml-ds seed=1 --out runs/table5-dml-ds
    """
    return cifar.densenet_40_12_twins().replace(method="dml_ds")


def table_5_dcm_1() -> Recipe:
    """DenseNet-40-12 twins, same stages teach each other: 22.86(0.16) / 22.89(0.14).

    codistill train table5/dcm-1 seed=1 --out runs/table5-dcm-1
    """
    return cifar.densenet_40_12_twins().replace(method="dcm_1")


def table_5_dcm_2() -> Recipe:
    """DenseNet-40-12 twins, different stages teach each other: 22.43(0.25) / 22.51(0.18).

    codistill train table5/dcm-2 seed=1 --out runs/table5-dcm-2
    """
    return cifar.densenet_40_12_twins().replace(method="dcm_2")


def table_5_dcm() -> Recipe:
    """DenseNet-40-12 twins, all stages teach each other: 22.35(0.12) / 22.41(0.17).

    codistill train table5/dcm seed=1 --out runs/table5-dcm
    """
    return cifar.densenet_40_12_twins()


def _deep_supervision(twins: Recipe) -> Recipe:
    return twins.replace(networks={"a": twins.networks["a"]}, method="ds")


def table_6_resnet_164() -> Recipe:
    """One ResNet-164 under deep supervision alone: 21.38(0.32), against 22.56(0.20) without.

    codistill train table6/resnet-164 seed=1 --out runs/table6-resnet-164
    """
    return _deep_supervision(cifar.resnet_164_twins())


def table_6_densenet_40_12() -> Recipe:
    """One DenseNet-40-12 under deep supervision alone: 24.46(0.22), against 24.91(0.18) without.

    codistill train table6/densenet-40-12 seed=1 --out runs/table6-densenet-40-12
    """
    return _deep_supervision(cifar.densenet_40_12_twins())


def table_6_wrn_28_10() -> Recipe:
    """One WRN-28-10 under deep supervision alone: 18.32(0.13), against 18.72(0.24) without.

    codistill train table6/wrn-28-10 seed=1 --out runs/table6-wrn-28-10
    """
    return _deep_supervision(cifar.wrn_28_10_twins())


def table_6_wrn_28_10_dropout() -> Recipe:
    """One WRN-28-10(+), dropout 0.3, under deep supervision alone: 17.80(0.29), against 18.64(0.19) without.

    codistill train table6/wrn-28-10-dropout seed=1 --out runs/table6-wrn-28-10-dropout
    """
    return _deep_supervision(cifar.wrn_28_10_dropout_twins())


def _table_7(wrong_labels: float) -> Recipe:
    return cifar.densenet_40_12_twins().replace(data=Data(name="cifar10", wrong_labels=wrong_labels))


def table_7_wrong_20() -> Recipe:
    """DenseNet-40-12 twins, CIFAR-10, 20 % wrong labels: DCM 7.11(0.11), DML 8.13(0.14), independent 9.85(0.24).

    codistill train table7/wrong-labels-20 method=dcm seed=1 --out runs/table7-wrong-labels-20
    """
    return _table_7(0.2)


def table_7_wrong_50() -> Recipe:
    """DenseNet-40-12 twins, CIFAR-10, 50 % wrong labels: DCM 12.08(0.34), DML 14.31(0.30), independent 17.93(0.39).

    codistill train table7/wrong-labels-50 method=dcm seed=1 --out runs/table7-wrong-labels-50
    """
    return _table_7(0.5)


def table_7_wrong_80() -> Recipe:
    """DenseNet-40-12 twins, CIFAR-10, 80 % wrong labels: DCM 31.26(0.94), DML 32.65(0.96), independent 35.32(0.42).

    codistill train table7/wrong-labels-80 method=dcm seed=1 --out runs/table7-wrong-labels-80
    """
    return _table_7(0.8)


def kd_wrn_28_10_resnet_110() -> Recipe:
    """A trained, frozen WRN-28-10 teaches ResNet-110: 26.66, against 26.55(0.26) alone under the same recipe.

    codistill train cifar100/wrn-28-10-twins method=independent seed=1 --out runs/teacher
    codistill train kd/wrn-28-10-resnet-110 start.teacher=runs/teacher/weights/a.safetensors seed=1 --out runs/kd
    """
    networks = {"teacher": "wrn-28-10", "student": "resnet-110"}
    pair = cifar.wrn_28_10_resnet_110()
    return pair.replace(networks=networks, method="kd", start={"teacher": TO_BE_GIVEN})


RECIPES: dict[str, Callable[[], Recipe]] = {
    "table3/independent": table_3_independent,
    "table3/c4": table_3_c4,
    "table3/c3": table_3_c3,
    "table3/c2": table_3_c2,
    "table3/c2c3": table_3_c2c3,
    "table3/c2c3c4": table_3_c2c3c4,
    "table4/densenet-40-12-apfc": table_4_densenet_apfc,
    "table4/densenet-40-12-narrow": table_4_densenet_narrow,
    "table4/densenet-40-12-paper": table_4_densenet_paper,
    "table4/wrn-28-10-apfc": table_4_wrn_apfc,
    "table4/wrn-28-10-narrow": table_4_wrn_narrow,
    "table4/wrn-28-10-paper": table_4_wrn_paper,
    "table5/independent": table_5_independent,
    "table5/dml": table_5_dml,
    "table5/dml-ds": table_5_dml_ds,
    "table5/dcm-1": table_5_dcm_1,
    "table5/dcm-2": table_5_dcm_2,
    "table5/dcm": table_5_dcm,
    "table6/resnet-164": table_6_resnet_164,
    "table6/densenet-40-12": table_6_densenet_40_12,
    "table6/wrn-28-10": table_6_wrn_28_10,
    "table6/wrn-28-10-dropout": table_6_wrn_28_10_dropout,
    "table7/wrong-labels-20": table_7_wrong_20,
    "table7/wrong-labels-50": table_7_wrong_50,
    "table7/wrong-labels-80": table_7_wrong_80,
    "kd/wrn-28-10-resnet-110": kd_wrn_28_10_resnet_110,
}
