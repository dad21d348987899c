"""The command line: parse, call one function, print. Torch is imported by the commands alone."""

import os
import sys
import warnings
from importlib import import_module
from io import TextIOWrapper

from sufficit.cli.console import GROUPS, PanelCommand, app, err, warn
from sufficit.errors import UserError
from sufficit.outside import literal

COMMANDS = (
    *("compare", "demo", "evaluate", "explain", "export", "figure", "methods", "report"),
    *("sanity", "serve", "status", "train_lax", "train_twin"),
)
__all__ = ["app", "main"]

for command in COMMANDS:
    import_module(f"sufficit.cli.{command}")  # adds its commands to the app
order = {name: group for group, names in GROUPS.items() for name in names}
for registered in app.registered_commands:
    assert registered.callback is not None
    name = registered.name or registered.callback.__name__
    registered.name, registered.rich_help_panel = name, order[name]
    registered.cls = PanelCommand
app.registered_commands.sort(key=lambda one: [*order].index(one.name or ""))


def main() -> None:
    """Run the command line; an error that the user can fix is one line, not a traceback."""
    warnings.showwarning = lambda message, *_, **__: warn(message)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names may hold what a terminal can't show
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except UserError as error:
        err.print("[bold red]Error:[/]", literal(error), soft_wrap=True)
        sys.exit(2)
    except Exception as error:
        if os.environ.get("SUFFICIT_TRACEBACK"):
            raise
        text = literal(f"{type(error).__name__}: {error}")
        err.print("[bold red]Error:[/]", text, soft_wrap=True)
        err.print(
            "This came from the model, a library or Sufficit; SUFFICIT_TRACEBACK=1 shows where."
        )
        sys.exit(1)
