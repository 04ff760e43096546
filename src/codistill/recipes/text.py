"""YAML as recipes are written in it, to plain values and back. JSON is read the same way, as a part of YAML.

PyYAML alone reads ``1e-3`` as text, ``on`` as true, lets the second of two equal keys win, and expands aliases until
the memory is full. Here it only finds the structure: numbers, booleans and nulls are YAML 1.2's, keys are text and
unique, and what a recipe has no use for (anchors, aliases, tags, deep nesting) is refused with its line.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

from codistill.recipes.errors import Path, Problem, RecipeError, brief

MAX_BYTES = 256 * 1024
MAX_DEPTH = 12

_NULL = re.compile(r"(?:|~|null|Null|NULL)")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)")
_INT = re.compile(r"[-+]?[0-9]{1,40}")
_FLOAT = re.compile(r"[-+]?(?:(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")


def scalar(text: str) -> object:
    """What an unquoted word means: null, a boolean, a number, or itself."""
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
    value: object
    lines: dict[Path, int]


def parse(text: str, source: str) -> Parsed:
    """The value that ``text`` writes down and the line of each of its parts; errors call the text ``source``."""
    try:
        _refuse_the_unneeded(text)
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
    """Quotes what either this reader or a YAML 1.1 one would take for something other than text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _written(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML's other styles lose unusual line breaks such as U+0085.
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


_Dumper.add_representer(str, _written)
_WHOLE_FLOAT = re.compile(f"(?:{_FLOAT.pattern})$", re.ASCII)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _WHOLE_FLOAT, list("-+.0123456789"))


def _refuse_the_unneeded(text: str) -> None:
    """Before anything is built, so that neither an alias bomb nor a tower of brackets costs anything."""
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
