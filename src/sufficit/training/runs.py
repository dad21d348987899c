"""A training run on disk: what it was asked, how far it is, and the best adapter so far."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sufficit.errors import UserError
from sufficit.files import check_output, writing
from sufficit.lax import Lax

CHECKPOINT = "checkpoint.pt"
Weights = dict[str, Tensor]


@dataclass
class State:
    """How far a run is."""

    epoch: int = 0  # epochs done
    stale: int = 0  # epochs since the best one
    best_worth: float = float("-inf")
    best: Weights | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False


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
        before = saved["settings"]
    except Exception as error:
        raise UserError(
            f"{path} can't be read ({error}): remove it, or begin anew with overwrite"
        ) from error
    differing = [key for key in settings if before.get(key) != settings[key]]
    if differing:
        key = differing[0]
        raise UserError(
            f"{out} holds a run with another {key} ({before.get(key)!r}, now {settings[key]!r}):"
            " choose another folder, or begin anew with overwrite"
        )
    return saved


def save_run(
    out: Path | None, settings: dict[str, Any], state: State, lax: Lax, optimizer: Any
) -> None:
    """Write the checkpoint; it appears whole or not at all."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": settings,
        "state": vars(state),
        "lax": weights_of(lax),
        "optimizer": optimizer.state_dict(),
    }
    with writing(out / CHECKPOINT) as path:
        torch.save(content, path)


def weights_of(lax: Lax) -> Weights:
    """A copy of an adapter's weights, on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in lax.state_dict().items()}
