"""`sufficit methods` and `sufficit models`."""

import json
from typing import Annotated

import typer
from rich.table import Table

from sufficit.cli.console import app, out, say_next
from sufficit.cli.options import JsonOption
from sufficit.errors import UserError
from sufficit.outside import literal


@app.command()
def methods(
    name: Annotated[str, typer.Argument(help="A method, to see all about it.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List the explanation methods with cost and purpose, or the options of one method.

    Cost is in forward passes per image; a backward pass counts as two. Give options after the
    name: --methods finer-cam:nearest=5.

    **Examples**

    sufficit methods

    sufficit methods finer-cam

    sufficit methods --json
    """
    from sufficit.explainers.registry import (
        EXPLAINERS,
        RECOMMENDED,
        explainer_named,
        method_facts,
    )
    from sufficit.report.tables import AGNOSTIC

    chosen = {name: explainer_named(name)} if name else EXPLAINERS
    facts = {one: method_facts(explainer) for one, explainer in chosen.items()}
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    if name:
        for key, value in facts[name].items():
            shown = value if not isinstance(value, dict) else ""
            out.print(f"[bold]{key}[/]", literal(shown), highlight=False)
            for option, about in value.items() if isinstance(value, dict) else ():
                out.print(literal(f"  {option}={about['default']}: {about['about']}"))
        _say_explain("torchvision:resnet50", "--methods", name)
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    for head in ("method", "cost", "for"):
        table.add_column(head, no_wrap=head != "for")
    for one, explainer in EXPLAINERS.items():
        needs = f" (extra {explainer.extra})" if explainer.extra else ""
        needs += f" ({explainer.nets} models only)" if explainer.nets != "any" else ""
        mark = f" {AGNOSTIC}" if explainer.class_agnostic else ""
        table.add_row(one + mark, str(explainer.passes), literal(explainer.what_for + needs))
    learned = "learned for one model by sufficit train-lax; --methods takes its folder"
    table.add_row("lax", "1", learned)
    table.add_row("captum:NAME", "", "any attribution of captum, as captum:DeepLift (extra captum)")
    table.add_row("zennit:NAME", "", "any composite of zennit, as zennit:EpsilonPlus (extra lrp)")
    out.print(table)
    out.print(
        "cost: forward passes per image, a backward pass counted as two;"
        f" {AGNOSTIC} class-agnostic: the same map for every class. Options of a method, as in"
        " finer-cam:nearest=5: sufficit methods NAME.",
        highlight=False,
    )
    usual, attribution = RECOMMENDED["convolutional"], RECOMMENDED["transformer"]
    out.print(
        f"Recommended, and used by sufficit explain without --methods: {usual}; {attribution} for a"
        " vision transformer.",
        highlight=False,
    )
    say_next("sufficit", "methods", usual)


def _say_explain(model: str, *words: str) -> None:
    """Say how to explain photographs with a model."""
    where = ", with a folder of your own as PHOTOS"
    say_next("sufficit", "explain", "PHOTOS", "--model", model, *words, where=where)


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
    out.print(
        "torchvision:NAME has the newest weights, torchvision:NAME@WEIGHTS those that you name.",
        highlight=False,
    )
    out.print("Also transformers:NAME from the hub, a saved one's folder, python:FILE.py:FUNCTION.")
    _say_explain(next(known for known, _ in known_models() if pattern.lower() in known.lower()))
