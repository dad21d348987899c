"""The command line: parse, call one function, print. Torch is imported by the commands alone."""

import os
import sys
import warnings
from io import TextIOWrapper

from sufficit.cli import (
    compare,
    demo,
    evaluate,
    explain,
    figure,
    methods,
    report,
    reproduce,
    sanity,
    serve,
    status,
    train_lax,
)
from sufficit.cli.app import app, err, literal
from sufficit.errors import UserError

COMMANDS = (
    *(compare, demo, explain, figure, methods, report, reproduce),
    *(sanity, evaluate, serve, status, train_lax),
)
"""Their files; importing one adds its commands to the app."""
__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; what the user can mend is one line, not a traceback."""
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names may hold what a terminal can't show
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except UserError as error:
        err.print("[bold red]Error:[/]", literal(str(error)))
        sys.exit(2)
    except Exception as error:
        if os.environ.get("SUFFICIT_TRACEBACK"):
            raise
        err.print("[bold red]Error:[/]", literal(f"{type(error).__name__}: {error}"))
        err.print(
            "This came from the model, a library or Sufficit; SUFFICIT_TRACEBACK=1 shows where."
        )
        sys.exit(1)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    err.print("[yellow]Warning:[/]", literal(str(message)))
