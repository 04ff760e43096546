"""The names of tensors in a checkpoint, and which of them ship.

A checkpoint names its tensors ``group/name``. The groups are ``cohort`` (the cohort's state dict:
``cohort/members.a.backbone.…``), ``optimizer`` (``optimizer/members.a.…/momentum_buffer``), ``average`` (the moving
averages of the backbones: ``average/a.…``), ``health`` and ``tally``. In the middle of an epoch there is also ``good``:
the state of every learning network at the end of the epoch before, to roll it back to (``good/cohort/members.a.…``).
Only this module composes or parses these names.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from codistill.errors import RunError
from codistill.recipes.schema import Recipe
from codistill.runs.checkpoint import Saved, Store
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.records import best_epoch, read_evaluations
from codistill.runs.seal import listed_in, read_sealed, sha256_of

if TYPE_CHECKING:
    from torch import Tensor, nn

GOOD = "good/"
EXPORT = "export.json"
"""The manifest of an export, beside its model file."""


def checkpoint_tensors(groups: Mapping[str, Iterable[tuple[str, "Tensor"]]]) -> dict[str, "Tensor"]:
    """All tensors of a training under the names that a checkpoint gives them."""
    return {f"{group}/{name}": tensor for group, members in groups.items() for name, tensor in members}


def cohort_key(network: str) -> str:
    """The name of a network with its heads in a checkpoint: ``cohort/members.a``."""
    return f"cohort/members.{network}"


def average_key(network: str) -> str:
    """The name of a network's moving average in a checkpoint: ``average/a``."""
    return f"average/{network}"


def tensors_of_network(network: str, tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """The tensors that belong to one network: its weights, its optimizer's state and its average, under full names."""
    prefixes = f"{cohort_key(network)}.", f"optimizer/members.{network}.", f"{average_key(network)}."
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}


def good_copies(networks: Iterable[str], tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """The tensors that belong to the networks, under the names of the copies that networks are rolled back to."""
    return {
        f"{GOOD}{name}": tensor for network in networks for name, tensor in tensors_of_network(network, tensors).items()
    }


def copied_name(name: str) -> str:
    """The name of the tensor that ``name`` is a copy of, to roll back to; of any other tensor, its own."""
    return name.removeprefix(GOOD)


def cohort_weights(tensors: Mapping[str, "Tensor"], networks: Iterable[str] | None = None) -> dict[str, "Tensor"]:
    """The cohort's state dict out of a checkpoint's tensors, or that of a cohort of these networks alone."""
    if networks is None:
        return _below("cohort/", tensors)
    return {f"members.{n}.{key}": t for n in networks for key, t in _below(f"{cohort_key(n)}.", tensors).items()}


def optimized_parameter(name: str) -> str | None:
    """The checkpoint's name of the parameter that an optimizer's tensor belongs to; None for any other tensor."""
    group, _, rest = name.partition("/")
    return f"cohort/{rest.rpartition('/')[0]}" if group == "optimizer" else None


def ships_average(recipe: Recipe, network: str) -> bool:
    """Whether a network ships as its moving average; a frozen teacher has none."""
    return recipe.ema > 0 and network in recipe.graph.learning_networks


def shipped_weights(recipe: Recipe, network: str, tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """The state dict that ships of a network, without heads, out of a checkpoint's tensors."""
    is_average = ships_average(recipe, network)
    return _below(f"{average_key(network)}." if is_average else f"{cohort_key(network)}.backbone.", tensors)


def _below(prefix: str, tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def best_checkpoint(folder: RunFolder) -> Saved:
    """Read the checkpoint with the lowest validation error; raises ValueError if the run kept none."""
    read_sealed(folder.data, MAX_BYTES)  # damaged, it would look like that of another run
    saved = Store(folder.best, foreign=folder.foreign).newest()
    if saved is None:
        raise ValueError(
            f"{folder.path} has kept no best checkpoint: that takes a training with checkpoints.best=true and "
            "data.validation=0.1 or so; leave out --best"
        )
    recipe = folder.stored_recipe()
    evaluations = read_evaluations(folder.journal, recipe, "validation")
    epoch = best_epoch(evaluations, recipe.graph.learning_networks) if evaluations else 0
    if saved.state.get("position") != {"epoch": epoch, "step": 0}:
        raise RunError(
            f"{folder.best} is not of epoch {epoch}, which {folder.journal.name} says is the best by validation error; "
            "put the right one back from a copy, continue an interrupted training, or leave out --best"
        )
    return saved


def last_checkpoint(folder: RunFolder, recipe: Recipe) -> Saved | None:
    """Read the checkpoint of the last epoch; None if there is none, or if it is damaged or earlier."""
    try:
        saved = Store(folder.checkpoints, foreign=folder.foreign).newest()
    except (ValueError, OSError):
        return None
    is_last = saved is not None and saved.state.get("position") == {"epoch": recipe.length.epochs, "step": 0}
    return saved if is_last else None


def load_strictly(module: "nn.Module", weights: Mapping[str, "Tensor"], label: str) -> None:
    """Load a state dict; raises ValueError unless it has exactly the module's tensors. Errors begin with ``label``."""
    if misfit := _misfit(module.state_dict(), weights):
        raise ValueError(f"{label} do not fit the network: {misfit}")
    state = module.state_dict()  # which has the versions of the modules' formats: without them, some refuse to load
    state.update(weights)
    module.load_state_dict(state)


def _misfit(expected: Mapping[str, "Tensor"], given: Mapping[str, "Tensor"]) -> str:
    """Describe how the tensors differ from the expected ones, with one example each; empty if they fit."""
    missing, unexpected = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    reasons = [f"{len(missing)} tensors are missing, such as {missing[0]!r}"] if missing else []
    reasons += [f"{len(unexpected)} are not the network's, such as {unexpected[0]!r}"] if unexpected else []
    if reasons:
        return ", and ".join(reasons)
    resized = [key for key in expected if expected[key].shape != given[key].shape]
    if not resized:
        return ""
    found, wanted = ("×".join(map(str, tensors[resized[0]].shape)) for tensors in (given, expected))
    return f"{len(resized)} tensors have another shape, such as {resized[0]!r}, {found} and not {wanted}"


def refuse_damaged(file: Path) -> None:
    """Raise RunError for weights in the folder of a run or an export that are not those that it describes."""
    run = RunFolder(file.parent.parent)
    if file == run.weights(file.stem) and run.recipe.is_file():
        if not run.result.is_file():
            raise RunError(
                f"{file}: its run is not finished, so this file cannot be checked; finish the run with: "
                f"{run.resume_command()}"
            )
        if damage := run.damage([file.stem], with_times=False):
            raise run.damage_error(damage)
    if (listed := listed_in(file.with_name(EXPORT)).get(file.name)) and listed != sha256_of(file):
        raise RunError(f"{file} is not the file that was exported (damaged or replaced); export it again")
