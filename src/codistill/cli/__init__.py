"""The command line. Importing it does not import torch, so help, listings and recipe errors are instant."""

from codistill.cli.app import app


def main() -> None:
    app(prog_name="codistill")
