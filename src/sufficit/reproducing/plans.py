"""All that decides a run, each of it known before it begins, and kept in its folder."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sufficit.errors import UserError, unknown
from sufficit.models import MODELS
from sufficit.reproducing.tables import table_of
from sufficit.results import save_json

NUMBERS = "numbers"  # the folder that a table and a report are made from
PLAN, TIMINGS = f"{NUMBERS}/plan.json", f"{NUMBERS}/timings.json"
RECIPES = ("paper", "robust")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Plan:
    """What a run does; the same plan gives the same table."""

    table: str
    model: str
    side: int
    weights: str  # default, none, or a file
    classes: tuple[str, ...]  # of CUB-200; twenty by the seed where it is empty
    train_images: int | None  # all
    test_images: int | None  # all; those that are scored are drawn from them
    epochs: int
    lax_epochs: int
    recipes: tuple[str, ...]
    seeds: int
    images: int  # of the test set that are scored, at most
    search_images: int
    precision: str
    batch_size: int | None
    group: int
    step: float  # of the pixel-value curves; the percentage curves have twice that
    seed: int

    @property
    def adapters(self) -> dict[str, tuple[str, int]]:
        """Every adapter's name with its recipe and seed."""
        seeds = range(self.seed, self.seed + self.seeds)
        return {f"lax-{recipe}-{seed}": (recipe, seed) for recipe in self.recipes for seed in seeds}


def make_plan(table: str, asked: Mapping[str, Any], *, quick: bool, cuda: bool) -> Plan:
    """What was asked for, and for the rest what is usual for the table, its size and the device."""
    known = table_of(table)
    model = asked.get("model") or (known.quick_model if quick else known.model)
    if model not in MODELS:
        raise unknown("model", model, MODELS)
    small = MODELS[model].fixed_side or (known.quick_side if quick else known.side)
    usual: dict[str, Any] = {
        "model": model,
        "side": small,
        "weights": "none" if quick else "default",
        "classes": (),
        "train_images": 2000 if quick else None,
        "test_images": 500 if quick else None,
        "epochs": 4 if quick else known.training.epochs,
        "lax_epochs": 3 if quick else known.adapter.epochs,
        "recipes": RECIPES,
        "seeds": 1 if quick else 3,
        "images": 20 if quick else 2000,
        "search_images": 10 if quick else 500,
        "precision": "bf16" if cuda else "fp32",
        "batch_size": (512 if small > 64 else 2048) if cuda else None,
        "group": (64 if small > 64 else 256) if cuda else 8,
        "step": 0.01,
        "seed": 0,
    }
    plan = Plan(table=table, **(usual | {k: v for k, v in asked.items() if v is not None}))
    _check(plan)
    return plan


def begin(out: Path, table: str, asked: Mapping[str, Any], *, quick: bool, cuda: bool) -> Plan:
    """The plan of a folder: the one it was begun with, where what is asked does not differ."""
    path = out / PLAN
    if not path.exists():
        plan = make_plan(table, asked, quick=quick, cuda=cuda)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_json(path, asdict(plan))
        return plan
    begun = read_plan(out)
    given = {"table": table} | {k: v for k, v in asked.items() if v is not None}
    for name, value in given.items():
        before = getattr(begun, name)
        if before != value:
            raise UserError(
                f"{out} was begun with {name} {before!r}, and is asked now for {value!r}: leave it"
                " as it was, or choose another --out"
            )
    return begun


def read_plan(out: Path) -> Plan:
    """The plan that a folder was begun with."""
    try:
        saved = json.loads((out / PLAN).read_text())
        lists = {name: tuple(saved[name]) for name in ("classes", "recipes")}
        return Plan(**{field.name: saved[field.name] for field in fields(Plan)} | lists)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{out / PLAN} can't be read ({error!r}): choose another --out") from error


def _check(plan: Plan) -> None:
    if plan.weights not in ("default", "none") and not Path(plan.weights).is_file():
        raise UserError(f"no weights file at {plan.weights}: give a file, default, or none")
    for name in plan.recipes:
        if name not in RECIPES:
            raise unknown("recipe", name, RECIPES)
    if plan.precision not in PRECISIONS:
        raise unknown("precision", plan.precision, PRECISIONS)
    if plan.classes and plan.table != "cub200":
        raise UserError(f"--classes is for cub200, {plan.table} has classes of its own")
    least = {"seeds": 0, "images": 2, "search_images": 1, "epochs": 1, "lax_epochs": 1, "group": 1}
    least |= {"train_images": 20, "test_images": 2, "seed": 0, "batch_size": 1}
    for name, fewest in least.items():
        value = getattr(plan, name)
        if value is not None and value < fewest:
            raise UserError(f"{name} must be {fewest} or more, got {value}")
