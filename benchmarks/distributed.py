"""What a cohort gains from processes, what it sends, and whether the cost model of docs/distributed.md says the same.

    python benchmarks/distributed.py --networks 1 2 4 8 --network wrn-10-1

Every process computes with one thread. Bytes are those that the kernel saw rank 0 write, headers included. Where other
programs run too, times of the processor say more than elapsed ones; all are medians over ``--repeats``.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from codistill.cohort import Cohort
from codistill.data.load import load
from codistill.distributed.group import ProcessGroup
from codistill.distributed.launch import LOOPBACK, local_store
from codistill.distributed.layout import Layout, Split
from codistill.distributed.mesh import LogitsAllGather, MeshPeers
from codistill.engine.peers import ALONE, Peers
from codistill.engine.runtime import prepare
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import prepare_training
from codistill.engine.trainer import choose_step, draw_epoch
from codistill.recipes import get
from codistill.recipes.schema import Recipe

WARM_UP = 3


class Measured(NamedTuple):
    """A step at rank 0: the median time, the processor's mean time, which other programs do not lengthen, bytes."""

    seconds: float
    cpu_seconds: float
    bytes_written: float


class Link(NamedTuple):
    """What a message costs: the processor's time for an empty one, and what it can move in a second."""

    cpu_seconds: float
    bytes_per_s: float


def recipe_of(count: int, network: str, batch_size: int) -> Recipe:
    networks = "{" + ", ".join(f"n{index}: {network}" for index in range(count)) + "}"
    changes = [f"networks={networks}", f"batch_size={batch_size}", "runtime.device=cpu", "runtime.threads=1"]
    return get("quickstart", [*changes, f"method={'dcm' if count > 1 else 'ds'}"])


def time_steps(recipe: Recipe, peers: Peers, steps: int) -> Measured:
    data = load(recipe.data, seed=recipe.seed)
    training = prepare_training(recipe, data, prepare(recipe.runtime), peers)
    step, timetable = choose_step(training), TrainingSchedule.of(recipe, len(data.train))
    plan = draw_epoch(training, 0)

    def take(index: int) -> None:
        step(plan.step(index), timetable.context(Position(0, index)))

    return timed(take, steps)


def timed(take: Callable[[int], None], steps: int) -> Measured:
    for index in range(WARM_UP):
        take(index)
    seconds, before, cpu_before = [], written(), time.process_time()
    for index in range(WARM_UP, WARM_UP + steps):
        began_at = time.perf_counter()
        take(index)
        seconds.append(time.perf_counter() - began_at)
    cpu_s = (time.process_time() - cpu_before) / steps
    return Measured(statistics.median(seconds), cpu_s, (written() - before) / steps)


def written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def alone(_world: ProcessGroup | None, recipe: Recipe, steps: int) -> Measured:
    return time_steps(recipe, ALONE, steps)


def by_cohort(world: ProcessGroup, recipe: Recipe, steps: int) -> Measured:
    layout = Layout(Split(tuple((name,) for name in recipe.networks)))
    return time_steps(recipe, MeshPeers(world, layout, recipe), steps)


def by_data(world: ProcessGroup, recipe: Recipe, steps: int) -> Measured:
    """Every process has all networks, and a share of the batch."""
    return time_steps(recipe, MeshPeers(world, Layout(Split((tuple(recipe.networks),)), world.size), recipe), steps)


def by_ddp(world: ProcessGroup, recipe: Recipe, steps: int) -> Measured:
    """The whole cohort in torch's own: its gradients are what counts here, not its time."""
    torch.set_num_threads(1)
    cohort = DistributedDataParallel(Cohort(recipe.networks, num_classes=10, in_channels=1, exits=recipe.graph.exits))
    images = torch.randn(8, 1, 28, 28)

    def take(_: int) -> None:
        cohort.zero_grad()
        sum(logits.square().mean() for logits in cohort(images).values()).backward()

    return timed(take, steps)


def link(world: ProcessGroup) -> Link:
    """From exchanges of one classifier each, of one number and of a million."""

    def cost(numbers: int) -> Measured:
        exchange = LogitsAllGather(world, {"a/final": 0, "b/final": 1})
        mine = {("a/final", "b/final")[world.rank]: torch.zeros(1, numbers)}
        return timed(lambda _: exchange.wait(mine, ["a/final", "b/final"]) and None, 100)

    small, large = cost(1), cost(10**6)
    return Link(small.cpu_seconds, 4e6 / (large.cpu_seconds - small.cpu_seconds))


def as_rank(rank: int, size: int, port: int, answers: Any, function: Any, *arguments: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = ProcessGroup(rank, size, dist.TCPStore(LOOPBACK, port), timeout_s=600) if size > 1 else None
    measured = function(world, *arguments)
    if rank == 0:
        answers.put(measured)
    if world:
        world.shutdown()


def measure(size: int, function: Any, *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with local_store() as port:
        ranks = [
            context.Process(target=as_rank, args=(rank, size, port, answers, function, *arguments))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        measured = answers.get(timeout=600)
        for process in ranks:
            process.join()
    return measured


def repeated(repeats: int, size: int, function: Any, *arguments: Any) -> Any:
    """The median of each figure by itself."""
    found = [measure(size, function, *arguments) for _ in range(repeats)]
    return type(found[0])(*(statistics.median(figures) for figures in zip(*found, strict=True)))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--networks", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--network", default="wrn-16-1")
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()

    link_of_two = repeated(given.repeats, 2, link)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{given.network}, batch {given.batch_size}, {cores} cores, load {load:.0f}")
    print(f"a message: {1e6 * link_of_two.cpu_seconds:.0f} µs and {link_of_two.bytes_per_s / 1e9:.1f} GB/s of CPU time")
    print("CPU s (elapsed s) of a step, and kB that rank 0 sends in it; formulas behind the slashes", flush=True)
    print("| N | one process | cohort | gain | / model | sent | data | gain | sent | DDP sent |")
    print("|" + "---:|" * 10)
    single = repeated(given.repeats, 1, alone, recipe_of(1, given.network, given.batch_size), given.steps)
    for count in given.networks:
        recipe = recipe_of(count, given.network, given.batch_size)
        together = repeated(given.repeats, 1, alone, recipe, given.steps)
        cells = [str(count), in_words(together)]
        if count > 1:
            cohort = repeated(given.repeats, count, by_cohort, recipe, given.steps)
            model_s = single.cpu_seconds + (count - 1) * classifiers(recipe) * link_of_two.cpu_seconds
            cells += [in_words(cohort), f"{together.cpu_seconds / cohort.cpu_seconds:.2f}"]
            cells += [f"{cohort.cpu_seconds / model_s:.2f}"]
            predictions = (count - 1) * classifiers(recipe) * given.batch_size * 10 * 4
            cells += [f"{cohort.bytes_written / 1e3:,.1f} / {predictions / 1e3:,.1f}"]
            data = repeated(given.repeats, count, by_data, recipe, given.steps)
            ring = 2 * (count - 1) / count * weights(recipe) * 4
            cells += [in_words(data), f"{together.cpu_seconds / data.cpu_seconds:.2f}"]
            cells += [f"{data.bytes_written / 1e3:,.0f} / {ring / 1e3:,.0f}"]
            cells += [f"{measure(count, by_ddp, recipe, 3).bytes_written / 1e3:,.0f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def in_words(measured: Measured) -> str:
    return f"{measured.cpu_seconds:.3f} ({measured.seconds:.3f})"


def classifiers(recipe: Recipe) -> int:
    """The number of classifiers of each network; all are alike."""
    return 1 + len(recipe.graph.exits["n0"])


def weights(recipe: Recipe) -> int:
    cohort = Cohort(recipe.networks, num_classes=10, in_channels=1, exits=recipe.graph.exits)
    return sum(parameter.numel() for parameter in cohort.parameters())


if __name__ == "__main__":
    main()
