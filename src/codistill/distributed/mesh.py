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

from codistill.cohort import Cohort
from codistill.data.batches import Draws, Share
from codistill.distributed.batchnorm import share_batch_norms
from codistill.distributed.crew import Crew
from codistill.distributed.layout import Layout
from codistill.distributed.pieces import Pieces, parts_of
from codistill.distributed.predictions import Fresh, OneStepOld, Predictions
from codistill.distributed.sharing import Gradients, RunningStatistics, Sharers
from codistill.engine.fast.sections import Network
from codistill.engine.optim import MovingAverage
from codistill.engine.peers import Look
from codistill.networks.backbone import Backbone
from codistill.recipes.schema import Recipe
from codistill.runs.weights import average_key, cohort_key

PREDICTIONS: dict[str, Callable[[Crew, Mapping[str, int]], Predictions]] = {"fresh": Fresh, "one_step_old": OneStepOld}


class Mesh:
    """``Peers`` of a process whose place ``layout`` knows."""

    recordable = False

    def __init__(self, crew: Crew, layout: Layout, recipe: Recipe, device_type: str = "cpu") -> None:
        self.crew, self.layout, self.recipe = crew, layout, recipe
        crew.layout = layout
        self.share = Share(layout.share_of(crew.rank), layout.shards)
        whereabouts = {
            f"{name}/{exit_name}": layout.rank_of(name, self.share.index)
            for name in recipe.networks
            for exit_name in ("final", *recipe.graph.exits[name])
        }
        self.predictions = PREDICTIONS[recipe.processes.predictions](crew, whereabouts)
        self.sharers: Sharers | None = None
        self.pieces: Pieces | None = None
        self.gradients: Gradients | None = None
        self.statistics: RunningStatistics | None = None
        if layout.shards > 1:
            sharers = device_mesh(crew, layout, device_type)["data"]
            self.sharers = Sharers(crew, sharers.get_group())
            self.pieces = Pieces(self.sharers, sharers) if recipe.processes.weights == "sharded" else None

    @property
    def words(self) -> tuple[str, ...]:
        weights = ("weights in pieces",) if self.pieces else ()
        return (self.layout.words, *weights, *self.predictions.words)

    def holds(self, network: str) -> bool:
        return network in self.layout.networks_of(self.crew.rank)

    def adopt(self, cohort: Cohort, average: MovingAverage | None) -> None:
        self.cohort = cohort
        if self.sharers is None:
            return
        self._refuse_other_weights(cohort)
        if self.recipe.processes.sync_batchnorm:
            share_batch_norms(cohort, self.sharers)
        else:
            learning = [
                member for name, member in cohort.members.items() if name in self.recipe.graph.learning_networks
            ]
            self.statistics = RunningStatistics(torch.nn.ModuleList(learning), self.sharers)
        if self.pieces:
            self._cut(self.pieces, cohort, average)
        else:
            self.gradients = Gradients(cohort, self.sharers)

    def _cut(self, pieces: Pieces, cohort: Cohort, average: MovingAverage | None) -> None:
        for name, member in cohort.members.items():
            pieces.cut(member, [*parts_of(member.backbone), *member.heads.values()], cohort_key(name))
        for name, backbone in average.backbones.items() if average else ():
            assert isinstance(backbone, Backbone)
            pieces.cut(backbone, parts_of(backbone), average_key(name))

    def held(self, tensor: Tensor) -> Tensor:
        return self.pieces.held(tensor) if self.pieces else tensor

    def norms_of_whole(self, norms_N: Tensor, order: float) -> Tensor:
        return self.pieces.norms(norms_N, order) if self.pieces else norms_N

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Everybody's, whole, at the leader; elsewhere nothing."""
        return self.crew.collect(self.pieces.joined(tensors) if self.pieces else tensors)

    def hand_out(self, wanted: Sequence[str], whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the leader's tensors what belongs here."""
        mine = self.crew.hand_out(wanted, whole)
        return self.pieces.cut_out(mine) if self.pieces else mine

    def following(self, batches: Iterable[Draws], look: Look) -> Iterable[Draws]:
        return self.predictions.following(batches, look)

    def run(self, name: str, network: Network, images: Tensor) -> Mapping[str, Tensor]:
        with self.crew.overhearing():  # synchronised batch norm
            return self.predictions.run(name, self.cohort.members[name], network, images)

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        return self.predictions.exchange(logits, names)

    def agreed(self, flags: Tensor) -> Tensor:
        # Who has failed saves what it can, and nobody answers any more.
        return self.sharers.agreed(flags) if self.sharers and not self.crew.failed else flags

    def summed(self, numbers: Tensor) -> Tensor:
        return self.sharers.summed(numbers) if self.sharers else numbers

    def completing(self, *, share_of_batch: float, updates: bool) -> AbstractContextManager[object]:
        return self._completing(share_of_batch, updates) if self.sharers else nullcontext()

    @contextmanager
    def _completing(self, share_of_batch: float, updates: bool) -> Iterator[None]:
        adding = self.pieces or self.gradients
        with self.crew.overhearing(), adding.added() if adding and updates else nullcontext():
            yield
        if self.statistics:
            self.statistics.average(share_of_batch)

    def merged(self, by_network: Mapping[str, int]) -> dict[str, int]:
        return {name: number for theirs in self.crew.gather(dict(by_network)) for name, number in theirs.items()}

    def _refuse_other_weights(self, cohort: Cohort) -> None:
        """Whoever shares a network must begin with the same weights; files of start= may differ between hosts."""
        digests = self.crew.gather({name: digest(member.state_dict()) for name, member in cohort.members.items()})
        for rank in range(self.layout.size):
            first = self.layout.sharers_of(rank)[0]
            for name, found in digests[rank].items():
                if found != digests[first][name]:
                    raise ValueError(
                        f"network {name!r} does not begin with the same weights on ranks {first} and {rank}; give "
                        f"every host the same file of start.{name}"
                    )


def device_mesh(crew: Crew, layout: Layout, device_type: str) -> DeviceMesh:
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
        return DeviceMesh.from_group(mine, device_type, mesh=ranks, mesh_dim_names=("cohort", "data"))


def digest(tensors: Mapping[str, Tensor]) -> str:
    content = sha256()
    for name in sorted(tensors):
        content.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()
