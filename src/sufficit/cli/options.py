"""Options of the commands, from the dataclasses in which each is declared once."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field
from functools import partial, wraps
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from sufficit.files import place
from sufficit.runs.config import TOML as TOML_ONLY
from sufficit.runs.config import (
    RunConfig,
    config_from,
    kinds_of,
    read_toml,
    read_workers,
    workers_from,
)

FIELDS = RunConfig.__dataclass_fields__
_keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)


def _declared(one: Field[Any], *flags: str) -> Any:
    """The typer option of a field."""
    about = one.metadata
    return typer.Option(
        *flags, help=about["help"], rich_help_panel=about["panel"], min=about["least"],
        max=about["most"], hidden=about.get("hidden", False),
    )  # fmt: skip


SeedOption = Annotated[int, _declared(FIELDS["seed"])]
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
WORKERS = {
    "workers": _keyword(
        "workers",
        annotation=Annotated[
            str | None,
            typer.Option(
                "--workers",
                help="Processes that Ray starts on this machine, or the cluster to join: auto,"
                " HOST:PORT or ray://HOST:PORT.",
                rich_help_panel="Compute",
            ),
        ],
        default=None,
    ),
    "unit_timeout": _keyword(
        "unit_timeout",
        annotation=Annotated[
            float | None,
            typer.Option(
                "--unit-timeout",
                help="Replace a worker that computes a unit for more seconds than this.",
                rich_help_panel="Compute",
            ),
        ],
        default=None,
    ),
}
TOML = Annotated[
    str | None,
    typer.Option(
        "--config", help="Read options from this RUN.toml; flags override it.",
        rich_help_panel="Input",
    ),
]  # fmt: skip


def run_options(
    *names: str,
    defaults: Mapping[str, Any] | None = None,
    more: tuple[type, ...] = (),
    toml: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options of RunConfig; it gets their config.

    An option is what the command line sets, else the RUN.toml of --config, else what `defaults`
    say, else its own default. With `toml` the command has --config. One with an argument `workers`
    has the options of workers too. The options of `more` dataclasses are in the dict `further`.
    """
    changed = dict(defaults or {})

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        options = [_parameter(FIELDS[name], changed) for name in names]
        workers = WORKERS if "workers" in own else {}
        further = {one: _parameter(one) for kind in more for one in _fields(kind)}
        made = {"config", "workers", "further"}
        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own.values() if p.name not in made]

        @wraps(command)
        def wrapped(ctx: typer.Context, **values: Any) -> None:
            flags = {name: values.pop(name) for name in names}
            given = {n: _plain(FIELDS[n], one) for n, one in flags.items() if was_given(ctx, n)}
            file = values.pop("toml", None)
            config = config_from({**changed, **(read_toml(place(file)) if file else {}), **given})
            if workers:
                chosen = {name: values.pop(name) for name in workers}
                table = (read_workers(place(file)) if file else {}) | _given(ctx, chosen)
                values["workers"] = workers_from(table)
            if further:
                found = {one.name: _plain(one, values.pop(p.name)) for one, p in further.items()}
                values["further"] = found
            command(config=config, **values)

        files = [_keyword("toml", annotation=TOML, default=None)] if toml else []
        context = _keyword("ctx", annotation=typer.Context)
        parameters = [context, *options, *workers.values(), *files, *kept, *further.values()]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def _given(ctx: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are on the command line."""
    return {name: one for name, one in values.items() if was_given(ctx, name)}


def _fields(kind: Any) -> list[Field[Any]]:
    """The fields of a dataclass that are options, its own before those it inherits."""
    found = kind.__dataclass_fields__
    names = (name for owner in kind.__mro__ for name in getattr(owner, "__annotations__", ()))
    return [found[name] for name in names if found[name].metadata.get("help")]


def shown_options(*without: str) -> tuple[str, ...]:
    """The options of runs that have a flag; others are set in a RUN.toml."""
    with_flag = (name for name, one in FIELDS.items() if one.metadata["shown"] != TOML_ONLY)
    return tuple(name for name in with_flag if name not in without)


def was_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _parameter(one: Field[Any], changed: Mapping[str, Any] | None = None) -> inspect.Parameter:
    """The option of a field, named as its flag; `changed` are other defaults by name."""
    hint: Any = one.metadata.get("kind", one.type)
    default = (changed or {}).get(one.name, one.default)
    if isinstance(default, tuple):
        default = ",".join(default)
    if "kind" in one.metadata and not isinstance(default, hint):
        default = None
    if default is MISSING:
        hint, default = hint | None, None  # a RUN.toml, or a plan, may set it
    flag = f"--{one.name.replace('_', '-')}"
    flags = one.metadata["flags"] or ((f"{flag}/--no-{flag[2:]}",) if hint is bool else (flag,))
    kinds = kinds_of(hint)
    several = len([k for k in kinds if k is not type(None)]) > 1
    if several or any(get_origin(k) is tuple for k in kinds):
        hint = str | None if type(None) in kinds or default is None else str
        default = default if default is None else str(default)
    name = flags[0].partition("/")[0].strip("-").replace("-", "_")
    return _keyword(name, annotation=Annotated[hint, _declared(one, *flags)], default=default)


def _plain(one: Field[Any], value: Any) -> Any:
    """A flag's value as RUN.toml has it."""
    kinds = kinds_of(one.type)
    if isinstance(value, str) and any(get_origin(kind) is tuple for kind in kinds):
        return tuple(listed(value))
    choices = {c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)}
    number = next((kind for kind in (float, int) if kind in kinds), None)
    if isinstance(value, str) and number is not None and value not in choices:
        with suppress(ValueError):
            return number(value)
    return value


def listed(text: str) -> list[str]:
    """The words of a text with commas between them."""
    return [part.strip() for part in text.split(",") if part.strip()]
