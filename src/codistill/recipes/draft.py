"""A recipe in the making: values that are not checked yet, and where each of them was written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from codistill.log import log
from codistill.recipes.errors import Path
from codistill.recipes.schema import Recipe
from codistill.recipes.shape import by_kind, sections

Values = Mapping[str, Any]

EMBEDDED = "fashion"
FOR_EMBEDDED = ("wrong_labels", "train_limit", "test_limit")
"""Keys of data that a recipe chooses for the embedded images, to make them a demonstration."""


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
        steps = [step for path, value in assignments.items() for step in _spread(path, value)]
        values = _of_other_images(self.values, dict(steps), self.source)
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


def _of_other_images(values: Values, given: Mapping[tuple[str, ...], object], source: str) -> Values:
    """The values without what was chosen for the embedded images, where ``data.name`` becomes another.

    Whoever trains the demonstration's networks on photos of their own wants all of them, with their true labels.
    """
    data = values.get("data")
    name = given.get(("data", "name"), EMBEDDED)
    if name == EMBEDDED or not isinstance(data, Mapping) or data.get("name") != EMBEDDED:
        return values
    dropped = {key: data[key] for key in FOR_EMBEDDED if data.get(key) and ("data", key) not in given}
    if dropped:
        settings = " ".join(f"data.{key}={value}" for key, value in dropped.items())
        log.info("data.name=%s: left out what %s sets for %s; to keep it, type %s", name, source, EMBEDDED, settings)
    return {**values, "data": {key: value for key, value in data.items() if key not in dropped}}


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
