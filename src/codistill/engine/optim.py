"""One optimizer for the whole cohort, a parameter group per network; the moving average of the weights."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from codistill.cohort import Cohort
from codistill.engine.runtime import Machine
from codistill.engine.timetable import Turn
from codistill.recipes.schema import AdamW, Recipe, Sgd, learning_rate


def build_optimizer(recipe: Recipe, cohort: Cohort, machine: Machine) -> torch.optim.Optimizer:
    """The recipe's optimizer over every network that learns; frozen teachers have no group."""
    settings, frozen, device = recipe.optimizer, recipe.graph.frozen, machine.device
    groups: list[dict[str, Any]] = [
        {
            "params": list(cohort.members[name].parameters()),
            "lr": settings.lr_of.get(name, settings.lr),
            "weight_decay": settings.weight_decay_of.get(name, settings.weight_decay),
        }
        for name in cohort.members
        if name not in frozen
    ]
    for group in groups:
        group["base_lr"] = group["lr"]
        if device.type == "cuda":
            # In device memory a captured step reads the rate when it is replayed, not when it was recorded.
            group["lr"] = torch.tensor(group["lr"], device=device)
    fused = device.type in ("cpu", "cuda")
    optimizer: torch.optim.Optimizer
    slots: tuple[str, ...]
    match settings:
        case Sgd(momentum=momentum, nesterov=nesterov):
            optimizer = torch.optim.SGD(groups, momentum=momentum, nesterov=nesterov, fused=fused)
            slots = ("momentum_buffer",) if momentum else ()
        case AdamW(beta1=beta1, beta2=beta2, eps=eps):
            capturable = machine.captures(recipe)
            optimizer = torch.optim.AdamW(groups, betas=(beta1, beta2), eps=eps, fused=fused, capturable=capturable)
            slots = ("exp_avg", "exp_avg_sq", "step")
    # Torch fills these at the first step. Zeros give the same update, and then a checkpoint always has the same shape.
    for parameter in (parameter for group in groups for parameter in group["params"]):
        zero_step = torch.zeros((), device=device)
        optimizer.state[parameter] = {
            slot: zero_step if slot == "step" else torch.zeros_like(parameter) for slot in slots
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, recipe: Recipe, turn: Turn) -> None:
    """Bring every group to the schedule's value for this step; with the authors' switch, a drop forgets momentum."""
    factor = learning_rate(recipe, turn.progress)
    previous = learning_rate(recipe, turn.previous_progress)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(group["base_lr"] * factor)
        else:
            group["lr"] = group["base_lr"] * factor
    if isinstance(recipe.optimizer, Sgd) and recipe.optimizer.reset_momentum_at_drops and factor < previous:
        for slots in optimizer.state.values():
            slots["momentum_buffer"].zero_()


def optimizer_tensors(optimizer: torch.optim.Optimizer, cohort: Cohort) -> Iterator[tuple[str, Tensor]]:
    """Everything the optimizer remembers, by parameter name: what a checkpoint saves and restores in place."""
    for name, parameter in cohort.named_parameters():
        for slot, tensor in optimizer.state.get(parameter, {}).items():
            yield f"{name}/{slot}", tensor


class MovingAverage:
    """The exponential moving average of every learning backbone; it is what is evaluated and shipped."""

    def __init__(self, cohort: Cohort, learning: list[str], decay: float) -> None:
        self.decay = decay
        self.backbones = nn.ModuleDict({name: deepcopy(cohort.members[name].backbone) for name in learning})
        self.backbones.requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, cohort: Cohort) -> None:
        for name, average in self.backbones.items():
            current = cohort.members[name].backbone.state_dict()
            for key, tensor in average.state_dict().items():
                if tensor.is_floating_point():
                    tensor.lerp_(current[key], 1 - self.decay)
                else:
                    tensor.copy_(current[key])
