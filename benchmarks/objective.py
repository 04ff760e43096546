"""What edges cost: DCM's 18 against DML + DS's 2 on the same six classifiers, and growth with the number of networks.

    python benchmarks/objective.py [--batch 128] [--classes 1000] [--rounds 60] [--device cpu]

Forward and backward of the objective alone. Everything compared in a line is run in turn, round after round, so that a
busy machine is equally unkind to all; the median of the rounds is shown, and ratios are medians of the rounds' ratios.

Measured on two shared CPU cores without a GPU (AMD EPYC, other work running; one thread, torch 2.13.0, n = 150):

    two networks   edges     objective  edge by edge
    dml_ds             2       8.12 ms       5.00 ms
    dcm               18       8.03 ms      31.39 ms
    dcm / dml_ds               0.98 ×        5.41 ×

    networks  classifiers  dcm edges         dcm      dml_ds    ratio
           2            6         18     8.07 ms     8.10 ms   1.00 ×
           4           12        108    19.50 ms    17.91 ms   1.05 ×
           8           24        504    83.56 ms    90.04 ms   0.96 ×
          16           48       2160   103.37 ms   108.72 ms   0.96 ×
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from codistill.transfer import methods
from codistill.transfer.graph import Outline, TransferGraph
from codistill.transfer.objective import Objective
from codistill.transfer.per_edge import edge_terms

Loss = Callable[[dict[str, Tensor], Tensor], Tensor]


def cohort(networks: int) -> Outline:
    return Outline({f"n{i}": {"final": 1, "stage2": 2, "stage1": 3} for i in range(networks)})


def as_product(graph: TransferGraph, device: str) -> Loss:
    objective = Objective(graph).to(device)
    return lambda logits, labels: objective(logits, labels).total


def as_edges(graph: TransferGraph) -> Loss:
    return lambda logits, labels: torch.stack(list(edge_terms(graph, logits, labels).values())).sum()


def measure(losses: dict[str, Loss], outline: Outline, options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of every round, by name; the first tenth warms up and is left out."""
    shape = options.batch, options.classes
    logits = {c.name: torch.randn(shape, device=options.device, requires_grad=True) for c in outline.classifiers}
    labels = torch.randint(options.classes, (options.batch,), device=options.device)
    wait = torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None
    times: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(options.rounds + options.rounds // 10):
        for name, loss in losses.items():
            for tensor in logits.values():
                tensor.grad = None
            wait()
            started = time.perf_counter()
            loss(logits, labels).backward()
            wait()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: series[options.rounds // 10 :] for name, series in times.items()}


def ratio(times: dict[str, list[float]], above: str, below: str) -> float:
    return median(a / b for a, b in zip(times[above], times[below], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="What the edges of a transfer graph cost.")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, batch {options.batch}, "
        f"{options.classes} classes, n = {options.rounds} rounds"
    )

    pair = cohort(2)
    graphs = {"dml_ds": methods.dml_ds(pair), "dcm": methods.dcm(pair)}
    losses = {name: as_product(graph, options.device) for name, graph in graphs.items()}
    losses |= {f"{name}, edge by edge": as_edges(graph) for name, graph in graphs.items()}
    times = measure(losses, pair, options)
    print(f"\n{'two networks':14}{'edges':>6}{'objective':>14}{'edge by edge':>14}")
    for name, graph in graphs.items():
        ours, slow = median(times[name]), median(times[f"{name}, edge by edge"])
        print(f"{name:14}{len(graph.transfers):>6}{ours:>11.2f} ms{slow:>11.2f} ms")
    slow_ratio = ratio(times, "dcm, edge by edge", "dml_ds, edge by edge")
    print(f"{'dcm / dml_ds':20}{ratio(times, 'dcm', 'dml_ds'):>11.2f} ×{slow_ratio:>12.2f} ×")

    print(f"\n{'networks':>8}{'classifiers':>13}{'dcm edges':>11}{'dcm':>12}{'dml_ds':>12}{'ratio':>9}")
    for size in (2, 4, 8, 16):
        outline = cohort(size)
        dcm, dml_ds = methods.dcm(outline), methods.dml_ds(outline)
        times = measure(
            {"dcm": as_product(dcm, options.device), "dml_ds": as_product(dml_ds, options.device)}, outline, options
        )
        print(
            f"{size:>8}{len(outline.classifiers):>13}{len(dcm.transfers):>11}{median(times['dcm']):>9.2f} ms"
            f"{median(times['dml_ds']):>9.2f} ms{ratio(times, 'dcm', 'dml_ds'):>7.2f} ×"
        )


if __name__ == "__main__":
    main()
