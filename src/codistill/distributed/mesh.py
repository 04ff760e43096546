"""A training's peers where there are some: a torch ``DeviceMesh`` of the axes ``cohort`` and ``data``.

With ``crew`` this is what knows ranks; the engine sees ``Peers``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from codistill.data.batches import Draws, Share
from codistill.distributed.batchnorm import share_batch_norms
from codistill.distributed.crew import Crew
from codistill.distributed.layout import Layout
from codistill.distributed.predictions import Fresh, OneStepOld, Predictions
from codistill.distributed.sharing import Gradients, RunningStatistics, Sharers
from codistill.engine.sections import Network
from codistill.engine.training import Training
from codistill.recipes.schema import Recipe

PREDICTIONS: dict[str, Callable[[Crew, Mapping[str, int]], Predictions]] = {"fresh": Fresh, "one_step_old": OneStepOld}


class Mesh:
    """``Peers`` of a process whose place ``layout`` knows."""

    recordable = False

    def __init__(self, crew: Crew, layout: Layout, recipe: Recipe) -> None:
        self.crew, self.layout, self.recipe = crew, layout, recipe
        crew.layout = layout
        self.share = Share(layout.share_of(crew.rank), layout.shards)
        whereabouts = {
            f"{name}/{exit_name}": layout.rank_of(name, self.share.index)
            for name in recipe.networks
            for exit_name in ("final", *recipe.graph.exits[name])
        }
        self.predictions = PREDICTIONS[recipe.processes.predictions](crew, whereabouts)
        self.sharers = Sharers(crew, device_mesh(crew, layout).get_group("data")) if layout.shards > 1 else None
        self.gradients: Gradients | None = None
        self.statistics: RunningStatistics | None = None

    @property
    def words(self) -> tuple[str, ...]:
        return (self.layout.words, *self.predictions.words)

    def holds(self, network: str) -> bool:
        return network in self.layout.networks_of(self.crew.rank)

    def adopt(self, training: Training) -> None:
        self.training = training
        if self.sharers is None:
            return
        self._refuse_other_weights(training)
        self.gradients = Gradients(training.cohort, self.sharers)
        if self.recipe.processes.sync_batchnorm:
            share_batch_norms(training.cohort, self.sharers)
        else:
            learning = torch.nn.ModuleList(training.cohort.members[name] for name in training.optimizers)
            self.statistics = RunningStatistics(learning, self.sharers)

    def following(self, batches: Iterable[Draws]) -> Iterable[Draws]:
        return self.predictions.following(self.training, batches)

    def run(self, name: str, network: Network, images: Tensor) -> Mapping[str, Tensor]:
        with self.crew.overhearing():  # synchronised batch norm
            return self.predictions.run(name, self.training.cohort.members[name], network, images)

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        return self.predictions.exchange(logits, names)

    def agreed(self, flags: Tensor) -> Tensor:
        return self.sharers.agreed(flags) if self.sharers else flags

    def summed(self, numbers: Tensor) -> Tensor:
        return self.sharers.summed(numbers) if self.sharers else numbers

    def completing(self, *, share_of_batch: float, updates: bool) -> AbstractContextManager[object]:
        return self._completing(share_of_batch, updates) if self.sharers else nullcontext()

    @contextmanager
    def _completing(self, share_of_batch: float, updates: bool) -> Iterator[None]:
        with self.crew.overhearing(), self.gradients.added() if self.gradients and updates else nullcontext():
            yield
        if self.statistics:
            self.statistics.average(share_of_batch)

    def merged(self, by_network: Mapping[str, int]) -> dict[str, int]:
        return {name: number for theirs in self.crew.gather(dict(by_network)) for name, number in theirs.items()}

    def _refuse_other_weights(self, training: Training) -> None:
        """Whoever shares a network must begin with the same weights; files of start= may differ between hosts."""
        digests = self.crew.gather({name: digest(training.tensors_of(name)) for name in training.cohort.members})
        for rank in range(self.layout.size):
            first = self.layout.sharers_of(rank)[0]
            for name, found in digests[rank].items():
                if found != digests[first][name]:
                    raise ValueError(
                        f"network {name!r} does not begin with the same weights on ranks {first} and {rank}; give "
                        f"every host the same file of start.{name}"
                    )


def device_mesh(crew: Crew, layout: Layout) -> DeviceMesh:
    """Its groups are made here, because torch would make them without our timeout."""
    ranks = torch.arange(layout.size).view(-1, layout.shards)
    timeout = timedelta(seconds=crew.timeout_s)
    mine: list[dist.ProcessGroup] = []
    with crew.talking():
        for axis in (ranks.T, ranks):  # along the cohort those with the same share, along the data the sharers
            for row in axis.tolist():
                group = dist.new_group(row, timeout=timeout, backend="gloo")
                if crew.rank in row:
                    mine.append(group)
        return DeviceMesh.from_group(mine, "cpu", mesh=ranks, mesh_dim_names=("cohort", "data"))


def digest(tensors: Mapping[str, Tensor]) -> str:
    content = sha256()
    for name in sorted(tensors):
        content.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()
