"""The loop: start reading here.

``train`` is a generator that yields after every evaluation. Whoever drives it (the command line, a notebook, a study)
may stop and call it again later with the same folder: it continues, bit for bit, as if it had never stopped, because
every random draw is a function of the seed and of the position. (On a GPU that takes ``runtime.deterministic=true``.)
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from codistill.data.batches import EpochPlan, plan_epoch
from codistill.data.images import ImageData
from codistill.engine.checks import load_images
from codistill.engine.evaluate import Metrics, ensemble, evaluate
from codistill.engine.health import Recovery
from codistill.engine.optim import set_learning_rate
from codistill.engine.run import Run, RunStorage
from codistill.engine.runtime import prepared
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import Training, prepare_training
from codistill.engine.step import choose_step
from codistill.log import log
from codistill.recipes.schema import Recipe
from codistill.runs.folder import RunFolder


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


class StoppedError(Exception):
    """Somebody asked to stop in the middle of an evaluation."""


def never() -> bool:
    return False


def ignore(position: Position, schedule: TrainingSchedule) -> None:
    pass


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data: ImageData | None = None,
    stop: Callable[[], bool] = never,
    heartbeat: Callable[[Position, TrainingSchedule], None] = ignore,
) -> Iterator[Progress]:
    """Train ``recipe`` in the folder ``out``, from the start or from where an earlier call left off.

    ``data`` replaces the images that the recipe names; its limits and wrong labels still apply. ``stop`` is asked after
    every update and before every batch of an evaluation: when it says so, the run is saved and the generator ends.
    ``heartbeat`` hears of every step. Runs save every ``checkpoints.every_s`` seconds, at the end, and when the
    generator is closed.
    """
    folder = RunFolder(Path(out))
    if folder.is_finished(recipe):
        log.info("%s is finished already", out)
        return
    data = load_images(recipe, data)
    schedule = TrainingSchedule.of(recipe, len(data.train))
    with prepared(recipe.runtime) as machine:
        training = prepare_training(recipe, data, machine)
        with Run.open(folder, recipe, data) as run:
            yield from run_training(training, schedule, run, stop, heartbeat)


def run_training(
    training: Training,
    schedule: TrainingSchedule,
    run: RunStorage,
    stop: Callable[[], bool],
    heartbeat: Callable[[Position, TrainingSchedule], None],
) -> Iterator[Progress]:
    recipe = training.recipe
    position = run.continue_from_newest(training)
    recovery = Recovery(training)
    step = choose_step(training)
    log.info("%s on %s: %s", recipe.name, training.machine.device, step.path)

    def save() -> None:
        recovery.look()
        recovery.remember(run.save(training, position, schedule))

    while position.epoch < schedule.epochs:
        plan = draw_epoch(training, position.epoch)
        for batch in training.peers.following(training.data.batches(plan, position.step), training.batch):
            context = schedule.context(position)
            set_learning_rate(training.optimizers.values(), recipe, context)
            step(batch, context)
            position = Position(position.epoch, position.step + 1)
            heartbeat(position, schedule)
            # Half an update is not part of a checkpoint, so nothing is saved between its batches.
            stopped = context.updates and stop()
            if stopped or (context.updates and run.save_is_due()):
                save()
            if stopped:
                run.wait()
                return
        last_step, position = position, Position(position.epoch + 1)
        if evaluates(recipe, position.epoch):
            recovery.look()
            try:
                progress = conclude_epoch(run, training, position, schedule, stop)
            except StoppedError:  # whoever continues evaluates this epoch again, from the start
                position = last_step
                save()
                run.wait()
                return
            if run.save_is_due() or position.epoch == schedule.epochs:
                save()
            try:
                yield progress
            except GeneratorExit:
                save()
                run.wait()
                raise
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
    return dataclasses.replace(plan.to(training.machine.device), share=training.peers.share)


def evaluates(recipe: Recipe, epochs_done: int) -> bool:
    return epochs_done % recipe.evaluation.every_epochs == 0 or epochs_done == recipe.length.epochs


def conclude_epoch(
    run: RunStorage, training: Training, position: Position, schedule: TrainingSchedule, stop: Callable[[], bool]
) -> Progress:
    """Evaluate, write it down, and keep it if it is the best; the next epoch begins with empty sums."""
    metrics = measure(training, position.epoch, stop)
    learned = training.tally.read()
    training.tally.sums.zero_()
    skipped = training.peers.merged(training.health.skipped())
    in_order = {name: skipped[name] for name in training.recipe.networks}
    run.record(position.epoch, {**learned, "skipped": in_order}, metrics)
    if training.recipe.checkpoints.best:
        run.save_if_best(training, position, schedule)
    done = schedule.steps_taken(position)
    return Progress(
        epoch=position.epoch,
        epochs=schedule.epochs,
        metrics=metrics["test"],
        train_error=learned["train_error"],
        terms=learned["terms"],
        images_per_s=schedule.images_seen(position) / run.elapsed_s,
        elapsed_s=run.elapsed_s,
        remaining_s=run.elapsed_s / done * (schedule.steps - done),
    )


def measure(training: Training, epochs_done: int, stop: Callable[[], bool] = never) -> dict[str, dict[str, Metrics]]:
    """Metrics by split and classifier: the networks as shipped; now and then every classifier, and the ensemble."""
    recipe, data = training.recipe, training.data
    everything = epochs_done % recipe.evaluation.all_every_epochs == 0 or epochs_done == recipe.length.epochs
    shipped = training.shipped()

    def classify(pixels: Tensor) -> dict[str, Tensor]:
        if stop():
            raise StoppedError
        images = data.plain(pixels).contiguous(memory_format=training.machine.memory_format)
        with training.machine.autocast():
            logits = training.cohort(images) if everything else {}
            # A moving average ships without heads, so auxiliary classifiers are those of the network that learns.
            ahead = {} if everything and not training.average else shipped
            finals = {f"{name}/final": network(images) for name, network in ahead.items()}
        names = training.classifiers if everything else training.finals
        known = training.peers.exchange({**logits, **finals}, names)
        return {**known, **({"ensemble": ensemble(known)} if everything else {})}

    training.set_mode(learning=False)
    metrics = {
        split: evaluate(classify, images, recipe.evaluation.batch_size, training.peers)
        for split, images in data.splits.items()
        if split != "train"
    }
    training.set_mode(learning=True)
    return metrics
