"""How help texts are laid out: the options that matter first, the rest in panels of one order."""

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from sufficit.errors import UserError

Command = TypeVar("Command", bound=Callable[..., Any])
FIRST = {  # command: the options to read first
    "check-metric": ("model", "data", "truth", "images", "to"),
    "compare": ("model", "data", "methods", "images", "to"),
    "demo": ("photos", "weights", "images", "open_report", "to"),
    "evaluate": ("model", "data", "heatmaps", "alpha_min", "to"),
    "explain": ("model", "methods", "weights", "target", "to"),
    "figure": ("show", "images", "methods", "width", "to"),
    "reproduce": ("data_word", "quick", "download", "images", "to"),
    "sanity": ("model", "data", "methods", "images", "to"),
    "serve": ("model", "methods", "weights", "example", "port"),
    "train-lax": ("model", "data", "recipe", "epochs", "to"),
    "train-twin": ("model", "data", "weights", "epochs", "to"),
}
MAIN, REST = "Most used", "More"
PANELS = (MAIN, "Input", "Methods", "Training", "Scoring", "Compute", REST, "Output")
BY_NAME = {  # options that a command declares itself
    **dict.fromkeys(("classes", "download", "example", "test_images", "train_images"), "Input"),
    **dict.fromkeys(
        ("alpha_min", "area", "cache_features", "epochs", "lax_epochs", "lr"), "Training"
    ),
    **dict.fromkeys(("patience", "recipe", "recipes", "seeds", "validation_share"), "Training"),
    **dict.fromkeys(("curves", "images", "random_labels", "search_images", "step"), "Scoring"),
    **dict.fromkeys(("batch_size", "devices", "num_nodes", "precision", "readers"), "Compute"),
    **dict.fromkeys(("as_json", "help", "log", "open_page", "open_report", "overwrite"), "Output"),
    **dict.fromkeys(("report", "title", "to", "verbose"), "Output"),
}


class PanelCommand(TyperCommand):
    """A command whose help has its panels in one order, and that takes each option once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option that is given twice, of which the first would be lost silently."""
        _, _, order = self.make_parser(ctx).parse_args([*args])
        once = [one for one in order if not getattr(one, "multiple", True)]
        for option in once:
            if once.count(option) > 1:
                several = " Separate several by commas." if option.name == "methods" else ""
                raise UserError(f"{option.opts[0]} is given twice: give it once.{several}")
        found: list[str] = super().parse_args(ctx, args)
        return found

    def get_params(self, ctx: Any) -> list[Any]:
        """The options in the order of their panels, the order within a panel as declared."""
        first = FIRST.get(self.name or "", ())
        found: list[Any] = super().get_params(ctx)
        arguments = [one for one in found if one.param_type_name == "argument"]
        options = [one for one in found if one.param_type_name != "argument"]
        for one in options:
            known = getattr(one, "rich_help_panel", None) or BY_NAME.get(one.name, REST)
            one.rich_help_panel = MAIN if one.name in first else known

        def place(one: Any) -> tuple[int, int]:
            own = one.rich_help_panel
            return PANELS.index(own), first.index(one.name) if own == MAIN else 0

        return [*arguments, *sorted(options, key=place)]


class PanelApp(typer.Typer):
    """An app whose commands are laid out so."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Command], Command]:
        """Register a command, as typer does."""
        return super().command(name, **{"cls": PanelCommand} | options)
