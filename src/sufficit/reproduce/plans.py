"""All that decides a run, each of it known before it begins, and kept in its folder."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from sufficit.classifier.architectures import MODELS
from sufficit.comparing.settings import fitting
from sufficit.crews import FOLDER as CREW
from sufficit.errors import UserError, unknown
from sufficit.files import is_unfinished, make_folder, read_json
from sufficit.perturbation.bands import grid
from sufficit.reproduce.tables import table_of
from sufficit.results import save_json

NUMBERS = "numbers"  # the folder that a table and a report are made from
PLAN, TIMINGS = f"{NUMBERS}/plan.json", f"{NUMBERS}/timings.json"
DATA = f"{NUMBERS}/data.json"  # which data the run was begun with
NOTES = (PLAN, TIMINGS, DATA)  # what is there before any stage has left anything
RECIPES = ("paper", "robust")
PRECISIONS = ("fp32", "bf16")
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Plan:
    """What a run does; the same plan gives the same table."""

    table: str
    quick: bool
    model: str
    side: int
    weights: str  # default, none, or a file
    classes: tuple[str, ...]  # of CUB-200; twenty by the seed where it is empty
    train_images: int | None  # all
    test_images: int | None  # all; those that are scored are drawn from them
    epochs: int
    train_batch: int
    lax_epochs: int
    lax_batch: int
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
    shipped = MODELS[model].shipped_for == known.data
    usual: dict[str, Any] = {
        "quick": quick,
        "model": model,
        "side": small,
        "weights": "default" if shipped or not quick else "none",
        "classes": (),
        "train_images": 512 if quick else None,
        "test_images": 200 if quick else None,
        "epochs": (2 if shipped else 6) if quick else known.training.epochs,
        "train_batch": 32 if quick else known.training.batch_size,
        "lax_epochs": 4 if quick else known.adapter.epochs,
        "lax_batch": 16 if quick else known.adapter.batch_size,
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
    if _untouched(out):
        plan = make_plan(table, asked, quick=quick, cuda=cuda)
        make_folder(path.parent)
        (out / DATA).unlink(missing_ok=True)
        save_json(path, asdict(plan))
        return plan
    begun = read_plan(out)
    given = {"table": table, "quick": quick} | {k: v for k, v in asked.items() if v is not None}
    for name, value in given.items():
        before = getattr(begun, name)
        if before != value:
            raise UserError(
                f"{out} was begun with {name} {before!r}, and is asked now for {value!r}: leave it"
                " as it was, or choose another --out"
            )
    return begun


def _untouched(out: Path) -> bool:
    """Whether no stage has left anything in a folder."""
    left = {path for path in out.rglob("*") if path.is_file() and not is_unfinished(path.name)}
    left = {path for path in left if path.parent != out / CREW}
    return left <= {out / note for note in NOTES}


@contextmanager
def leaving_nothing(out: Path) -> Iterator[None]:
    """Where the block fails before any stage has left anything, leave no new folder behind."""
    before = {path for path in _around(out) if path.exists()}
    try:
        yield
    except BaseException:
        if _untouched(out):
            _clear(out, _around(out) - before)
        raise


def _around(out: Path) -> set[Path]:
    """A folder, those it lies in, and all that lies in it."""
    return {out, *out.parents, *out.rglob("*")}


def _clear(out: Path, new: set[Path]) -> None:
    """Remove the note of a plan that was never begun, and of the new folders the empty ones."""
    with suppress(OSError):
        for note in NOTES:
            (out / note).unlink(missing_ok=True)
    for path in sorted(new, key=lambda path: len(path.parts), reverse=True):
        with suppress(OSError):  # it is a file, or holds something
            path.rmdir()


def read_plan(out: Path) -> Plan:
    """The plan that a folder was begun with; what it does not name yet is as usual."""
    try:
        return plan_of(read_json(out / PLAN))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{out / PLAN} can't be read ({error}): choose another --out") from error


def plan_of(saved: Mapping[str, Any]) -> Plan:
    """A plan from its fields, as JSON has them."""
    hints = get_type_hints(Plan)
    saved = asdict(make_plan(saved["table"], {}, quick=False, cuda=False)) | dict(saved)
    known = {field.name: saved[field.name] for field in fields(Plan)}
    plan = Plan(**{name: fitting(name, value, hints[name]) for name, value in known.items()})
    _check_values(plan)
    return plan


def _check(plan: Plan) -> None:
    if plan.weights not in ("default", "none") and not Path(plan.weights).is_file():
        raise UserError(f"no weights file at {plan.weights}: give a file, default, or none")
    _check_values(plan)


def _check_values(plan: Plan) -> None:
    if plan.model not in MODELS:
        raise unknown("model", plan.model, MODELS)
    for name in plan.recipes:
        if name not in RECIPES:
            raise unknown("recipe", name, RECIPES)
    if plan.precision not in PRECISIONS:
        raise unknown("precision", plan.precision, PRECISIONS)
    if plan.classes and plan.table != "cub200":
        raise UserError(f"--classes is for cub200, {plan.table} has classes of its own")
    if len(plan.classes) == 1:
        raise UserError(f"--classes needs two classes or more, got {plan.classes[0]!r} alone")
    least = {"seeds": 0, "images": 2, "search_images": 1, "epochs": 1, "lax_epochs": 1, "group": 1}
    least |= {"train_batch": 1, "lax_batch": 2}
    least |= {"train_images": 20, "test_images": 2, "seed": 0, "batch_size": 1}
    for name, fewest in least.items():
        value = getattr(plan, name)
        if value is not None and value < fewest:
            raise UserError(f"{name} must be {fewest} or more, got {value}")
    for step in (plan.step, 2 * plan.step):
        grid(step)  # refuses one that makes none, before anything is trained
    if plan.seeds > MOST_SEEDS:
        raise UserError(f"seeds must be {MOST_SEEDS} or fewer, got {plan.seeds}")
