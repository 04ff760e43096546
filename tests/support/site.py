"""How tests build the site."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(tree: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """`mkdocs build --strict` of a checkout, or of a copy of one."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", tree / "mkdocs.yml", "-d", out]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme's successor
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)  # type: ignore[arg-type]
