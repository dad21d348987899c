"""`sufficit methods` and `sufficit models`."""

from typing import Annotated

import typer
from rich.table import Table

from sufficit.cli.console import app, literal, out
from sufficit.errors import UserError


@app.command()
def methods() -> None:
    """List the explanation methods.

    **Example**

    sufficit methods
    """
    from sufficit.explainers import EXPLAINERS

    table = Table("method", "what it draws", box=None)
    for name, explainer in EXPLAINERS.items():
        table.add_row(name, explainer.description)
    table.add_row("lax", "learned for one model by sufficit train-lax; --methods takes its folder")
    out.print(table)


@app.command()
def models(
    pattern: Annotated[str, typer.Argument(help="Only names that contain this.")] = "",
) -> None:
    """List the models that can be loaded by name.

    **Examples**

    sufficit models

    sufficit models resnet
    """
    from sufficit.classifier.loading import known_models

    table = Table("model", "about", box=None)
    for name, about in known_models():
        if pattern.lower() in name.lower():
            table.add_row(literal(name), literal(about))
    if not table.rows:
        raise UserError(f"no model's name contains {pattern!r}: try sufficit models")
    out.print(table)
    out.print("Also transformers:NAME from the hub, a saved one's folder, python:FILE.py:FUNCTION.")
