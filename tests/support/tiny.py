"""The smallest training that still has everything in it, for tests of the engine."""

from typing import Any

from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Augment, Checkpoints, Data, Evaluation, Length, Runtime, Sgd, Steps


def tiny_recipe(**changes: Any) -> Recipe:
    """Two networks; augmentation, dropout, momentum, moving average, wrong labels; 3 steps an epoch, the last short."""
    recipe = Recipe(
        name="tiny",
        networks={"a": "wrn-10-1-dropout-0.3", "b": "resnet-8"},
        method="dcm",
        data=Data(name="fashion", train_limit=70, test_limit=50, wrong_labels=0.4),
        augment=Augment(pad=2),
        length=Length(epochs=2),
        batch_size=32,
        optimizer=Sgd(lr=0.05, weight_decay=5e-4, nesterov=True),
        schedule=Steps(milestones=(0.5,), factor=0.2),
        ema=0.9,
        evaluation=Evaluation(all_every_epochs=2),
        checkpoints=Checkpoints(every_s=0),
        runtime=Runtime(device="cpu", threads=1),
        seed=3,
    )
    return recipe.replace(**changes)


def tiniest_recipe(**changes: Any) -> Recipe:
    """The same with images of 14 × 14, a quarter of the work: for tests that compare runs with one another."""
    data = {**tiny_recipe().data.model_dump(), "image_size": 14}
    return tiny_recipe(**{"data": data, **changes})
