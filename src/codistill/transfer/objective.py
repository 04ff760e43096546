"""A transfer graph compiled to tensors: logits and labels in, the total and its named terms out.

L = Σ_j a_j·CE(y, p_j) + Σ_(i→j) w_ij·KL(p̂_i ‖ p̂_j), summed over classes and averaged over the batch; p̂ is softened by
the temperature, and the source p̂_i is a constant. Axes: M classifiers, B batch, C classes, E edges (labels first).
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codistill.transfer.graph import TransferGraph


@dataclass
class Loss:
    """The scalar to minimise and the weighted terms that sum to it; one vector, so that one read brings them all."""

    total: Tensor
    values: Tensor
    weights: Tensor
    names: tuple[str, ...]
    counted: Tensor
    """False for the terms of a network that is left out; their value and weight are 0."""

    @property
    def terms(self) -> dict[str, Tensor]:
        """Weighted, ``{"labels->a/final": …, "a/final->b/stage2": …}``: a cross-entropy for labels, else a KL."""
        return dict(zip(self.names, self.values.unbind(), strict=True))

    @property
    def divergences(self) -> dict[str, Tensor]:
        """The same without the weights (and without T², where the graph has it)."""
        return dict(zip(self.names, (self.values / self.weights).unbind(), strict=True))


class Objective(nn.Module):
    """``Objective(graph)(logits, labels)``; labels are int64 [B], or probabilities [B, C] when smoothed or mixed.

    ``epsilon`` is added to every probability of a transfer, and the sum divided out, as in the authors' code.
    Computes in float32, or in float64 if the logits are float64; autocast is off inside. On a GPU the matrix product is
    in TF32 if torch allows it (`torch.set_float32_matmul_precision`, which runtime.precision=tf32 sets).
    """

    positions: Tensor
    learners: Tensor
    sources: Tensor
    weights: Tensor
    weights_rest: Tensor
    initial: Tensor
    initial_rest: Tensor
    ramp_done: Tensor

    def __init__(self, graph: TransferGraph, epsilon: float = 0.0) -> None:
        super().__init__()
        self.graph, self.epsilon = graph, epsilon
        self.names = tuple(graph.weights)
        self.classifiers = tuple(classifier.name for classifier in graph.classifiers)
        row = {name: index for index, name in enumerate(self.classifiers)}
        width = 1 + len(row)  # of the matrix [learner, labels and sources]
        positions = [row[name] * width for name in graph.labels]
        positions += [row[edge.learner] * width + 1 + row[edge.source] for edge in graph.transfers]
        self.register_buffer("positions", torch.tensor(positions), persistent=False)
        # Labels belong to no network: for their edges the learner is entered as the source too.
        edges = [(row[name], row[name]) for name in graph.labels]
        edges += [(row[edge.learner], row[edge.source]) for edge in graph.transfers]
        learners, sources = zip(*edges, strict=True)
        self.register_buffer("learners", torch.tensor(learners), persistent=False)
        self.register_buffer("sources", torch.tensor(sources), persistent=False)

        self._register("weights", graph.weights)
        if graph.ramp is not None:
            self._register("initial", graph.ramp.initial.weights)
            self.register_buffer("ramp_done", torch.tensor(graph.ramp.done(0.0), dtype=torch.float32), persistent=False)

    def _register(self, name: str, weights: Mapping[str, float]) -> None:
        # Two float32 that sum to the float64: MPS has no float64, but a float64 computation needs all digits of 0.1.
        factor = self.graph.temperature**2 if self.graph.t_squared else 1.0
        factors = [1.0] * len(self.graph.labels) + [factor] * len(self.graph.transfers)
        values = [times * weights.get(edge, 0.0) for times, edge in zip(factors, self.names, strict=True)]
        exact = torch.tensor(values, dtype=torch.float64)
        self.register_buffer(name, exact.float(), persistent=False)
        self.register_buffer(f"{name}_rest", (exact - exact.float()).float(), persistent=False)

    def set_progress(self, progress: float) -> None:
        """Move the graph's ramp, if it has one, to this fraction of the training; before the first call it is 0.

        A captured step reads it from device memory when it is replayed.
        """
        if self.graph.ramp is not None:
            self.ramp_done.fill_(self.graph.ramp.done(progress))

    def forward(self, logits: Mapping[str, Tensor], labels: Tensor, finite_M: Tensor | None = None) -> Loss:
        """``finite_M`` is bool, in the order of ``classifiers``; those with False neither teach nor learn."""
        used = self._used(logits)
        _check_labels(labels, used[0])
        with _without_autocast(used[0].device.type):
            logits_MBC = self._stack(used)
            if finite_M is not None:
                # Replace logits that may be NaN: a weight of 0 would remove NaN neither here nor in the backward pass.
                logits_MBC = torch.where(finite_M[:, None, None], logits_MBC, 0.0)
            log_probs_MBC = F.log_softmax(logits_MBC, dim=-1)
            from_labels_M = _cross_entropies(log_probs_MBC, labels)
            if self.graph.transfers:
                is_plain = self.graph.temperature == 1 and not self.epsilon
                soft_MBC = log_probs_MBC if is_plain else self._soften(logits_MBC)
                crossings_MM = _crossings(soft_MBC)
                divergences_MM = crossings_MM - crossings_MM.detach().diagonal()
            else:
                divergences_MM = logits_MBC.new_zeros(len(used), len(used))
            weights_E = self._weights(logits_MBC)
            counted_E = self._counted(weights_E, finite_M)
            weights_E = weights_E * counted_E
            values_E = weights_E * self._edges(from_labels_M, divergences_MM)
        return Loss(values_E.sum(), values_E, weights_E, self.names, counted_E)

    @torch.no_grad()
    def source_entropy(self, logits: Mapping[str, Tensor]) -> Tensor:
        """Σ w·H(source): the difference between the paper's Eq. 2, a cross-entropy, and the total, which uses KL.

        It does not depend on the learners, so the gradients are the same with and without it.
        """
        used = self._used(logits)
        with _without_autocast(used[0].device.type):
            logits_MBC = self._stack(used)
            entropies_M = _crossings(self._soften(logits_MBC)).diagonal()
            by_edge_E = self._edges(torch.zeros_like(entropies_M), entropies_M.expand(len(used), -1))
            return (self._weights(logits_MBC) * by_edge_E).sum()

    def _soften(self, logits_MBC: Tensor) -> Tensor:
        log_probs_MBC = F.log_softmax(logits_MBC / self.graph.temperature, dim=-1)
        if not self.epsilon:
            return log_probs_MBC
        return (log_probs_MBC.exp() + self.epsilon).log() - math.log1p(self.epsilon * logits_MBC.shape[-1])

    def _edges(self, from_labels_M: Tensor, from_sources_MM: Tensor) -> Tensor:
        """The values of the graph's edges, selected from the matrix; other entries, even infinite, have no effect."""
        matrix = torch.cat([from_labels_M[:, None], from_sources_MM], dim=1)
        return matrix.flatten().index_select(0, self.positions.to(matrix.device))

    def _counted(self, weights_E: Tensor, finite_M: Tensor | None) -> Tensor:
        if finite_M is None:
            return torch.ones_like(weights_E, dtype=torch.bool)
        return finite_M[self.learners.to(finite_M.device)] & finite_M[self.sources.to(finite_M.device)]

    def _weights(self, like: Tensor) -> Tensor:
        own = self.weights.to(like.device, like.dtype) + self.weights_rest.to(like.device, like.dtype)
        if self.graph.ramp is None:
            return own
        initial = self.initial.to(like.device, like.dtype) + self.initial_rest.to(like.device, like.dtype)
        return initial.lerp(own, self.ramp_done.to(like.device, like.dtype))

    def _stack(self, used: list[Tensor]) -> Tensor:
        logits_MBC = torch.stack(used)
        return logits_MBC if logits_MBC.dtype == torch.float64 else logits_MBC.float()

    def _used(self, logits: Mapping[str, Tensor]) -> list[Tensor]:
        """The logits of the graph's classifiers, checked; those of others are ignored."""
        for name in self.classifiers:
            if name not in logits:
                raise ValueError(
                    f"no logits for {name!r}, which the graph uses; there are {', '.join(logits) or 'none'}"
                )
        used = [logits[name] for name in self.classifiers]
        for name, tensor in zip(self.classifiers, used, strict=True):
            if tensor.ndim != 2 or not tensor.is_floating_point():
                raise ValueError(f"logits of {name}: {_kind(tensor)}; they must be floating-point [batch, classes]")
            if tensor.shape != used[0].shape:
                raise ValueError(
                    f"logits of {name} are {list(tensor.shape)} and those of {self.classifiers[0]} "
                    f"{list(used[0].shape)}; all classifiers must see the same batch and have the same classes"
                )
        if used[0].shape[0] == 0:
            raise ValueError("the batch is empty, and the mean over no images is not a number; leave the batch out")
        return used


def _cross_entropies(log_probs_MBC: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point():
        return -torch.einsum("mbc,bc->m", log_probs_MBC, labels.to(log_probs_MBC.dtype)) / labels.shape[0]
    of_label_MB1 = log_probs_MBC.gather(-1, labels.expand(len(log_probs_MBC), -1).unsqueeze(-1))
    return -of_label_MB1.mean(dim=(1, 2))


def _crossings(log_probs_MBC: Tensor) -> Tensor:
    """CE(source, learner) for every [learner, source] in one matrix product; the diagonal is each classifier's entropy.

    As fast as one cross-entropy per learner with the weighted mixture of its sources, and it gives every term by name.
    No gradient reaches a source. A source that is NaN is left out of the gradient, image by image, so that one
    non-finite network does not spoil its peers; the value still shows it.
    """
    sources_MBC = log_probs_MBC.detach().exp().nan_to_num(nan=0.0)
    return -(log_probs_MBC.flatten(1) @ sources_MBC.flatten(1).T) / log_probs_MBC.shape[1]


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # "meta"


def _check_labels(labels: Tensor, logits_BC: Tensor) -> None:
    batch, classes = logits_BC.shape
    if labels.dtype != torch.int64 and not labels.is_floating_point():
        raise ValueError(f"labels are {labels.dtype}; class numbers must be int64 (labels.long()), probabilities float")
    expected = [batch, classes] if labels.is_floating_point() else [batch]
    if list(labels.shape) != expected:
        raise ValueError(
            f"labels are {_kind(labels)}; for logits of {[batch, classes]} they must be int64 [{batch}] or "
            f"floating-point [{batch}, {classes}]"
        )
    # Reading values would make an accelerator wait, and break a compiled step.
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_label_values(labels, classes)


def _check_label_values(labels: Tensor, classes: int) -> None:
    if not labels.is_floating_point():
        for found in torch.stack(labels.aminmax()).tolist():
            if not 0 <= found < classes:
                raise ValueError(f"label {found} is out of range; {classes} classes are numbered 0 … {classes - 1}")
        return
    sums = labels.sum(dim=1, dtype=torch.float32)
    wrong = ((labels < 0).any(dim=1) | ~((sums - 1).abs() < 1e-2)).nonzero()
    if len(wrong):
        image = int(wrong[0])
        raise ValueError(
            f"labels of image {image} sum to {float(sums[image]):g} with a smallest value of "
            f"{float(labels[image].min()):g}; probabilities are not negative and sum to 1"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
