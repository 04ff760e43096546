"""What a cohort gains from processes and what it sends: time and bytes for a step, spread and not, and DDP's bytes.

    python benchmarks/distributed.py --networks 1 2 4 --network wrn-16-1

Every process computes with one thread. Bytes are those that the kernel saw rank 0 write, headers included.
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
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from codistill.cohort import Cohort
from codistill.data.load import load
from codistill.distributed.crew import Crew
from codistill.distributed.launch import LOOPBACK, meeting_place
from codistill.distributed.split import Split
from codistill.engine.peers import ALONE, Peers
from codistill.engine.runtime import prepare
from codistill.engine.step import choose_step
from codistill.engine.timetable import Position, Timetable
from codistill.engine.trainer import draw_epoch
from codistill.engine.training import prepare_training
from codistill.recipes import get
from codistill.recipes.schema import Recipe

WARM_UP = 3


class Measured(NamedTuple):
    """Of a step at rank 0: the median time, the processor's mean time, which other programs do not lengthen, bytes."""

    seconds: float
    cpu_seconds: float
    bytes_written: float


def recipe_of(count: int, network: str, batch_size: int) -> Recipe:
    networks = "{" + ", ".join(f"n{index}: {network}" for index in range(count)) + "}"
    changes = [f"networks={networks}", f"batch_size={batch_size}", "runtime.device=cpu", "runtime.threads=1"]
    return get("quickstart", [*changes, f"method={'dcm' if count > 1 else 'ds'}"])


def time_steps(recipe: Recipe, peers: Peers, steps: int) -> Measured:
    data = load(seed=recipe.seed, **recipe.data.model_dump())
    training = prepare_training(recipe, data, prepare(recipe.runtime), peers)
    step, timetable = choose_step(training), Timetable.of(recipe, len(data.train))
    plan = draw_epoch(training, 0)

    def take(index: int) -> None:
        step(plan.step(index), timetable.turn(Position(0, index)))

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


def alone(_crew: Crew | None, recipe: Recipe, steps: int) -> Measured:
    return time_steps(recipe, ALONE, steps)


def spread(crew: Crew, recipe: Recipe, steps: int) -> Measured:
    crew.split = Split(tuple((name,) for name in recipe.networks))
    return time_steps(recipe, crew, steps)


def data_parallel(crew: Crew, recipe: Recipe, steps: int) -> Measured:
    """The whole cohort in every process, its gradients averaged: what DDP would move for the same cohort."""
    torch.set_num_threads(1)
    cohort = DistributedDataParallel(Cohort(recipe.networks, num_classes=10, in_channels=1, exits=recipe.graph.exits))
    images = torch.randn(8, 1, 28, 28)

    def take(_: int) -> None:
        cohort.zero_grad()
        sum(logits.square().mean() for logits in cohort(images).values()).backward()

    return timed(take, steps)


def as_rank(rank: int, size: int, port: int, answers: Any, function: Any, *arguments: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    crew = Crew(rank, size, dist.TCPStore(LOOPBACK, port), timeout_s=600) if size > 1 else None
    measured = function(crew, *arguments)
    if rank == 0:
        answers.put(measured)
    if crew:
        crew.leave()


def measure(size: int, function: Any, *arguments: Any) -> Measured:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with meeting_place() as port:
        ranks = [
            context.Process(target=as_rank, args=(rank, size, port, answers, function, *arguments))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        measured: Measured = answers.get(timeout=600)
        for process in ranks:
            process.join()
    return measured


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--networks", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--network", default="wrn-16-1")
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--steps", type=int, default=20)
    given = options.parse_args()

    headings = ("N", "1 process, s (CPU)", "N processes, s (CPU)", "ratio", "sent, kB", "formula", "DDP, kB", "formula")
    table = Table(*headings, title=f"{given.network}, batch {given.batch_size}, {len(os.sched_getaffinity(0))} cores")
    for count in given.networks:
        recipe = recipe_of(count, given.network, given.batch_size)
        together = measure(1, alone, recipe, given.steps)
        if count == 1:
            table.add_row("1", f"{together.seconds:.3f} ({together.cpu_seconds:.3f})")
            continue
        apart = measure(count, spread, recipe, given.steps)
        by_ddp = measure(count, data_parallel, recipe, 3)
        classifiers = 1 + len(recipe.graph.exits["n0"])
        formula = (count - 1) * classifiers * given.batch_size * 10 * 4
        cohort = Cohort(recipe.networks, num_classes=10, in_channels=1, exits=recipe.graph.exits)
        weights = sum(parameter.numel() for parameter in cohort.parameters())
        ring = 2 * (count - 1) / count * weights * 4
        sizes = (apart.bytes_written, formula, by_ddp.bytes_written, ring)
        times = [f"{measured.seconds:.3f} ({measured.cpu_seconds:.3f})" for measured in (together, apart)]
        ratios = f"{together.seconds / apart.seconds:.2f} ({together.cpu_seconds / apart.cpu_seconds:.2f})"
        table.add_row(str(count), *times, ratios, *(f"{size / 1e3:,.1f}" for size in sizes))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
