"""Listings, reports and studies read runs without waiting for torch."""

import subprocess
import sys
from pathlib import Path

import codistill.runs

MODULES = sorted(f"codistill.runs.{file.stem}" for file in Path(codistill.runs.__file__).parent.glob("[!_]*.py"))


def test_no_module_of_the_package_imports_torch() -> None:
    assert len(MODULES) == 9
    code = f"import sys, {', '.join(MODULES)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
