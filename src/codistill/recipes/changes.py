"""What changed between two recipes, and which of it matters."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from codistill.recipes.schema import Recipe

# Where a run is computed and kept: results do not depend on these keys, except for rounding on another machine.
WHERE = (
    *("checkpoints", "data.folder", "data.resident", "data.workers", "data.timeout_s"),
    *("runtime.device", "runtime.threads"),
)
# And with which kernels, which round differently too: a run may continue with others.
WHERE_AND_HOW = (*WHERE, "runtime.kernels", "runtime.winograd", "runtime.capture")
_ABSENT = "(none)"


def difference(old: Recipe, new: Recipe) -> list[str]:
    """List the changed keys as ``key: old → new``, in the recipe's order."""
    before, after = (dict(_leaves(recipe.model_dump(mode="json"))) for recipe in (old, new))
    if (old.method, old.networks) == (new.method, new.networks) and old.graph.frozen != new.graph.frozen:
        # Only the order differs, and kd's teacher is the first.
        before["networks"], after["networks"] = (json.dumps(recipe.networks) for recipe in (old, new))
    return [
        f"{key}: {before.get(key, _ABSENT)} → {after.get(key, _ABSENT)}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def obstacle_to_lengthening(recipe: Recipe) -> str:
    """Why the epochs that are done would have been others in a longer training; empty if they would be the same."""
    schedule = recipe.schedule
    if schedule.kind != "constant":
        return f"schedule.kind={schedule.kind} spreads its learning rates over the whole length"
    if schedule.warmup:
        return f"schedule.warmup={schedule.warmup} is a share of the length"
    if recipe.graph.ramp:
        return f"method={recipe.method} changes its transfers over the whole length"
    if recipe.augment.half_until:
        return f"augment.half_until={recipe.augment.half_until} is a share of the length"
    return ""


def start_names(start: Mapping[str, str]) -> dict[str, str]:
    """Shorten paths of weights to ``RUN/weights/a.safetensors``: the run's name identifies them on any machine."""
    return {name: "/".join(PurePath(file).parts[-3:]) for name, file in start.items()}


def key_of(difference_line: str) -> str:
    """The key in a line of ``difference``."""
    return difference_line.partition(": ")[0]


def as_change(line: str) -> str:
    """A line of ``difference`` as a change to type: ``key=new``."""
    return f"{key_of(line)}={line.rpartition(' → ')[2]}"


def is_below(key: str, parents: Sequence[str]) -> bool:
    """Whether a key is one of ``parents`` or inside one: ``runtime.threads`` is inside ``runtime``."""
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def _leaves(values: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, values if isinstance(values, str) else json.dumps(values, ensure_ascii=False)
