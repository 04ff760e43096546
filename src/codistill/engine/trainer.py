"""The loop: start reading here.

``train`` is a generator that yields after every evaluation. Whoever drives it (the command line, a notebook, a study)
may stop and call it again later with the same folder: it continues, bit for bit, as if it had never stopped, because
every random draw is a function of the seed and of the position.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from codistill.data.batches import EpochPlan, plan_epoch
from codistill.data.images import ImageData
from codistill.data.load import load
from codistill.engine.evaluate import Metrics, ensemble, evaluate
from codistill.engine.optim import set_learning_rate
from codistill.engine.run import Run, is_finished
from codistill.engine.runtime import prepare
from codistill.engine.step import choose_step
from codistill.engine.timetable import Position, Timetable
from codistill.engine.training import Training, prepare_training
from codistill.recipes.schema import Recipe

log = logging.getLogger("codistill")


@dataclass(frozen=True)
class Progress:
    """What is known after an evaluation; errors in percent."""

    epoch: int
    epochs: int
    metrics: Mapping[str, Metrics]
    train_error: Mapping[str, float]
    terms: Mapping[str, float]
    images_per_s: float
    elapsed_s: float
    remaining_s: float


def never() -> bool:
    return False


def ignore(position: Position, timetable: Timetable) -> None:
    pass


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data: ImageData | None = None,
    stop: Callable[[], bool] = never,
    heartbeat: Callable[[Position, Timetable], None] = ignore,
) -> Iterator[Progress]:
    """Train ``recipe`` in the folder ``out``, from the start or from where an earlier call left off.

    ``data`` replaces what the recipe names. ``stop`` is asked after every update: when it says so, the run is saved and
    the generator ends. ``heartbeat`` hears of every step.
    """
    if is_finished(Path(out), recipe):
        log.info("%s is finished already", out)
        return
    machine = prepare(recipe.runtime)
    data = data or load(seed=recipe.seed, **recipe.data.model_dump())
    with Run.open(Path(out), recipe, data) as run:
        training = prepare_training(recipe, data, machine)
        timetable = Timetable.of(recipe, len(data.train))
        position = run.continue_from_newest(training)
        step = choose_step(training)
        log.info("%s on %s: %s", recipe.name, machine.device, step.path)

        while position.epoch < timetable.epochs:
            plan = draw_epoch(training, position.epoch)
            while position.step < timetable.steps_per_epoch:
                turn = timetable.turn(position)
                set_learning_rate(training.optimizer, recipe, turn)
                step(plan.step(position.step), turn)
                position = Position(position.epoch, position.step + 1)
                heartbeat(position, timetable)
                # Half an update is not part of a checkpoint, so nothing is saved between its batches.
                stopped = turn.updates and stop()
                if stopped or (turn.updates and run.save_is_due()):
                    run.save(training, position, timetable)
                if stopped:
                    return
            position = Position(position.epoch + 1)
            if evaluates(recipe, position.epoch):
                yield conclude_epoch(run, training, position, timetable)
        run.finish(training, step.path)


def draw_epoch(training: Training, epoch: int) -> EpochPlan:
    """Every random draw of the epoch: its order, crops, flips, mixing."""
    train = training.data.splits["train"]
    height, width = train.pixels.shape[-2:]
    plan = plan_epoch(
        len(train),
        epoch,
        training.recipe.seed,
        batch_size=training.recipe.batch_size,
        settings=training.data.augmentation,
        image_size=(height, width),
    )
    return plan.to(training.machine.device)


def evaluates(recipe: Recipe, epochs_done: int) -> bool:
    return epochs_done % recipe.evaluation.every_epochs == 0 or epochs_done == recipe.length.epochs


def conclude_epoch(run: Run, training: Training, position: Position, timetable: Timetable) -> Progress:
    """Evaluate, write it down, and save; the next epoch begins with empty sums."""
    metrics = measure(training, position.epoch)
    learned = training.tally.read()
    training.tally.sums.zero_()
    run.record(position.epoch, learned, metrics)
    if run.save_is_due() or position.epoch == timetable.epochs:
        run.save(training, position, timetable)
    done = timetable.steps_taken(position)
    return Progress(
        epoch=position.epoch,
        epochs=timetable.epochs,
        metrics=metrics["test"],
        train_error=learned["train_error"],
        terms=learned["terms"],
        images_per_s=timetable.images_seen(position) / run.elapsed_s,
        elapsed_s=run.elapsed_s,
        remaining_s=run.elapsed_s / done * (timetable.steps - done),
    )


def measure(training: Training, epochs_done: int) -> dict[str, dict[str, Metrics]]:
    """Metrics by split and classifier: the networks as shipped; now and then every classifier, and the ensemble."""
    recipe, data = training.recipe, training.data
    everything = epochs_done % recipe.evaluation.all_every_epochs == 0 or epochs_done == recipe.length.epochs
    shipped = training.shipped()

    def classify(pixels: Tensor) -> dict[str, Tensor]:
        images = data.plain(pixels).contiguous(memory_format=training.machine.memory_format)
        with training.machine.autocast():
            finals = {f"{name}/final": network(images) for name, network in shipped.items()}
            if not everything:
                return finals
            # A moving average ships without heads, so auxiliary classifiers are those of the network that learns.
            return {**training.cohort(images), **finals, "ensemble": ensemble(finals)}

    training.set_mode(learning=False)
    metrics = {
        split: evaluate(classify, images, recipe.evaluation.batch_size)
        for split, images in data.splits.items()
        if split != "train"
    }
    training.set_mode(learning=True)
    return metrics
