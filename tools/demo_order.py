"""How often the demonstration's order holds: a table of docs/demo.md, from runs of seeds that the demo does not show.

    for seed in $(seq 4 33); do for method in independent dml dcm; do
        codistill train quickstart method=$method seed=$seed runtime.threads=1 --quiet --out runs/order/$method-$seed
    done; done
    python tools/demo_order.py runs/order

A set is three seeds, as many as `make demo` shows (41 to 43): seeds 4 to 6, 7 to 9, and so on.
"""

import sys
from pathlib import Path
from statistics import mean

from codistill.runs.folder import RunFolder
from codistill.runs.result import read_finished
from codistill.studies.statistics import summarise

METHODS = {"independent": "independent", "dml": "DML", "dcm": "DCM"}
SEEDS_IN_A_SET = 3


def errors(runs: Path) -> dict[int, dict[str, float]]:
    """By seed and method, the mean over both networks of the last epoch's test error, where all methods are done."""
    found: dict[int, dict[str, float]] = {}
    for folder in sorted(runs.iterdir()):
        if RunFolder(folder).result.exists():
            result = read_finished(RunFolder(folder))
            last = result.mean_error(result.recipe.networks)
            found.setdefault(result.recipe.seed, {})[result.recipe.method] = last
    return {seed: by_method for seed, by_method in sorted(found.items()) if by_method.keys() == METHODS.keys()}


def main(runs: Path) -> None:
    by_seed = errors(runs)
    seeds = list(by_seed)
    sets = [seeds[at : at + SEEDS_IN_A_SET] for at in range(0, len(seeds) - SEEDS_IN_A_SET + 1, SEEDS_IN_A_SET)]
    print("| seeds | " + " | ".join(METHODS.values()) + " |\n| --- | ---: | ---: | ---: |")
    of_sets = []
    for chosen in sets:
        of_sets.append({method: mean(by_seed[seed][method] for seed in chosen) for method in METHODS})
        cells = " | ".join(f"{of_sets[-1][method]:.2f}" for method in METHODS)
        print(f"| {chosen[0]}–{chosen[-1]} | {cells} |")
    over_all = [summarise([by_seed[seed][method] for seed in seeds]) for method in METHODS]
    print(f"| all {len(seeds)}, mean(std) | " + " | ".join(str(summary) for summary in over_all) + " |\n")
    for better, worse in (("dml", "independent"), ("dcm", "independent"), ("dcm", "dml")):
        in_sets = sum(one[better] < one[worse] for one in of_sets)
        in_seeds = sum(by_seed[seed][better] < by_seed[seed][worse] for seed in seeds)
        print(
            f"- {METHODS[better]} ahead of {METHODS[worse]} in {in_sets} of {len(sets)} sets, "
            f"and in {in_seeds} of {len(seeds)} single seeds."
        )
    whole = sum(one["dcm"] < one["dml"] < one["independent"] for one in of_sets)
    print(f"- The whole order, DCM before DML before independent, in {whole} of {len(sets)} sets.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
