"""A machine that is ready, one that lacks something, and one that is broken."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from codistill.cli import doctor
from support.cli import Codistill

SUBJECTS = {"python", "codistill", "torch", "threads", "device", "kernels", "torch.compile", "space"} | {
    f"data: {name}" for name in ("fashion", "cifar10", "cifar100")
}


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


def test_an_old_python_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (9, 0))
    (finding,) = doctor.check_python()
    assert (finding.status, finding.advice) == ("broken", "use Python 9.0 or newer")
