"""The app that every command joins, where it prints, and the options of its model."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sufficit import __version__
from sufficit.cli.options import config_of, run_options
from sufficit.cli.panels import PanelApp
from sufficit.errors import UserError
from sufficit.lock import owning
from sufficit.outside import literal
from sufficit.runs.config import RunConfig, Workers

if TYPE_CHECKING:
    from sufficit.classifier.classifier import Classifier
    from sufficit.runs.job import Job

MODEL = (
    *("model", "weights", "num_classes", "prompts", "output", "size", "layer", "device"),
    "precision",
)
app = PanelApp(
    name="sufficit",
    help="Score visual explanations of image classifiers. Start with: sufficit demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
RESUME = "Run the same command again to resume."
out, err = Console(emoji=False), Console(stderr=True, emoji=False)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Score visual explanations of image classifiers. Start with: sufficit demo"""
    if version:
        typer.echo(f"sufficit {__version__}")
        raise typer.Exit


def config_options(*names: str, **defaults: Any) -> Callable[..., Callable[..., None]]:
    """Give a command these options of RunConfig; it gets them as `config`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def configured(given: dict[str, Any], **values: Any) -> None:
            command(config=config_of(given, fixed=defaults), **values)

        own = inspect.signature(command, eval_str=True).parameters
        kept = [p for name, p in own.items() if name != "config"]
        configured.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]  # run_options reads it
        return run_options(*names, defaults=defaults)(configured)

    return decorate


def load(config: RunConfig, **changed: Any) -> "Classifier":
    """The classifier that the options MODEL name, some of them changed."""
    from sufficit.classifier.loading import load_classifier

    return load_classifier(**{name: getattr(config, name) for name in MODEL} | changed)


def print_forecast(job: "Job", folder: Path | None, workers: Workers | None) -> None:
    """Say how long a run takes and what shortens it, where it is long."""
    from sufficit.runs.forecast import LONG, forecast

    found = forecast(job, folder, workers)
    if found is not None and found.seconds >= LONG:
        err.print(literal(found.words), soft_wrap=True, highlight=False)


@contextmanager
def resumable(folder: Path, kept: "Callable[[Path], str] | None" = None) -> Iterator[None]:
    """Own the folder of results inside. After Ctrl-C, say what is kept and how to resume."""
    try:
        with owning(folder):
            yield
    except KeyboardInterrupt:
        words = f"Interrupted: {(kept or _units_kept)(folder)}"
        err.print(literal(words), soft_wrap=True)
        raise typer.Exit(130) from None


def _units_kept(folder: Path) -> str:
    """What is kept of a run, and what to do next."""
    from sufficit.runs.store import Store

    kept = "nothing is done yet"
    with suppress(UserError):
        state = Store(folder).state()
        if state.is_finished:
            return (
                f"the results in {folder} are complete, but for pictures. The same compare again"
                f" draws them all, `sufficit report {folder}` draws the report."
            )
        kept = f"{state.done_images} of {state.images} images are done and kept"
    return f"{kept}. {RESUME}"


def warn(text: object) -> None:
    """Print a warning."""
    err.print("[yellow]Warning:[/]", literal(text))


def print_skipped(skipped: dict[str, str], count: int | None = None) -> None:
    """Name the first images that were skipped, and why; a run lists all of them in skipped.csv."""
    for name, reason in list(skipped.items())[:10]:
        err.print("[yellow]Skipped[/]", literal(f"{name}: {reason}"))
    if skipped:
        one = "1 image skipped; run.json names it."
        file = "run.json" if count in (None, len(skipped)) else "skipped.csv"
        many = f"{count or len(skipped)} images skipped; {file} names all of them."
        err.print(one if len(skipped) == 1 else many)
