"""The app that every command joins, and where it prints."""

from typing import Annotated

import typer
from rich.console import Console

from sufficit import __version__

app = typer.Typer(
    name="sufficit",
    help="Score visual explanations of image classifiers. Start with: sufficit demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Score visual explanations of image classifiers. Start with: sufficit demo"""
    if version:
        typer.echo(f"sufficit {__version__}")
        raise typer.Exit


def literal(text: str) -> str:
    r"""Text in which square brackets are no markup, and nothing is an order to the terminal.

    >>> print(literal("a[b]\x1b[2J"))
    a\[b]\x1b\[2J
    """
    shown = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return shown.replace("[", r"\[")


def print_skipped(skipped: dict[str, str]) -> None:
    """Name the first images that were left out, and why."""
    for name, reason in list(skipped.items())[:10]:
        err.print("[yellow]Skipped[/]", literal(f"{name}: {reason}"))
    if skipped:
        one = "1 image skipped; run.json names it."
        many = f"{len(skipped)} images skipped; run.json names all of them."
        err.print(one if len(skipped) == 1 else many)
