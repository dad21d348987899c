"""`sufficit status`."""

import json
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from sufficit.cli.console import app, out
from sufficit.cli.options import JsonOption
from sufficit.files import place
from sufficit.outside import literal

SHOWN = 5  # images of a failed unit


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

    store = Store(place(run))
    state = store.state()
    stage = next((name for name, done in state.done.items() if done < state.units), "")
    left = state.units - state.done.get(stage, state.units)
    speed, idle = (store.pace(stage) if stage else None) or (None, None)
    size = state.images / max(1, state.units)
    rates = {
        "images_per_second": round(speed * size, 3) if speed else None,
        "seconds_left": round(left / speed, 1) if speed else None,
        "seconds_since_last_unit": None if idle is None else round(idle, 1),
    }
    if as_json:
        typer.echo(json.dumps(asdict(state) | rates, indent=2))
        return
    if state.is_finished:
        out.print(f"Finished: {state.images} images.")
        return
    for name, done in state.done.items():
        out.print(f"{name}: {done} of {state.units} units")
    out.print(f"{state.done_images} of {state.images} images")
    if speed and idle is not None:
        ahead, ago = (timedelta(seconds=round(s)) for s in (left / speed, idle))
        words = f"{speed * size:.3g} images/s lately, about {ahead} left."
        out.print(f"{words} The last unit was done {ago} ago.")
    for one in state.failed:
        named = ", ".join(one["images"][:SHOWN]) or "the donors for leakage"
        more = f" and {len(one['images']) - SHOWN} more" if len(one["images"]) > SHOWN else ""
        out.print(literal(f"Failed: unit {one['unit']} ({named}{more}): {one['reason']}"))
    if state.failed:
        out.print("Run the same command again to retry failed units; --json names all images.")
