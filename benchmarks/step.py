"""Throughput, share of the chip, memory and start-up of the training step, beside the plain loop, in one run.

    python benchmarks/step.py                                   # four pairs of twins, DCM
    python benchmarks/step.py cifar100/wrn-28-4-twins method=dml --steps 100 --no-reference

Images are random: the step's arithmetic does not depend on them. FLOPs are counted (2 per multiply-add, forward × 3);
the matmul rate is bf16, 8192³, best of 20, measured in the same run.
"""

import argparse
import json
import time

import torch

from codistill import recipes
from codistill.data.images import ImageData, Images
from codistill.engine.runtime import prepare
from codistill.engine.step import choose_step
from codistill.engine.timetable import Position, Timetable
from codistill.engine.trainer import draw_epoch
from codistill.engine.training import prepare_training
from codistill.networks.counting import cost
from codistill.recipes.schema import Recipe
from reference import throughput as plain_throughput

PAIRS = ("wrn-28-10-twins", "wrn-28-4-twins", "densenet-40-12-twins", "resnet-110-twins")


def random_data(images: int = 12_800, classes: int = 100) -> ImageData:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, 32, 32), dtype=torch.uint8, generator=generator)
    split = Images(pixels, torch.randint(0, classes, (images,), generator=generator))
    names = tuple(map(str, range(classes)))
    return ImageData("random", split, split, None, names, (0.5,) * 3, (0.25,) * 3, report={})


def matmul_tflops(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return 2 * size**3 / min(seconds[3:]) / 1e12


def measure(recipe: Recipe, data: ImageData, steps: int) -> dict[str, float | str]:
    """Images per second of full batches, after everything is compiled and recorded."""
    torch.cuda.reset_peak_memory_stats()
    started_at = time.perf_counter()
    training = prepare_training(recipe, data, prepare(recipe.runtime))
    step, plan = choose_step(training), draw_epoch(training, 0)
    timetable = Timetable.of(recipe, len(data.train))
    step(plan.step(0), timetable.turn(Position()))
    torch.cuda.synchronize()
    start_up_s = time.perf_counter() - started_at
    flops = 3 * sum(cost(member, (3, 32, 32)).flops for member in training.cohort.members.values())
    for warm in (True, False):
        started_at = time.perf_counter()
        for index in range(10 if warm else steps):
            at = Position(0, index % (timetable.steps_per_epoch - 1))
            step(plan.step(at.step), timetable.turn(at))
        torch.cuda.synchronize()
    images_per_s = steps * recipe.batch_size / (time.perf_counter() - started_at)
    return {
        "images_per_s": round(images_per_s),
        "tflops": round(images_per_s * flops / 1e12, 1),
        "start_up_s": round(start_up_s, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "path": step.path,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="*", help="recipe and key=value overrides")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--no-reference", action="store_true")
    options = parser.parse_args()
    names, overrides = options.recipe[:1] or [f"cifar100/{pair}" for pair in PAIRS], options.recipe[1:]
    fast = ["runtime.device=cuda", "runtime.precision=bf16", "runtime.compile=true"]
    data, rate = random_data(), matmul_tflops()
    print(json.dumps({"matmul_tflops": round(rate), "device": torch.cuda.get_device_name()}), flush=True)
    for name in names:
        recipe = recipes.get(name, [*fast, *overrides])
        row = {"recipe": name, "method": recipe.method, **measure(recipe, data, options.steps)}
        row["share_of_matmul"] = round(float(row["tflops"]) / rate, 3)
        torch.cuda.empty_cache()
        if not options.no_reference:
            row["plain_images_per_s"] = round(plain_throughput(recipe, data, steps=options.steps // 2))
            row["times_plain"] = round(float(row["images_per_s"]) / float(row["plain_images_per_s"]), 2)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
