"""The metrics of classifiers on a labelled set: top-1 and top-5 error, NLL, ECE. Everything is summed on the device.

``evaluate_finished`` measures a finished run again, with the weights that it ships or with its best checkpoint.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codistill.cohort import Cohort
from codistill.data.augmentation import OnDevice
from codistill.data.batches import WHOLE
from codistill.data.images import ImageData, ImageSet
from codistill.data.load import load_elsewhere, load_for
from codistill.engine.own import NO_NETWORKS, OwnNetworks, given_networks, require_given
from codistill.engine.peers import ALONE, Peers
from codistill.engine.runtime import Machine, prepared, without_trials
from codistill.engine.state import cohort_of
from codistill.engine.weight_files import load_weights, read_report
from codistill.networks.families import architecture
from codistill.recipes.schema import Recipe
from codistill.runs import weights
from codistill.runs.checkpoint import Saved
from codistill.runs.folder import RunFolder
from codistill.runs.records import DataReport, ImageSetReport, saved_state
from codistill.runs.result import Result, read_finished, runtime_for_evaluation

CALIBRATION_BINS = 15
TOLERANCES = {"top1_error": 0.1, "top5_error": 0.1, "nll": 0.002, "ece": 0.2}
"""Another device, or another order of summation, may change single images; more means other weights."""

Classify = Callable[[Tensor], Mapping[str, Tensor]]
"""Raw pixels in, logits by classifier name out."""


@dataclass(frozen=True)
class Metrics:
    """Errors in percent; NLL in nats per image; ECE (15 equal bins of confidence) in percent."""

    top1_error: float
    top5_error: float
    nll: float
    ece: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass
class _Sums:
    """The sums of one classifier over the batches."""

    wrong1: Tensor
    wrong5: Tensor
    nll: Tensor
    bins: Tensor
    """[3, bins]: images, summed confidence, right answers."""

    @classmethod
    def zero(cls, device: torch.device) -> "_Sums":
        dtype = torch.float32 if device.type == "mps" else torch.float64
        wrong1, wrong5, nll = torch.zeros(3, dtype=dtype, device=device)
        return cls(wrong1, wrong5, nll, wrong1.new_zeros(3, CALIBRATION_BINS))

    def add(self, logits_BC: Tensor, labels_B: Tensor) -> None:
        log_probs_BC = F.log_softmax(logits_BC.float(), dim=-1)
        top_BK = log_probs_BC.topk(min(5, logits_BC.shape[-1]), dim=-1).indices
        hits_BK = top_BK == labels_B[:, None]
        right_B = hits_BK[:, 0]
        confidence_B = log_probs_BC.amax(dim=-1).exp()
        bin_B = (confidence_B * CALIBRATION_BINS).ceil().long().sub(1).clamp(0, CALIBRATION_BINS - 1)
        self.wrong1 += (~right_B).sum()
        self.wrong5 += (~hits_BK.any(dim=-1)).sum()
        self.nll += F.nll_loss(log_probs_BC, labels_B, reduction="sum")
        # A product with the one-hot bins, because index_add is not deterministic on CUDA.
        facts_3B = torch.stack([torch.ones_like(confidence_B), confidence_B, right_B.float()])
        self.bins += (facts_3B @ F.one_hot(bin_B, CALIBRATION_BINS).float()).to(self.bins.dtype)

    def each(self, change: Callable[[Tensor], Tensor]) -> "_Sums":
        return _Sums(*(change(getattr(self, field.name)) for field in fields(self)))

    def metrics(self, images: int) -> Metrics:
        _, confidence, right = self.bins.unbind()
        return Metrics(
            top1_error=100 * float(self.wrong1) / images,
            top5_error=100 * float(self.wrong5) / images,
            nll=float(self.nll) / images,
            ece=100 * float((confidence - right).abs().sum()) / images,
        )


@torch.no_grad()
@without_trials()
def evaluate(classify: Classify, images: ImageSet, batch_size: int, peers: Peers = ALONE) -> dict[str, Metrics]:
    """Measure every classifier that ``classify`` returns for raw pixels. The device is read once, at the end.

    Every process classifies its share of the images, and all return the metrics over all images.
    """
    sums: dict[str, _Sums] = {}
    mine = images if peers.share == WHOLE else images.take(torch.tensor(peers.share.range_of(len(images))))
    largest_share = math.ceil(len(images) / peers.share.of)
    for pixels, labels in pad_batches(mine.in_batches(batch_size), math.ceil(largest_share / batch_size)):
        for name, logits_BC in classify(pixels).items():
            sums.setdefault(name, _Sums.zero(logits_BC.device)).add(logits_BC, labels)
    return {name: total.each(peers.sum).metrics(len(images)) for name, total in sums.items()}


def pad_batches(batches: Iterable[tuple[Tensor, Tensor]], count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pad with an empty batch up to ``count``, so that all ranks run the same number of forwards (FSDP collectives)."""
    seen = 0
    for pixels, labels in batches:
        seen += 1
        yield pixels, labels
    if seen < count:
        yield pixels[:0], labels[:0]


def ensemble(logits: Mapping[str, Tensor]) -> Tensor:
    """The log of the mean probability over the networks' final classifiers."""
    finals = [F.log_softmax(tensor.float(), dim=-1) for name, tensor in logits.items() if name.endswith("/final")]
    return torch.stack(finals).logsumexp(dim=0) - math.log(len(finals))


@dataclass(frozen=True)
class Agreement:
    """How alike two networks answer: shares of the test images, in percent."""

    networks: tuple[str, str]
    same: float
    both_wrong: float


@dataclass(frozen=True)
class ClassErrors:
    """Every network's top-1 error in percent, class by class."""

    names: tuple[str, ...]
    images: tuple[int, ...]
    """Test images of each class."""
    errors: Mapping[str, tuple[float | None, ...]]
    """By network; None for a class without images."""

    @classmethod
    def of(cls, names: Sequence[str], networks: Sequence[str], predicted_MN: Tensor, labels_N: Tensor) -> "ClassErrors":
        images = labels_N.bincount(minlength=len(names)).tolist()
        by_network = {}
        for network, predicted_N in zip(networks, predicted_MN, strict=True):
            wrong = labels_N[predicted_N != labels_N].bincount(minlength=len(names)).tolist()
            shares = (100 * errors / total if total else None for errors, total in zip(wrong, images, strict=True))
            by_network[network] = tuple(shares)
        return cls(tuple(names), tuple(images), by_network)

    @property
    def are_equal(self) -> bool:
        """Whether all classes that have images have the same number."""
        return len({images for images in self.images if images}) == 1

    @property
    def balanced(self) -> dict[str, float]:
        """Every network's error if all classes with images counted alike: the mean over these classes."""
        found = {network: [one for one in errors if one is not None] for network, errors in self.errors.items()}
        return {network: sum(errors) / len(errors) for network, errors in found.items()}


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a finished run's networks, measured again."""

    recipe: Recipe
    epoch: int
    metrics: Mapping[str, Metrics]
    """By network."""
    agreement: list[Agreement]
    """One for every pair of networks."""
    classes: ClassErrors
    differences: list[str]
    """The metrics that differ from result.json by more than the tolerance, in words."""
    damage: list[str]
    """The run's damaged files that the evaluation did not need, in words."""
    left_out: Mapping[str, Any]
    """Files of another folder that were not evaluated: ``skipped``, which cannot be read, and ``ignored``."""


def evaluate_finished(
    folder: RunFolder | str | Path,
    *,
    best: bool = False,
    networks: OwnNetworks = NO_NETWORKS,
    data: str | Path | None = None,
) -> Evaluation:
    """Evaluate the networks of a finished run on its test images: as shipped, or those of its best checkpoint.

    ``networks`` are the modules of your own that it was trained with. ``data`` is a folder of other images of the
    run's classes, which then have the metrics; result.json knows nothing of them, so nothing is compared with it.
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))
    with given_networks(networks):
        return _evaluate_finished(folder, best=best, elsewhere=Path(data) if data is not None else None)


def _evaluate_finished(folder: RunFolder, *, best: bool, elsewhere: Path | None) -> Evaluation:
    result = read_finished(folder)
    recipe = result.recipe
    require_given(recipe, recipe.networks, f"evaluate_finished({str(folder.path)!r}")
    saved = weights.best_checkpoint(folder) if best else None
    epoch = saved_state(saved, folder.best).position.epoch if saved else recipe.length.epochs
    if elsewhere is None:
        data = load_for(recipe)
    else:
        first = next(iter(recipe.networks))
        about = read_report(folder.weights(first), first)
        data = load_elsewhere(recipe, elsewhere, tuple(about.class_names), (tuple(about.mean), tuple(about.std)))
    if elsewhere is None and not has_test_images_of(result.data, data):
        raise ValueError(f"{folder.path}: {other_test_images(recipe)}")
    with prepared(runtime_for_evaluation(recipe, result.environment)) as machine:
        networks = {name: load_shipped(folder, recipe, name, data, saved) for name in recipe.networks}
        on_device = OnDevice.of(data, machine.device, recipe.augment)
        classify = build_classify(networks, None, on_device, machine)
        answered: list[Tensor] = []

        def classify_and_keep(pixels: Tensor) -> Mapping[str, Tensor]:
            logits = classify(pixels)
            answered.append(torch.stack([logits[f"{name}/final"].argmax(dim=-1) for name in networks]).cpu())
            return logits

        metrics = evaluate(classify_and_keep, on_device.splits["test"], recipe.evaluation.batch_size)
    predicted_MN, labels_N, names = torch.cat(answered, dim=1), data.test.labels, list(networks)
    by_network = {name: metrics[f"{name}/final"] for name in recipe.networks}
    return Evaluation(
        recipe=recipe,
        epoch=epoch,
        metrics=by_network,
        agreement=agreement(names, predicted_MN, labels_N),
        classes=ClassErrors.of(data.class_names, names, predicted_MN, labels_N),
        differences=[] if elsewhere else find_differences(by_network, result, epoch),
        damage=folder.damage(),
        left_out=data.report if elsewhere else {},
    )


def agreement(networks: Sequence[str], predicted_MN: Tensor, labels_N: Tensor) -> list[Agreement]:
    """How alike every pair of networks answers the N test images."""
    pairs = []
    for one, other in combinations(range(len(networks)), 2):
        same_N = predicted_MN[one] == predicted_MN[other]
        wrong_N = (predicted_MN[one] != labels_N) & (predicted_MN[other] != labels_N)
        shares = (100 * float(hits_N.double().mean()) for hits_N in (same_N, wrong_N))
        pairs.append(Agreement((networks[one], networks[other]), *shares))
    return pairs


def classify_finished(
    folder: RunFolder, recipe: Recipe, data: ImageData, on_device: OnDevice, machine: Machine
) -> Classify:
    """All classifiers of a finished run: the networks as shipped, and the auxiliary ones if the last checkpoint exists.

    Where no moving average ships, one pass gives both: the heads sit on the shipped backbones.
    """
    cohort = load_trained_cohort(folder, recipe, data)
    shipped: dict[str, nn.Module] = {}
    for name in recipe.networks:
        if cohort is not None and not recipe.ema:
            load_weights(cohort.members[name].backbone, folder.weights(name), name)
        else:
            shipped[name] = load_shipped(folder, recipe, name, data)
    return build_classify(shipped, cohort, on_device, machine)


def load_shipped(
    folder: RunFolder, recipe: Recipe, name: str, data: ImageData, saved: Saved | None = None
) -> nn.Module:
    """Build a network without heads and load its weight file, or what would ship of the checkpoint ``saved``."""
    backbone = architecture(recipe.networks[name]).backbone(data.num_classes, data.channels)
    if saved is None:
        load_weights(backbone, folder.weights(name), name)
    else:
        shipped = weights.shipped_weights(recipe, name, saved.tensors)
        weights.load_strictly(backbone, shipped, f"the weights of {name} in {folder.best}")
    return backbone


def load_trained_cohort(folder: RunFolder, recipe: Recipe, data: ImageData) -> Cohort | None:
    """The cohort with its heads, from the checkpoint of the last epoch; None if there is no such checkpoint."""
    saved = weights.last_checkpoint(folder, recipe)
    if saved is None:
        return None
    cohort = cohort_of(recipe, data.num_classes, data.channels)
    weights.load_strictly(cohort, weights.cohort_weights(saved.tensors), f"the tensors saved in {folder.path}")
    return cohort


def build_classify(
    shipped: Mapping[str, nn.Module], cohort: Cohort | None, on_device: OnDevice, machine: Machine
) -> Classify:
    """Move the networks to the device, and return ``classifier`` of them."""
    modules: list[nn.Module] = [*shipped.values(), *([cohort] if cohort is not None else [])]
    for module in modules:
        module.eval().to(machine.device).to(memory_format=machine.memory_format)  # type: ignore[call-overload]
    return classifier(shipped, cohort, on_device, machine)


def classifier(
    shipped: Mapping[str, nn.Module], cohort: Cohort | None, on_device: OnDevice, machine: Machine
) -> Classify:
    """Raw pixels in, logits by classifier name out; final classifiers in ``shipped`` replace those of ``cohort``."""

    def classify(pixels: Tensor) -> dict[str, Tensor]:
        images = on_device.plain(pixels).contiguous(memory_format=machine.memory_format)
        with machine.autocast():
            logits = cohort(images) if cohort is not None else {}
            return {**logits, **{f"{name}/final": network(images) for name, network in shipped.items()}}

    return classify


def has_test_images_of(recorded: DataReport, data: ImageData) -> bool:
    """Whether the test set of ``data`` is the one in a run's description of its data."""
    return ImageSetReport.model_validate(data.report["sets"]["test"]) == recorded.sets.test


def other_test_images(recipe: Recipe) -> str:
    return f"the test images of {recipe.data.name} are not those that the run was measured on"


def find_differences(measured: Mapping[str, Metrics], result: Result, epoch: int) -> list[str]:
    """Describe the metrics that differ from the result's at that epoch by more than the tolerance.

    Metrics that are not finite are null in the result. It has those of the last epoch twice, which must be equal:
    tables read the second ones.
    """
    record = next((record for record in result.epochs if record.epoch == epoch), None)
    if record is None:
        raise ValueError(f"result.json has no epoch {epoch}, from which the weights are: they are not this run's")
    differences = []
    for name, metrics in measured.items():
        values = metrics.to_dict()
        recorded = record.test[f"{name}/final"]
        if record is result.epochs[-1] and recorded != result.networks[name].last:
            differences.append(f"{name}: result.json contradicts itself about the last epoch, so it is damaged")
        for key, tolerance in TOLERANCES.items():
            now = values[key] if math.isfinite(values[key]) else None
            then = getattr(recorded, key)
            if (now is None) != (then is None) or (now is not None and abs(now - then) > tolerance):
                differences.append(f"{name}: {key} is {now}, in result.json {then}")
    return differences
