"""One training step: augment, every network forward, one objective, one backward, one update.

``PlainStep`` is the step as one reads it, and what every device can run. ``CapturedStep`` is the same step recorded
once as a CUDA graph and replayed. ``choose_step`` picks one and names the path taken.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from codistill.data.batches import Draws
from codistill.engine.logs import log
from codistill.engine.runtime import hindrances
from codistill.engine.timetable import Turn
from codistill.engine.training import Training
from codistill.randomness import derive

WARM_UP_STEPS = 3

Networks = Mapping[str, Callable[[Tensor], Mapping[str, Tensor]]]
"""The cohort's members by name, as they are or compiled."""


class Step(Protocol):
    path: str
    """How the step is computed, in words for the log."""

    def __call__(self, draws: Draws, turn: Turn) -> None: ...


class PlainStep:
    def __init__(self, training: Training, networks: Networks, path: str) -> None:
        self.training, self.networks, self.path = training, networks, path

    def __call__(self, draws: Draws, turn: Turn) -> None:
        images, labels = self.training.batch(draws)
        with self.training.machine.autocast():
            logits = forward(networks_for(draws, self.training, self.networks), images, turn.seed)
        learn(self.training, logits, labels, turn)


class CapturedStep:
    """Records one CUDA graph per batch size: the recipe's, and the short last batch's from the uncompiled networks.

    Dropout is seeded per step, not per network as in the plain step: a recorded graph has one source of random numbers.
    """

    def __init__(self, training: Training, networks: Networks, path: str) -> None:
        self.training, self.networks, self.path = training, networks, path
        self.recorded: dict[int, tuple[torch.cuda.CUDAGraph, Draws]] = {}

    def __call__(self, draws: Draws, turn: Turn) -> None:
        size = len(draws.indices)
        if size not in self.recorded:
            self.recorded[size] = self._record(draws, turn)
        graph, inputs = self.recorded[size]
        inputs.copy_(draws)
        torch.cuda.manual_seed(turn.seed)
        graph.replay()

    def _record(self, draws: Draws, turn: Turn) -> tuple[torch.cuda.CUDAGraph, Draws]:
        networks = networks_for(draws, self.training, self.networks)
        inputs = draws.clone()

        def body() -> None:
            images, labels = self.training.batch(inputs)
            with self.training.machine.autocast():
                logits = forward_side_by_side(networks, images)
            learn(self.training, logits, labels, turn)

        # The warm-up trains: put everything back afterwards.
        before = {name: tensor.clone() for name, tensor in self.training.tensors().items()}
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*capturable=True.*")  # these steps are not captured yet
            for _ in range(WARM_UP_STEPS):
                body()
        torch.cuda.current_stream().wait_stream(beside)
        self.training.restore(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return graph, inputs


def plain_networks(training: Training) -> Networks:
    return dict(training.cohort.members.items())


def networks_for(draws: Draws, training: Training, networks: Networks) -> Networks:
    """Compiling for the one short batch of an epoch would cost more than it saves in the whole training."""
    full = len(draws.indices) == training.recipe.batch_size
    return networks if full else plain_networks(training)


def forward(networks: Networks, images: Tensor, seed: int) -> dict[str, Tensor]:
    """Every network's logits by classifier name. Dropout is keyed by network: it does not matter who else runs here."""
    logits: dict[str, Tensor] = {}
    for name, network in networks.items():
        torch.manual_seed(derive(seed, name))
        logits |= {f"{name}/{exit}": tensor for exit, tensor in network(images).items()}
    return logits


def forward_side_by_side(networks: Networks, images: Tensor) -> dict[str, Tensor]:
    """The same with a CUDA stream per network: once recorded, small kernels of different networks overlap."""
    logits: dict[str, Tensor] = {}
    here = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in networks]  # type: ignore[no-untyped-call]
    for stream, (name, network) in zip(streams, networks.items(), strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            logits |= {f"{name}/{exit}": tensor for exit, tensor in network(images).items()}
    for stream in streams:
        here.wait_stream(stream)
    return logits


def learn(training: Training, logits: Mapping[str, Tensor], labels: Tensor, turn: Turn) -> None:
    """From predictions to new weights."""
    loss = training.objective(logits, labels)
    (loss.total * turn.share_of_update).backward()
    training.tally.add(loss, logits, labels)
    if turn.updates:
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        if training.average:
            training.average.update(training.cohort)


def choose_step(training: Training) -> Step:
    """The fastest path that the recipe allows on this device; the log names it."""
    recipe, machine = training.recipe, training.machine
    networks, path = plain_networks(training), [machine.precision]
    if recipe.runtime.compile:
        # Each network by itself: twins share one compilation, and a short batch can still use the plain module.
        networks = {name: torch.compile(member, fullgraph=True, dynamic=False) for name, member in networks.items()}
        path.append("compiled")
    if machine.captures(recipe):
        return CapturedStep(training, networks, ", ".join([*path, "captured as one CUDA graph"]))
    if machine.device.type == "cuda" and recipe.runtime.capture:
        log.warning("with %s the step cannot be captured, so it is slower", " and ".join(hindrances(recipe)))
    return PlainStep(training, networks, ", ".join([*path, "step by step"]))
