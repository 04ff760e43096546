"""``key=value`` changes to a recipe, as typed on a command line, and what changed between two recipes."""

import json
from collections.abc import Iterator, Mapping, Sequence

from codistill.recipes import text
from codistill.recipes.draft import Draft, Values
from codistill.recipes.errors import Problem, RecipeError, brief, typed
from codistill.recipes.schema import Recipe

COMMAND_LINE = "command line"
# Where a run is computed and kept: what is learned does not depend on it, but for the rounding of another machine.
WHERE = (
    *("checkpoints", "data.folder", "data.resident", "data.workers", "data.timeout_s"),
    *("runtime.device", "runtime.threads"),
)
# And by which kernels, which round otherwise too: a run may go on with others, and a table says which were used.
WHERE_AND_HOW = (*WHERE, "runtime.compile", "runtime.capture")


def apply(recipe: Recipe | Values | Draft, assignments: Sequence[str]) -> Recipe:
    """The recipe with ``["method=dml", "length.epochs=1", "networks.b=mobilenet"]`` applied, checked as a whole."""
    if isinstance(recipe, Recipe):
        recipe = Draft(recipe.model_dump(mode="json"), source=recipe.name)
    draft = recipe if isinstance(recipe, Draft) else Draft(recipe)
    given, problems = parse(assignments)
    try:
        changed = draft.changed(given, dict.fromkeys(given, COMMAND_LINE)).recipe()
    except RecipeError as error:
        problems += error.problems
    if problems:
        raise RecipeError(problems, draft.source)
    return changed


def parse(assignments: Sequence[str]) -> tuple[dict[tuple[str, ...], object], list[Problem]]:
    """Typed changes as values by path, and what is no ``key=value`` or contradicts another."""
    given: dict[tuple[str, ...], object] = {}
    problems: list[Problem] = []
    for assignment in assignments:
        key, equals, word = assignment.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            message = f"{brief(assignment)} is no change; type key=value, as in method=dcm"
            problems.append(Problem("", message, COMMAND_LINE))
            continue
        try:
            value = _value(word)
        except RecipeError as error:
            problems += [Problem(key, problem.message, COMMAND_LINE) for problem in error.problems]
            continue
        problems += _contradictions(path, value, given)
        given.setdefault(path, value)
    return given, problems


def difference(old: Recipe, new: Recipe) -> list[str]:
    """What changed, one ``key: old → new`` for each key, in the recipe's order."""
    before, after = (dict(_leaves(recipe.model_dump(mode="json"))) for recipe in (old, new))
    if (old.method, old.networks) == (new.method, new.networks) and old.graph.frozen != new.graph.frozen:
        # Only the order differs, and kd's teacher is the first.
        before["networks"], after["networks"] = (json.dumps(recipe.networks) for recipe in (old, new))
    return [
        f"{key}: {before.get(key, _ABSENT)} → {after.get(key, _ABSENT)}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def key_of(difference_line: str) -> str:
    """The key in a line of ``difference``."""
    return difference_line.partition(": ")[0]


def as_change(line: str) -> str:
    """A line of ``difference`` as it is typed."""
    return f"{key_of(line)}={line.rpartition(' → ')[2]}"


def is_below(key: str, parents: Sequence[str]) -> bool:
    """Whether a key is one of ``parents`` or inside one: ``runtime.threads`` is inside ``runtime``."""
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


_ABSENT = "(none)"


def _value(word: str) -> object:
    """Lists, mappings and quoted text are YAML; anything else is one word, so that ``start.a=C: #1`` stays a path."""
    word = word.strip()
    return text.parse(word, "value").value if word[:1] in {"[", "{", '"', "'"} else text.scalar(word)


def _contradictions(path: tuple[str, ...], value: object, given: Mapping[tuple[str, ...], object]) -> Iterator[Problem]:
    for other, other_value in given.items():
        shared = min(len(path), len(other))
        if path == other and value != other_value:
            message = f"given twice, {brief(other_value)} and {brief(value)}; give it once"
            yield Problem(typed(path), message, COMMAND_LINE)
        elif path != other and path[:shared] == other[:shared]:
            outer, inner = sorted([path, other], key=len)
            yield Problem(typed(inner), f"{typed(outer)} is given too, which holds it; give one of them", COMMAND_LINE)


def _leaves(values: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, values if isinstance(values, str) else json.dumps(values, ensure_ascii=False)
