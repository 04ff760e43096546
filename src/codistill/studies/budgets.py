"""Studies of trainings as one has them: short ones, few images, one's own images, wrong labels.

Each has one primary contrast, `mutual` against independent training, and the same augmentation, schedule and length in
all rows but the two that name theirs. What `mutual` is was decided before any of their runs; ``share-scale`` varies it.
"""

from codistill import recipes
from codistill.recipes import Recipe
from codistill.recipes.catalogue import wrn_twins
from codistill.recipes.sections import Augment, Cosine, Data, Evaluation, Heads, Length, Sgd, Steps
from codistill.studies.study import METHOD_LABELS, Study, StudyRow, cohort_title

FIRST_SEED = 11  # share-scale has 1 to 10
RARELY = Evaluation(every_epochs=5, all_every_epochs=10)
SMOOTHED, LONGER = "independent, smoothed labels", "independent, 2× as long"
METHODS = ("dml", "dcm", "mutual")
PRIMARY = (("mutual", "independent"),)
CONTRASTS = (
    *(("mutual", label) for label in ("independent", SMOOTHED, LONGER, "DML", "DCM")),
    *((label, "independent") for label in (SMOOTHED, LONGER, "DML", "DCM")),
)


def _wrn_16_2(epochs: int, *, data: str = "cifar100", train_limit: int | None = None, wrong: float = 0.0) -> Recipe:
    """WRN-16-2 twins under the paper's recipe for WRN, but for their length, which is a whole training here."""
    return wrn_twins("wrn-16-2").replace(
        length=Length(epochs=epochs),
        data=Data(name=data, train_limit=train_limit, wrong_labels=wrong),
        evaluation=RARELY,
    )


def _photos(a: str, b: str) -> Recipe:
    """Networks of timm on a folder of images, as one would begin: the library's networks and 20 epochs."""
    return Recipe(
        networks={"a": f"timm:{a}", "b": f"timm:{b}"},
        data=Data(name="folder", image_size=64),
        augment=Augment(pad=8),
        length=Length(epochs=20),
        batch_size=128,
        optimizer=Sgd(lr=0.05, weight_decay=5e-4, momentum=0.9, nesterov=True),
        schedule=Steps(milestones=(0.3, 0.6, 0.9), factor=0.1),
        evaluation=RARELY,
    )


def finetune() -> Study:
    """WRN-16-2 twins of one CIFAR on 5,000 images of the other."""
    pretraining = _wrn_16_2(100).replace(name="pretraining", method="independent")
    recipe = pretraining.replace(
        name="finetune",
        method="mutual",
        data=Data(name="cifar10", train_limit=5000),
        length=Length(epochs=30),
        optimizer=Sgd(lr=0.05, weight_decay=5e-4, momentum=0.9, lr_factor={"backbone": 0.1}),
        schedule=Cosine(warmup=0.1),
        start=dict.fromkeys(("a", "b"), "the weights of a finished run"),
    )
    group = cohort_title(recipe)
    before = StudyRow(group, "pretraining", pretraining)
    trained = {METHOD_LABELS[method]: recipe.replace(method=method) for method in ("independent", "dml", "mutual")}
    trained["mutual, heads apart"] = recipe.replace(heads=Heads(gradient=0.0))
    return Study(
        "finetune",
        f"Fine-tuning {group}, pretrained on CIFAR-100, on 5,000 images of CIFAR-10",
        tuple(
            StudyRow(group, label, one, teachers={"a": (before, "a"), "b": (before, "b")})
            for label, one in trained.items()
        ),
        (*PRIMARY, ("DML", "independent"), ("mutual, heads apart", "mutual")),
        PRIMARY,
        seeds=5,
        first_seed=FIRST_SEED,
        notes=("Every row begins from the same pretrained pair of its seed, trained independently.",),
    )


def _study(name: str, title: str, recipe: Recipe, *, seeds: int, more: tuple[str, ...] = ()) -> Study:
    recipe, group = recipe.replace(name=name), cohort_title(recipe)
    alone = recipe.replace(method="independent")
    rows = (
        StudyRow(group, "independent", alone),
        StudyRow(group, SMOOTHED, alone.replace(label_smoothing=0.1)),
        StudyRow(group, LONGER, alone, length_factor=2.0),
        *(StudyRow(group, METHOD_LABELS[method], recipe.replace(method=method)) for method in (*METHODS, *more)),
    )
    contrasts = (*CONTRASTS, *((METHOD_LABELS[method], "independent") for method in more))
    note = "Independent training twice as long takes about the seconds of training with auxiliary classifiers."
    return Study(name, title, rows, contrasts, PRIMARY, seeds, FIRST_SEED, notes=(note,), shows_cost=True)


def budget_30_epochs() -> Study:
    title = "WRN-16-2 twins on CIFAR-100, 30 epochs"
    return _study("budget-30-epochs", title, _wrn_16_2(30), seeds=5, more=("ds", "complete"))


def budget_100_epochs() -> Study:
    return _study("budget-100-epochs", "WRN-16-2 twins on CIFAR-100, 100 epochs", _wrn_16_2(100), seeds=3)


def budget_own_images() -> Study:
    title = "timm's ResNet-18 twins on 40 classes of CIFAR-100 from a folder, 64×64, 20 epochs"
    return _study("budget-own-images", title, _photos("resnet18", "resnet18"), seeds=5)


def budget_unequal() -> Study:
    title = "timm's ResNet-18 & EfficientNet-B0 on CIFAR-10 from a folder, 64×64, 20 epochs"
    return _study("budget-unequal", title, _photos("resnet18", "efficientnet_b0"), seeds=3)


def budget_few_images() -> Study:
    title = "WRN-16-2 twins on a tenth of CIFAR-100, 100 epochs"
    return _study("budget-few-images", title, _wrn_16_2(100, train_limit=5_000), seeds=5)


def budget_wrong_labels() -> Study:
    title = "WRN-16-2 twins on CIFAR-10, half of the training labels wrong, 30 epochs"
    return _study("budget-wrong-labels", title, _wrn_16_2(30, data="cifar10", wrong=0.5), seeds=5)


def budget_embedded() -> Study:
    title = "The demonstration's networks on the embedded data, all labels right"
    return _study("budget-embedded", title, recipes.get("quickstart", ["data.wrong_labels=0"]), seeds=5)


def share_scale() -> Study:
    """The teacher share and the scale varied apart; the constant share 3/4 at scale 4 is DCM itself."""
    recipe = _wrn_16_2(30).replace(name="share-scale")
    group = cohort_title(recipe)
    ramp = {"initial_share": 0.0, "initial_scale": 1.0}
    half, more = {"share": 0.5}, {"share": 0.75}
    others = {
        "share 1/2, scale 2": half | {"scale": 2.0},
        "share 1/2, scale 4": half | {"scale": 4.0},
        "share 3/4, scale 2": more | {"scale": 2.0},
        "share 1/2, scale 2, ramped": half | {"scale": 2.0} | ramp,
        "share 1/2, ramped at scale 2": half | {"scale": 2.0, "initial_share": 0.0},
        "DCM, ramped": ramp,
    }
    rows = (
        *(
            StudyRow(group, METHOD_LABELS[name], recipe.replace(method=name))
            for name in ("independent", "ds", "dml", "dcm")
        ),
        *(StudyRow(group, label, recipe.replace(method="dcm", transfer=values)) for label, values in others.items()),
    )
    contrasts = (
        *((row.label, "independent") for row in rows[1:]),
        *((label, "DCM") for label in ("share 1/2, scale 4", "share 3/4, scale 2", "DCM, ramped")),
        ("share 1/2, scale 4", "share 1/2, scale 2"),
        ("share 1/2, scale 2, ramped", "share 1/2, scale 2"),
    )
    title = "Teacher share and scale, apart and ramped, WRN-16-2 twins on CIFAR-100, 30 epochs"
    return Study("share-scale", title, rows, contrasts, primary=(("share 1/2, scale 4", "DCM"),), seeds=3)


STUDIES = (
    *(budget_30_epochs, budget_100_epochs, budget_own_images, budget_unequal, budget_few_images, budget_wrong_labels),
    *(budget_embedded, share_scale, finetune),
)
