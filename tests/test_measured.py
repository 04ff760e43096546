"""benchmarks/RESULTS.md has the numbers that the benchmarks printed, where their output is kept: by commit."""

import json
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MEASURED = BENCHMARKS / "measured"
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
        for row in rows:
            _, numbers = row.strip("| ").split(" | ", maxsplit=1)
            assert f"| {numbers} |" in RESULTS, row


def test_scaling_is_quoted_as_it_was_printed() -> None:
    files = sorted(MEASURED.glob("*-scaling.md"))
    assert files
    for file in files:
        _, _, *rows = file.read_text(encoding="utf-8").splitlines()
        assert rows
        for row in rows:
            _, numbers = row.strip("| ").replace("%", " %").split(" | ", maxsplit=1)
            assert numbers in RESULTS, row
