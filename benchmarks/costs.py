"""What a step of several networks costs, counted and measured: what `codistill train --nproc` shares networks out by.

python benchmarks/costs.py --repeats 5
"""

import argparse
import time
from statistics import median

from codistill.data.load import load
from codistill.distributed.costs import counted_costs, seconds_for_an_image
from codistill.engine.runtime import prepared
from codistill.recipes import get

NETWORKS = [
    *("wrn-10-1", "resnet-8", "resnet-14", "resnet-20", "wrn-16-2"),
    *("densenet-10-8", "densenet-22-12", "mobilenetv2"),
]
MACHINE = ["runtime.device=cpu", "runtime.threads=1"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--networks", nargs="+", default=NETWORKS)
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    named = ", ".join(f"n{index}: {network}" for index, network in enumerate(given.networks))
    recipe = get("quickstart", [f"networks={{{named}}}", "method=dcm", "data.image_size=28", *MACHINE])
    data = load(recipe.data, seed=recipe.seed)
    counted = counted_costs(recipe, data)
    print("| network | MFLOP | ms for an image, least to most | GFLOP/s | measuring took s |")
    print("|---|---:|---:|---:|---:|")
    with prepared(recipe.runtime) as machine:
        for name, network in recipe.networks.items():
            began_at = time.perf_counter()
            ms = sorted(1000 * seconds_for_an_image(name, recipe, data, machine) for _ in range(given.repeats))
            took_s = (time.perf_counter() - began_at) / given.repeats
            gflops = counted[name] / median(ms) / 1e6
            spread = f"{median(ms):.2f} ({ms[0]:.2f} to {ms[-1]:.2f})"
            print(f"| {network} | {counted[name] / 1e6:,.0f} | {spread} | {gflops:.0f} | {took_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
