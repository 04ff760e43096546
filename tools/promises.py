"""The promises of docs/reliability.md, from the marks on the tests that keep them; ``fill_docs.py`` puts them there.

    @pytest.mark.promise("killed", "A training that is killed continues.", repeated="{KILLED} SIGKILLs")
    @pytest.mark.promise("killed")              # on another test that keeps the same promise

In ``repeated``, a name in braces is a count of tests/support/stress.py as `make stress` has it, or the length of a
table in the test's own module. Tests are parsed, not imported.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"


@dataclass
class Promise:
    sentence: str = ""
    repeated: str = ""
    tests: dict[str, list[str]] = field(default_factory=dict)
    """By their file below tests/."""


def promises(tests: Path = TESTS) -> dict[str, Promise]:
    """Every promise by its key, in the order of files and lines."""
    found: dict[str, Promise] = {}
    published = dict(counts(ast.parse((tests / "support" / "stress.py").read_text(encoding="utf-8"))))
    for file in sorted(tests.rglob("test_*.py")):
        module = ast.parse(file.read_text(encoding="utf-8"))
        for test, arguments, repeated in marks(module):
            key, *sentence = arguments
            promise = found.setdefault(key, Promise())
            promise.tests.setdefault(file.relative_to(tests).as_posix(), []).append(test)
            if sentence:
                if promise.sentence:
                    raise ValueError(f"{file.name}: {test}: the sentence of {key!r} is on another test already")
                promise.sentence = sentence[0]
                promise.repeated = repeated.format_map({**published, **dict(counts(module))})
    if bare := sorted(key for key, promise in found.items() if not promise.sentence or not promise.repeated):
        raise ValueError(f"no test says in a sentence what is promised, and how often: {', '.join(bare)}")
    return found


def marks(module: ast.Module) -> Iterator[tuple[str, list[str], str]]:
    """The tests that are marked, with the mark's arguments."""
    for test in module.body:
        for mark in getattr(test, "decorator_list", []):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                assert isinstance(test, ast.FunctionDef)
                named = {option.arg: ast.literal_eval(option.value) for option in mark.keywords}
                yield test.name, [ast.literal_eval(value) for value in mark.args], named.get("repeated", "")


def counts(module: ast.Module) -> Iterator[tuple[str, str]]:
    """A module's numbers, ``times(published, share)`` and lengths of tables, as the page prints them."""
    for statement in module.body:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Constant(int(number))):
                yield name, f"{number:,}"
            case ast.Assign([ast.Name(name)], ast.Call(ast.Name("times"), [ast.Constant(int(number)), _])):
                yield name, f"{number:,}"
            case ast.Assign([ast.Name(name)], ast.Dict(entries) | ast.Tuple(entries) | ast.List(entries)) if not any(
                entry is None or isinstance(entry, ast.Starred) for entry in entries
            ):
                yield name, f"{len(entries):,}"
