"""What every network of the zoo must do: be built in a cohort with its heads, stripped, and loaded by its library."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from codistill.cohort import Cohort
from codistill.networks.adapters.architecture import LibraryArchitecture
from codistill.networks.families import parse
from codistill.transfer import methods
from codistill.transfer.objective import Objective
from support import zoo

CLASSES = 10
PARTNER = "resnet-8"


@dataclass(frozen=True)
class Checked:
    """A network of the zoo; ``heads`` by exit: the module in front and what the head is made of."""

    parameters: int
    image_size: int
    any_size: bool
    heads: dict[str, tuple[str, str]]


def plain(name: str, num_classes: int = CLASSES) -> nn.Module:
    """What the library alone builds."""
    options: Any = parse(name).options
    build = zoo.timm.create_model if options["library"] == "timm" else zoo.torchvision.models.get_model
    more = dict(options["options"])
    if options["library"] == "torchvision" and options["model"] in {"googlenet", "inception_v3"}:
        more |= {"aux_logits": False, "init_weights": True}
    network: nn.Module = build(options["model"], num_classes=num_classes, **more)
    return network


def check_on_meta(name: str) -> Checked:
    """Build the network beside another with all of their heads, without memory; raises where anything does not fit."""
    with torch.device("meta"):
        network = LibraryArchitecture(**dict(parse(name).options))  # type: ignore[arg-type]
        side = network.made_for
        cohort = Cohort({"a": network, "b": PARTNER}, CLASSES, image_size=(side, side))
        logits = cohort(torch.empty(2, 3, side, side))
        Objective(methods.get("dcm")(cohort.outline))
        stripped = cohort.strip("a")
    reference = plain_on_meta(name, CLASSES)
    if wrong := {key: tuple(value.shape) for key, value in logits.items() if value.shape != (2, CLASSES)}:
        raise ValueError(f"{name}: logits of other shapes: {wrong}")
    reference.load_state_dict(stripped.state_dict(), strict=True)
    if list(stripped.state_dict()) != list(reference.state_dict()):
        raise ValueError(f"{name}: the order of the weights is not the library's")
    places = {exit.name: exit.path for exit in network.exits}
    exits = [key.partition("/")[2] for key in logits if key.startswith("a/") and key != "a/final"]
    heads = {exit: (places[exit], cohort.head_descriptions[f"a/{exit}"]) for exit in exits}
    parameters = sum(math.prod(weight.shape) for weight in plain_on_meta(name, 1000).parameters())
    return Checked(parameters, side, network.image_size is None, heads)


def plain_on_meta(name: str, num_classes: int) -> nn.Module:
    """``plain`` on the meta device, where torchvision's RegNets cannot be built."""
    try:
        with torch.device("meta"):
            return plain(name, num_classes)
    except NotImplementedError:
        with torch.device("cpu"):
            return plain(name, num_classes).to("meta")


def take_steps(cohort: Cohort, images: Tensor, labels: Tensor, steps: int) -> list[float]:
    """Train with DCM; every weight must get a gradient. Returns the losses."""
    objective = Objective(methods.dcm(cohort.outline))
    optimizer = torch.optim.SGD(cohort.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = objective(cohort(images), labels).total
        optimizer.zero_grad()
        loss.backward()
        assert [name for name, weight in cohort.named_parameters() if weight.grad is None] == []
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
