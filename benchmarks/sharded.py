"""What `processes.weights=sharded` saves and costs: a network in D processes that share its batches.

    python benchmarks/sharded.py --network wrn-28-10 --processes 1 2 4 --batch-size 4 --steps 2

Bytes held are those of weights, momentum and moving average after a step, with heads; the rest is as in distributed.py.
"""

import argparse
from typing import NamedTuple

from codistill.data.load import load
from codistill.distributed.group import ProcessGroup
from codistill.distributed.layout import Layout, Split
from codistill.distributed.mesh import MeshPeers
from codistill.engine.peers import ALONE
from codistill.engine.runtime import prepare
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import prepare_training
from codistill.engine.trainer import choose_step, draw_epoch
from codistill.recipes import get
from codistill.recipes.schema import Recipe
from distributed import Measured, measure, timed


class Held(NamedTuple):
    bytes_held: int
    step: Measured


def in_shares(world: ProcessGroup | None, recipe: Recipe, steps: int) -> Held:
    data = load(recipe.data, seed=recipe.seed)
    peers = MeshPeers(world, Layout(Split((("a",),)), world.size), recipe) if world else ALONE
    training = prepare_training(recipe, data, prepare(recipe.runtime), peers)
    step, timetable, plan = choose_step(training), TrainingSchedule.of(recipe, len(data.train)), draw_epoch(training, 0)
    measured = timed(lambda index: step(plan.step(index), timetable.context(Position(0, index))), steps)
    return Held(sum(tensor.nbytes for tensor in training.tensors_of("a").values()), measured)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--network", default="wrn-16-4")
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--steps", type=int, default=5)
    given = options.parse_args()
    about = [f"networks={{a: {given.network}}}", "method=ds", f"batch_size={given.batch_size}", "ema=0.9"]
    machine = ["runtime.device=cpu", "runtime.threads=1"]
    print("| processes | weights | MB held | MB sent in a step | CPU s of a step |")
    print("|---:|---|---:|---:|---:|")
    for count in given.processes:
        for weights in ("replicated", "sharded") if count > 1 else ("replicated",):
            recipe = get("quickstart", [*about, *machine, f"processes.weights={weights}"])
            found = measure(count, in_shares, recipe, given.steps)
            cells = [f"{found.bytes_held / 1e6:,.1f}", f"{found.step.bytes_written / 1e6:,.1f}"]
            print(f"| {count} | {weights} | {' | '.join(cells)} | {found.step.cpu_seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
