"""Every key of recipes and studies, from their schemas; ``fill_docs.py`` puts them into the documentation."""

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from codistill.recipes.schema import Recipe
from codistill.studies.files import StudyFile

NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text", Any: "value"}


def sections() -> dict[str, list[tuple[str, str, str, str]]]:
    """The rows (key, type, default, meaning) of every section of a recipe; "" for keys outside of one."""
    found: dict[str, list[tuple[str, str, str, str]]] = {"": []}
    for name, field in Recipe.model_fields.items():
        models = [kind for kind in members(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if models:
            found[name] = list(dict.fromkeys(row for model in models for row in rows(model, f"{name}.", models)))
        else:
            found[""] += [row(name, field)]
    return found


def study_keys() -> list[tuple[str, str, str, str]]:
    """The rows of a study's file, for docs/own-study.md."""
    return [row(name, field) for name, field in StudyFile.model_fields.items()]


def rows(model: type[BaseModel], prefix: str, models: list[Any]) -> Iterator[tuple[str, str, str, str]]:
    shared = set.intersection(*(set(other.model_fields) for other in models))
    for name, field in model.model_fields.items():
        key, kind, default, meaning = row(prefix + name, field)
        if len(models) > 1 and name not in shared:
            meaning = f"{meaning} ({model.model_fields['kind'].default} only)"
        if len(models) > 1 and name == "kind":
            default = "required"
        yield key, kind, default, meaning


def row(key: str, field: FieldInfo) -> tuple[str, str, str, str]:
    if not field.description:
        raise ValueError(f"{key}: has no description; give it one where recipes/sections.py or schema.py declares it")
    default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
    return key, describe(field.annotation), default, field.description


def describe(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if kind is type(None) else describe(kind) for kind in arguments)
    if origin is dict:
        return f"mapping to {describe(arguments[1])}s"
    if origin is list:
        return f"list of {describe(arguments[0])}s"
    if origin is tuple:
        return f"list of {describe(arguments[0])}s"
    return NAMES[annotation]


def members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
