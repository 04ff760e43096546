"""The objective one edge at a time, slow and obvious: the reference for tests, and for inspecting single edges."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from codistill.transfer.graph import LABELS, TransferGraph


def divergence(source_logits_BC: Tensor, learner_logits_BC: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(source ‖ learner), summed over classes and averaged over the batch, with both sides softened."""
    source_log_probs_BC = F.log_softmax(source_logits_BC.detach() / temperature, dim=-1)
    learner_log_probs_BC = F.log_softmax(learner_logits_BC / temperature, dim=-1)
    # "batchmean", because kl_div's "mean" would also divide by the number of classes.
    return F.kl_div(learner_log_probs_BC, source_log_probs_BC, reduction="batchmean", log_target=True)


def edge_terms(
    graph: TransferGraph, logits: Mapping[str, Tensor], labels: Tensor, progress: float = 0.0
) -> dict[str, Tensor]:
    """Every weighted term by name, in the graph's order; they sum to ``Objective``'s total."""
    factor = graph.temperature**2 if graph.t_squared else 1.0
    weights = dict.fromkeys(graph.weights, 0.0) | graph.at(progress).weights
    terms = {
        f"{LABELS}->{name}": weights[f"{LABELS}->{name}"] * F.cross_entropy(logits[name], labels)
        for name in graph.labels
    }
    for edge in graph.transfers:
        kl = divergence(logits[edge.source], logits[edge.learner], graph.temperature)
        terms[edge.name] = factor * weights[edge.name] * kl
    return terms
