"""A description of the machine and software of a run, without paths, user names or network access. Never fails."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from codistill.hardware import cores


def describe() -> dict[str, Any]:
    """Versions, machine, commit and command line; None for facts that cannot be determined."""
    import torch

    facts: dict[str, Callable[[], object]] = {
        "codistill": lambda: version("codistill"),
        "python": platform.python_version,
        "torch": lambda: version("torch"),
        "numpy": lambda: version("numpy"),
        "platform": platform.platform,
        "cpu": _cpu_name,
        "cores": cores,
        "threads": torch.get_num_threads,
        "accelerators": lambda: _accelerators(torch),
        "cuda": lambda: torch.version.cuda,
        "cudnn": lambda: _cudnn(torch),
        "commit": _commit,
        "dirty": _dirty,
        "command": _command,
    }
    return {name: _or_none(fact) for name, fact in facts.items()}


def _or_none(fact: Callable[[], object]) -> object:
    """Return None on any error: broken drivers must not stop a training."""
    try:
        return fact()
    except Exception:
        return None


def _cpu_name() -> str:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace")
    names = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return names[1] if names else platform.processor() or platform.machine()


def _accelerators(torch: Any) -> list[str]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return names + (["Apple MPS"] if torch.backends.mps.is_available() else [])


def _cudnn(torch: Any) -> int | None:
    return int(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None


def _commit(source: Path = Path(__file__)) -> str:
    """The commit of this code; an installed copy inside another repository does not get that repository's commit.

    For a copy without its repository, on a cluster or in a container, set $CODISTILL_COMMIT.
    """
    if named := os.environ.get("CODISTILL_COMMIT"):
        return named
    _git(source, "ls-files", "--error-unmatch", source.name)
    return _git(source, "rev-parse", "HEAD")


def _dirty(source: Path = Path(__file__)) -> bool:
    _git(source, "ls-files", "--error-unmatch", source.name)
    return bool(_git(source, "status", "--porcelain", "--untracked-files=no"))


def _git(source: Path, *arguments: str) -> str:
    return _output("git", "-c", "core.fsmonitor=false", *arguments, folder=source.parent)


def _output(*command: str, folder: Path | None = None) -> str:
    """The output of a program. GIT_DIR and similar variables, set inside git hooks, would name another repository."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=10, check=True)
    return ended.stdout.strip()


# An absolute path begins with a slash after nothing or after no letter; recipes' names (cifar100/…) have one inside.
_PATH = re.compile(r"(?<![\w.-])[/~]|\.\./")


def _command() -> list[str]:
    """The command line, with "<path>" for paths outside the working folder or with the user's name."""
    return [Path(sys.argv[0]).name, *map(_without_paths, sys.argv[1:])]


def _without_paths(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if _is_private(name):
        return "<path>"
    return f"{name}={'<path>' if _is_private(value) else value}" if equals else name


def _is_private(text: str) -> bool:
    user = Path.home().name
    return bool(_PATH.search(text)) or (user != "" and user in text.split("/"))
