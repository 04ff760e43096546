"""A recipe in the making: values that are not checked yet, and where each of them was written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from codistill.recipes.errors import Path
from codistill.recipes.schema import Recipe
from codistill.recipes.shape import by_kind, sections

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Draft:
    """``places`` maps a path to words such as ``line 3``, for errors; ``source`` is what they call the whole."""

    values: Values
    places: Mapping[Path, str] = field(default_factory=dict)
    source: str = "recipe"

    def recipe(self) -> Recipe:
        return Recipe.check(self.values, self.source, self.places)

    def changed(self, assignments: Mapping[tuple[str, ...], object], places: Mapping[Path, str]) -> "Draft":
        """This draft with some paths set. A mapping given for a section sets its keys one by one.

        A section's kind goes first, so that keys set beside it are judged as the new kind's, in whatever order.
        """
        values = self.values
        steps = [step for path, value in assignments.items() for step in _spread(path, value)]
        for path, value in sorted(steps, key=lambda step: step[0][1:] != ("kind",)):
            values = _of_kind(values, path[0], value) if path[1:] == ("kind",) else values
            values = _assigned(values, path, value)
        kept = {place: words for place, words in self.places.items() if not _is_set(place, assignments)}
        return Draft(values, {**kept, **places}, self.source)


def _is_set(place: Path, assignments: Mapping[tuple[str, ...], object]) -> bool:
    return any(place[: len(path)] == path for path in assignments)


def _spread(path: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    if len(path) == 1 and isinstance(value, Mapping) and sections(Recipe, path[0]):
        yield from (((*path, key), inner) for key, inner in value.items())
    else:
        yield path, value


def _assigned(values: object, path: tuple[str, ...], value: object) -> dict[str, Any]:
    key, *rest = path
    before = values if isinstance(values, Mapping) else {}
    return {**before, key: _assigned(before.get(key), tuple(rest), value) if rest else value}


def _of_kind(values: Values, section: str, kind: object) -> Values:
    """Before a section changes its kind: what the new kind lacks goes, and what every kind needs must be said again.

    A learning rate that suits SGD is not taken over by AdamW, nor a cosine schedule given somebody's milestones.
    """
    before = values.get(section)
    new = by_kind(sections(Recipe, section)).get(str(kind))
    if new is None or not isinstance(before, Mapping) or before.get("kind") == kind:
        return values
    optional = {name for name, field in new.model_fields.items() if not field.is_required()}
    return {**values, section: {key: value for key, value in before.items() if key in optional}}
