"""``codistill doctor``: checks whether this machine is ready to train. A check that fails is reported, never raised."""

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import typer

import codistill
from codistill.cli.terminal import AsJson, console
from codistill.errors import SAME_BUILD, ExitCode, install_hint
from codistill.hardware import cores

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
ENOUGH_SPACE = 2 * 10**9  # a run of two large networks keeps two checkpoints of a few hundred MB each

EXTRAS = {
    "export": "codistill export --format onnx",
    "zoo": "networks of timm and torchvision",
    "tensorboard": "--track tensorboard",
    "mlflow": "--track mlflow",
    "wandb": "--track wandb",
}
REQUIREMENT = re.compile(r"(?P<package>[\w.-]+)>=(?P<least>[\d.]+).*; extra == ['\"](?P<extra>\w+)['\"]")
PINNED = re.compile(r"torch \(?==([\d.]+)")

Status = Literal["ok", "warning", "broken"]
STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class Finding:
    """``broken`` means that no training is possible; ``advice`` says what to do."""

    subject: str
    status: Status
    text: str
    advice: str = ""


def report(as_json: AsJson = False) -> int:
    """Check whether this machine is ready to train."""
    findings = [finding for check in CHECKS for finding in attempt(check)]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        screen = console()
        for finding in findings:
            advice = f"; {finding.advice}" if finding.advice else ""
            screen.print(f"{finding.status:8}", style=STYLES[finding.status], end="")
            screen.print(f"{finding.subject}: {finding.text}{advice}")
    is_broken = any(finding.status == "broken" for finding in findings)
    return ExitCode.WRONG_INPUT if is_broken else ExitCode.DONE


def attempt(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return the findings of a check, or its exception as one: broken drivers and packages raise nearly anything."""
    try:
        return list(check())
    except Exception as error:
        subject = check.__name__.removeprefix("check_")
        advice = "reinstall codistill and its dependencies: in its clone, type pip install --force-reinstall ."
        return [Finding(subject, "broken", f"{type(error).__name__}: {error}", advice)]


def check_python() -> Iterator[Finding]:
    good = sys.version_info[:2] >= OLDEST_PYTHON
    advice = "" if good else f"use Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
    yield Finding("python", "ok" if good else "broken", f"{platform.python_version()} on {platform.platform()}", advice)


def check_codistill() -> Iterator[Finding]:
    yield Finding("codistill", "ok", codistill.__version__)


def check_torch() -> Iterator[Finding]:
    import torch

    torch.ones(2, 2) @ torch.ones(2, 2)
    good = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= OLDEST_TORCH
    advice = "" if good else f"install torch {'.'.join(map(str, OLDEST_TORCH))} or newer"
    yield Finding("torch", "ok" if good else "broken", str(torch.__version__), advice)
    threads, there = torch.get_num_threads(), cores()
    crowded = "set OMP_NUM_THREADS or runtime.threads to no more than the cores" if threads > there else ""
    yield Finding("threads", "warning" if crowded else "ok", f"{threads} on {there} cores", crowded)


def check_devices() -> Iterator[Finding]:
    import torch

    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield Finding("device", "ok", f"cuda:{index}, {facts.name}, {facts.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        yield Finding("device", "ok", "mps, Apple")
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        advice = "fine for small recipes such as quickstart; the paper's recipes need a GPU and a torch build for it"
        yield Finding("device", "warning", "only the CPU", advice)


def check_kernels() -> Iterator[Finding]:
    """Name what ``auto`` chooses here; without Triton, a GPU that could run its kernels is slower."""
    from codistill.engine.runtime import has_triton, is_since_ampere, prepared
    from codistill.recipes.sections import Runtime

    with prepared(Runtime()) as machine:
        text = f"runtime.kernels=auto is {machine.kernels}, runtime.precision=auto is {machine.precision}"
        is_lacking = is_since_ampere(machine.device.type) and not has_triton()
    advice = "type `pip install triton` for kernels that are several times as fast" if is_lacking else ""
    yield Finding("kernels", "warning" if is_lacking else "ok", text, advice)


def check_compiler() -> Iterator[Finding]:
    """Check what runtime.kernels=inductor needs: a C++ compiler for the CPU, Triton for a GPU."""
    import torch

    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)]
    lacking = [] if compilers else ["a C++ compiler"]
    if torch.cuda.is_available() and find_spec("triton") is None:
        lacking.append("Triton")
    if lacking:
        advice = "install it to use runtime.kernels=inductor; nothing else needs it"
        yield Finding("torch.compile", "warning", f"lacks {' and '.join(lacking)}", advice)
    else:
        yield Finding("torch.compile", "ok", f"compiles with {compilers[0]}")


def check_extras() -> Iterator[Finding]:
    """Compare what is installed with what the optional extras need, from the packages' metadata."""
    needed: dict[str, dict[str, str]] = {}
    for line in (installed("codistill") and requires("codistill")) or ():  # none if it is not installed
        if (found := REQUIREMENT.match(line)) and found["extra"] in EXTRAS:
            needed.setdefault(found["extra"], {})[found["package"]] = found["least"]
    for extra, packages in sorted(needed.items()):
        versions = {package: installed(package) for package in packages}
        lacking = [package for package, version in versions.items() if version is None]
        old = [f"{package} {version}" for package, version in versions.items() if is_older(version, packages[package])]
        shown = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
        if len(lacking) == len(packages):
            yield Finding(f"extra: {extra}", "ok", f"not installed; for {EXTRAS[extra]}", install_hint(extra))
        elif lacking or old:
            what = [*(f"{package} is missing" for package in lacking), *(f"{one} is too old" for one in old)]
            yield Finding(f"extra: {extra}", "warning", ", ".join(what), install_hint(extra))
        elif extra == "zoo" and (why := misfit()):
            yield Finding(f"extra: {extra}", "warning", why, SAME_BUILD)
        else:
            yield Finding(f"extra: {extra}", "ok", shown)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_older(version: str | None, least: str) -> bool:
    """Whether a version is below ``least``, by its numbers."""
    found, wanted = ([int(part) for part in re.findall(r"\d+", text)[:3]] for text in (version or "", least))
    return version is not None and found < wanted


def misfit() -> str:
    """Say why torchvision is not for this torch; an empty text if it is. Imports it only if metadata leave a doubt."""
    torch, torchvision = version("torch"), version("torchvision")
    pinned = next((found[1] for line in requires("torchvision") or () if (found := PINNED.match(line))), "")
    text = f"torchvision {torchvision} is not for torch {torch}"
    if pinned and pinned != torch.partition("+")[0]:
        return f"{text}, but for {pinned}"
    if torch.partition("+")[2] == torchvision.partition("+")[2]:
        return ""
    try:
        import torchvision as _  # type: ignore[import-untyped]  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        return f"{text}: {str(error).splitlines()[0]}"
    return ""


def check_space() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    advice = "" if free >= ENOUGH_SPACE else "free some space, or choose a folder on another disk with --out"
    yield Finding("space", "warning" if advice else "ok", f"{free / 1e9:,.1f} GB free in this folder", advice)


def check_data() -> Iterator[Finding]:
    from codistill.data import embedded
    from codistill.data.cifar import found_files
    from codistill.data.download import data_folder
    from codistill.recipes.datasets import DATASETS

    folder = data_folder()
    for name, row in DATASETS.items():
        if row.files == "package":
            yield Finding(f"data: {name}", "ok", f"{len(embedded.read().train):,} training images inside the package")
        elif row.files == "archive" and (found := found_files(name, folder)):
            yield Finding(f"data: {name}", "ok", f"{found[0]}")
        elif row.files == "archive":
            advice = f"type `codistill data {name} --download`, or set CODISTILL_DATA to the folder that holds it"
            yield Finding(f"data: {name}", "warning", f"not in {folder}", advice)


CHECKS = (
    *(check_python, check_codistill, check_torch, check_devices, check_kernels, check_compiler),
    *(check_extras, check_space, check_data),
)
