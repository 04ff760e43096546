"""What could execute a file's content, or use the network, is used where it is named here and nowhere else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import codistill
from codistill.networks.families import FAMILIES

SOURCE = Path(__file__).parents[2] / "src" / "codistill"

EXECUTES = (
    *("eval", "exec", "compile", "__import__", "importlib.import_module", "importlib.util.module_from_spec", "runpy"),
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "copyreg"),
    *("torch.load", "torch.jit.load", "torch.hub", "torch.package", "torch.serialization", "torch.export.load"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.Loader", "yaml.UnsafeLoader"),
    *("os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv", "pty", "commands", "code", "codeop", "ctypes"),
    *("shell=True", "allow_pickle=True", "weights_only=False", "tarfile.extractall", "zipfile.extractall"),
)
TALKS = (
    *("socket", "ssl", "http", "urllib", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "pooch", "webbrowser"),
    "huggingface_hub",
)
ALLOWED = {
    # Two tables of constants name modules of codistill, so that help and listings import no torch.
    "__init__.py": {"importlib.import_module"},
    "networks/families.py": {"importlib.import_module"},
    "data/cifar.py": {"pickle"},  # CIFAR's own files; every name in them becomes an inert stand-in
    "export/formats.py": {"torch.export.load"},  # of what this process has just written, to check it
    "engine/weight_files.py": {"torch.load"},  # with weights_only=True, which the test below asserts
    # Where the libraries' caches are; they download in `fetch` alone, for `codistill train --download`.
    "networks/adapters/pretrained.py": {"torch.hub", "huggingface_hub", "torch.load"},
    "data/download.py": {"pooch"},  # `codistill data NAME --download`, and nothing else, downloads
    "report/server.py": {"http", "socket", "urllib"},  # `codistill watch` serves its page to this machine alone
    "cli/results.py": {"webbrowser"},  # `codistill watch --browser` shows it
    "distributed/launch.py": {"socket"},  # `codistill train --nproc`: processes that meet on the loopback interface
}
BUILTINS = {"eval", "exec", "compile", "__import__"}


def imported(nodes: list[ast.AST]) -> dict[str, str]:
    """What names stand for: ``import torch as t`` makes t torch, and ``from torch import load`` load torch.load."""
    meaning = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                meaning[alias.asname or alias.name] = alias.name
                meaning.setdefault(alias.name.split(".")[0], alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            meaning |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return meaning


def used_names(tree: ast.AST) -> Iterator[str]:
    """Full names of all that a file imports or mentions of what it imports, and the keywords of its calls."""
    nodes = list(ast.walk(tree))
    meaning = imported(nodes) | {name: name for name in BUILTINS}
    yield from {name for name in meaning.values() if name not in BUILTINS}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in BUILTINS:
            yield node.id
        elif isinstance(node, ast.Attribute):
            first, dot, rest = ast.unparse(node).partition(".")
            yield meaning.get(first, "") + dot + rest
            yield f"*.{node.attr}"
        elif isinstance(node, ast.keyword):
            yield ast.unparse(node)


def risks(code: str) -> set[str]:
    """Those of the names above that the code uses; ``extractall`` by whatever object it is called on."""
    found = set()
    for name in used_names(ast.parse(code)):
        for risk in (*EXECUTES, *TALKS):
            if name == risk or name.startswith(f"{risk}.") or (name == "*.extractall" and risk.endswith("extractall")):
                found.add(risk)
    return found


@pytest.mark.promise(
    "no-code",
    "What could execute a file (`pickle`, `torch.load`, `torch.export.load`, `eval`, `exec`, `yaml.load`, "
    "`shell=True`, imports by name) is used in three places: for CIFAR's own files through inert stand-ins, "
    "`torch.load` with `weights_only=True` for the `.pth` files that a training starts from and pretrained "
    "weights in a library's cache, and `torch.export.load` for the bytes of a `pt2` export that the same process "
    "has just written. `predict` refuses `pt2`. Code that uses the network is in five: `codistill data NAME "
    "--download`, `codistill train --download` for pretrained weights, the live page of `codistill watch` and the "
    "browser it opens, and the processes of `--nproc`, on the loopback interface.",
    repeated="every source file",
)
def test_nothing_else_executes_or_talks() -> None:
    files = list(SOURCE.rglob("*.py"))
    assert len(files) > 100
    found = {file.relative_to(SOURCE).as_posix(): risks(file.read_text()) for file in files}
    assert {name: names for name, names in found.items() if names} == ALLOWED


def test_weight_files_are_loaded_as_weights_only() -> None:
    for file in ("engine/weight_files.py", "networks/adapters/pretrained.py"):
        calls = [node for node in ast.walk(ast.parse((SOURCE / file).read_text())) if isinstance(node, ast.Call)]
        (load,) = (call for call in calls if ast.unparse(call.func) == "torch.load")
        assert "weights_only=True" in [ast.unparse(keyword) for keyword in load.keywords]


def test_modules_that_are_imported_by_name_are_our_own() -> None:
    named = [*codistill._MODULES.values(), *(family.architecture for family in FAMILIES if family.architecture)]
    assert len(named) > 15
    assert [name for name in named if not name.startswith("codistill.")] == []


@pytest.mark.parametrize(
    ("code", "risk"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads as read", "pickle"),
        ("import torch as t\nt.load('x')", "torch.load"),
        ("from torch import load", "torch.load"),
        ("from torch.export import load", "torch.export.load"),
        ("read = eval", "eval"),
        ("exec('1')", "exec"),
        ("import yaml\nyaml.load(x, yaml.Loader)", "yaml.load"),
        ("import subprocess as s\ns.run('ls', shell=True)", "shell=True"),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", "allow_pickle=True"),
        ("from importlib import import_module", "importlib.import_module"),
        ("import importlib\nimportlib.import_module(name)", "importlib.import_module"),
        ("__import__(name)", "__import__"),
        ("tar.extractall()", "tarfile.extractall"),
        ("from huggingface_hub import hf_hub_download", "huggingface_hub"),
        ("import urllib.request", "urllib"),
        ("from socket import socket", "socket"),
    ],
)
def test_every_way_to_write_it_is_seen(code: str, risk: str) -> None:
    assert risk in risks(code)


def test_what_only_looks_like_it_is_not() -> None:
    lines = ["import re, torch", "re.compile('x')", "network.eval()", "torch.compile(f)", "run(shell=False)"]
    lines += ["compile: bool = False", "code = requests"]
    assert risks("\n".join(lines)) == set()
