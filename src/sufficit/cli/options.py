"""Options of the commands. Those of a run come from RunConfig, where each is declared once."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING
from functools import wraps
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from sufficit.files import place
from sufficit.runs.config import RunConfig, Workers, config_from, read_toml


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
    bool,
    typer.Option("--json", help="Print the summary as JSON only.", rich_help_panel="Output"),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config", help="Read options from this RUN.toml; flags override it.",
        rich_help_panel="Input",
    ),
]  # fmt: skip


def _worker_option(kind: Any, default: Any, flag: str, text: str) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(flag, help=text, rich_help_panel="Compute")]
    name = flag[2:].replace("-", "_")
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


WORKERS = {  # the field of Workers: its option
    "count": _worker_option(
        int | None, None, "--workers", "Workers; Ray starts them on this machine."
    ),
    "address": _worker_option(
        str | None, None, "--address", "Ray cluster to join: auto, HOST:PORT or ray://HOST:PORT."
    ),
    "gpus": _worker_option(
        float | None, None, "--gpus-per-worker", "GPUs per worker, or a part of one, as in 0.5."
    ),
    "cpus": _worker_option(float, 1.0, "--cpus-per-worker", "CPUs and threads per worker."),
    "unit_timeout": _worker_option(
        float | None, None, "--unit-timeout",
        "Replace a worker that computes a unit for more seconds than this.",
    ),
}  # fmt: skip


def run_options(
    *names: str, defaults: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options of RunConfig; it gets their values as `given`, a dict.

    Only what the command line sets is in `given`, so that a RUN.toml can set the rest. A command
    with an argument `workers` has the options of workers too.
    """
    hints, changed = get_type_hints(RunConfig), dict(defaults or {})

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        offered = WORKERS if "workers" in own else {}
        options = [_parameter(name, hints[name], changed) for name in names]
        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.values()]
        kept = [p for p in kept if p.name not in ("given", "ctx", "workers")]

        @wraps(command)
        def wrapped(ctx: typer.Context, **values: Any) -> None:
            given = {
                name: _plain(name, values.pop(name)) if was_given(ctx, name) else values.pop(name)
                for name in names
            }
            given = {name: value for name, value in given.items() if was_given(ctx, name)}
            if offered:
                chosen = {field: values.pop(option.name) for field, option in offered.items()}
                asked = Workers(**chosen)  # also without --workers, so that a wrong one is refused
                distributed = asked.count is not None or asked.address is not None
                values["workers"] = asked if distributed else None
            command(given=given, **values)

        parameters = [context, *options, *offered.values(), *kept]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def config_of(
    given: Mapping[str, Any], toml: str | None = None, fixed: Mapping[str, Any] | None = None
) -> RunConfig:
    """The config of a command: flags, else the RUN.toml, else what is fixed, else the defaults."""
    return config_from({**(fixed or {}), **(read_toml(place(toml)) if toml else {}), **given})


def was_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _parameter(name: str, hint: Any, changed: Mapping[str, Any]) -> inspect.Parameter:
    default = changed.get(name, RunConfig.__dataclass_fields__[name].default)
    if isinstance(default, tuple):
        default = ",".join(default)
    short = ("-m",) if name == "methods" else ()
    flag = f"--{name.replace('_', '-')}"
    flags = (flag, *short)
    if hint is bool:
        flags = (f"{flag}/--no-{flag[2:]}",)
    kind: Any = hint
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if len([k for k in kinds if k is not type(None)]) > 1 or any(
        get_origin(k) is tuple for k in kinds
    ):
        kind = str | None if type(None) in kinds or default is None else str
        default = default if default is None else str(default)
    if default is MISSING:
        kind, default = str | None, None  # a RUN.toml may set it
    annotation = Annotated[kind, _declared(name, *flags)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def _plain(name: str, value: Any) -> Any:
    """A flag's value as RUN.toml has it."""
    hint = get_type_hints(RunConfig)[name]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if isinstance(value, str) and any(get_origin(kind) is tuple for kind in kinds):
        return [part.strip() for part in value.split(",") if part.strip()]
    number = next((kind for kind in (float, int) if kind in kinds), None)
    if isinstance(value, str) and number is not None and value not in _choices(kinds):
        with suppress(ValueError):
            return number(value)
    return value


def _choices(kinds: tuple[Any, ...]) -> set[str]:
    return {c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)}
