"""A training run on disk: what it was asked, how far it is, and the best adapter so far."""

from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sufficit.errors import UserError
from sufficit.explainers.lax import Lax
from sufficit.files import CHECKPOINT, check_output, make_folder, writing

Weights = dict[str, Tensor]


@dataclass
class State:
    """How far a run is."""

    epoch: int = 0  # epochs done
    stale: int = 0  # epochs since the best one
    best_worth: float = float("-inf")
    best: Weights | None = None
    made: dict[str, Any] = field(default_factory=dict)  # when, where and by what the best one was
    history: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False


def best_of(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the epoch whose adapter is kept: of equals the one that has learned longer."""
    return max(history, key=lambda row: (float(row["worth"]), row["epoch"]))


def open_run(out: Path | None, settings: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """What an earlier start of the same run left in a folder, or None."""
    if out is None:
        return None
    check_output(out)
    path = out / CHECKPOINT
    if overwrite or not path.exists():
        return None
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        before = dict(saved["settings"])
        _check_state(State(**saved["state"]))
    except Exception as error:
        raise UserError(
            f"{path} can't be read ({error}): remove it, or begin anew with overwrite"
        ) from error
    differing = _difference(before, settings)
    if differing:
        raise UserError(
            f"{out} holds a run with another {differing}: choose another folder, or begin anew with"
            " overwrite"
        )
    return saved


def _check_state(state: State) -> None:
    """Raise where what was saved is not how far a run can be."""
    rows = [{**row, "worth": float(row["worth"])} for row in state.history]
    if [row["epoch"] for row in rows] != list(range(1, state.epoch + 1)) or state.stale < 0:
        raise ValueError(f"{len(rows)} epochs are told of {state.epoch}")
    if state.best is None and rows:
        raise ValueError("it has no best adapter")
    float(state.best_worth)


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first setting that is not what it was, and both its values.

    >>> _difference({"seed": 0, "recipe": {"epochs": 5}}, {"seed": 0, "recipe": {"epochs": 6}})
    'recipe epochs (5, now 6)'
    """
    for key in {**before, **now}:
        known, value = before.get(key), now.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            inner = _difference(known, value)
            if inner is not None:
                return f"{key} {inner}"
        elif known != value:
            return f"{key} ({repr(known)[:40]}, now {repr(value)[:40]})"
    return None


def save_run(
    out: Path | None, settings: dict[str, Any], state: State, lax: Lax, optimizer: Any
) -> None:
    """Write the checkpoint; it appears whole or not at all."""
    if out is None:
        return
    make_folder(out)
    content = {
        "settings": settings,
        "state": vars(state),
        "lax": weights_of(lax),
        "optimizer": optimizer.state_dict(),
    }
    # In memory first: torch does not tell a full disk from other errors.
    with writing(out / CHECKPOINT) as path:
        written = BytesIO()
        torch.save(content, written)
        path.write_bytes(written.getvalue())


def weights_of(lax: Lax) -> Weights:
    """A copy of an adapter's weights, on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in lax.state_dict().items()}
