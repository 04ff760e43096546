"""What TAB completes: names of listings, keys and values of recipes, rows of studies. Imports no torch.

bash gives ``method=d`` as three words, other shells as one; typer offers what these functions return.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import typer

from codistill import recipes
from codistill.networks.adapters.naming import LIBRARIES
from codistill.networks.families import EXAMPLES
from codistill.recipes.parse import SUFFIXES, draft_of, read
from codistill.studies.files import resolve
from codistill.transfer import methods

NETWORKS = (*EXAMPLES, *(f"{library}:" for library in LIBRARIES))
BY_NETWORK = ("start", "freeze", "optimizer.lr_of", "optimizer.weight_decay_of", "optimizer.clip_norm_of")

Completion = Callable[[typer.Context, str], list[str]]


def complete(names: Sequence[str] | Callable[[], Iterable[str]]) -> Completion:
    """Return a completion function for these names, or for those that a function returns."""

    def complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
        return _begun(names() if callable(names) else names, incomplete)

    return complete_name


def complete_changes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete ``KEY=VALUE``: first the key, then its allowed values and the one that the recipe has."""
    values = _values_of_recipe(ctx.params)
    allowed = _allowed(values)
    changes: Sequence[str] = ctx.params.get("changes") or ()
    *before, last = ["", "", *changes]
    key = before[-1] if last == "=" else last
    if key in allowed and "=" not in incomplete:  # bash's words
        return _begun(_offered(key, allowed, values), incomplete)
    key, equals, _ = incomplete.partition("=")
    keys = [key] if equals else _begun(allowed, key)
    if len(keys) != 1:
        return [f"{name}=" for name in keys]
    (key,) = keys
    alone = [] if equals else [f"{key}="]  # one of several, so that bash adds no space behind the "="
    return alone + _begun([f"{key}={value}" for value in _offered(key, allowed, values)], incomplete)


def complete_in_study(what: str) -> Completion:
    """Return a completion function for the ``key`` or ``method`` of a study's rows; several with commas between."""

    def complete_list(ctx: typer.Context, incomplete: str) -> list[str]:
        # Behind an option that still lacks its value, the words before it are not assigned to parameters yet.
        study = ctx.params.get("name") or next(iter(ctx.args), "")
        try:
            rows = resolve(study).rows
        except ValueError:
            return []
        done, comma, begun = incomplete.rpartition(",")
        names = [row.key if what == "key" else row.resolve().method for row in rows]
        return [f"{done}{comma}{name}" for name in _begun(dict.fromkeys(names), begun)]

    return complete_list


def _begun(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _values_of_recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the recipe, or of a study's first row, by key; nothing if it cannot be read."""
    source, study = given.get("source") or "", given.get("name")
    try:
        if study:
            found: Mapping[str, Any] = resolve(study).rows[0].resolve().model_dump(mode="json")
        else:
            found = (read(source) if PurePath(source).suffix in SUFFIXES else draft_of(source)).values
    except ValueError:
        return {}
    return _flat(found)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _offered(key: str, allowed: Mapping[str, Sequence[str]], values: Mapping[str, Any]) -> list[str]:
    value = values.get(key)
    own = [] if value is None else [value if isinstance(value, str) else json.dumps(value).replace(" ", "")]
    return list(dict.fromkeys([*allowed.get(key, ()), *own]))


def _allowed(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """The allowed values of every key; none for numbers and texts."""
    allowed: dict[str, list[str]] = {}
    schema = recipes.json_schema()
    _walk(schema, schema["$defs"], "", allowed)
    networks = [key.partition(".")[2] for key in values if key.startswith("networks.")]
    method = str(values.get("method", "mutual"))
    settings = methods.settings(method) if method in methods.NAMES else {}
    return {
        **{key: found for key, found in allowed.items() if key not in ("networks", "weights", "edges", *BY_NETWORK)},
        "method": list(methods.NAMES),
        **{f"networks.{name}": list(NETWORKS) for name in networks},
        **{f"weights.{name}": [] for name, default in settings.items() if default is not None},
        **{f"{key}.{name}": [] for key in BY_NETWORK for name in networks},
    }


def _walk(part: Mapping[str, Any], definitions: Mapping[str, Any], key: str, allowed: dict[str, list[str]]) -> None:
    """Collect the allowed values below a part of the JSON Schema."""
    for branch in part.get("anyOf") or part.get("oneOf") or [part]:
        found = definitions[branch["$ref"].rpartition("/")[2]] if "$ref" in branch else branch
        for name, below in found.get("properties", {}).items():
            _walk(below, definitions, f"{key}.{name}" if key else name, allowed)
        if "properties" not in found:
            by_type: Mapping[str, list[Any]] = {"boolean": [True, False], "null": [None]}
            values: list[Any] = found.get("enum") or (
                [found["const"]] if "const" in found else by_type.get(found.get("type", ""), [])
            )
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            allowed[key] = list(dict.fromkeys([*allowed.get(key, ()), *texts]))
