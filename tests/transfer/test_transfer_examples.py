"""The readable truth, the examples, the documentation and the benchmark say what the library does."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from codistill.transfer import methods
from codistill.transfer.graph import Outline
from codistill.transfer.objective import Objective

ROOT = Path(__file__).parents[2]
BY_HAND = runpy.run_path(str(ROOT / "examples" / "by_hand.py"))
TWINS = Outline({name: {"final": 1, "stage2": 2, "stage1": 3} for name in "ab"})


def test_dcm_by_hand_equals_the_library() -> None:
    torch.manual_seed(0)
    a, b = BY_HAND["SmallNet"](width=4).double(), BY_HAND["SmallNet"](width=2).double()
    images, labels = torch.randn(8, 3, 16, 16, dtype=torch.float64), torch.arange(8)
    by_hand = BY_HAND["dcm_loss"](a(images), b(images), labels)
    logits = {f"{name}/{exit}": z for name, net in (("a", a), ("b", b)) for exit, z in net(images).items()}
    library = Objective(methods.dcm(TWINS))(logits, labels).total
    assert library.item() == pytest.approx(by_hand.item(), abs=1e-12)
    parameters = [*a.parameters(), *b.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(library, parameters), torch.autograd.grad(by_hand, parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_training_by_hand_lowers_the_loss() -> None:
    torch.manual_seed(0)
    nets = (BY_HAND["SmallNet"](width=4), BY_HAND["SmallNet"](width=4))
    losses = BY_HAND["train"](nets, BY_HAND["made_up_batches"](steps=20, batch_size=16), lr=0.05)
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5])


def test_by_hand_imports_nothing_of_ours() -> None:
    script = (ROOT / "examples" / "by_hand.py").read_text()
    assert "codistill" not in script
    assert len(script.splitlines()) < 120


def test_a_method_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "own_method.py"), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    assert printed[6].split() == ["b/stage1", "1", "1", "1", "·", "·", "·", "·", "0.667", "3"]
    assert printed[7] == "6 transfers, labels on 6 classifiers, temperature 1"


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", (ROOT / "docs" / "methods.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", methods.NAMES)
def test_the_documentation_shows_what_the_code_prints(name: str) -> None:
    graph = methods.get(name)(Outline({network: {"final": 1, "stage2": 2} for network in "ab"}))
    section = sections()[name]
    assert f"```text\n{graph.matrix()}\n```" in section
    assert f"```mermaid\n{graph.to_mermaid()}\n```" in section
    for setting in methods.settings(name):
        assert f"`{setting}`" in section


def test_the_documented_method_is_the_example() -> None:
    documented = re.search(r"def top_down\(outline\):\n(.+?)```", sections()["A method of your own"], re.DOTALL)
    assert documented is not None
    assert documented[1].strip() in (ROOT / "examples" / "own_method.py").read_text()


def test_the_benchmark_prints_its_tables() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "objective.py", "--batch=4", "--classes=10", "--rounds=2"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # type: ignore[arg-type]
    assert "dcm / dml_ds" in printed
    assert [line.split()[0] for line in printed.splitlines() if re.match(r" *\d+ ", line)] == ["2", "4", "8", "16"]
