"""`sufficit status`."""

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from sufficit.cli.console import RESUME, app, out, say, say_next
from sufficit.cli.options import JsonOption
from sufficit.files import CHECKPOINT, place, read_json
from sufficit.outside import literal

SHOWN = 5  # images of a failed unit


@app.command()
def status(
    run: Annotated[str, typer.Argument(help="The --out of a run or of a training.")],
    as_json: JsonOption = False,
) -> None:
    """How far is a run? Read from its files, on any machine that sees them.

    **Examples**

    sufficit status sufficit-compare

    sufficit status sufficit-compare --json

    sufficit status birds-lax
    """
    from sufficit.runs.store import Store

    folder = place(run)
    if (found := _training(folder)) is not None:
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            _print_training(found)
        return
    store = Store(folder)
    state = store.state()
    left = state.units - state.done
    speed, idle = store.pace() or (None, None)
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
        say_next("sufficit", "report", run)
        return
    out.print(f"{state.done} of {state.units} units")
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
    else:
        out.print("If it no longer runs, the same command resumes it.")


def _training(folder: Path) -> dict[str, Any] | None:
    """How far the training in a folder is; None if it holds none."""
    from sufficit.training.trainer import read_progress

    if (folder / "run.json").exists():
        history = read_json(folder / "run.json").get("history")
        known = {"is_finished": True, "trainings": {"training": {"done": len(history or ())}}}
        return known if history else None
    if not (folder / CHECKPOINT).exists():
        return None
    found = read_progress(folder)
    # A command still has its report to write; a training from Python ends with its last epoch.
    over = found["is_over"] and found["command"] is None
    known = {"command": found["command"], "is_finished": over}
    return known | {"trainings": {"training": found}}


def _print_training(found: dict[str, Any]) -> None:
    """A line per training, and how to resume."""
    for name, one in found["trainings"].items():
        planned = one.get("epochs") or one["done"]
        early = ", stopped early" if one.get("is_over") and one["done"] < planned else ""
        say(f"{name}: {one['done']} of {planned} epochs done{early}")
    if found["is_finished"]:
        say("Finished.")
    else:
        command = found["command"]
        say(f"{RESUME[:-1]}: {command}" if command else RESUME, soft_wrap=True)
