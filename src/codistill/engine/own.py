"""A module of the user's own in the place of a recipe's network.

A recipe has its class and the names and shapes of its tensors, so that a run continues with the same network or not at
all. It never has the code: who continues, evaluates or exports the run passes the module again.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from codistill.errors import unknown
from codistill.log import log
from codistill.networks.adapters.architecture import OwnArchitecture
from codistill.networks.adapters.own import given, is_missing, is_own_name, missing, parse_own_name
from codistill.networks.backbone import Architecture
from codistill.randomness import derive
from codistill.recipes.schema import Recipe

OwnNetworks = Mapping[str, nn.Module | Callable[[], nn.Module]]
"""By name in the recipe: modules, which begin with their weights as they are, or functions that build one."""
NO_NETWORKS: OwnNetworks = MappingProxyType({})


def architectures_of(networks: OwnNetworks, seed: int = 0) -> dict[str, OwnArchitecture]:
    """The modules as architectures; what builds one draws its weights from ``seed`` and the network's name."""
    return {name: OwnArchitecture(_built(name, one, seed), label=f"network {name!r}") for name, one in networks.items()}


def _built(name: str, network: object, seed: int) -> nn.Module:
    if callable(network) and not isinstance(network, nn.Module):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(seed, "init", name))
            network = network()
    if not isinstance(network, nn.Module):
        raise ValueError(
            f"networks: {name!r} is of type {type(network).__name__}; pass an nn.Module, or what builds one"
        )
    return network


def given_networks(networks: OwnNetworks) -> AbstractContextManager[None]:
    """Inside, the names of these modules in the recipes of runs stand for them."""
    return given(architectures_of(networks).values())


def adopt(recipe: Recipe, networks: OwnNetworks) -> tuple[Recipe, dict[str, Architecture]]:
    """The recipe with the given modules written down in the place of its networks, and the modules to build.

    Raises ValueError if the recipe has no such network, or if it is a run's and began with another module.
    """
    for name in networks:
        if name not in recipe.networks:
            raise unknown("network", name, recipe.networks)
    own = {name: _with_exits(recipe, name, one) for name, one in architectures_of(networks, recipe.seed).items()}
    if len({id(one.module) for one in own.values()}) < len(own):
        raise ValueError("networks: one module is given twice, which would be equal and teach nothing; build two")
    for name, network in recipe.networks.items():
        if is_own_name(network) and name not in own:
            raise ValueError(
                missing(f"networks.{name}={network}", f"train(recipe, out, networks={{{name!r}: module}})")
            )
    if own:
        recipe = recipe.replace(networks=recipe.networks | {name: one.name for name, one in own.items()})
    return recipe, dict(own)


def _with_exits(recipe: Recipe, name: str, network: OwnArchitecture) -> OwnArchitecture:
    """The network with the exits that the recipe names, or else with those that the module shows."""
    written = recipe.networks[name]
    if is_own_name(written):
        parsed = parse_own_name(written)
        if parsed.described not in ("own", network.described):
            raise ValueError(
                f"networks.{name}: the module passed is {network.described}, and the run began with "
                f"{parsed.described}; pass that one, or choose another out"
            )
        if parsed.paths is not None:
            return replace(network, paths=parsed.paths)
    wanted = recipe.heads.exits
    chosen = [exit for exit in network.exits if exit.stage <= 3 or (wanted and exit.name in wanted)]
    if not chosen and recipe.graph.exits[name]:
        log.warning("network %r: no stages found to attach heads at; name modules, as in own@block1,block2", name)
    return replace(network, paths=tuple(exit.path for exit in chosen))


def require_given(recipe: Recipe, names: Iterable[str], call: str) -> None:
    """Raise ValueError with what to type, ``call``, if one of these networks is the user's own and was not passed."""
    for name in names:
        if is_missing(network := recipe.networks[name]):
            raise ValueError(missing(f"networks.{name}={network}", f"{call}, networks={{{name!r}: module}})"))
