"""The studies that ship, as functions by name. Rows derive from the recipe catalogue, so tables share runs."""

from collections.abc import Callable, Mapping

from codistill import recipes
from codistill.errors import unknown
from codistill.networks.families import title
from codistill.recipes import Recipe, paper
from codistill.studies import budgets
from codistill.studies.study import METHOD_LABELS, Study, StudyRow, cohort_title, paper_numbers

THREE = ("independent", "dml", "dcm")
THREE_CONTRASTS = (("DML", "independent"), ("DCM", "independent"), ("DCM", "DML"))
PRIMARY = (("DCM", "DML"),)  # the paper's claim
FOUR_CONTRASTS = (*THREE_CONTRASTS, ("complete", "DCM"))
FOUR_PRIMARY = (*PRIMARY, ("complete", "DCM"))
EDGE_CONTRASTS = (
    *((METHOD_LABELS[method], "independent") for method in ("dml", "dml_ds", "dcm_1", "dcm_2", "dcm")),
    ("DML + DS", "DML"),
    ("DCM-1", "DML + DS"),
    ("DCM-2", "DML + DS"),
    ("DCM-2", "DCM-1"),
    ("DCM", "DCM-1"),
    ("DCM", "DCM-2"),
    ("DCM", "DML"),
)
EDGE_PRIMARY = (("DCM-2", "DCM-1"),)  # between different stages, or between the same


def method_rows(
    recipe: Recipe,
    methods: tuple[str, ...],
    cells: Mapping[str, str] | None = None,
    *,
    group: str | None = None,
    runs: int | None = paper.RUNS,
) -> tuple[StudyRow, ...]:
    """One row per method on the same recipe, each with the paper's number where there is one."""
    return tuple(
        StudyRow(
            group or cohort_title(recipe),
            METHOD_LABELS[method],
            recipe.replace(method=method),
            paper_numbers((cells or {}).get(method, ""), runs),
        )
        for method in methods
    )


def pair_rows(cells: Mapping[str, Mapping[str, str]], runs: int | None = paper.RUNS) -> tuple[StudyRow, ...]:
    return tuple(row for name, pair in cells.items() for row in method_rows(recipes.get(name), THREE, pair, runs=runs))


def noise_rows(recipe: Recipe, cells: Mapping[str, str] | None = None) -> tuple[StudyRow, ...]:
    return method_rows(recipe, THREE, cells, group=f"{recipe.data.wrong_labels:.0%} wrong")


def demo() -> Study:
    title = "Two small networks on the embedded data, half of the training labels wrong"
    rows = method_rows(recipes.get("quickstart"), THREE)
    # The setting was chosen on seeds 101 to 103, a shorter one rejected on 1 to 3.
    primary = (("DCM", "independent"),)
    return Study("demo", title, rows, THREE_CONTRASTS, primary, seeds=3, first_seed=41)


def table1() -> Study:
    title = "Table 1: pairs of networks on CIFAR-100"
    return Study("table1", title, pair_rows(paper.TABLE_1), THREE_CONTRASTS, PRIMARY)


def table2() -> Study:
    return Study(
        "table2",
        "Table 2: pairs of networks on ImageNet",
        pair_rows(paper.TABLE_2, runs=None),
        THREE_CONTRASTS,
        PRIMARY,
        metrics=("top1_error", "top5_error"),
        seeds=1,
        notes=("The paper does not say of how many runs its Table 2 is.",),
    )


def table3() -> Study:
    labels = {
        "table3/independent": "independent",
        "table3/c4": "C1+C4",
        "table3/c3": "C1+C3",
        "table3/c2": "C1+C2",
        "table3/c2c3": "C1+C2C3",
        "table3/c2c3c4": "C1+C2C3C4",
    }
    # C1+C2C3 is the default placement: the recipe of Table 1, so that the two tables share its runs.
    same_as = {"table3/c2c3": "cifar100/wrn-28-10-twins"}
    rows = tuple(
        StudyRow("WRN-28-10 & same", label, recipes.get(same_as.get(name, name)), paper_numbers(paper.TABLE_3[name]))
        for name, label in labels.items()
    )
    contrasts = (
        *((row.label, "independent") for row in rows[1:]),
        *(("C1+C2C3", label) for label in ("C1+C4", "C1+C3", "C1+C2")),
        ("C1+C2C3C4", "C1+C2C3"),
    )
    heading = "Table 3: where the auxiliary classifiers are attached, DCM on CIFAR-100"
    return Study("table3", heading, rows, contrasts, primary=(("C1+C2C3", "C1+C3"),))


def table4() -> Study:
    kinds = {"apfc": "APFC", "narrow": "narrow", "paper": "default"}
    rows = tuple(
        StudyRow(cohort_title(recipe := recipes.get(name)), kinds[recipe.heads.kind], recipe, paper_numbers(cell))
        for name, cell in paper.TABLE_4.items()
    )
    contrasts = (("narrow", "APFC"), ("default", "APFC"), ("default", "narrow"))
    heading = "Table 4: the kind of auxiliary classifiers, DCM on CIFAR-100"
    return Study("table4", heading, rows, contrasts, primary=(("default", "APFC"),))


def table5() -> Study:
    rows = tuple(
        StudyRow(cohort_title(recipe := recipes.get(name)), METHOD_LABELS[recipe.method], recipe, paper_numbers(cell))
        for name, cell in paper.TABLE_5.items()
    )
    directions = " and ".join(f"{name} {cell}" for name, cell in paper.TABLE_5_COMMENTED_OUT.items())
    note = f"{paper.COMMENTED_OUT} Commented out in the paper's LaTeX source, and no rows here: {directions}."
    return Study(
        "table5", "Table 5: which transfers matter, on CIFAR-100", rows, EDGE_CONTRASTS, EDGE_PRIMARY, notes=(note,)
    )


def table6() -> Study:
    def rows(alone: str, twins: str) -> tuple[StudyRow, ...]:
        pair, cells = recipes.get(twins), paper.TABLE_6[alone]
        trained = {
            "independent": pair.replace(method="independent"),
            "ds": recipes.get(alone),
            "dcm": pair.replace(method="dcm"),
        }
        return tuple(
            StudyRow(title(pair.networks["a"]), METHOD_LABELS[method], recipe, paper_numbers(cells[method]))
            for method, recipe in trained.items()
        )

    every = (
        *rows("table6/resnet-164", "cifar100/resnet-164-twins"),
        *rows("table6/densenet-40-12", "cifar100/densenet-40-12-twins"),
        *rows("table6/wrn-28-10", "cifar100/wrn-28-10-twins"),
        *rows("table6/wrn-28-10-dropout", "cifar100/wrn-28-10-dropout-twins"),
        *rows("table6/resnet-110", "cifar100/resnet-110-twins"),
        *rows("table6/mobilenet", "cifar100/mobilenet-twins"),
    )
    contrasts = (("DS", "independent"), ("DCM", "independent"), ("DCM", "DS"))
    return Study("table6", "Table 6: deep supervision alone, on CIFAR-100", every, contrasts, (("DCM", "DS"),))


def table7() -> Study:
    title = "Table 7: wrong training labels, DenseNet-40-12 twins on CIFAR-10, clean test set"
    rows = tuple(row for name, cells in paper.TABLE_7.items() for row in noise_rows(recipes.get(name), cells))
    return Study("table7", title, rows, THREE_CONTRASTS, PRIMARY)


def kd() -> Study:
    pair = recipes.get("cifar100/wrn-28-10-resnet-110")
    alone, *mutual = method_rows(pair, THREE, {**paper.TABLE_1[pair.name], **paper.KD})
    # The teacher is the WRN-28-10 trained alone with the same seed; planning fills in the path of its weights.
    student = StudyRow(
        alone.group,
        METHOD_LABELS["kd"],
        pair.replace(method="kd", start={"a": "the weights of a finished run"}),
        paper_numbers(paper.KD["kd"]),
        teachers={"a": (alone, "a")},
    )
    return Study(
        "kd",
        "KD: a trained, frozen WRN-28-10 (a) teaches ResNet-110 (b), on CIFAR-100",
        (alone, student, *mutual),
        (("KD", "independent"), ("DML", "KD"), ("DCM", "KD")),
        primary=(("KD", "independent"),),
        notes=("In the row KD, network a is the teacher: trained alone, then frozen.",),
    )


def efficiency() -> Study:
    return _efficiency("efficiency", recipes.get("cifar100/wrn-28-4-twins"), dcm_cost=2.8)


def wrn_16_2_efficiency() -> Study:
    return _efficiency("wrn-16-2-efficiency", _pair("wrn-16-2-efficiency", "wrn-16-2"), dcm_cost=2.7)


def _efficiency(name: str, pair: Recipe, *, dcm_cost: float) -> Study:
    """Build the study; ``dcm_cost`` is the cost of DCM's forward pass, with both heads, relative to plain training."""
    alone, dml, dcm, complete = method_rows(pair, (*THREE, "complete"))
    kinds = {"narrow": "DCM, narrow heads", "apfc": "DCM, APFC heads"}
    longer = f"independent, {dcm_cost}× as long"
    return Study(
        name,
        f"Error against training cost, {title(pair.networks['a'])} twins on CIFAR-100",
        (
            alone,
            StudyRow(alone.group, longer, alone.recipe, length_factor=dcm_cost),
            dml,
            *(StudyRow(dcm.group, label, pair.replace(heads={"kind": kind})) for kind, label in kinds.items()),
            dcm,
            complete,
        ),
        (
            *(("DCM", label) for label in ("independent", longer, "DML")),
            *(("DCM, narrow heads", label) for label in (longer, "DCM")),
            ("DCM, APFC heads", "DCM"),
            ("complete", "DCM"),
        ),
        primary=(("DCM", longer),),
        seeds=3,
        notes=(f"A network trained alone {dcm_cost}× as long costs what DCM with its default heads costs.",),
        shows_cost=True,
    )


def curves() -> Study:
    name = "cifar100/wrn-28-10-twins"
    rows = method_rows(recipes.get(name), THREE, paper.TABLE_1[name])
    heading = "Test error over the training, WRN-28-10 twins on CIFAR-100"
    return Study("curves", heading, rows, THREE_CONTRASTS, PRIMARY)


def wrn_28_4_twins() -> Study:
    cells = {"independent": paper.WRN_28_4_ALONE}
    rows = method_rows(recipes.get("cifar100/wrn-28-4-twins"), (*THREE, "complete"), cells)
    note = "The paper has no WRN-28-4 twins; its WRN-28-4 beside a WRN-28-10 has DML 20.21(0.16), DCM 18.76(0.14)."
    return Study(
        "wrn-28-4-twins", "WRN-28-4 twins on CIFAR-100", rows, FOUR_CONTRASTS, FOUR_PRIMARY, seeds=3, notes=(note,)
    )


def wrn_28_4_edges() -> Study:
    return _edges("wrn-28-4-edges", recipes.get("cifar100/wrn-28-4-twins"), {"independent": paper.WRN_28_4_ALONE})


def wrn_16_2_edges() -> Study:
    return _edges("wrn-16-2-edges", _pair("wrn-16-2-edges", "wrn-16-2"), {})


def _edges(name: str, pair: Recipe, cells: Mapping[str, str]) -> Study:
    heading = f"Which transfers matter: the rows of Table 5 on {title(pair.networks['a'])} twins, CIFAR-100"
    rows = method_rows(pair, ("independent", "dml", "dml_ds", "dcm_1", "dcm_2", "dcm"), cells)
    note = "The paper's Table 5 is of DenseNet-40-12 twins: codistill study table5."
    return Study(name, heading, rows, EDGE_CONTRASTS, EDGE_PRIMARY, seeds=3, notes=(note,))


def _pair(name: str, first: str, second: str | None = None) -> Recipe:
    """A pair that is not in the paper, by default twins, trained like its WRN-28-4."""
    networks = {"a": first, "b": second or first}
    return recipes.get("cifar100/wrn-28-4-twins").replace(name=name, networks=networks)


def wrn_16_4_noise() -> Study:
    pair, mixed = _pair("wrn-16-4-noise", "wrn-16-4"), "independent, mixup"

    def rows(share: float) -> tuple[StudyRow, ...]:
        recipe = pair.replace(data={"name": "cifar10", "wrong_labels": share})
        alone, *mutual = noise_rows(recipe)
        augment = {**recipe.augment.model_dump(), "mixup": 1.0}
        return alone, StudyRow(alone.group, mixed, alone.recipe.replace(augment=augment)), *mutual

    return Study(
        "wrn-16-4-noise",
        "Wrong training labels: the rows of Table 7 on WRN-16-4 twins, CIFAR-10, clean test set",
        tuple(row for share in (0.2, 0.5, 0.8) for row in rows(share)),
        # Mixup is the control: it costs almost nothing and is known to be robust to wrong labels.
        (*THREE_CONTRASTS, (mixed, "independent"), ("DCM", mixed)),
        PRIMARY,
        seeds=3,
        notes=("The paper's Table 7 is of DenseNet-40-12 twins: codistill study table7.",),
    )


def wrn_28_4_mobilenet() -> Study:
    name, heading = "wrn-28-4-mobilenet", "A mixed pair, WRN-28-4 & MobileNet, on CIFAR-100"
    rows = method_rows(_pair(name, "wrn-28-4", "mobilenet"), (*THREE, "complete"))
    note = "The paper's mixed pairs have a WRN-28-10: codistill study table1."
    return Study(name, heading, rows, FOUR_CONTRASTS, FOUR_PRIMARY, seeds=3, notes=(note,))


STUDIES: dict[str, Callable[[], Study]] = {
    study.__name__.replace("_", "-"): study
    for study in (
        *(demo, table1, table2, table3, table4, table5, table6, table7, kd, efficiency, curves),
        *(wrn_28_4_twins, wrn_28_4_edges, wrn_16_2_edges, wrn_16_2_efficiency, wrn_16_4_noise, wrn_28_4_mobilenet),
        *budgets.STUDIES,
    )
}
NAMES = tuple(STUDIES)


def get(name: str) -> Study:
    """Build the study of this name; raises ValueError with a suggestion if there is none."""
    if name not in STUDIES:
        raise unknown("study", name, NAMES)
    return STUDIES[name]()
