"""The plain loop that anyone would write from the paper, to measure ours against.

Eager, channels first, float32 with TF32 convolutions, ``cudnn.benchmark``, one KL divergence per edge, per-image
augmentation in pinned DataLoader workers, ``loss.item()`` at every step for the progress bar. The networks are ours:
the comparison is of the step, not of the model code.
"""

import random
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from codistill import Cohort
from codistill.data.images import ImageData
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Sgd


class Augmented(Dataset[tuple[Tensor, int]]):
    """One image at a time: pad, crop, flip, normalise."""

    def __init__(self, data: ImageData, pad: int = 4) -> None:
        self.images, self.pad = data.train, pad
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (data.mean, data.std))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = F.pad(self.images.pixels[index], [self.pad] * 4)
        height, width = self.images.pixels.shape[-2:]
        top, left = random.randint(0, 2 * self.pad), random.randint(0, 2 * self.pad)
        image = image[:, top : top + height, left : left + width]
        if random.random() < 0.5:
            image = image.flip(-1)
        return (image / 255 - self.mean) / self.std, int(self.images.labels[index])


def throughput(recipe: Recipe, data: ImageData, *, warm_up: int, steps: int) -> float:
    """Images per second of the recipe's training done the plain way."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers = 8 if device.type == "cuda" else 0  # on a CPU they would take the networks' cores
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    graph = recipe.graph
    cohort = Cohort(
        recipe.networks, data.num_classes, in_channels=data.channels, heads=recipe.heads.kind, exits=graph.exits
    ).to(device)
    settings = recipe.optimizer
    assert isinstance(settings, Sgd)
    optimizer = torch.optim.SGD(
        cohort.parameters(),
        settings.lr,
        settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
    )
    loader = DataLoader(
        Augmented(data),
        recipe.batch_size,
        shuffle=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
        persistent_workers=workers > 0,
    )

    started_at, taken = 0.0, 0
    while taken < warm_up + steps:
        for images, labels in loader:
            if taken == warm_up:
                started_at = time.perf_counter()
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            logits = cohort(images)
            loss = sum(weight * F.cross_entropy(logits[name], labels) for name, weight in graph.labels.items())
            for edge in graph.transfers:
                source, learner = logits[edge.source].detach(), logits[edge.learner]
                loss = loss + edge.weight * F.kl_div(
                    F.log_softmax(learner, dim=1), F.softmax(source, dim=1), reduction="batchmean"
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            taken += 1
            if taken == warm_up + steps:
                break
    return steps * recipe.batch_size / (time.perf_counter() - started_at)
