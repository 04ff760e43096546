"""The command line. Importing it imports no torch: help, listings and recipe errors are instant."""

from codistill.cli.app import app


def main() -> None:
    app(prog_name="codistill")
