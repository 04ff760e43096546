"""A machine that is ready, one that lacks something, and one that is broken."""

import json
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from codistill.cli import doctor
from support.cli import Codistill

SUBJECTS = (
    {"python", "codistill", "torch", "threads", "device", "kernels", "torch.compile", "space"}
    | {f"data: {name}" for name in ("fashion", "cifar10", "cifar100")}
    | {f"extra: {name}" for name in ("export", "zoo", "tensorboard", "mlflow", "wandb")}
)


def test_this_machine_is_ready_and_every_warning_says_what_to_do(codistill: Codistill) -> None:
    result = codistill("doctor", "--json")
    findings = json.loads(result.stdout)
    assert result.exit_code == 0
    assert {finding["subject"] for finding in findings} == SUBJECTS
    assert all(finding["advice"] for finding in findings if finding["status"] != "ok")
    lines = codistill("doctor").stdout.splitlines()
    assert len(lines) == len(findings)
    assert all(line.split()[0] in doctor.STYLES for line in lines)


def test_data_are_found_where_the_environment_says(
    codistill: Codistill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    monkeypatch.setenv("CODISTILL_DATA", str(tmp_path))
    found = {finding.subject: finding for finding in doctor.check_data()}
    assert (found["data: cifar100"].status, found["data: cifar100"].text) == ("ok", str(tmp_path / "cifar-100-python"))
    assert found["data: cifar10"].status == "warning"
    assert "codistill data cifar10 --download" in found["data: cifar10"].advice


def test_what_is_lacking_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor, "ENOUGH_SPACE", 10**30)
    (compiler,) = doctor.check_compiler()
    (space,) = doctor.check_space()
    assert (compiler.status, space.status) == ("warning", "warning")
    assert "runtime.kernels=inductor" in compiler.advice


def test_what_is_essential_and_broken_gives_exit_code_2(codistill: Codistill, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_torch() -> Iterator[doctor.Finding]:
        raise ImportError("libtorch.so: cannot open shared object file")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_python, check_torch, doctor.check_space))
    result = codistill("doctor")
    assert result.exit_code == 2
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["ok", "python:"],
        ["broken", "torch:"],
        ["ok", "space:"],
    ]
    assert "cannot open shared object file; reinstall" in result.stdout
    assert "in its clone, type pip install --force-reinstall ." in " ".join(result.stdout.split())


def test_extras_that_do_not_fit_are_found_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is installed, as packages describe themselves; nothing is imported where that is enough."""
    versions = {"codistill": "0.1.0", "torch": "2.13.0+cpu", "timm": "1.0.30", "torchvision": "0.27.0", "onnx": "1.9.0"}
    needs = {
        "codistill": [
            "torch<3,>=2.11",
            *(f"{name}>=1.0.15; extra == 'zoo'" for name in ("timm", "torchvision")),
            *(f"{name}>=1.18; extra == 'export'" for name in ("onnx", "onnxscript")),
            "wandb>=0.19; extra == 'wandb'",
            "pytest>=8.3; extra == 'dev'",
        ],
        "torchvision": ["numpy", "torch (==2.12.0)"],
    }

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "requires", needs.get)
    versions["torchvision"] = "1.27.0"
    monkeypatch.setitem(sys.modules, "torchvision", None)  # an import would fail
    found = {finding.subject.removeprefix("extra: "): finding for finding in doctor.check_extras()}
    assert list(found) == ["export", "wandb", "zoo"]
    assert found["export"].text == "onnxscript is missing, onnx 1.9.0 is too old"
    assert "pip install '.[export]'" in found["export"].advice
    assert (found["wandb"].status, found["wandb"].text) == ("ok", "not installed; for --track wandb")
    assert found["zoo"].text == "torchvision 1.27.0 is not for torch 2.13.0+cpu, but for 2.12.0"
    assert "pip install --force-reinstall torch torchvision" in found["zoo"].advice
    needs["torchvision"] = ["torch (==2.13.0)"]  # the same version, but a build for CUDA: only an import can tell
    assert [finding.status for finding in doctor.check_extras()] == ["warning", "ok", "warning"]
    versions["torchvision"] += "+cpu"
    assert [finding.status for finding in doctor.check_extras()] == ["warning", "ok", "ok"]


def test_an_old_python_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (9, 0))
    (finding,) = doctor.check_python()
    assert (finding.status, finding.advice) == ("broken", "use Python 9.0 or newer")
