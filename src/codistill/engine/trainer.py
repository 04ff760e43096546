"""The loop: start reading here.

``train`` is a generator that yields after every evaluation. Its caller (the command line, a notebook, a study) may stop
and call it again later with the same folder: it continues, bit for bit, as if it had never stopped, because every
random draw is a function of the seed and of the position. (On a GPU that takes ``runtime.deterministic=true``.)
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from codistill.data.batches import EpochPlan, plan_epoch
from codistill.data.images import ImageData
from codistill.engine.checks import load_images
from codistill.engine.evaluate import Classify, Metrics, classifier, ensemble, evaluate
from codistill.engine.fast.capture import CapturedStep
from codistill.engine.optim import set_learning_rate
from codistill.engine.own import NO_NETWORKS, OwnNetworks, adopt
from codistill.engine.peers import ALONE
from codistill.engine.recovery import Recovery
from codistill.engine.run import Run, RunStorage
from codistill.engine.runtime import capture_obstacles, prepared, without_trials
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import Training, prepare_training
from codistill.engine.step import PlainStep
from codistill.errors import unknown
from codistill.log import log
from codistill.recipes.schema import Recipe
from codistill.runs.folder import RunFolder
from codistill.transfer.graph import Outline, TransferGraph


@dataclass(frozen=True)
class Progress:
    """The state of a training after an evaluation; errors in percent."""

    epoch: int
    epochs: int
    metrics: Mapping[str, Metrics]
    train_error: Mapping[str, float]
    terms: Mapping[str, float]
    images_per_s: float
    elapsed_s: float
    remaining_s: float
    predict: "Callable[..., tuple[dict[str, Tensor], Tensor]]" = field(repr=False, compare=False)
    """For metrics of your own: ``predict("test")`` has the logits of every network by name, and the labels.

    They are of the networks as they ship, as tensors on the CPU. Call it before the training goes on.
    """
    validation: Mapping[str, Metrics] = field(default_factory=dict)
    """The metrics on the validation set, if there is one."""


class StoppedError(Exception):
    """A stop was requested in the middle of an evaluation."""


def never() -> bool:
    return False


def ignore(*_: object) -> None:
    pass


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    networks: OwnNetworks = NO_NETWORKS,
    graph: TransferGraph | Callable[[Outline], TransferGraph] | None = None,
    data: ImageData | None = None,
    stop: Callable[[], bool] = never,
    heartbeat: Callable[[Position, TrainingSchedule], None] = ignore,
) -> Iterator[Progress]:
    """Train ``recipe`` in the folder ``out``, from the start or from where an earlier call left off.

    ``networks`` are modules of your own in the place of the recipe's networks of these names, ``graph`` is a graph of
    your own, or a method, in the place of the recipe's; the run's recipe.yaml has the whole graph, but of a module only
    what it takes to recognise it. ``data`` replaces the images that the recipe names; its limits and wrong labels still
    apply. ``stop`` is asked after every update and before every batch of an evaluation: when it returns True, the run
    is saved and the generator ends. ``heartbeat`` is called after every step. Runs save every ``checkpoints.every_s``
    seconds, at the end, and when the generator is closed.
    """
    recipe, own = adopt(recipe, networks)
    if graph is not None:
        recipe = recipe.with_graph(graph)
    folder = RunFolder(Path(out))
    if folder.is_finished(recipe):
        log.info("%s is finished already", out)
        return
    data = load_images(recipe, data, own)
    schedule = TrainingSchedule.of(recipe, len(data.train))
    with prepared(recipe.runtime) as machine:
        training = prepare_training(recipe, data, machine, own=own, begins=not folder.has_checkpoint())
        with Run.open(folder, recipe, data) as run:
            yield from run_training(training, schedule, run, stop, heartbeat)


def run_training(
    training: Training,
    schedule: TrainingSchedule,
    run: RunStorage,
    stop: Callable[[], bool],
    heartbeat: Callable[[Position, TrainingSchedule], None],
) -> Iterator[Progress]:
    """Train from the newest checkpoint to the end; yields after every evaluation."""
    recipe = training.recipe
    recovery = Recovery(training)
    position = run.continue_from_newest(recovery)
    step = choose_step(training)
    log.info("%s on %s: %s", recipe.name, training.machine.device, step.path)

    def save() -> None:
        # At the end of an epoch, the copies to roll back to are the state itself.
        run.save(recovery if position.step else training, position, schedule)

    while position.epoch < schedule.epochs:
        plan = draw_epoch(training, position.epoch)
        for batch in training.data.batches(plan, position.step):
            context = schedule.context(position)
            set_learning_rate(training.optimizers.values(), recipe, context)
            training.objective.set_progress(context.progress)
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
        recovery.end_epoch()
        if evaluates(recipe, position.epoch):
            try:
                progress = conclude_epoch(run, training, position, schedule, stop)
            except StoppedError:  # a continued run evaluates this epoch again, from the start
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


def choose_step(training: Training) -> PlainStep | CapturedStep:
    """The fastest way to run the step that the recipe allows on this device; the log names it."""
    recipe, machine, peers = training.recipe, training.machine, training.peers
    path = [*machine.words, *peers.description]
    if machine.captures(recipe) and peers is ALONE:
        return CapturedStep(training, ", ".join([*path, "captured as one CUDA graph"]))
    if machine.device.type == "cuda" and recipe.runtime.capture:
        reasons = [*capture_obstacles(recipe), *peers.description]
        log.warning("with %s the step cannot be captured, so it is slower", " and ".join(reasons))
    return PlainStep(training, ", ".join([*path, "step by step"]))


def draw_epoch(training: Training, epoch: int) -> EpochPlan:
    """Make every random draw of the epoch: its order, crops, flips, mixing."""
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
    """Evaluate, record the metrics, save the checkpoint if it is the best, and reset the sums."""
    metrics = measure(training, position.epoch, stop)
    learned = training.tally.read()
    training.tally.sums.zero_()
    run.record(position.epoch, {**learned, "skipped": training.health.skipped()}, metrics)
    if training.recipe.checkpoints.best:
        run.save_if_best(training, position, schedule)
    return Progress(
        epoch=position.epoch,
        epochs=schedule.epochs,
        metrics=metrics["test"],
        validation=metrics.get("validation", {}),
        train_error=learned["train_error"],
        terms=learned["terms"],
        images_per_s=schedule.images_seen(position) / run.elapsed_s,
        elapsed_s=run.elapsed_s,
        remaining_s=run.elapsed_s / schedule.work_done(position) * schedule.work_left(position),
        predict=partial(predict, training),
    )


def measure(training: Training, epochs_done: int, stop: Callable[[], bool] = never) -> dict[str, dict[str, Metrics]]:
    """Measure the shipped networks; every ``all_every_epochs``, all classifiers and the ensemble. By split and name."""
    recipe = training.recipe
    everything = epochs_done % recipe.evaluation.all_every_epochs == 0 or epochs_done == recipe.length.epochs
    classify = build_classify(training, everything, stop)
    with training.evaluation_mode():
        return {
            split: evaluate(classify, images, recipe.evaluation.batch_size, training.peers)
            for split, images in training.data.splits.items()
            if split != "train"
        }


def build_classify(training: Training, everything: bool, stop: Callable[[], bool] = never) -> Classify:
    """Raw pixels in, logits of the shipped networks out; with ``everything``, of all classifiers and the ensemble."""
    # A moving average ships without heads, so auxiliary classifiers are those of the network that learns.
    shipped = {} if everything and not training.average else training.shipped()
    local = classifier(shipped, training.cohort if everything else None, training.data, training.machine)
    names = training.classifiers if everything else training.finals

    def classify(pixels: Tensor) -> dict[str, Tensor]:
        if stop():
            raise StoppedError
        known = training.peers.exchange(local(pixels), names)
        return {**known, **({"ensemble": ensemble(known)} if everything else {})}

    return classify


@torch.no_grad()
def predict(training: Training, split: str = "test") -> tuple[dict[str, Tensor], Tensor]:
    """The logits of the shipped networks for every image of a split, ``{"a/final": …}``, and its labels, on the CPU."""
    if split not in training.data.splits:
        raise unknown("split", split, training.data.splits)
    classify, images = build_classify(training, everything=False), training.data.splits[split]
    with training.evaluation_mode(), without_trials():
        batches = images.in_batches(training.recipe.evaluation.batch_size)
        parts = [({name: z.float().cpu() for name, z in classify(x).items()}, labels.cpu()) for x, labels in batches]
    logits = {name: torch.cat([part[name] for part, _ in parts]) for name in training.finals}
    return logits, torch.cat([labels for _, labels in parts])
