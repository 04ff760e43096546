"""The command line: its commands, which are functions of the modules beside this one, and what their errors become."""

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from codistill.cli import doctor, explore, results, study, train
from codistill.cli.terminal import describe_error, shows_tracebacks
from codistill.errors import ExitCode


class Commands(TyperGroup):
    """Turns an exception into one message and an exit code. CODISTILL_DEBUG=1 shows the traceback instead.

    A command returns its exit code, None for 0.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            code = super().invoke(ctx)
        except (BrokenPipeError, typer.Exit, typer.Abort):
            raise  # the reader closed the pipe, as in `codistill list | head -1`, or the message is already printed
        except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
            if shows_tracebacks():
                raise
            typer.echo(f"error: {describe_error(error)}", err=True)
            raise typer.Exit(ExitCode.WRONG_INPUT) from None
        raise typer.Exit(code or ExitCode.DONE)


class Command(TyperCommand):
    """Shows arguments in help by their metavar alone; typer adds Python types such as ``<list[str]>``."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                name, text = record
                records[parameter.param_type_name].append((re.sub(r" <[^<>]+>$", "", name), text))
        for kind, rows in records.items():
            if rows:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(rows)


app = typer.Typer(
    cls=Commands,
    help="Train networks that teach each other, and export each one as a plain network.",
    epilog="Exit codes: 0 success, 1 a run of a study failed or an image could not be read, 2 invalid input, "
    "75 stopped and saved (run the same command to continue), 130 interrupted.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS: dict[str, Callable[..., int | None]] = {
    "train": train.train,
    "evaluate": results.evaluate,
    "export": results.export,
    "predict": results.predict,
    "list": explore.show_listings,
    "show": explore.show,
    "data": explore.describe,
    "bench": explore.bench,
    "doctor": doctor.report,
    "study": study.study,
    "report": results.report,
    "watch": results.watch,
    "compare": results.compare,
    "prune": results.prune,
}
for name, function in COMMANDS.items():
    app.command(name, cls=Command)(function)


@app.callback(invoke_without_command=True)
def codistill(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from codistill import __version__

        typer.echo(f"codistill {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
