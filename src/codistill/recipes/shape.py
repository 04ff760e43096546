"""Which keys a recipe has, read off its models: errors suggest from it, overrides merge by it."""

from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel

Model = type[BaseModel]


def sections(model: Model, key: str) -> list[Model]:
    """The models that a field may hold: one for a section, several for one with a ``kind``, none for a plain value."""
    field = model.model_fields.get(key)
    if field is None:
        return []
    candidates = get_args(field.annotation) or (field.annotation,)
    return [candidate for candidate in candidates if isinstance(candidate, type) and issubclass(candidate, BaseModel)]


def by_kind(models: list[Model]) -> dict[str, Model]:
    """The alternatives of a section that has several, ``{"sgd": Sgd, "adamw": AdamW}``; empty for the others."""
    return {model.model_fields["kind"].default: model for model in models} if len(models) > 1 else {}


def keys(model: Model, prefix: str = "") -> Iterator[str]:
    """Every key below ``model`` as it is typed: ``method``, ``heads``, ``heads.kind``, …"""
    for key in model.model_fields:
        yield prefix + key
        for section in sections(model, key):
            yield from keys(section, f"{prefix}{key}.")
