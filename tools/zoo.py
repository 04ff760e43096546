"""Checks that networks of timm and torchvision can be trained and taken out again, for docs/zoo.md.

    python tools/zoo.py --pick    # writes the list: of every file of timm the smallest classifier, all of torchvision
    python tools/zoo.py           # checks every network of the list on the meta device; then: python tools/fill_docs.py

The list and what was found are benchmarks/measured/zoo.json. Both take minutes and neither weights nor network.
"""

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pick", action="store_true", help="make the list anew; nothing is checked")
    warnings.simplefilter("ignore")  # the libraries' own
    if parser.parse_args().pick:
        networks: dict[str, object] = dict.fromkeys(pick())
    else:
        networks = json.loads(MEASURED.read_text(encoding="utf-8"))["networks"]
        for name in networks:
            print(name, flush=True)
            try:
                networks[name] = asdict(check_on_meta(name))
            except Exception as error:
                networks[name] = {"error": " ".join(str(error).split())}
    versions = {library.__name__: library.__version__.partition("+")[0] for library in (timm, torchvision, torch)}
    MEASURED.write_text(json.dumps({"versions": versions, "networks": networks}, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, found in networks.items() if isinstance(found, dict) and "error" in found]
    print(f"{len(networks)} networks" + (f"; these fail: {', '.join(failed)}" if failed else ""))


if __name__ == "__main__":
    main()
