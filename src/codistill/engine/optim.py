"""One optimizer per network, so that each can be left out of an update, and the moving average of the weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from codistill.cohort import Cohort, Member
from codistill.engine.health import Health
from codistill.engine.runtime import Machine
from codistill.engine.schedule import StepContext
from codistill.networks.parts import layer_depths
from codistill.recipes.schema import Recipe, learning_rate
from codistill.recipes.sections import AdamW, Part, Sgd

Local = Callable[[Tensor], Tensor]
"""A network's tensor to the part of it in this process; see ``Peers.local``."""


def build_optimizers(
    recipe: Recipe, cohort: Cohort, machine: Machine, local: Local
) -> dict[str, torch.optim.Optimizer]:
    """Build the recipe's optimizer for every network that learns; frozen teachers have none."""
    learning = recipe.graph.learning_networks
    return {
        name: _optimizer(recipe, name, parameters_by_factor(recipe.optimizer, member, local), machine)
        for name, member in cohort.members.items()
        if name in learning
    }


def parameters_by_factor(settings: Sgd | AdamW, member: Member, local: Local) -> dict[float, list[Tensor]]:
    """The parameters of a network and its heads that learn, by the factor on their learning rate."""
    groups: dict[float, list[Tensor]] = {}
    depths = layer_depths(member.backbone) if settings.lr_factor or settings.layer_decay != 1 else {}
    classifier = {parameter for parameter, depth in depths.items() if not depth}
    for parameter in filter(lambda one: one.requires_grad, member.parameters()):
        part: Part = "classifier" if parameter in classifier else "backbone" if parameter in depths else "heads"
        factor = settings.lr_factor.get(part, 1.0) * settings.layer_decay ** depths.get(parameter, 0) if depths else 1.0
        groups.setdefault(factor, []).append(local(parameter))
    return groups


def _optimizer(
    recipe: Recipe, name: str, groups: Mapping[float, list[Tensor]], machine: Machine
) -> torch.optim.Optimizer:
    settings, device = recipe.optimizer, machine.device
    rate = settings.lr_of.get(name, settings.lr)
    described: list[dict[str, Any]] = [
        {
            "params": parameters,
            # In device memory a captured step reads the rate when it is replayed, not when it was recorded.
            "lr": torch.tensor(rate * factor, device=device) if device.type == "cuda" else rate * factor,
            "base_lr": rate * factor,
            "weight_decay": settings.weight_decay_of.get(name, settings.weight_decay),
        }
        for factor, parameters in groups.items()
    ]
    # Fused optimizers read on the device whether to skip an update; see engine/health.py.
    optimizer: torch.optim.Optimizer
    slots: tuple[str, ...]
    match settings:
        case Sgd(momentum=momentum, nesterov=nesterov):
            optimizer = torch.optim.SGD(described, momentum=momentum, nesterov=nesterov, fused=True)
            slots = ("momentum_buffer",) if momentum else ()
        case AdamW(beta1=beta1, beta2=beta2, eps=eps):
            capturable = machine.captures(recipe)
            optimizer = torch.optim.AdamW(described, betas=(beta1, beta2), eps=eps, fused=True, capturable=capturable)
            slots = ("exp_avg", "exp_avg_sq", "step")
    # Torch fills these at the first step. Zeros give the same update, and then a checkpoint always has the same shape.
    for parameter in chain.from_iterable(groups.values()):
        zero_step = torch.zeros((), device=device)
        optimizer.state[parameter] = {
            slot: zero_step if slot == "step" else torch.zeros_like(parameter) for slot in slots
        }
    return optimizer


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], recipe: Recipe, context: StepContext) -> None:
    """Set every network's learning rate for this step; with reset_momentum_at_drops, a drop zeroes the momentum."""
    factor = learning_rate(recipe, context.progress)
    is_drop = factor < learning_rate(recipe, context.previous_progress)
    resets = isinstance(recipe.optimizer, Sgd) and recipe.optimizer.reset_momentum_at_drops and is_drop
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["base_lr"] * factor)
            else:
                group["lr"] = group["base_lr"] * factor
        if resets:
            for slots in optimizer.state.values():
                slots["momentum_buffer"].zero_()


def optimizer_tensors(
    optimizers: Mapping[str, torch.optim.Optimizer], cohort: Cohort, local: Local
) -> Iterator[tuple[str, Tensor]]:
    """The optimizers' state by parameter name and slot: what a checkpoint saves and restores in place."""
    memory = {parameter: slots for optimizer in optimizers.values() for parameter, slots in optimizer.state.items()}
    for name, parameter in cohort.named_parameters():
        for slot, tensor in memory.get(local(parameter), {}).items():
            yield f"{name}/{slot}", tensor


class MovingAverage:
    """The exponential moving average of every learning backbone, which is evaluated and shipped instead of it."""

    def __init__(self, cohort: Cohort, learning: list[str], decay: float) -> None:
        self.decay = decay
        self.backbones = nn.ModuleDict({name: deepcopy(cohort.members[name].backbone) for name in learning})
        self.backbones.requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, cohort: Cohort, health: Health, local: Local) -> None:
        """Average in the networks that took part in the update: a NaN would stay in the average forever."""
        for name, average in self.backbones.items():
            current, participates = cohort.members[name].backbone.state_dict(), health.participates(name)
            for key, tensor in ((key, local(tensor)) for key, tensor in average.state_dict().items()):
                latest = torch.where(participates, local(current[key]), tensor)
                if tensor.is_floating_point():
                    tensor.lerp_(latest, 1 - self.decay)
                else:
                    tensor.copy_(latest)
