"""The training step beside the plain loop (``reference.py``), in one run: throughput, share of the chip, memory.

    python benchmarks/step.py                                   # four pairs of twins, DCM, on a GPU
    python benchmarks/step.py quickstart runtime.threads=2 --steps 20
    python benchmarks/step.py cifar100/wrn-28-4-twins --no-reference

One line of JSON each. Images are random: the arithmetic does not depend on them. A recipe for a folder of images is
measured as for ImageNet.
"""

import argparse
import json
from dataclasses import asdict

import torch
from reference import throughput as plain_throughput

from codistill import recipes
from codistill.engine.bench import bench, random_data
from codistill.recipes.schema import Recipe
from codistill.studies.costs import Sizes, sizes

PAIRS = ("wrn-28-10-twins", "wrn-28-4-twins", "densenet-40-12-twins", "resnet-110-twins")
WARM_UP_STEPS = 10
IMAGENET = Sizes(1_281_167, classes=1_000, shape=(3, 224, 224))
FAST = ("runtime.device=cuda", "runtime.precision=bf16", "runtime.kernels=triton")


def compare(recipe: Recipe, steps: int, *, with_reference: bool) -> dict[str, object]:
    seen = sizes(recipe) or IMAGENET
    channels, side, _ = seen.shape
    ours = bench(recipe, channels, side, seen.classes, steps, images=seen.images)
    row = {"recipe": recipe.name, "method": recipe.method, **asdict(ours), "share_of_matmul": ours.share_of_matmul}
    if with_reference:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        plain_steps = steps // 2
        data = random_data(channels, side, seen.classes, images=(WARM_UP_STEPS + plain_steps) * recipe.batch_size)
        plain = plain_throughput(recipe, data, warm_up=WARM_UP_STEPS, steps=plain_steps)
        row |= {"plain_images_per_s": plain, "times_plain": ours.images_per_s / plain}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="*", help="recipe and key=value overrides")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--no-reference", action="store_true")
    options = parser.parse_args()
    wanted = [(options.recipe[0], options.recipe[1:])] if options.recipe else [(f"cifar100/{x}", FAST) for x in PAIRS]
    for name, overrides in wanted:
        recipe = recipes.get(name, list(overrides))
        print(json.dumps(compare(recipe, options.steps, with_reference=not options.no_reference)), flush=True)


if __name__ == "__main__":
    main()
