"""The metrics of classifiers on a labelled set: top-1 and top-5 error, NLL, ECE. Everything is summed on the device."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from codistill.data.batches import WHOLE
from codistill.data.images import ImageSet
from codistill.engine.peers import ALONE, Peers
from codistill.engine.runtime import without_trials

CALIBRATION_BINS = 15

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
