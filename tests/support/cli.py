"""The command line as tests call it."""

from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner

from codistill.cli.app import app

# One step per epoch.
TINY = ["quickstart", "data.train_limit=20", "data.test_limit=20", "evaluation.every_epochs=1", "runtime.device=cpu"]

Codistill = Callable[..., Any]


def call(*arguments: object) -> Any:
    """``call("list", "data")`` has ``exit_code``, ``stdout`` and ``stderr``."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="codistill")
