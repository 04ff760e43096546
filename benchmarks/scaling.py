"""What a step costs as the method, the number of networks and the batch grow: time beside arithmetic.

    python benchmarks/scaling.py cifar100/wrn-28-4-twins
    python benchmarks/scaling.py quickstart runtime.threads=2 --steps 5 --networks 2 3 --batches 32 64

One row of a Markdown table per setting, when it is measured. Images are random. ``time`` and ``FLOPs`` are of one step,
divided by those of the first row: where time grows less than FLOPs, the larger setting uses the machine better.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from string import ascii_lowercase

from codistill import recipes
from codistill.engine.bench import bench
from codistill.recipes.schema import Recipe
from codistill.studies.costs import sizes


def settings(
    recipe: Recipe, methods: list[str], networks: list[int], batches: list[int]
) -> Iterator[tuple[str, Recipe]]:
    """The methods, then with the last of them more networks, then other batches."""
    kind = next(iter(recipe.networks.values()))
    for method in methods:
        recipe = recipe.replace(method=method)
        yield method, recipe
    for number in networks:
        yield f"{number} networks", recipe.replace(networks=dict.fromkeys(islice(ascii_lowercase, number), kind))
    for batch in batches:
        yield f"batches of {batch}", recipe.replace(batch_size=batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="+", help="recipe and key=value overrides")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--methods", nargs="*", default=["independent", "dml", "dcm"])
    parser.add_argument("--networks", nargs="*", type=int, default=[3, 4, 8])
    parser.add_argument("--batches", nargs="*", type=int, default=[32, 64, 256, 512])
    options = parser.parse_args()
    recipe = recipes.get(options.recipe[0], options.recipe[1:])
    seen = sizes(recipe)
    if seen is None:
        parser.error(f"{recipe.name}: its images are not there to be counted; give data.folder=DIR")
    channels, side, _ = seen.shape
    print("| setting | ms a step | time | FLOPs | images/s | of the matmul rate | peak memory |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    first = None
    for name, setting in settings(recipe, options.methods, options.networks, options.batches):
        measured = bench(setting, channels, side, seen.classes, options.steps, images=seen.images)
        seconds = setting.batch_size / measured.images_per_s
        flops = setting.batch_size * measured.flops_per_image
        first = first or (seconds, flops)
        memory = f"{measured.peak_device_bytes / 2**30:.2f} GiB" if measured.peak_device_bytes else ""
        print(
            f"| {name} | {1e3 * seconds:.2f} | {seconds / first[0]:.2f} | {flops / first[1]:.2f} "
            f"| {measured.images_per_s:,.0f} | {measured.share_of_matmul:.1%} | {memory} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
