"""Equations 1 to 10 of Yao & Sun (2020) in numpy, written from the paper: networks explicit, no matrix, no torch.

A network is {stage: logits [N, M]}, stage 1 being its own classifier; ``held`` are the same networks as sources, which
finite differences keep still. ``l_kd`` is Eq. 2 (cross-entropy) or Eq. 5 (Kullback-Leibler).
"""

from collections.abc import Callable

import numpy as np

Network = dict[int, np.ndarray]
Transfer = Callable[[np.ndarray, np.ndarray], float]


def soften(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Eq. 3."""
    exps = np.exp(logits / temperature - (logits / temperature).max(axis=1, keepdims=True))
    return exps / exps.sum(axis=1, keepdims=True)


def eq_2(source: np.ndarray, learner: np.ndarray) -> float:
    return float(-np.sum(source * np.log(learner)) / len(source))


def eq_5(source: np.ndarray, learner: np.ndarray) -> float:
    return float(np.sum(source * np.log(source / learner)) / len(source))


def classification(logits: np.ndarray, labels: np.ndarray) -> float:
    """L_c; labels are class numbers or probabilities."""
    targets = np.eye(logits.shape[1])[labels] if labels.ndim == 1 else labels
    return float(-np.sum(targets * np.log(soften(logits, 1.0))) / len(logits))


def deep_supervision(network: Network, labels: np.ndarray) -> float:
    """Eq. 8: the auxiliary classifiers."""
    return sum(classification(logits, labels) for stage, logits in network.items() if stage != 1)


def loss(
    method: str,
    networks: list[Network],
    labels: np.ndarray,
    l_kd: Transfer,
    *,
    temperature: float = 1.0,
    lam: float = 1.0,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 1.0,
    delta: float = 1.0,
    teachers: int = 1,
    held: list[Network] | None = None,
) -> float:
    """The sum of the networks' losses (Eq. 1, 4 and 7); for more than two networks, over all other networks.

    Of kd and cml, the first ``teachers`` networks only teach.
    """
    held = held or networks

    def transfer(source: np.ndarray, learner: np.ndarray) -> float:
        return l_kd(soften(source, temperature), soften(learner, temperature))

    if method in ("kd", "cml"):
        total = 0.0
        for here, student in list(enumerate(networks))[teachers:]:
            total += classification(student[1], labels)
            total += lam * sum(transfer(teacher[1], student[1]) for teacher in held[:teachers])  # Eq. 1
            peers = [peer for there, peer in enumerate(held) if there >= teachers and there != here]
            total += (beta if method == "cml" else 0.0) * sum(transfer(peer[1], student[1]) for peer in peers)  # Eq. 4
        return total

    total = 0.0
    for here, network in enumerate(networks):
        total += classification(network[1], labels)
        if method not in ("independent", "dml"):
            total += (1.0 if method == "mutual" else alpha) * deep_supervision(network, labels)
        for there, peer in enumerate(held):
            if here != there and method in ("dml", "dml_ds"):
                total += lam * transfer(peer[1], network[1])
            if here != there and method in ("dcm_1", "dcm", "complete"):  # Eq. 9
                total += beta * sum(transfer(peer[k], network[k]) for k in network if k in peer)
            if here != there and method in ("dcm_2", "dcm", "complete"):  # Eq. 10
                total += gamma * sum(transfer(peer[i], network[j]) for i in peer for j in network if i != j)
            if here != there and method == "mutual":  # of a learner's sources the mean, at the end of the ramp
                sources = [logits for other, one in enumerate(held) if other != here for logits in one.values()]
                total += sum(transfer(i, j) for i in peer.values() for j in network.values()) / len(sources)
            if here == there and method in ("dks", "complete"):
                total += delta * sum(transfer(peer[i], network[j]) for i in peer for j in network if i != j)
    return total


def learn(
    learner: np.ndarray,
    label: np.ndarray,
    sources: list[np.ndarray],
    proportions: np.ndarray,
    *,
    share: float,
    scale: float,
    temperature: float = 1.0,
    t_squared: bool = False,
) -> tuple[float, np.ndarray]:
    """Loss and gradient of one learner: ``scale`` times those of a target that is ``share`` a mixture of its sources.

    With T = 1 the gradient is scale·(p - target) / N. ``proportions`` sum to 1; ``label`` are probabilities.
    """
    own, soft = soften(learner, 1.0), soften(learner, temperature)
    factor = temperature**2 if t_squared else 1.0
    mixture = sum((p * soften(z, temperature) for p, z in zip(proportions, sources, strict=True)), np.zeros_like(soft))
    divergence = sum(p * eq_5(soften(z, temperature), soft) for p, z in zip(proportions, sources, strict=True))
    value = scale * ((1 - share) * classification(learner, label) + share * factor * divergence)
    pull = (1 - share) * (own - label) + share * factor / temperature * (soft * np.sum(proportions) - mixture)
    return value, scale * pull / len(learner)
