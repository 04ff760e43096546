"""A look into a .pt2 file before torch loads it: torch's own loader runs whatever code the file brings along.

It unpickles weights, constants and sample inputs that ask for it, evaluates symbolic expressions and guards as Python,
looks up any function by its name, and loads compiled libraries. A plain network needs none of this, so a file that
has any of it was not written here, and is refused.
"""

import ast
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Behind the archive's own folder, which bears the file's name.
MODEL, SAMPLE_INPUTS = "models/model.json", "data/sample_inputs/model.pt"
CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
KNOWN = re.compile(
    "|".join(
        (
            *map(re.escape, (MODEL, SAMPLE_INPUTS, *CONFIGS)),
            r"data/weights/weight_\d+|data/constants/tensor_\d+",
            "archive_format|archive_version|byteorder|version",
            r"\.data/(version|serialization_id)",
        )
    )
)
MAX_JSON_BYTES = 256 * 2**20
# Torch's own operators, and arithmetic on the size of a batch.
OPERATOR = re.compile(r"torch\.ops\.aten\.\w+\.\w+|_operator\.(add|sub|mul|floordiv)")
SYMBOL = re.compile(r"s\d+")
ARITHMETIC = {"Symbol", "Integer", "Add", "Mul"}
MAX_EXPRESSION = 400


def refuse_code(path: Path) -> None:
    """Raise unless the file holds tensors and torch's own operators, and nothing else."""
    try:
        with zipfile.ZipFile(path) as archive:
            odd = next(_odd(archive), None)
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a network that `codistill export` wrote ({error})") from None
    if odd:
        raise ValueError(f"{path}: {odd}, which no network that `codistill export` wrote has; it is not loaded")


def _odd(archive: zipfile.ZipFile) -> Iterator[str]:
    members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
    if len(members) != len(archive.infolist()):
        yield "two of its parts bear the same name"
    for name in members:
        if not KNOWN.fullmatch(name):
            yield f"it has a part {name!r}"
    if members[SAMPLE_INPUTS].file_size:
        yield "it has pickled inputs"
    for name in (MODEL, *CONFIGS):
        if members[name].file_size > MAX_JSON_BYTES:
            yield f"its part {name} is larger than {MAX_JSON_BYTES:,} bytes"
        for key, value in _entries(json.loads(archive.read(members[name]))):
            if key == "use_pickle" and value:
                yield "it has pickled tensors"
            elif key == "guards_code" and value:
                yield "it has guards"
            elif key == "target" and isinstance(value, str) and not OPERATOR.fullmatch(value):
                yield f"it calls {value!r}"
            elif key == "expr_str" and not _is_arithmetic(value):
                yield f"it computes a shape from {value!r}"


def _is_arithmetic(text: str) -> bool:
    """Whether a shape is the size of a batch, or sums and products of it, in sympy's own notation; nothing is run."""
    if len(text) > MAX_EXPRESSION:
        return False
    try:
        parsed = ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return all(_is_harmless(node) for node in ast.walk(parsed))


def _is_harmless(node: ast.AST) -> bool:
    match node:
        case ast.Expression() | ast.Load():
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in ARITHMETIC
        case ast.Name(id=name):
            return name in ARITHMETIC or SYMBOL.fullmatch(name) is not None
        case ast.keyword(arg=name):
            return name in ("positive", "integer")
        case ast.Constant(value=str(name)):
            return SYMBOL.fullmatch(name) is not None
        case ast.Constant(value=value):
            return isinstance(value, int)
    return False


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a JSON value, however deep, with what it holds."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _entries(item)
    elif isinstance(value, list):
        for item in value:
            yield from _entries(item)
