"""benchmarks/RESULTS.md has the numbers that the benchmarks printed, where their output is kept: by commit."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MEASURED = BENCHMARKS / "measured"
IMAGES = 50_000
"""Training images of CIFAR-100, the images of an epoch."""
RESULTS = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")


def test_steps_are_quoted_as_they_were_printed() -> None:
    files = sorted(MEASURED.glob("*-step.jsonl"))
    assert files
    for file in files:
        commit, _ = file.stem.split("-")
        for line in file.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            rate = f"{found['share_of_matmul']:.1%} of {found['matmul_flops_per_s'] / 1e12:.0f}".replace("%", " %")
            row = [
                f"{found['images_per_s']:,.0f}",
                f"{found['plain_images_per_s']:,.0f}",
                f"{found['times_plain']:.3g}",
                rate,
                f"{found['peak_device_bytes'] / 2**30:.2f} GiB",
                f"{found['start_up_s']:.0f} s",
                f"`{commit}` |",
            ]
            assert " | ".join(row) in RESULTS, found["recipe"]
            assert " | ".join(f"{ms:.2f}" for ms in found["parts_ms"].values()) in RESULTS, found["recipe"]


def test_errors_are_quoted_as_they_were_printed() -> None:
    files = sorted(MEASURED.glob("*-rounding.md"))
    assert files
    for file in files:
        _, _, *rows = file.read_text(encoding="utf-8").splitlines()
        assert len(rows) == 3
        errors = []
        for row in rows:
            _, numbers = row.strip("| ").split(" | ", maxsplit=1)
            assert f"| {numbers} |" in RESULTS, row
            errors.append([float(number) for number in numbers.split(" | ")])
        winograd, *others = errors
        differences = [[ours - theirs for ours, theirs in zip(winograd, other, strict=True)] for other in others]
        first, second = (f"{mean(found):.2f} ± {stdev(found):.2f}".replace("-", "−") for found in differences)
        assert f"{first} to bf16 as usual and {second} to fp32 (n = {len(winograd)} pairs)" in RESULTS


def test_a_training_is_told_as_it_went() -> None:
    """What an epoch took, beside the bare step of the same commit; errors with Winograd's method and without."""
    (file,) = MEASURED.glob("*-training.jsonl")
    commit, _ = file.stem.split("-")
    step = json.loads((MEASURED / f"{commit}-step.jsonl").read_text(encoding="utf-8").splitlines()[0])
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    ours, theirs = ([row for row in rows if row["convolutions"] == way] for way in ("winograd", "library"))
    seconds = [after["elapsed_s"] - before["elapsed_s"] for before, after in pairwise(ours)]
    rate = IMAGES / median(seconds)
    assert (
        f"{median(seconds):.2f} s an epoch, {rate:,.0f} images/s: {rate / step['images_per_s']:.1%}".replace("%", " %")
        in RESULTS
    )
    assert f"| {mean(seconds):.1f} s |" in RESULTS
    both = ours[len(theirs) - 1], theirs[-1], ours[-1]
    pairs = [f"{row['a']:.2f} and {row['b']:.2f}" for row in both]
    words = (
        f"after {len(theirs)} epochs {pairs[0]} % where the library's convolutions had {pairs[1]} when the time was up"
    )
    assert f"{words}; at the end {pairs[2]}." in " ".join(RESULTS.split())


def test_scaling_is_quoted_as_it_was_printed() -> None:
    files = sorted(MEASURED.glob("*-scaling.md"))
    assert files
    for file in files:
        _, _, *rows = file.read_text(encoding="utf-8").splitlines()
        assert rows
        for row in rows:
            _, numbers = row.strip("| ").replace("%", " %").split(" | ", maxsplit=1)
            assert numbers in RESULTS, row
