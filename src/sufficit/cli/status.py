"""`sufficit status`."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from sufficit.cli.console import app, literal, out
from sufficit.cli.options import JsonOption
from sufficit.files import place


@app.command()
def status(
    run: Annotated[str, typer.Argument(help="The --out of compare, evaluate or explain.")],
    as_json: JsonOption = False,
) -> None:
    """How far is a run? Read from its files, on any machine that sees them.

    **Examples**

    sufficit status sufficit-compare

    sufficit status sufficit-compare --json
    """
    from sufficit.runs.store import Store

    state = Store(place(run)).state()
    if as_json:
        typer.echo(json.dumps(asdict(state), indent=2))
        return
    if state.is_finished:
        out.print(f"Finished: {state.images} images.")
        return
    for stage, done in state.done.items():
        out.print(f"{stage}: {done} of {state.units} units")
    out.print(f"{state.done_images} of {state.images} images")
    for one in state.failed:
        first = one["images"][:1] or ["the donors for leakage"]
        what = f"unit {one['unit']} ({len(one['images'])} images, first {first[0]})"
        out.print(literal(f"Failed: {what}: {one['reason']}"))
    if state.failed:
        out.print("Run the same command again to retry failed units.")
