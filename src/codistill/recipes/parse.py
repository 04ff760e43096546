"""Reads recipes: YAML and JSON files, a ``base`` in the catalogue with what differs from it, ``key=value`` changes.

PyYAML alone reads ``1e-3`` as text and ``on`` as true, lets the second of two equal keys win, and expands aliases until
the memory is full. Here it only finds the structure: numbers, booleans and nulls are YAML 1.2's, keys are text and
unique, and what a recipe does not need (anchors, aliases, tags, deep nesting) is refused with its line. JSON is read as
a subset of YAML.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal

import yaml

from codistill.errors import did_you_mean
from codistill.log import log
from codistill.recipes import catalogue
from codistill.recipes.datasets import DATASETS
from codistill.recipes.errors import Path, Problem, RecipeError, brief, by_kind, sections, typed
from codistill.recipes.schema import Recipe

Values = Mapping[str, Any]

SUFFIXES = (".yaml", ".yml", ".json")
COMMAND_LINE = "command line"
MAX_BYTES = 256 * 1024
MAX_DEPTH = 12
DEMO_KEYS = ("wrong_labels", "train_limit", "test_limit")
"""Keys of data that a recipe sets for the embedded images, to make them a demonstration."""

_NULL = re.compile(r"(?:|~|null|Null|NULL)")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)")
_INT = re.compile(r"[-+]?[0-9]{1,40}")
_FLOAT = re.compile(r"[-+]?(?:(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Draft:
    """Values that are not checked yet; for errors, ``places`` maps a path to ``line 3``, ``source`` names the whole."""

    values: Values
    places: Mapping[Path, str] = field(default_factory=dict)
    source: str = "recipe"

    def recipe(self) -> Recipe:
        """Check the values as a whole."""
        return Recipe.check(self.values, self.source, self.places)

    def changed(self, assignments: Mapping[tuple[str, ...], object], places: Mapping[Path, str]) -> "Draft":
        """Return this draft with some paths set. A mapping given for a section sets its keys one by one.

        A section's kind is set first, so that other keys are applied to the new kind, in any order.
        """
        steps = [step for path, value in assignments.items() for step in _spread(path, value)]
        values = _without_demo_keys(self.values, dict(steps), self.source)
        for path, value in sorted(steps, key=lambda step: step[0][1:] != ("kind",)):
            values = _with_kind(values, path[0], value) if path[1:] == ("kind",) else values
            values = _assigned(values, path, value)
        kept = {p: words for p, words in self.places.items() if not any(p[: len(path)] == path for path in assignments)}
        return Draft(values, {**kept, **places}, self.source)


def load(path: str | FilePath, changes: Sequence[str] = ()) -> Recipe:
    """Load the recipe in a file, with ``key=value`` changes applied before it is checked."""
    return apply(read(path), changes)


def loads(written: str, source: str = "recipe") -> Recipe:
    """Load the recipe in a text; ``source`` is what errors call it."""
    return parse(written, source).recipe()


def dumps(recipe: Recipe, form: Literal["yaml", "json"] = "yaml") -> str:
    """Write the whole recipe, defaults too, as a text that ``loads`` reads back."""
    values = recipe.model_dump(mode="json")
    return to_json(values) if form == "json" else to_yaml(values)


def read(path: str | FilePath) -> Draft:
    """Read a file as a draft; refuse what is not a small UTF-8 text file."""
    path = FilePath(path)
    source = str(path)
    try:
        if not path.is_file():
            found = "not a regular file" if path.exists() else "no such file"
            raise FileNotFoundError(2, "is a folder" if path.is_dir() else found)
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError([Problem("", f"cannot be read: {error.strerror}")], source) from None
    if len(content) > MAX_BYTES:
        raise RecipeError([Problem("", f"larger than {MAX_BYTES // 1024} KiB, which no recipe needs")], source)
    try:
        written = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError([Problem("", f"not UTF-8 text (byte {error.start + 1})")], source) from None
    # A JSON file may be indented with tabs, which YAML refuses; inside its strings they must be escaped.
    return parse(written.replace("\t", " ") if path.suffix == ".json" else written, source)


def parse(written: str, source: str) -> Draft:
    """Parse a text as a draft: a whole recipe, or changes to the catalogue's ``base``."""
    parsed = parse_yaml(written, source)
    if not isinstance(parsed.value, dict):
        found = "nothing" if parsed.value is None else brief(parsed.value)
        raise RecipeError([Problem("", f"a recipe is written as key: value lines, and this has {found}")], source)
    values = dict(parsed.value)
    places = {path: f"line {line}" for path, line in parsed.lines.items()}
    if "base" not in values:
        return Draft(values, places, source)
    base = values.pop("base")
    try:
        draft = draft_of(str(base))
    except RecipeError as error:
        raise RecipeError([Problem("base", error.problems[0].message, places["base",])], source) from None
    changed = draft.changed({(key,): value for key, value in values.items()}, places)
    return Draft(changed.values, changed.places, source)


def draft_of(name: str) -> Draft:
    """A catalogue recipe as a draft, without placeholders for what only the user can name."""
    if name not in catalogue.RECIPES:
        hint = did_you_mean(name, catalogue.NAMES) or ";"
        message = f"unknown recipe {brief(name)}{hint} codistill list shows all {len(catalogue.NAMES)}"
        raise RecipeError([Problem("", message)], "recipe")
    values = catalogue.RECIPES[name].build().model_dump(mode="json")
    start = {member: file for member, file in values["start"].items() if file != catalogue.TO_BE_GIVEN}
    return Draft({**values, "name": name, "start": start}, source=name)


def apply(recipe: Recipe | Values | Draft, assignments: Sequence[str]) -> Recipe:
    """Apply changes such as ``["method=dml", "length.epochs=1", "networks.b=mobilenet"]`` and check the whole."""
    if isinstance(recipe, Recipe):
        recipe = Draft(recipe.model_dump(mode="json"), source=recipe.name)
    draft = recipe if isinstance(recipe, Draft) else Draft(recipe)
    given, problems = parse_changes(assignments)
    try:
        changed = draft.changed(given, dict.fromkeys(given, COMMAND_LINE)).recipe()
    except RecipeError as error:
        problems += error.problems
    if problems:
        raise RecipeError(problems, draft.source)
    return changed


def parse_changes(assignments: Sequence[str]) -> tuple[dict[tuple[str, ...], object], list[Problem]]:
    """Parse typed changes to values by path; return them with the problems of malformed and conflicting ones."""
    given: dict[tuple[str, ...], object] = {}
    problems: list[Problem] = []
    for assignment in assignments:
        key, equals, word = assignment.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            message = f"{brief(assignment)} is not a change; type key=value, as in method=dcm"
            problems.append(Problem("", message, COMMAND_LINE))
            continue
        try:
            value = _typed_value(word)
        except RecipeError as error:
            problems += [Problem(key, problem.message, COMMAND_LINE) for problem in error.problems]
            continue
        problems += _conflicts(path, value, given)
        given.setdefault(path, value)
    return given, problems


def _typed_value(word: str) -> object:
    """Parse lists, mappings and quoted text as YAML, anything else as one word, so that ``start.a=C: #1`` is a path."""
    word = word.strip()
    return parse_yaml(word, "value").value if word[:1] in {"[", "{", '"', "'"} else scalar(word)


def _conflicts(path: tuple[str, ...], value: object, given: Mapping[tuple[str, ...], object]) -> Iterator[Problem]:
    for other, other_value in given.items():
        shared = min(len(path), len(other))
        if path == other and value != other_value:
            message = f"given twice, {brief(other_value)} and {brief(value)}; give it once"
            yield Problem(typed(path), message, COMMAND_LINE)
        elif path != other and path[:shared] == other[:shared]:
            outer, inner = sorted([path, other], key=len)
            yield Problem(
                typed(inner), f"conflicts with {typed(outer)}, which contains it; give only one", COMMAND_LINE
            )


def _spread(path: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    if len(path) == 1 and isinstance(value, Mapping) and sections(Recipe, path[0]):
        yield from (((*path, key), inner) for key, inner in value.items())
    else:
        yield path, value


def _assigned(values: object, path: tuple[str, ...], value: object) -> dict[str, Any]:
    key, *rest = path
    before = values if isinstance(values, Mapping) else {}
    return {**before, key: _assigned(before.get(key), tuple(rest), value) if rest else value}


def _without_demo_keys(values: Values, given: Mapping[tuple[str, ...], object], source: str) -> Values:
    """Drop the settings chosen for the embedded images where ``data.name`` names another data set.

    The demonstration's networks on the user's own images train on all of them, with their true labels.
    """
    data = values.get("data")
    if not isinstance(data, Mapping) or ("data", "name") not in given:
        return values
    before, name = data.get("name"), given["data", "name"]
    if name == before or before not in DATASETS or DATASETS[str(before)].files != "package":
        return values
    dropped = {key: data[key] for key in DEMO_KEYS if data.get(key) and ("data", key) not in given}
    if dropped:
        settings = " ".join(f"data.{key}={value}" for key, value in dropped.items())
        log.info("data.name=%s: left out what %s sets for %s; to keep it, type %s", name, source, before, settings)
    return {**values, "data": {key: value for key, value in data.items() if key not in dropped}}


def _with_kind(values: Values, section: str, kind: object) -> Values:
    """Prepare a section for a new kind: drop keys that it lacks, and keys that every kind requires.

    A learning rate that suits SGD is not kept for AdamW, nor milestones for a cosine schedule.
    """
    before = values.get(section)
    new = by_kind(sections(Recipe, section)).get(str(kind))
    if new is None or not isinstance(before, Mapping) or before.get("kind") == kind:
        return values
    optional = {name for name, field in new.model_fields.items() if not field.is_required()}
    return {**values, section: {key: value for key, value in before.items() if key in optional}}


def scalar(text: str) -> object:
    """The value of an unquoted word: null, a boolean, a number, or the word itself."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(re.sub(r"\.(?=[iInN])", "", text))
    return text


@dataclass(frozen=True)
class Parsed:
    """A YAML value and the line of each path in it."""

    value: object
    lines: dict[Path, int]


def parse_yaml(text: str, source: str) -> Parsed:
    """Parse YAML to a value and the line of each of its parts; errors call the text ``source``."""
    try:
        _check_events(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[Path, int] = {}
        return Parsed(_value(node, (), lines), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ": ".join(part for part in (error.context, error.problem) if part)
        raise _refused(source, reason or "not YAML", mark) from None
    except yaml.reader.ReaderError as error:
        raise _refused(source, f"{error.reason} (character {error.position + 1})") from None


def to_yaml(value: object) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def to_json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


class _Dumper(yaml.SafeDumper):
    """Quotes text that this reader or a YAML 1.1 one would read as something else."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML's other styles lose unusual line breaks such as U+0085.
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
_WHOLE_FLOAT = re.compile(f"(?:{_FLOAT.pattern})$", re.ASCII)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _WHOLE_FLOAT, list("-+.0123456789"))


def _check_events(text: str) -> None:
    """Refuse aliases, tags and deep nesting before anything is built, so that an alias bomb costs nothing."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        opens = isinstance(event, yaml.CollectionStartEvent)
        depth += opens - isinstance(event, yaml.CollectionEndEvent)
        if getattr(event, "anchor", None) is not None:
            raise _at(event.start_mark, "anchors and aliases (&name, *name) are not read; write the value out")
        if (opens or isinstance(event, yaml.ScalarEvent)) and event.tag is not None:
            raise _at(event.start_mark, f"tags ({brief(event.tag)}) are not read; leave it out")
        if isinstance(event, yaml.ScalarEvent) and _SURROGATE.search(event.value):
            raise _at(event.start_mark, "half a character (\\ud800 to \\udfff); write the character itself")
        if depth > MAX_DEPTH:
            raise _at(event.start_mark, f"nested more than {MAX_DEPTH} deep")


def _value(node: yaml.Node | None, path: Path, lines: dict[Path, int]) -> object:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, lines)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, index), lines) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return scalar(node.value) if node.style is None else node.value
    return None


def _mapping(node: yaml.MappingNode, path: Path, lines: dict[Path, int]) -> dict[str, object]:
    mapping: dict[str, object] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _at(key_node.start_mark, "a key must be a word, not a list or a mapping")
        key = key_node.value
        here = (*path, key)
        if key in mapping:
            raise _at(key_node.start_mark, f"the key {brief(key)} is given twice, first in line {lines[here]}")
        lines[here] = key_node.start_mark.line + 1
        mapping[key] = _value(value_node, here, lines)
    return mapping


def _at(mark: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _refused(source: str, reason: str, mark: yaml.Mark | None = None) -> RecipeError:
    return RecipeError([Problem("", reason, f"line {mark.line + 1}" if mark else "")], source)
