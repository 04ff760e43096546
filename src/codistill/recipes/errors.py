"""Errors of recipes: every problem at once, each with its place, what is allowed and what to type."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from codistill.errors import did_you_mean, unknown

Path = tuple[str | int, ...]
Model = type[BaseModel]

REMOVED = {
    "runtime.compile": "was removed: type runtime.kernels=torch for false, runtime.kernels=auto for true",
    "sick": "was renamed: type on_nonfinite=skip, or rollback, freeze, stop",
    "processes.predictions": "was removed: leave it out; networks learn from the other processes' current predictions",
}
"""Keys of earlier versions as they are typed, and what to type today."""
CONVERT = "python tools/convert_results.py"
"""The command that converts the files of a run of an earlier version; a path follows."""
_OF_A_RUN = ("recipe.yaml", "result.json")

# What fits a screen: problems, characters of a message, characters of a value.
MAX_SHOWN, MAX_MESSAGE, MAX_VALUE = 12, 400, 60

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_unicode": "text",
    "bool_type": "true or false",
    "tuple_type": "a list, [a, b]",
    "list_type": "a list, [a, b]",
    "dict_type": "a mapping, {key: value}",
    "model_type": "a section, {key: value}",
    "model_attributes_type": "a section, {key: value}",
}


@dataclass(frozen=True)
class Problem:
    """One problem: the key as it is typed, what to do about it, and where it was written (``line 3``)."""

    path: str
    message: str
    where: str = ""

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.where, self.path, self.message) if part)
        text = "".join(character if character.isprintable() else "?" for character in text)
        return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


class RecipeError(ValueError):
    """A recipe that cannot be used. ``problems`` are all problems; the text shows those that fit a screen."""

    def __init__(self, problems: Iterable[Problem], source: str = "recipe") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(self._text())

    def _text(self) -> str:
        files = [file for file in _OF_A_RUN if self.source.partition(": ")[0].endswith(file)]
        if files and any(one.path in REMOVED for one in self.problems):
            folder = self.source.partition(": ")[0].removesuffix(files[0]).rstrip("/") or "."
            return f"{self._list()}\n{written_by_an_earlier_version(folder)}"
        return self._list()

    def _list(self) -> str:
        if len(self.problems) == 1:
            return f"{self.source}: {self.problems[0]}"
        lines = [f"{self.source}: {len(self.problems)} problems", *(f"  {one}" for one in self.problems[:MAX_SHOWN])]
        hidden = len(self.problems) - MAX_SHOWN
        return "\n".join([*lines, f"  … and {hidden} more"] if hidden > 0 else lines)


def written_by_an_earlier_version(path: str) -> str:
    """The sentence for files of an earlier version: how to convert them."""
    return f"An earlier version wrote this; convert it with `{CONVERT} {path}`, or train again with another --out"


class Contradiction(NamedTuple):
    """Keys that are valid one by one but not together; ``about`` names the parts of the recipe that are involved."""

    path: Path
    message: str
    about: frozenset[str]


class InconsistentError(ValueError):
    """The contradictions that a recipe's own validator found."""

    def __init__(self, found: Iterable[Contradiction]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(f"{typed(one.path)}: {one.message}" for one in self.found))


def sections(model: Model, key: str) -> list[Model]:
    """The models of a field: one for a section, several for a section with a ``kind``, none for a plain value."""
    field = model.model_fields.get(key)
    if field is None:
        return []
    candidates = get_args(field.annotation) or (field.annotation,)
    return [candidate for candidate in candidates if isinstance(candidate, type) and issubclass(candidate, BaseModel)]


def by_kind(models: list[Model]) -> dict[str, Model]:
    """The models of a section by kind, ``{"sgd": Sgd, "adamw": AdamW}``; empty for a section without kinds."""
    return {model.model_fields["kind"].default: model for model in models} if len(models) > 1 else {}


def keys(model: Model, prefix: str = "") -> Iterator[str]:
    """Every key below ``model`` as it is typed: ``method``, ``heads``, ``heads.kind``, …"""
    for key in model.model_fields:
        yield prefix + key
        for section in sections(model, key):
            yield from keys(section, f"{prefix}{key}.")


def problems(details: Iterable[ErrorDetails], model: Model, places: Mapping[Path, str]) -> list[Problem]:
    """Translate pydantic's errors for the author of the recipe; ``places`` maps each path to where it was written."""
    return [problem for detail in details for problem in _problems(detail, model, places)]


def describe_contradictions(found: Iterable[Contradiction], places: Mapping[Path, str]) -> list[Problem]:
    return [Problem(typed(one.path), one.message, _where(one.path, places)) for one in found]


def typed(path: Path) -> str:
    """Format a path as it is typed: ``optimizer.lr``."""
    return ".".join(map(str, path))


def brief(value: object) -> str:
    """Format a value as it would be typed, short enough for an error."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…"


def _problems(detail: ErrorDetails, model: Model, places: Mapping[Path, str]) -> list[Problem]:
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, InconsistentError):
        return describe_contradictions(cause.found, places)
    path, section = _locate(detail["loc"], model)
    if detail["type"].startswith("union_tag"):
        path = (*path, "kind")
    return [Problem(typed(path), _message(detail, path, model, section), _where(path, places))]


def _locate(loc: Path, model: Model) -> tuple[Path, Model]:
    """The path as it is typed and the section of its last key; pydantic's path also contains the section's kind."""
    path: Path = ()
    section, candidates = model, [model]
    for step in loc:
        if step in by_kind(candidates):
            candidates = [by_kind(candidates)[str(step)]]
        elif step != "[key]":
            path = (*path, step)
            section = candidates[0]
            candidates = sections(section, str(step)) or candidates
    return path, section


def _where(path: Path, places: Mapping[Path, str]) -> str:
    """Where ``path`` was written, otherwise the nearest section around it that was."""
    while path and path not in places:
        path = path[:-1]
    return places.get(path, "") if path else ""


def _message(detail: ErrorDetails, path: Path, model: Model, section: Model) -> str:
    value = detail["input"]
    context = detail.get("ctx", {})
    match detail["type"]:
        case "missing":
            return _missing(path, model, section)
        case "extra_forbidden":
            return _unknown_key(path, model, section)
        case "literal_error" if isinstance(value, str):
            return str(unknown("value", value, _quoted(context["expected"])))
        case "union_tag_invalid":
            return str(unknown("kind", context["tag"], _quoted(context["expected_tags"])))
        case "union_tag_not_found":
            kinds = by_kind(sections(model, str(path[0])))
            return f"missing; give {typed(path)}=KIND, one of {', '.join(kinds)}"
        case "string_pattern_mismatch":
            return f"{brief(value)} is not a name for a network; use letters, digits, - and _, up to 40"
        case "too_short" | "string_too_short":
            return "must not be empty"
        case "too_long" | "string_too_long":
            return f"too long; at most {context['max_length']} are allowed"
    return mismatch(detail)


def mismatch(detail: ErrorDetails) -> str:
    """Say what a value must be, and what it is instead."""
    match detail["type"]:
        case "missing":
            return "missing"
        case "value_error":
            return str(detail["ctx"]["error"])
        case kind if kind in _EXPECTED:
            return f"must be {_EXPECTED[kind]}, not {brief(detail['input'])}"
    return f"{detail['msg'].replace('Input should be', 'must be')}, not {brief(detail['input'])}"


def _missing(path: Path, model: Model, section: Model) -> str:
    if len(path) == 2 and by_kind(sections(model, str(path[0]))):
        return f"missing; {path[0]}.kind={section.model_fields['kind'].default} needs its own: {typed(path)}=VALUE"
    needed = [
        f"{typed(path)}.{key}=VALUE"
        for below in sections(section, str(path[-1]))[:1]
        for key, field in below.model_fields.items()
        if field.is_required() or key == "kind"
    ]
    return f"missing; give {', '.join(needed) or f'{typed(path)}=VALUE'}"


def _unknown_key(path: Path, model: Model, section: Model) -> str:
    """Suggest a kind that has the key, a key of that name elsewhere (``optimizer.lr``), or one spelt alike."""
    if removed := REMOVED.get(typed(path)):
        return removed
    key = str(path[-1])
    kinds = by_kind(sections(model, str(path[0]))) if len(path) == 2 else {}
    owners = [kind for kind, other in kinds.items() if key in other.model_fields]
    if owners:
        return f"only {path[0]}.kind={owners[0]} has this key; allowed here: {', '.join(section.model_fields)}"
    elsewhere = [other for other in keys(model) if other.rpartition(".")[2] == key]
    hint = f"; did you mean {elsewhere[0]!r}?" if elsewhere else did_you_mean(key, section.model_fields)
    return f"unknown key{hint}" if hint else f"unknown key; allowed here: {', '.join(section.model_fields)}"


def _quoted(expected: str) -> list[str]:
    return re.findall("'([^']*)'", expected)
