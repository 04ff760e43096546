"""``codistill watch``: runs while they learn, as a page on this machine or in the terminal."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path

import typer

from codistill.cli.output import console


def watch(paths: Sequence[Path], port: int, *, browser: bool) -> None:
    """Serve the page until Ctrl-C."""
    from codistill.report.server import News, serve

    news = News(paths)
    news.page()  # what is wrong with the paths is said now, not in the browser

    def ready(address: str) -> None:
        typer.echo(f"{address}  (this machine only; Ctrl-C ends it, the trainings go on)")
        if browser:
            webbrowser.open(address)

    typer.echo(f"Watching took {serve(news, port, ready):.2f} CPU seconds.")


def watch_in_terminal(paths: Sequence[Path]) -> None:
    """Keep a table up to date until all runs are finished; where nobody watches, print it once."""
    from codistill.report.server import News
    from codistill.report.terminal import follow

    screen = console()
    follow(News(paths).look, screen, once=not screen.is_terminal)


def print_state(paths: Sequence[Path]) -> None:
    from codistill.report.server import News
    from codistill.report.terminal import to_dict
    from codistill.runs.files import to_json

    typer.echo(to_json(to_dict(News(paths).look()), indent=2))
