"""Options of the commands. Those of a run come from RunConfig, where each is declared once."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from functools import wraps
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from sufficit.files import place
from sufficit.runs.config import RunConfig, Workers, config_from, kinds_of, read_toml


def _declared(name: str, *flags: str) -> Any:
    """The typer option of a config field."""
    about = RunConfig.__dataclass_fields__[name].metadata
    least, most = about["least"], about["most"]
    return typer.Option(
        *flags, help=about["help"], rich_help_panel=about["panel"], min=least, max=most
    )


SeedOption = Annotated[int, _declared("seed")]
OutOption = Annotated[  # words, because a Path would make s3:/ of s3://
    str, typer.Option("--out", help="Folder for the results.", rich_help_panel="Output")
]
OverwriteOption = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace an earlier run in --out.", rich_help_panel="Output"),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the summary as JSON only.", rich_help_panel="Output")
]


def own_option(
    name: str, kind: Any, text: str, *flags: str, default: Any = None, **bounds: Any
) -> inspect.Parameter:
    """An option that RunConfig does not have; one that is off has no --no-NAME unless given."""
    flags = flags or ((f"--{name.replace('_', '-')}",) if default is False else ())
    hint: Any = kind | None if default is None else kind
    annotation = Annotated[hint, typer.Option(*flags, help=text, **bounds)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


WORKERS = {  # the field of Workers: its option
    "count": own_option("workers", int, "Workers; Ray starts them on this machine."),
    "address": own_option(
        "address", str, "Ray cluster to join: auto, HOST:PORT or ray://HOST:PORT."
    ),
    "gpus": own_option("gpus_per_worker", float, "GPUs per worker, or a part of one, as in 0.5."),
    "cpus": own_option("cpus_per_worker", float, "CPUs and threads per worker.", default=1.0),
    "unit_timeout": own_option(
        "unit_timeout", float, "Replace a worker that computes a unit for more seconds than this."
    ),
}
TOML = own_option(
    "toml", str, "Read options from this RUN.toml; flags override it.", "--config",
    rich_help_panel="Input",
)  # fmt: skip
TRAINING = (  # what every training has
    own_option("batch_size", int, "Images per step and process.", default=32, min=1),
    own_option(
        "patience", int,
        "Epochs without improvement that end training; default: as many as 750 steps take, but at"
        " least 5; 0: no limit.",
        min=0,
    ),
    own_option(
        "validation_share", float, "Share of images held out for validation; at most 256 images.",
        default=0.1,
    ),
    own_option("readers", int, "Workers that read images.", "--workers", default=0, min=0),
    own_option("devices", int, "Number of GPUs, or of CPU processes.", default=1, min=1),
    own_option("num_nodes", int, "Number of machines.", default=1, min=1),
    own_option(
        "precision", Literal["fp32", "bf16"], "bf16 is mixed precision: weights stay fp32.",
        default="fp32",
    ),
    own_option(
        "overwrite", bool, "Start again in --out.", "--overwrite/--no-overwrite", default=False
    ),
)  # fmt: skip


def run_options(
    *names: str,
    defaults: Mapping[str, Any] | None = None,
    further: Sequence[inspect.Parameter] = (),
    toml: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options of RunConfig; it gets their config.

    An option is what the command line sets, else the RUN.toml of --config, else what `defaults`
    say, else its own default. With `toml` the command has --config. One with an argument `workers`
    has the options of workers too. The values of `further` options are in a dict of that name.
    """
    hints, changed = get_type_hints(RunConfig), dict(defaults or {})

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        workers = WORKERS if "workers" in own else {}
        options = [_parameter(name, hints[name], changed) for name in names]
        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        made = {"config", "workers", "further"}
        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own.values() if p.name not in made]

        @wraps(command)
        def wrapped(ctx: typer.Context, **values: Any) -> None:
            flags = {name: values.pop(name) for name in names}
            given = {n: _plain(n, value) for n, value in flags.items() if was_given(ctx, n)}
            file = values.pop("toml", None)
            config = config_from({**changed, **(read_toml(place(file)) if file else {}), **given})
            if workers:
                chosen = {field: values.pop(option.name) for field, option in workers.items()}
                asked = Workers(**chosen)  # also without --workers, so that a wrong one is refused
                distributed = asked.count is not None or asked.address is not None
                values["workers"] = asked if distributed else None
            if further:
                values["further"] = {option.name: values.pop(option.name) for option in further}
            command(config=config, **values)

        files = [TOML] if toml else []
        parameters = [context, *options, *workers.values(), *files, *kept, *further]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def was_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _parameter(name: str, hint: Any, changed: Mapping[str, Any]) -> inspect.Parameter:
    default = changed.get(name, RunConfig.__dataclass_fields__[name].default)
    if isinstance(default, tuple):
        default = ",".join(default)
    flag = f"--{name.replace('_', '-')}"
    flags = (flag, "-m") if name == "methods" else (flag,)
    if hint is bool:
        flags = (f"{flag}/--no-{flag[2:]}",)
    kind: Any = hint
    kinds = kinds_of(hint)
    several = len([k for k in kinds if k is not type(None)]) > 1
    if several or any(get_origin(k) is tuple for k in kinds):
        kind = str | None if type(None) in kinds or default is None else str
        default = default if default is None else str(default)
    if default is MISSING:
        kind, default = str | None, None  # a RUN.toml may set it
    annotation = Annotated[kind, _declared(name, *flags)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def _plain(name: str, value: Any) -> Any:
    """A flag's value as RUN.toml has it."""
    kinds = kinds_of(get_type_hints(RunConfig)[name])
    if isinstance(value, str) and any(get_origin(kind) is tuple for kind in kinds):
        return listed(value)
    choices = {c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)}
    number = next((kind for kind in (float, int) if kind in kinds), None)
    if isinstance(value, str) and number is not None and value not in choices:
        with suppress(ValueError):
            return number(value)
    return value


def listed(text: str) -> list[str]:
    """The words of a text with commas between them."""
    return [part.strip() for part in text.split(",") if part.strip()]
