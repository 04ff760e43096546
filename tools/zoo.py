"""Checks that networks of timm and torchvision can be trained and taken out again, for docs/zoo.md.

    python tools/zoo.py --pick    # writes the list: of every file of timm the smallest classifier, all of torchvision
    python tools/zoo.py           # checks those of the list that have no result yet; then: python tools/fill_docs.py

The list and what was found are benchmarks/measured/zoo.json. Nothing is downloaded, and a few GB of memory suffice.
"""

import argparse
import json
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "measured" / "zoo.json"
sys.path.insert(0, str(ROOT / "tests"))

from support.zoo import timm, torchvision  # noqa: E402
from support.zoo_check import check_on_meta  # noqa: E402


def pick() -> list[str]:
    """The smallest classifier of every file of timm, and all classifiers of torchvision."""
    smallest: dict[str, tuple[int, str]] = {}
    for module in timm.list_modules():
        for model in set(timm.list_models(module=module)) - set(timm.list_models("test_*")):  # timm's own toys
            with torch.device("meta"):
                network = timm.create_model(model)
            if getattr(network, "num_classes", 0):
                size = sum(parameter.numel() for parameter in network.parameters())
                smallest[module] = min(smallest.get(module, (size, model)), (size, model))
    models = torchvision.models
    return [
        *(f"timm:{model}" for _, model in sorted(smallest.values(), key=lambda found: found[1])),
        *(f"torchvision:{model}" for model in models.list_models(module=models)),
    ]


def check(name: str) -> dict[str, object]:
    warnings.simplefilter("ignore")  # the libraries' own
    try:
        return asdict(check_on_meta(name))
    except Exception as error:
        return {"error": " ".join(str(error).split())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pick", action="store_true", help="make the list anew; nothing is checked")
    parser.add_argument("--jobs", type=int, default=1, help="processes that check")
    options = parser.parse_args()
    networks: dict[str, Any] = dict.fromkeys(pick()) if options.pick else json.loads(MEASURED.read_text())["networks"]
    versions = {library.__name__: library.__version__.partition("+")[0] for library in (timm, torchvision, torch)}

    def write() -> None:
        text = json.dumps({"versions": versions, "networks": networks}, indent=1) + "\n"
        MEASURED.write_text(text, encoding="utf-8")

    write()
    if options.pick:
        return
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(check, name): name for name, found in networks.items() if found is None}
        for done in as_completed(waiting):
            networks[waiting[done]] = done.result()
            print(waiting[done], done.result().get("error", ""), flush=True)
            write()


if __name__ == "__main__":
    main()
