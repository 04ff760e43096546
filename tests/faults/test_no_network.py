"""Without a network everything works: nothing is fetched or reported unless asked."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from support.stress import Counted

SMALL = ["data.train_limit=20", "data.test_limit=20", "length.epochs=1", "runtime.device=cpu"]
LOOK = "import socket; print([name for _, name in socket.if_nameindex()])"


@pytest.fixture(scope="module")
def cut_off() -> list[str]:
    """How a command is run with no network but a loopback that is down."""
    prefix = [shutil.which("unshare") or "", "--map-root-user", "--net"]
    if not prefix[0] or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("namespaces cannot be made here, so the network cannot be switched off")
    return prefix


def test_there_is_no_network(cut_off: list[str]) -> None:
    code = "import socket; socket.create_connection(('127.0.0.1', 9), timeout=5)"
    ended = subprocess.run([*cut_off, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Network is unreachable" in ended.stderr
    ended = subprocess.run([*cut_off, sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    assert ended.stdout == "['lo']\n"


PROGRAM = """
import json, sys
from typer.testing import CliRunner
from codistill.cli.app import app
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (arguments, result.output)
"""


@pytest.mark.promise(
    "no-network",
    "Nothing needs a network, and nothing is reported anywhere.",
    repeated="6 commands without a network interface",
)
def test_training_and_all_that_follows(cut_off: list[str], tmp_path: Path, counted: Counted) -> None:
    commands = [
        ["train", "quickstart", *SMALL, "--out", "run"],
        ["evaluate", "run"],
        ["export", "run", "--network", "a", "--out", "exported"],
        ["predict", "exported", "one.png"],
        ["show", "quickstart"],
        ["list", "recipes"],
    ]
    Image.new("L", (28, 28)).save(tmp_path / "one.png")
    program = [*cut_off, sys.executable, "-c", PROGRAM, json.dumps(commands)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    counted("commands run with the network switched off", len(commands))
