"""Checks across the sections of a recipe, for settings that are valid one by one but not together."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from codistill.errors import unknown
from codistill.networks.adapters.naming import is_library_name, is_tagged
from codistill.networks.adapters.own import is_own_name
from codistill.networks.families import BACKBONE, IN_AUTHORS_CODE, parse
from codistill.recipes.errors import Contradiction, Path
from codistill.transfer import methods
from codistill.transfer.graph import Outline

if TYPE_CHECKING:
    from codistill.recipes.schema import Recipe


def contradictions(recipe: "Recipe") -> Iterator[Contradiction]:
    """Everything that does not go together in a recipe whose sections are valid."""
    yield from _misnamed(recipe)
    yield from _graph_problems(recipe)
    yield from _switch_problems(recipe)


def _misnamed(recipe: "Recipe") -> Iterator[Contradiction]:
    by_network: dict[Path, Mapping[str, object]] = {
        ("start",): recipe.start,
        ("freeze",): recipe.freeze,
        ("optimizer", "lr_of"): recipe.optimizer.lr_of,
        ("optimizer", "weight_decay_of"): recipe.optimizer.weight_decay_of,
        ("optimizer", "clip_norm_of"): recipe.optimizer.clip_norm_of,
    }
    for path, named in by_network.items():
        yield from _unknown_names(path, named, "network", recipe.networks, {"networks", path[0]})


def _graph_problems(recipe: "Recipe") -> Iterator[Contradiction]:
    about = {"networks", "heads", "method", "weights", "teachers", "edges", "transfer", "start"}
    is_custom = recipe.method == methods.CUSTOM
    settings = {} if is_custom else methods.settings(recipe.method)
    numbers = [name for name, default in settings.items() if default is not None]
    found = _unknown_names(("weights",), recipe.weights, f"setting of {recipe.method}", numbers, about)
    if recipe.teachers and "teachers" not in settings:
        found.append(Contradiction(("teachers",), f"{recipe.method} has none, only kd and cml have", frozenset(about)))
    if recipe.transfer.initial_edges and not is_custom:
        message = f"only method=custom has them; {recipe.method} may begin with transfer.initial_share=0"
        found.append(Contradiction(("transfer", "initial_edges"), message, frozenset(about)))
    culprit: Path = ("heads", "exits")
    try:
        outline = recipe.outline
        found += [Contradiction(path, message, frozenset(about)) for path, message in _wrong_edges(recipe, outline)]
        if found:
            yield from found
            return
        culprit = ("edges",) if is_custom else ("teachers",) if recipe.teachers else ("method",)
        method, reweighted = recipe.method_graph, {} if is_custom else recipe.edges
        if unknown_names := _unknown_names(("edges",), reweighted, "edge", method.weights, about):
            yield from unknown_names
            return
        culprit = ("edges",)
        method.reweighted(reweighted)
        culprit = ("transfer", "begin" if recipe.transfer.end in (None, 1) else "end")
        graph = recipe.graph
    except ValueError as error:
        yield from found
        yield Contradiction(culprit, str(error), frozenset(about))
        return
    for name in [name for name in graph.frozen if name not in recipe.start]:
        if is_own_name(recipe.networks[name]) or is_tagged(recipe.networks[name]):
            continue
        yield Contradiction(("start", name), _lacks_weights(recipe, name), frozenset(about))
    for name in [name for name in graph.frozen if graph.exits[name]]:
        message = f"{name} only teaches, and its auxiliary classifiers would teach untrained; let only its final teach"
        yield Contradiction(("edges",), message, frozenset(about))
    yield from _freeze_problems(recipe)


def _wrong_edges(recipe: "Recipe", outline: Outline) -> Iterator[tuple[Path, str]]:
    """The edges of a graph of the user's own that name what the outline does not have."""
    if recipe.method == methods.CUSTOM:
        for path, edges in {
            ("edges",): recipe.edges,
            ("transfer", "initial_edges"): recipe.transfer.initial_edges,
        }.items():
            for edge in edges:
                try:
                    methods.custom(outline, {edge: 1.0})
                except ValueError as error:
                    yield (*path, edge), str(error)


def _lacks_weights(recipe: "Recipe", name: str) -> str:
    if recipe.teachers or recipe.method not in ("kd", "cml"):
        return f"missing; with {recipe.method} this network only teaches, so give its weights: start.{name}=FILE"
    other = next(iter(recipe.start), list(recipe.networks)[-1])
    return (
        f"missing; {recipe.method}'s teacher is the first network, {name}, and needs its weights: start.{name}=FILE; "
        f"if {other!r} is to teach, type teachers=[{other}]"
    )


def _switch_problems(recipe: "Recipe") -> Iterator[Contradiction]:
    side, crop = recipe.data.side, recipe.augment.crop
    if crop and crop > side:
        message = f"{crop} is more than the {side} pixels of an image's side, and at test nothing is padded; lower it"
        yield Contradiction(("augment", "crop"), message, frozenset({"data", "augment"}))
    if recipe.augment.padding == "reflect" and recipe.augment.pad >= side:
        message = f"padding=reflect cannot pad images of {side} pixels by {recipe.augment.pad}"
        yield Contradiction(("augment", "pad"), message, frozenset({"data", "augment"}))
    seen = crop or side
    if recipe.augment.half_until and seen % 2:
        message = f"halves the side of images, and theirs is {seen}; take an even one with data.image_size"
        yield Contradiction(("augment", "half_until"), message, frozenset({"data", "augment"}))
    if recipe.augment.cutout > seen:
        message = f"{recipe.augment.cutout} is more than the {seen} pixels of an image's side; lower it"
        yield Contradiction(("augment", "cutout"), message, frozenset({"data", "augment"}))
    for key in ("init", "batchnorm_init"):
        others = [one for one in recipe.networks.values() if parse(one).family.paper not in IN_AUTHORS_CODE]
        if getattr(recipe, key) == "authors" and others:
            message = (
                f"the authors' code has {' and '.join(IN_AUTHORS_CODE)} only, not {', '.join(dict.fromkeys(others))}"
            )
            yield Contradiction((key,), message, frozenset({key, "networks"}))
    yield from _momentum_problems(recipe)
    yield from _normalisation_problems(recipe)
    every, all_every = recipe.evaluation.every_epochs, recipe.evaluation.all_every_epochs
    if all_every % every:
        message = f"{all_every} is not a multiple of evaluation.every_epochs={every}"
        yield Contradiction(("evaluation", "all_every_epochs"), message, frozenset({"evaluation"}))
    # A folder may have a validation set of its own, which is only known once it is read.
    if recipe.checkpoints.best and not recipe.data.validation and recipe.data.name != "folder":
        message = "needs data.validation above 0: chosen by test images, the best would look better than it is"
        yield Contradiction(("checkpoints", "best"), message, frozenset({"checkpoints", "data"}))
    yield from _kernel_problems(recipe)


def _freeze_problems(recipe: "Recipe") -> Iterator[Contradiction]:
    about = frozenset({"networks", "freeze", "method", "heads", "processes"})
    for name, until in recipe.freeze.items():
        if name not in recipe.networks:  # which _misnamed reports
            continue
        if until not in (parts := [BACKBONE, *parse(recipe.networks[name]).exits]):
            yield Contradiction(("freeze", name), str(unknown(f"part of {name}", until, parts)), about)
        elif name not in recipe.graph.learning_networks:
            yield Contradiction(("freeze", name), f"{name} only teaches, so all of it is frozen; leave it out", about)
    if recipe.freeze and recipe.processes.weights == "sharded":
        message = "all weights that are sharded together must learn, or none; type processes.weights=replicated"
        yield Contradiction(("freeze",), message, about)


def _normalisation_problems(recipe: "Recipe") -> Iterator[Contradiction]:
    own = [f"{name}={network}" for name, network in recipe.networks.items() if not is_library_name(network)]
    if recipe.data.normalisation == "pretrained" and own:
        message = f"only timm's and torchvision's networks say what they were trained with, not {own[0]}; give the "
        message += "numbers, as in data.mean=[0.5,0.5,0.5] data.std=[0.25,0.25,0.25], with data.normalisation=own"
        yield Contradiction(("data", "normalisation"), message, frozenset({"data", "networks"}))


def _kernel_problems(recipe: "Recipe") -> Iterator[Contradiction]:
    kernels = recipe.runtime.kernels
    if recipe.runtime.winograd == "on" and kernels not in {"auto", "triton"}:
        message = f"on needs runtime.kernels=triton, not {kernels}; or type runtime.winograd=auto"
        yield Contradiction(("runtime", "winograd"), message, frozenset({"runtime"}))
    if kernels not in {"inductor", "triton"}:
        return
    if recipe.runtime.activation_checkpointing:
        message = f"recomputes layers with torch's kernels, not {kernels}; type runtime.kernels=torch"
        yield Contradiction(("runtime", "activation_checkpointing"), message, frozenset({"runtime"}))
    if recipe.processes.weights == "sharded":
        message = (
            f"sharded gathers weights between layers, for torch's kernels, not {kernels}; type runtime.kernels=torch"
        )
        yield Contradiction(("processes", "weights"), message, frozenset({"processes", "runtime"}))


def _momentum_problems(recipe: "Recipe") -> Iterator[Contradiction]:
    optimizer, about = recipe.optimizer, frozenset({"optimizer", "schedule"})
    if optimizer.kind != "sgd":
        return
    for switch in ("nesterov", "reset_momentum_at_drops"):
        if getattr(optimizer, switch) and not optimizer.momentum:
            yield Contradiction(("optimizer", switch), "needs a momentum above 0", about)
    if optimizer.reset_momentum_at_drops and recipe.schedule.kind != "steps":
        message = f"goes with schedule.kind=steps; {recipe.schedule.kind} has no drops"
        yield Contradiction(("optimizer", "reset_momentum_at_drops"), message, about)


def _unknown_names(
    path: Path, named: Iterable[str], kind: str, allowed: Collection[str], about: Iterable[str | int]
) -> list[Contradiction]:
    return [
        Contradiction((*path, name), str(unknown(kind, name, allowed)), frozenset(map(str, about)))
        for name in named
        if name not in allowed
    ]
