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


ModelOption = Annotated[
    str,
    typer.Option(
        help="torchvision:NAME, timm:NAME, transformers:NAME, a saved classifier's folder, or your"
        " own python:FILE.py:FUNCTION."
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
WeightsOption = Annotated[
    str,
    typer.Option(help="default (published), none (random), or a .safetensors, .pt or .pth file."),
]
ClassesOption = Annotated[
    int | None,
    typer.Option("--num-classes", help="Number of classes, for weights of your own.", min=2),
]
LayerOption = Annotated[
    str | None, typer.Option(help="Feature layer by name; found by itself for most models.")
]
SizeOption = Annotated[
    str | None, typer.Option(help="What the model sees: 224 or 224x320 (height x width).")
]


def literal(text: str) -> str:
    """Text in which square brackets are no markup."""
    return text.replace("[", r"\[")


def print_skipped(skipped: dict[str, str]) -> None:
    """Name the first images that were left out, and why."""
    for name, reason in list(skipped.items())[:10]:
        err.print("[yellow]Skipped[/]", literal(f"{name}: {reason}"))
    if skipped:
        err.print(f"{len(skipped)} images skipped; run.json names all of them.")
