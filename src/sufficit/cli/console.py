"""The app that every command joins: its help in panels, where it prints, the page it opens."""

import os
import shlex
import sys
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from sufficit import __version__
from sufficit.errors import UserError
from sufficit.lock import locked
from sufficit.outside import literal
from sufficit.runs.config import TOML, RunConfig, Workers

if TYPE_CHECKING:
    from sufficit.runs.results import RunResults


GROUPS = {  # of commands, in the order of `sufficit --help`
    "Start": ("demo", "compare", "report"),
    "Explain": ("explain", "evaluate", "serve", "train-lax", "export"),
    "Check": ("sanity", "train-twin"),
    "More": ("figure", "status", "methods", "models"),
}
FIRST = {  # command: the options to read first
    "compare": (
        *("model", "data", "methods", "to", "images", "quick", "targets", "alpha_min", "fills"),
        *("checks", "device", "toml"),
    ),
    "demo": ("photos", "weights", "images", "open_report", "to"),
    "evaluate": ("model", "data", "heatmaps", "alpha_min", "to"),
    "explain": ("model", "methods", "fit", "target", "to"),
    "export": ("model", "weights", "size", "to"),
    "figure": ("show", "images", "methods", "width", "to"),
    "sanity": ("model", "data", "methods", "images", "to"),
    "serve": ("model", "methods", "weights", "example", "port"),
    "train-lax": ("model", "data", "recipe", "epochs", "to"),
    "train-twin": ("model", "data", "weights", "epochs", "to"),
}
SHORT = ("compare",)  # commands with many options
MAIN, REST = "Most used", "More"
PANELS = (MAIN, "Input", "Methods", "Training", "Scoring", "Compute", REST, "Output")
BY_NAME = {  # options that a command declares itself
    **dict.fromkeys(("example", "train_images"), "Input"),
    **dict.fromkeys(("alpha_min", "area", "cache_features", "epochs", "lr"), "Training"),
    **dict.fromkeys(("patience", "recipe", "validation_share"), "Training"),
    **dict.fromkeys(("curves", "images"), "Scoring"),
    **dict.fromkeys(("batch_size", "devices", "num_nodes", "precision", "workers"), "Compute"),
    **dict.fromkeys(("help", "open_page", "open_report", "overwrite"), "Output"),
    **dict.fromkeys(("title", "to", "verbose"), "Output"),
}


TOML_OPTIONS = [
    name for name, one in RunConfig.__dataclass_fields__.items() if one.metadata["shown"] == TOML
]
RESPELLED = {  # options that commands with --checks and --fills once had
    "--fill": "--fills, as in --fills blur",
    "--held-out-fill": "--checks fill: the first of blur, mean and noise that is not in --fills",
    "--leak": "--checks leak",
    "--no-leak": "--checks controls,fill,alpha-curve",
    "--controls": "--checks controls",
    "--no-controls": "--checks fill,leak,alpha-curve",
    "--alpha-curve": "--checks alpha-curve",
    "--no-alpha-curve": "--checks controls,fill,leak",
    "--ceiling": "--checks default,ceiling",
    "--no-ceiling": "--checks default",
    "--sanity": "--checks default,head",
    "--no-sanity": "--checks default",
    "--address": "--workers, as in --workers ray://HOST:PORT",
}
IN_FILE = {  # options that are set in a RUN.toml alone: the line that sets one
    **{f"--{name.replace('_', '-')}": f"{name} = VALUE" for name in TOML_OPTIONS},
    "--gpus-per-worker": "gpus = VALUE under [workers]",
    "--cpus-per-worker": "cpus = VALUE under [workers]",
}


class PanelCommand(TyperCommand):
    """A command whose help has its panels in one order, and that takes each option once.

    The help of a command in SHORT has the options in FIRST alone; --help-all has the others too.
    """

    shows_all = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option that is given twice, of which the first would be lost silently."""
        self.shows_all = "--help-all" in args
        self._check_words(ctx, args)
        _, _, order = self.make_parser(ctx).parse_args([*args])
        once = [one for one in order if not getattr(one, "multiple", True)]
        for option in once:
            if once.count(option) > 1:
                several = " Separate several by commas." if option.name == "methods" else ""
                raise UserError(f"{option.opts[0]} is given twice: give it once.{several}")
        found: list[str] = super().parse_args(ctx, args)
        return found

    def _check_words(self, ctx: Any, args: list[str]) -> None:
        """Refuse an option in place of a value, and one that is spelled otherwise now."""
        every = [one for one in self.get_params(ctx) if one.param_type_name == "option"]
        known = {word: one for one in every for word in (*one.opts, *one.secondary_opts)}
        options = args[: args.index("--")] if "--" in args else args
        for word, following in zip(options, [*args[1:], ""], strict=False):
            name = word.partition("=")[0]
            option = known.get(word)
            if option is not None and following.startswith("--") and not _is_flag(option):
                # Else a folder of this name would be made, and the option be lost.
                raise UserError(f"{word} needs a value, got {following}: write {word} VALUE")
            if name in known:
                continue
            if name in RESPELLED and "--checks" in known:
                raise UserError(f"there is no option {name}: use {RESPELLED[name]}")
            if name.replace("--no-", "--") in IN_FILE and "--config" in known:
                line = IN_FILE[name.replace("--no-", "--")]
                raise UserError(
                    f"{name} is no option of the command line: write `{line}` into a file"
                    " RUN.toml, and pass --config RUN.toml"
                )

    def get_params(self, ctx: Any) -> list[Any]:
        """The options in the order of their panels, the order within a panel as declared."""
        first = FIRST.get(self.name or "", ())
        found: list[Any] = super().get_params(ctx)
        arguments = [one for one in found if one.param_type_name == "argument"]
        options = [one for one in found if one.param_type_name != "argument"]
        for one in options:
            known = getattr(one, "rich_help_panel", None) or BY_NAME.get(one.name, REST)
            one.rich_help_panel = MAIN if one.name in first else known
            if self.name in SHORT and one.name != "help":
                one.hidden = one.name not in first and not self.shows_all

        def place(one: Any) -> tuple[int, int]:
            own = one.rich_help_panel
            return PANELS.index(own), first.index(one.name) if own == MAIN else 0

        return [*arguments, *sorted(options, key=place)]


def _is_flag(option: Any) -> bool:
    """Whether an option takes no value."""
    return bool(getattr(option, "is_flag", False) or getattr(option, "count", False))


app = typer.Typer(
    name="sufficit",
    help="Score visual explanations of image classifiers. Start with: sufficit demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help", "--help-all"]},
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


def scored(
    config: RunConfig,
    folder: Path,
    *,
    as_json: bool,
    overwrite: bool,
    workers: Workers | None,
) -> "RunResults":
    """Run a config in a folder; where it is long, say how long it takes."""
    from sufficit.runs.engine import run
    from sufficit.runs.forecast import LONG, forecast
    from sufficit.runs.job import make_job
    from sufficit.runs.workers import spreading

    job = make_job(config)
    found = None if as_json else forecast(job, None if overwrite else folder, workers)
    if found is not None:
        chosen = found.masks(job) if config.calls == "auto" else ""
        long = found.words if found.seconds >= LONG else ""
        for line in filter(None, (chosen, long)):
            err.print(literal(line), soft_wrap=True, highlight=False)
    progress = False if as_json else None
    with spreading(workers, job) as (job, spread):
        return run(job, folder, overwrite=overwrite, progress=progress, spread=spread)


@contextmanager
def resumable(folder: Path, kept: Callable[[Path], str] | str = "") -> Iterator[None]:
    """Own the folder of results inside. After Ctrl-C, say what is kept and how to resume."""
    try:
        with locked(folder):
            yield
    except KeyboardInterrupt:
        words = kept if isinstance(kept, str) else kept(folder)
        words = words or units_kept(folder)
        if "--overwrite" in sys.argv:
            words += " Leave out --overwrite, which starts from the beginning."
        err.print(literal(f"Interrupted: {words}"), soft_wrap=True)
        raise typer.Exit(130) from None


def units_kept(folder: Path) -> str:
    """What is kept of a run, and what to do next."""
    from sufficit.runs.store import Store

    kept = "nothing is done yet"
    with suppress(UserError):
        state = Store(folder).state()
        if state.is_finished:
            return (
                f"the results in {folder} are complete, the figures are not. Run the same command"
                f" again, or only `sufficit report {folder}`."
            )
        kept = f"{state.done_images} of {state.images} images are done and kept"
    return f"{kept}. {RESUME}"


def table(title: str, heads: Sequence[str], *, left: int = 1, **look: Any) -> Table:
    """A table with a title, the first columns to the left and the others to the right."""
    wide, found = look.pop("no_wrap", False), Table(title=title, title_justify="left", **look)
    for number, head in enumerate(heads):
        side: Any = "left" if number < left else "right"
        found.add_column(literal(head), justify=side, no_wrap=wide)
    return found


def say(text: object, *, soft_wrap: bool = False) -> None:
    """Print a sentence as it is, without colours; `soft_wrap` leaves the lines to the terminal."""
    out.print(literal(text), highlight=False, soft_wrap=soft_wrap)


def say_next(*words: object, where: str = "") -> None:
    """End a command with the one that usually follows; `where` says what to replace in it."""
    say(f"Next{where}: {shlex.join(map(str, words))}", soft_wrap=True)


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


PATIENCE = 5.0  # seconds for a browser to start


def show_page(page: Path | str, wanted: bool | None = None) -> bool:
    """Open a file or URL if wanted, or (None) in a terminal with a screen; return whether it opens.

    Never raises and never takes long, whatever the browser does.
    """
    if wanted is None:
        wanted = sys.stdout.isatty() and not {"SSH_CONNECTION", "CI"} & {*os.environ}
        if sys.platform.startswith(("linux", "freebsd")):
            screens = (os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
            wanted = wanted and any(screens)
    if not wanted:
        return False
    address = page if isinstance(page, str) else page.resolve().as_uri()
    opened: list[bool] = []

    def open_it() -> None:
        with suppress(Exception):
            browser = webbrowser.get()
            # A browser that runs inside the terminal, such as lynx, would take it over.
            if type(browser) is not webbrowser.GenericBrowser or "BROWSER" in os.environ:
                opened.append(browser.open(address))

    opening = Thread(target=open_it, daemon=True)
    opening.start()
    opening.join(PATIENCE)
    return opened == [True]
