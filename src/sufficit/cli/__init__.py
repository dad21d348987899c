"""The command line: parse, call one function, print. Torch is imported by the commands alone."""

import os
import sys
import warnings

from sufficit.cli import (
    compare,
    demo,
    drawing,
    lists,
    reproduce,
    sanity,
    scoring,
    training,
)
from sufficit.cli.app import app, err, literal
from sufficit.errors import UserError

__all__ = [
    "app",
    "compare",
    "demo",
    "drawing",
    "lists",
    "main",
    "reproduce",
    "sanity",
    "scoring",
    "training",
]


def main() -> None:
    """Run the command line; what the user can mend is one line, not a traceback."""
    warnings.showwarning = _show_warning
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
