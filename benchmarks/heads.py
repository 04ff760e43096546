"""The paper's own heads beside those that any network gets by the rule, in the same short training on real images.

    python benchmarks/heads.py --network wrn-16-4 --epochs 15 --seed 1          # CIFAR-100, on a GPU in bfloat16
    python benchmarks/heads.py --network wrn-10-1 --epochs 1 --data fashion

Twins with DCM, by the loop that docs/own-loop.md shows, with the same batches and the same initial weights of the
networks themselves. One row of a Markdown table each: what the heads cost, and the test errors after the last epoch.
"""

import argparse
import copy
from collections.abc import Iterator

import torch

from codistill import Cohort, Objective, methods
from codistill.data.augmentation import OnDevice
from codistill.data.batches import plan_epoch
from codistill.data.images import ImageData
from codistill.data.load import load
from codistill.engine.evaluate import evaluate
from codistill.networks.cost import cost
from codistill.recipes.sections import Augment

BATCH_SIZE, LR, MOMENTUM, WEIGHT_DECAY = 128, 0.1, 0.9, 5e-4


def cohorts(network: str, data: ImageData, seed: int) -> Iterator[tuple[str, Cohort]]:
    """As modules of one's own, our networks get heads like everybody's."""
    papers = Cohort({"a": network, "b": network}, data.num_classes, in_channels=data.channels, seed=seed)
    modules = {name: copy.deepcopy(member.backbone) for name, member in papers.members.items()}
    yield "the paper's", papers
    yield "by the rule", Cohort(modules, data.num_classes, in_channels=data.channels, seed=seed)


def errors(cohort: Cohort, data: OnDevice, epochs: int, seed: int) -> dict[str, float]:
    """The error of every network in percent, after training."""
    device = data.mean.device
    objective = Objective(methods.dcm(cohort.outline)).to(device)
    cohort.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        cohort.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True, fused=device.type == "cuda"
    )
    train = data.splits["train"]
    steps = epochs * -(-len(train) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps, cycle_momentum=False)
    autocast = torch.autocast(device.type, torch.bfloat16)
    image_size = train.pixels.shape[-2:]
    for epoch in range(epochs):
        cohort.train()
        plan = plan_epoch(
            len(train), epoch, seed, batch_size=BATCH_SIZE, settings=data.augmentation, image_size=image_size
        )
        for draws in data.batches(plan.to(device), 0):
            images, labels = data.augmented(draws, label_smoothing=0.0)
            with autocast:
                logits = cohort(images.contiguous(memory_format=torch.channels_last))
            optimizer.zero_grad()
            objective(logits, labels).total.backward()
            optimizer.step()
            schedule.step()
    cohort.eval()
    with autocast:
        found = evaluate(lambda pixels: cohort(data.plain(pixels)), data.splits["test"], 500)
    return {name: metrics.top1_error for name, metrics in found.items() if name.endswith("/final")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="wrn-16-4")
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    data = load(options.data)
    on_device = OnDevice.of(data, device, Augment())
    shape = data.channels, *data.image_size
    print(f"{options.network} twins, {options.epochs} epochs, seed {options.seed}\n")
    print("| heads | parameters | forward GFLOPs | a | b |")
    print("| --- | ---: | ---: | ---: | ---: |", flush=True)
    for kind, cohort in cohorts(options.network, data, options.seed):
        costs = cost(cohort.members["a"], shape)
        found = errors(cohort, on_device, options.epochs, options.seed)
        per_network = " | ".join(f"{error:.2f}" for error in found.values())
        print(f"| {kind} | {costs.parameters:,} | {costs.flops / 1e9:.3f} | {per_network} |", flush=True)


if __name__ == "__main__":
    main()
