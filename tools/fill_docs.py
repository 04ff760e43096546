"""Fills the marked blocks of README, docs and results: numbers from JSON, keys from the schema, promises from tests.

    python tools/fill_docs.py            # write; `git diff` shows what changed
    python tools/fill_docs.py --check    # exit code 1 and the names of pages that are out of date

In a page, everything between ``<!-- block: NAME -->`` and ``<!-- end -->`` is the template ``tools/blocks/NAME.md``
(Jinja), rendered with ``Published`` below, the catalogues, ``recipe_keys.py`` and ``promises.py``. Edit the template,
not the page.
"""

import argparse
import csv
import json
import re
import sys
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any

import jinja2
from promises import promises
from recipe_keys import sections, study_keys

from codistill.recipes import describe
from codistill.studies import catalogue

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "results/README.md", "docs/*.md", "benchmarks/*.md")
BLOCK = re.compile(r"(<!-- block: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Published:
    """What templates may ask: published runs and tables (results/), and benchmarks' output (benchmarks/measured)."""

    def __init__(self, root: Path = ROOT) -> None:
        self.results, self.measured = root / "results", root / "benchmarks" / "measured"

    @cached_property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Every published run by its file's path below results/, without the suffix."""
        files = sorted(self.results.rglob("*-seed*.json"))
        return {file.relative_to(self.results).with_suffix("").as_posix(): read(file) for file in files}

    @cached_property
    def remarks(self) -> dict[str, Any]:
        """What no file records of a run: what ran beside it, and the commit where it could not be read."""
        remarks: dict[str, Any] = read(ROOT / "tools" / "blocks" / "remarks.json")
        if unknown := remarks.keys() - self.runs.keys():
            raise ValueError(f"remarks.json: {', '.join(sorted(unknown))} are not published runs")
        return remarks

    def select(
        self, twins: str, method: str, *, seed: int | None = None, mixup: bool = False, epochs: int | None = None
    ) -> list[dict[str, Any]]:
        """The runs of a pair and a method, such as ("cifar10-wrn-16-4-twins", "dcm")."""
        found = [
            run
            for name, run in self.runs.items()
            if name.startswith(f"{twins}-{method}-seed")
            and seed in (None, run["recipe"]["seed"])
            and bool(run["recipe"]["augment"]["mixup"]) is mixup
            and epochs in (None, run["recipe"]["length"]["epochs"])
        ]
        if not found:
            raise ValueError(f"no published run of {twins}, {method}, seed {seed}")
        return found

    def error(self, twins: str, method: str, at: str = "last", **which: Any) -> float:
        """The mean test error (%) of all networks and seeds at their ``last`` or ``best_epoch``."""
        runs = self.select(twins, method, **which)
        return mean(float(network[at]["top1_error"]) for run in runs for network in run["networks"].values())

    def error_in_epoch(self, twins: str, method: str, epoch: int) -> float:
        """The mean test error (%) of all networks and seeds after that number of epochs."""
        runs = self.select(twins, method)
        return mean(
            float(run["epochs"][epoch - 1]["test"][f"{n}/final"]["top1_error"]) for run in runs for n in run["networks"]
        )

    def train_error(self, twins: str, method: str) -> float:
        """The mean training error (%) of all networks and seeds in the last epoch."""
        return mean(float(x) for run in self.select(twins, method) for x in run["epochs"][-1]["train_error"].values())

    def memorised(self, twins: str, method: str) -> float:
        """The share (%) of wrong labels that were learned, if all that is learned of true ones is right."""
        wrong = 100 * self.select(twins, method)[0]["recipe"]["data"]["wrong_labels"]
        return float(100 * (1 - self.train_error(twins, method) / wrong))

    def minutes(self, twins: str, method: str, seed: int = 1) -> float:
        """How long a run took."""
        (run,) = self.select(twins, method, seed=seed)
        return float(run["elapsed_s"]) / 60

    def table(self, study: str, number: int = 0, folder: str = "") -> str:
        """A table of results/tables, or of a folder in results: the errors, or with 1 the differences."""
        text = (self.results / folder / "tables" / f"{study}.md").read_text(encoding="utf-8")
        tables: list[str] = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        return tables[number].rstrip("\n")

    def cells(self, study: str) -> dict[str, tuple[str, str]]:
        """A study's rows that were run, each with its networks' errors as the table has them."""
        rows = [line.strip("| ").split(" | ") for line in self.table(study).splitlines()[2:]]
        return {row: (a, b) for row, n, a, b in rows if n != "0"}

    def difference(self, study: str, of: str) -> dict[str, Any]:
        """A contrast of the mean over networks: points, low, high (95 %) and verdict."""
        with (self.results / "tables" / f"{study}.differences.csv").open(encoding="utf-8", newline="") as file:
            (row,) = [row for row in csv.DictReader(file) if (row["difference"], row["of"]) == (of, "mean of a, b")]
        names = {"points": "points", "low": "95 % interval low", "high": "95 % interval high"}
        return {key: float(row[name]) for key, name in names.items()} | {"verdict": row["verdict"]}

    def budget(self, study: str, difference: str = "mutual − independent", folder: str = "budgets") -> str:
        """A contrast of a study in that folder of results, with its interval and verdict; a dash without runs."""
        file = self.results / folder / "tables" / f"{study}.differences.csv"
        if not file.exists():
            return "–"
        with file.open(encoding="utf-8", newline="") as lines:
            found = [row for row in csv.DictReader(lines) if row["difference"] == difference]
        (row,) = [row for row in found if row["of"].startswith("mean of")]
        points, low, high = (row[name] for name in ("points", "95 % interval low", "95 % interval high"))
        interval = f" (n = {row['n']}, 95 %: {signed(float(low), 2)} to {signed(float(high), 2)})" if low else ""
        return f"{signed(float(points), 2)}{interval}: {row['verdict']}" if points else "–"

    @cached_property
    def zoo(self) -> dict[str, Any]:
        """What tools/zoo.py found, with the number of networks whose heads are of their own blocks, and the failed."""
        zoo: dict[str, Any] = read(self.measured / "zoo.json")
        failed = [name for name, found in zoo["networks"].items() if "error" in found]
        made = [[words for _, words in found.get("heads", {}).values()] for found in zoo["networks"].values()]
        own = sum(bool(heads) and not any(words.startswith("generic") for words in heads) for heads in made)
        return {**zoo, "failed": failed, "own": own}

    def step(self, twins: str) -> dict[str, Any]:
        """The newest benchmark of a step, as benchmarks/step.py printed it."""
        lines = [line for file in self.measured.glob("*-step.jsonl") for line in file.read_text().splitlines()]
        rows = [row for row in map(json.loads, lines) if row["recipe"] == f"cifar100/{twins}-twins"]
        return max(rows, key=lambda row: row["images_per_s"])

    def versions(self) -> list[dict[str, Any]]:
        """Steps of two or three versions, taken in turn: medians in ms and, beside the first, ratios."""
        (file,) = self.measured.glob("*-versions.jsonl")
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            row["median"] = {version: median(ms) for version, ms in row["ms"].items()}
            first, *others = row["median"].values()
            row["ratios"] = [other / first for other in others]
        return rows

    def speedup(self, twins: str) -> tuple[float, float]:
        """How many times the plain loop's pace: beside its fastest and its slowest run."""
        plain: list[float] = read(self.measured / "plain-loop.json")["images_per_s"][twins]
        ours = self.step(twins)["images_per_s"]
        return ours / max(plain), ours / min(plain)

    def cost(self, row: str) -> dict[str, float]:
        """Time and FLOPs of a row of benchmarks/scaling.py, beside DML's."""
        (file,) = self.measured.glob("*-scaling.md")
        cells = [line.strip("| ").split(" | ") for line in file.read_text(encoding="utf-8").splitlines()]
        (found,) = [cell for cell in cells if cell[0] == row]
        return {"time": float(found[2]), "flops": float(found[3])}


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def signed(number: float, digits: int = 1) -> str:
    """With a true minus sign."""
    return f"{number:.{digits}f}".replace("-", "−")


def clock(seconds: float) -> str:
    """As in 7 min 15 s."""
    return f"{round(seconds) // 60} min {round(seconds) % 60} s"


def render(name: str) -> str:
    """The block's text, from its template."""
    loader = jinja2.FileSystemLoader(ROOT / "tools" / "blocks")
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    environment.filters |= {"signed": signed, "clock": clock, "digits": lambda x, n: f"{x:.{n}f}"}
    template = environment.get_template(f"{name}.md")
    studies = [catalogue.get(study) for study in catalogue.NAMES]
    keys = {"recipe_keys": sections(), "study_keys": study_keys()}
    about = {"promises": promises(), "recipes": describe(), "studies": studies, **keys}
    return template.render(published=Published(), **about).strip("\n") + "\n"


def filled(page: str) -> str:
    """The page with all of its blocks rendered anew."""
    return BLOCK.sub(lambda match: match[1] + render(match[2]) + match[3], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is out of date")
    options = parser.parse_args()
    stale = []
    for file in sorted(file for pattern in PAGES for file in ROOT.glob(pattern)):
        before = file.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            stale.append(file.relative_to(ROOT).as_posix())
            if not options.check:
                file.write_text(after, encoding="utf-8")
    if options.check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; type: python tools/fill_docs.py")
    print(f"{'changed' if stale else 'nothing to change'}: {', '.join(stale)}" if stale else "nothing to change")


if __name__ == "__main__":
    main()
