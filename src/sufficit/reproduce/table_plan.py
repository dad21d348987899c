"""The plan of a table: every option with its value, stored in the folder that is resumed."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sufficit.classifier.architectures import MODELS
from sufficit.declared import asked
from sufficit.errors import UserError, cannot_resume, unknown
from sufficit.files import make_folder, read_json
from sufficit.perturbation.bands import grid
from sufficit.provenance import plain, resume_command, save_json
from sufficit.reproduce.paper_tables import PAPER_CAMS, PaperTable, PlanOptions, table_named
from sufficit.runs.config import CONTROLS
from sufficit.training import RECIPES, LaxRecipe
from sufficit.training.lax_training import LOSS

PLAN, SECONDS = "reproduce.json", "seconds.json"
STAGES = (  # what they write
    *("classifier-training", "classifier", "adapters", "test", "truth", "test.json"),
    *("compare", "search", "results"),
)
TRAINED = "trained.json"  # the last file of a training
PRECISIONS = ("fp32", "bf16")
DEFAULT_RECIPES = ("paper", "robust")
LAX_RECIPES = (*DEFAULT_RECIPES, "crisp")


@dataclass(frozen=True, kw_only=True)
class TablePlan(PlanOptions):
    """All that decides the numbers of a table."""

    table: str
    quick: bool
    side: int = asked("", 8, 10**4)
    train_batch: int = asked("", 1, 10**9)
    lax_batch: int = asked("", 2, 10**9)
    group: int = asked("", 1, 10**6)  # images per unit of the run

    @property
    def paper(self) -> PaperTable:
        """The table of the paper."""
        return table_named(self.table)

    @property
    def adapters(self) -> dict[str, tuple[str, int]]:
        """Every adapter's name with its recipe and seed."""
        seeds = range(self.seed, self.seed + self.seeds)
        return {f"lax-{recipe}-{seed}": (recipe, seed) for recipe in self.recipes for seed in seeds}

    @property
    def peers(self) -> tuple[str, ...]:
        """The methods of others that the table has: CAMs, and rollout for networks with tokens."""
        return (*PAPER_CAMS, "rollout") if MODELS[self.model].attention else PAPER_CAMS

    @property
    def methods(self) -> list[str]:
        """All that is scored: peers, adapters, controls."""
        return [*self.peers, *self.adapters, *CONTROLS]

    def recipe(self, name: str) -> LaxRecipe:
        """A recipe of LAX with the values of this table."""
        own = self.paper.adapter
        papers = {"entropy": own.entropy, "upsample": own.upsample, "lr": own.lr}
        changed: Any = papers if name == "paper" else {}
        return replace(RECIPES[name], epochs=self.lax_epochs, **changed)

    @property
    def recipe_values(self) -> dict[str, Any]:
        """Every value of every recipe by name: {"robust.size": 2, ...}."""
        chosen = {name: asdict(self.recipe(name)) for name in self.recipes}
        found = {f"{name}.{key}": v for name, values in chosen.items() for key, v in values.items()}
        return {"version of the formulas": LOSS} | found


def make_plan(table: str, asked: Mapping[str, Any], *, quick: bool, cuda: bool) -> TablePlan:
    """The options that are given, and the defaults of table, size and device for the rest."""
    known = table_named(table)
    model = asked.get("model") or (known.quick_model if quick else known.model)
    if model not in MODELS:
        raise unknown("model", model, MODELS)
    side = MODELS[model].fixed_side or (known.quick_side if quick else known.side)
    shipped, large = MODELS[model].shipped_for == known.data, side > 64
    defaults: dict[str, Any] = {
        **{"quick": quick, "model": model, "side": side, "classes": (), "recipes": DEFAULT_RECIPES},
        "weights": "default" if shipped or not quick else "none",
        "train_images": 512 if quick else None,
        "test_images": 200 if quick else None,
        "images": 20 if quick else 2000,
        "search_images": 10 if quick else 500,
        "seeds": 1 if quick else 3,
        "epochs": (2 if shipped else 6) if quick else known.training.epochs,
        "train_batch": 32 if quick else known.training.batch_size,
        "lax_epochs": 4 if quick else known.adapter.epochs,
        "lax_batch": 16 if quick else known.adapter.batch_size,
        "precision": "bf16" if cuda else "fp32",
        "batch_size": (512 if large else 2048) if cuda else None,
        "group": (64 if large else 256) if cuda else 8,
        **{"step": 0.01, "seed": 0},
    }
    given = {name: value for name, value in asked.items() if value is not None}
    plan = TablePlan(table=table, **(defaults | given))
    if plan.weights not in ("default", "none") and not Path(plan.weights).is_file():
        raise UserError(f"no weights file at {plan.weights}: give a file, default, or none")
    _check(plan)
    return plan


def plan_for(
    out: Path, table: str, asked: Mapping[str, Any], *, quick: bool, cuda: bool
) -> TablePlan:
    """The plan that a folder was started with, or a new one where no stage has started.

    Options that are not given are those of the stored plan, on any device.
    """
    started = [name for name in STAGES if (out / name).exists()]
    if not started:
        (out / PLAN).unlink(missing_ok=True)
        return make_plan(table, asked, quick=quick, cuda=cuda)
    if not (out / PLAN).exists():
        words = f"{out} has {started[0]}, but no {PLAN} of an earlier run"
        raise UserError(f"{words}: use another --out")
    plan = read_plan(out)
    given = {"table": table, "quick": quick} | {k: v for k, v in asked.items() if v is not None}
    for name, value in given.items():
        if getattr(plan, name) != value:
            raise cannot_resume(out, name, getattr(plan, name), value)
    return plan


def keep_plan(out: Path, plan: TablePlan, data: Mapping[str, Any]) -> None:
    """Store a plan with its recipes and its data, or raise where the stored data differs."""
    if (out / PLAN).exists():
        check_same(out, "data", data)
    else:
        make_folder(out)
        known = {"plan": plan, "recipes": plan.recipe_values, "data": data}
        save_json(out / PLAN, known | {"command": resume_command()})


def check_same(out: Path, kind: str, now: Mapping[str, Any]) -> None:
    """Raise where the stored recipes or data are not those of now."""
    before = stored if isinstance(stored := read_json(out / PLAN).get(kind), dict) else {}
    for name, value in plain(now).items():
        if before.get(name) != value:
            raise cannot_resume(out, f"{name} of the {kind}", before.get(name), value)


def read_plan(out: Path) -> TablePlan:
    """The plan in a folder."""
    try:
        saved = dict(read_json(out / PLAN)["plan"])
        lists = {name: tuple(map(str, saved[name])) for name in ("classes", "recipes")}
        plan = TablePlan(**(saved | lists))
        _check(plan)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        words = f"cannot read {out / PLAN} ({error})"
        raise UserError(f"{words}: use another --out, or --overwrite") from error
    return plan


def clear(out: Path) -> None:
    """Delete what an earlier run left in a folder; nothing where there was none."""
    for name in (SECONDS, *STAGES, PLAN) if (out / PLAN).exists() else ():
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _check(plan: TablePlan) -> None:
    """Raise where a value is out of range, before anything is trained."""
    table_named(plan.table)
    if plan.model not in MODELS:
        raise unknown("model", plan.model, MODELS)
    for name in plan.recipes:
        if name not in LAX_RECIPES:
            raise unknown("recipe", name, LAX_RECIPES)
    if plan.precision not in PRECISIONS:
        raise unknown("precision", plan.precision, PRECISIONS)
    if plan.classes and plan.table != "cub200":
        raise UserError(f"--classes is for cub200, got it for {plan.table}: omit it")
    if len(plan.classes) == 1:
        raise UserError(f"--classes has {plan.classes[0]!r} alone: name two classes or more")
    bounds = {one.name: one.metadata for one in fields(plan) if one.metadata.get("limit")}
    for name, about in bounds.items():
        value, least, most = getattr(plan, name), about["least"], about["limit"]
        if value is not None and (not isinstance(value, int) or not least <= value <= most):
            wanted = f"a whole number, {least} or more, at most {most}"
            raise UserError(f"{name} must be {wanted}, got {value!r}: change it")
    for step in (plan.step, 2 * plan.step):
        grid(step)
