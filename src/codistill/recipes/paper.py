"""Every number of the paper (Yao & Sun, ECCV 2020), once, by catalogue recipe and method. Imports no torch.

Test error in %, mean(std) of 5 runs, network a, then network b. Where the paper prints one number for both twins
(independent training), both have it. Tables 4, 6 and 7 print one number for twins that learn together; it is that of
the ``better`` one: their numbers are the lower of Table 1's wherever a pair is in both, once network b's. Table 2 is
top-1/top-5, and the paper does not say of how many runs. Tables reprint each other's rows: so do these.

Numbers marked † are not in the printed paper: its LaTeX source has their rows commented out.
"""

from collections.abc import Mapping

RUNS = 5
COMMENTED_OUT = "†"
BETTER = "better"


def _table(text: str) -> dict[str, dict[str, str]]:
    """Cells by recipe and method; the first line names the methods."""
    (_, *methods), *rows = ([cell.strip() for cell in line.split("|")] for line in text.strip().splitlines())
    return {name: dict(zip(methods, cells, strict=True)) for name, *cells in rows}


TABLE_1 = _table("""
                                 | independent               | dml                       | dcm
cifar100/resnet-164-twins        | 22.56(0.20) 22.56(0.20)   | 20.69(0.25) 20.72(0.14)   | 19.57(0.20) 19.59(0.15)
cifar100/wrn-28-10-twins         | 18.72(0.24) 18.72(0.24)   | 17.89(0.26) 17.95(0.07)   | 16.61(0.24) 16.65(0.22)
cifar100/densenet-40-12-twins    | 24.91(0.18) 24.91(0.18)   | 23.18(0.18) 23.15(0.20)   | 22.35(0.12) 22.41(0.17)
cifar100/wrn-28-10-resnet-110    | 18.72(0.24) 26.55(0.26)   | 17.99(0.24) 24.42(0.19)   | 17.82(0.14) 22.99(0.30)
cifar100/wrn-28-10-wrn-28-4      | 18.72(0.24) 21.39(0.30)   | 17.80(0.11) 20.21(0.16)   | 16.84(0.08) 18.76(0.14)
cifar100/wrn-28-10-mobilenet     | 18.72(0.24) 26.30(0.35)   | 17.24(0.13) 23.91(0.22)   | 16.83(0.07) 21.43(0.20)
cifar100/wrn-28-10-dropout-twins | 18.64(0.19) 18.64(0.19)   | 17.62(0.12) 17.61(0.13)   | 16.57(0.12) 16.59(0.15)
cifar100/resnet-110-twins        | 27.66(0.60)† 27.66(0.60)† | 25.46(0.52)† 25.30(0.47)† | 25.37(0.29)† 25.18(0.15)†
cifar100/mobilenet-twins         | 23.60(0.22)† 23.60(0.22)† | 21.94(0.16)† 21.90(0.28)† | 20.74(0.11)† 20.47(0.04)†
""")

TABLE_2 = _table("""
                               | independent             | dml                     | dcm
imagenet/resnet-18-twins       | 31.08/11.17 31.08/11.17 | 29.13/9.89 29.25/10.00  | 28.67/9.71 28.74/9.74
imagenet/mobilenetv2-twins     | 27.80/9.50 27.80/9.50   | 26.61/8.85 26.78/8.97   | 25.62/8.16 25.74/8.21
imagenet/resnet-50-resnet-18   | 25.47/7.58 31.08/11.17  | 25.24/7.56 28.65/9.49   | 24.92/7.42 27.93/9.19
imagenet/resnet-50-mobilenetv2 | 25.47/7.58† 27.80/9.50† | 24.87/7.35† 26.15/8.64† | 24.32/7.02† 25.23/7.97†
""")

TABLE_3 = {
    "table3/independent": "18.72(0.24) 18.72(0.24)",
    "table3/c4": "17.16(0.14) 17.25(0.15)",
    "table3/c3": "16.89(0.21) 17.04(0.06)",
    "table3/c2": "17.40(0.20) 17.38(0.17)",
    "table3/c2c3": "16.61(0.24) 16.65(0.22)",
    "table3/c2c3c4": "16.59(0.12) 16.73(0.17)",
}

TABLE_4 = {
    "table4/densenet-40-12-apfc": "better 25.10(0.25)",
    "table4/densenet-40-12-narrow": "better 22.45(0.25)",
    "table4/densenet-40-12-paper": "better 22.35(0.12)",
    "table4/wrn-28-10-apfc": "better 18.23(0.10)",
    "table4/wrn-28-10-narrow": "better 16.88(0.17)",
    "table4/wrn-28-10-paper": "better 16.61(0.24)",
}

TABLE_5 = {
    "table5/independent": "24.91(0.18) 24.91(0.18)",
    "table5/dml": "23.18(0.18) 23.15(0.20)",
    "table5/dml-ds": "23.18(0.33) 23.08(0.28)",
    "table5/dcm-1": "22.86(0.16) 22.89(0.14)",
    "table5/dcm-2": "22.43(0.25) 22.51(0.18)",
    "table5/dcm": "22.35(0.12) 22.41(0.17)",
}

# Transfers in one direction only, for which no method ships; docs/own-method.md builds the first.
TABLE_5_COMMENTED_OUT = {"top-down": "23.08(0.15)† 23.03(0.12)†", "bottom-up": "23.88(0.13)† 23.98(0.20)†"}

TABLE_6 = _table("""
                         | independent               | ds           | dcm
table6/resnet-164        | 22.56(0.20) 22.56(0.20)   | 21.38(0.32)  | better 19.57(0.20)
table6/densenet-40-12    | 24.91(0.18) 24.91(0.18)   | 24.46(0.22)  | better 22.35(0.12)
table6/wrn-28-10         | 18.72(0.24) 18.72(0.24)   | 18.32(0.13)  | better 16.61(0.24)
table6/wrn-28-10-dropout | 18.64(0.19) 18.64(0.19)   | 17.80(0.29)  | better 16.57(0.12)
table6/resnet-110        | 27.66(0.60)† 27.66(0.60)† | 26.95(0.51)† | better 25.18(0.15)†
table6/mobilenet         | 23.60(0.22)† 23.60(0.22)† | 22.98(0.17)† | better 20.47(0.04)†
""")

TABLE_7 = _table("""
                       | independent             | dml                | dcm
table7/wrong-labels-20 | 9.85(0.24) 9.85(0.24)   | better 8.13(0.14)  | better 7.11(0.11)
table7/wrong-labels-50 | 17.93(0.39) 17.93(0.39) | better 14.31(0.30) | better 12.08(0.34)
table7/wrong-labels-80 | 35.32(0.42) 35.32(0.42) | better 32.65(0.96) | better 31.26(0.94)
""")

# A frozen WRN-28-10 teaches ResNet-110, network b.
KD = {"independent": TABLE_1["cifar100/wrn-28-10-resnet-110"]["independent"], "kd": "- 26.66"}

# WRN-28-4 alone, under the recipe that its twins have.
WRN_28_4_ALONE = " ".join(2 * [TABLE_1["cifar100/wrn-28-10-wrn-28-4"]["independent"].split()[1]])

_COLUMNS = {"dcm": "DCM", "dml": "DML", "independent": "independent"}


def sentence(name: str) -> str:
    """The expected result of a catalogue recipe as listings print it after its title; empty where there is none."""
    found = _sentence(name)
    return f"{found} †: commented out in the paper's source." if COMMENTED_OUT in found else found


def _sentence(name: str) -> str:
    if cells := TABLE_1.get(name):
        return f". Table 1: {_by_method(cells, ' / ')}."
    if cells := TABLE_2.get(name):
        return f". Table 2: {_by_method(cells, ' and ')}."
    if cell := {**TABLE_3, **TABLE_5}.get(name):
        return f": {_by_network(cell, ' / ')}."
    if cell := TABLE_4.get(name):
        return f": {_by_network(cell, '')}, the better twin's."
    if cells := TABLE_6.get(name):
        return f": {cells['ds']}, against {_by_network(cells['independent'], '')} without."
    if cells := TABLE_7.get(name):
        return f": {_by_method(cells, '')}; of twins the better."
    if name == "cifar100/wrn-28-4-twins":
        return f". Not in the paper, whose WRN-28-4 has {_by_network(WRN_28_4_ALONE, ' / ')} alone (Table 1)."
    if name == "kd/wrn-28-10-resnet-110":
        taught, alone = (KD[method].split()[1] for method in ("kd", "independent"))
        return f": {taught}, against {alone} alone under the same recipe."
    return ""


def _by_method(cells: Mapping[str, str], between: str) -> str:
    return ", ".join(f"{label} {_by_network(cells[method], between)}" for method, label in _COLUMNS.items())


def _by_network(cell: str, between: str) -> str:
    """Both networks' numbers, or one if they are the same."""
    return between.join(dict.fromkeys(word for word in cell.split() if word != BETTER))
