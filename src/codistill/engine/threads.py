"""On a CPU, networks on threads of their own: a small layer shared by two cores takes both almost as long as one."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from codistill.engine.parts import Functions, PlainWay
from codistill.engine.peers import ALONE
from codistill.engine.sections import Network
from codistill.engine.timetable import Turn
from codistill.engine.training import Training
from codistill.networks.steady import is_steady


def network_threads(training: Training) -> ThreadPoolExecutor | None:
    """As many as have something to do; None where networks must run one after the other.

    So must those that draw random numbers: threads would draw from one source, by turns that nobody knows.
    """
    runtime, threads = training.recipe.runtime, torch.get_num_threads()
    workers = min(threads, len(training.cohort.members))
    if (
        workers < 2
        or training.machine.device.type != "cpu"
        or training.peers is not ALONE
        or runtime.compile
        or runtime.activation_checkpointing
        or not is_steady(training.cohort)
    ):
        return None
    return ThreadPoolExecutor(workers, "network", torch.set_num_threads, (threads // workers,))


class ThreadedWay(PlainWay):
    """Every network forward, then, from the objective's gradients of its logits, backward: nobody else's are in it."""

    def __init__(self, training: Training, functions: Functions, pool: ThreadPoolExecutor) -> None:
        super().__init__(training, functions)
        self.pool = pool
        self.cuts: list[list[tuple[Tensor, Tensor]]] = []
        """By network: its logits, and as what the objective sees them."""

    def forward(self, images: Tensor, turn: Turn) -> Mapping[str, Tensor]:
        def run(network: Network) -> Mapping[str, Tensor]:
            with self.training.machine.autocast():  # every thread has its own
                return network(images, nullcontext)

        networks = self.functions.networks
        by_network = dict(zip(networks, self.pool.map(run, networks.values()), strict=True))
        seen = {
            f"{name}/{exit}": (tensor, tensor.detach().requires_grad_(tensor.requires_grad))
            for name, logits in by_network.items()
            for exit, tensor in logits.items()
        }
        self.cuts = [[seen[f"{name}/{exit}"] for exit in logits] for name, logits in by_network.items()]
        return {name: leaf for name, (_, leaf) in seen.items()}

    def backward(self, total: Tensor) -> None:
        super().backward(total)
        for _ in self.pool.map(_backward, self.cuts):
            pass


def _backward(cuts: Iterable[tuple[Tensor, Tensor]]) -> None:
    learning = [(tensor, leaf.grad) for tensor, leaf in cuts if leaf.grad is not None]
    if learning:
        tensors, gradients = zip(*learning, strict=True)
        torch.autograd.backward(tensors, gradients)
