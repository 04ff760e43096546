"""What rounding costs in accuracy: the same short training in float32, in bfloat16, and by Winograd's method.

    python benchmarks/rounding.py --seeds 41 42 43
    python benchmarks/rounding.py length.epochs=1 --ways fp32 bf16

Quickstart on images of 16×16, so that all of its 3×3 convolutions can be computed by Winograd's method, and are where
it is asked for; a training takes it for wide ones only, on a GPU. One row of a Markdown table each: the test error
after the last epoch, the mean of both networks, for every seed.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch

from codistill import recipes
from codistill.engine import trainer
from codistill.ops import dispatch as kernels

WAYS = {"winograd": "bf16", "bf16": "bf16", "fp32": "fp32"}
"""And the precision of each."""


@contextmanager
def all_wide() -> Iterator[None]:
    """Inside, no convolution has too few channels, or too little work, for Winograd's method."""
    before = kernels.WIDE_CHANNELS, kernels.WIDE_WORK, kernels.SMALL_CHANNELS
    kernels.WIDE_CHANNELS, kernels.WIDE_WORK, kernels.SMALL_CHANNELS = kernels.WIDE_UNIT, 1, 0
    try:
        yield
    finally:
        kernels.WIDE_CHANNELS, kernels.WIDE_WORK, kernels.SMALL_CHANNELS = before


def error(way: str, seed: int, changes: Sequence[str]) -> float:
    """The error of the last epoch, in percent."""
    winograd = "on" if way == "winograd" else "off"
    own = "data.image_size=16", f"runtime.precision={WAYS[way]}", f"runtime.winograd={winograd}", f"seed={seed}"
    recipe = recipes.get("quickstart", [*own, *changes])
    with TemporaryDirectory() as folder, all_wide() if way == "winograd" else nullcontext():
        *_, last = trainer.train(recipe, Path(folder) / "run")
    return fmean(last.metrics[f"{name}/final"].top1_error for name in recipe.networks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="changes to the recipe")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[41, 42, 43])
    options = parser.parse_args()
    if "winograd" in options.ways and not torch.cuda.is_available():
        parser.error("Winograd's method is for an NVIDIA GPU: --ways bf16 fp32")
    print(f"| way | {' | '.join(map(str, options.seeds))} |")
    print(f"| --- |{' ---: |' * len(options.seeds)}", flush=True)
    for way in options.ways:
        found = [error(way, seed, options.changes) for seed in options.seeds]
        print(f"| {way} | {' | '.join(f'{percent:.2f}' for percent in found)} |", flush=True)


if __name__ == "__main__":
    main()
