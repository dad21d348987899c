"""`write_report`: content -> one HTML file."""

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from sufficit.files import writing
from sufficit.metrics.leakage import LIMIT
from sufficit.perturbation.bands import EVERYTHING
from sufficit.report import charts, numbers
from sufficit.report import interpretation as words
from sufficit.report.content import Content, Facts
from sufficit.report.encoding import SIDES, encode_images
from sufficit.report.templates import environment, look_and_feel
from sufficit.statistics import Estimate

MAIN = (
    "msi",
    "base_score",
    "mask_penalty",
    "insertion_percent",
    "deletion_percent",
    "leak_ratio",
)
HEADINGS = {
    "msi": ("MSI", "base score less mask penalty, in -2..1"),
    "base_score": ("base", "whether the region above alpha_min suffices, and the rest does not"),
    "mask_penalty": ("penalty", "share of the image at or above alpha_min"),
    "insertion_percent": ("insertion", "how soon the model is right as marked pixels appear"),
    "deletion_percent": ("deletion", "how long it stays right as marked pixels vanish"),
    "insertion_pixel": ("insertion, by value", "insertion along the heatmap's values"),
    "deletion_pixel": ("deletion, by value", "deletion along the heatmap's values"),
    "fid_minus_percent": ("Fid\u2212", "how far its probability moves with marked pixels alone"),
    "fid_plus_percent": ("Fid+", "how far its probability moves without them"),
    "fid_minus_pixel": ("Fid\u2212, by value", "Fid- along the heatmap's values"),
    "fid_plus_pixel": ("Fid+, by value", "Fid+ along the heatmap's values"),
    "leak_ratio": (
        "leak ratio",
        "how often masks alone make the model say their class, by chance 1",
    ),
    "msi_held_out": ("MSI, held-out fill", "MSI with another fill"),
    "fill_drop": ("drop by fill", "MSI less MSI with the held-out fill"),
    "leak": ("leak", "share of other classes' images called the mask's class"),
    "leak_chance": ("leak, chance", "the same through masks of other classes"),
    "leak_grey": ("leak on grey", "share of plain grey called the mask's class"),
    "leak_grey_chance": ("on grey, chance", "the same through masks of other classes"),
    "leak_noise": ("leak on noise", "share of noise called the mask's class"),
    "leak_noise_chance": ("on noise, chance", "the same through masks of other classes"),
}


def write_report(path: Path | str, content: Content) -> Path:
    """Write the report of a comparison, and return where it is."""
    content.check()
    page = render(content)
    path = Path(path)
    with writing(path) as part:
        # A file name may hold bytes that are no text; they become the sign for that.
        part.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return path


def render(content: Content) -> str:
    """The page as text."""
    return (
        _environment()
        .get_template("page.html")
        .render(
            content=content,
            facts=facts_list(content),
            columns=columns_of(content),
            main=(content.standing.column, *MAIN),
            headings=HEADINGS,
            limit=LIMIT,
            alphas=alphas_of(content),
            styles=charts.styles(content),
            readings=(found := words.readings(content)),
            bars=charts.loss_bars(found),
            cautions=words.cautions(content),
            whiskers=charts.whiskers(content),
            scatter=charts.scatter(content),
            mean_panels=charts.mean_panels(content),
            percent_panels=charts.percent_panels(content),
            search_panel=charts.search_panel(content),
            pictures=encode_images(content.shown.images),
            rows=rows_of(content),
            reduced=max(content.shown.images.shape[-2:]) > SIDES[0],
            data=Markup(numbers.script_safe(numbers.viewer_data(content))),
            downloads=downloads(content),
            **look_and_feel(),
        )
    )


def columns_of(content: Content) -> list[str]:
    """The columns of the table: the standing's, the main ones, then all others."""
    known = dict.fromkeys(name for found in content.summaries.values() for name in found)
    first = [name for name in (content.standing.column, *MAIN) if name in known]
    return list(dict.fromkeys([*first, *(name for name in HEADINGS if name in known), *known]))


def rows_of(content: Content) -> list[dict[str, Any]]:
    """What stands beside each image shown."""
    shown, found = content.shown, []
    scores = content.first
    some = scores.answers.rows(list(shown.rows))
    whole, right = (some.of([EVERYTHING], kind)[:, 0] for kind in ("confidence", "accuracy"))
    named = some.classes_of([EVERYTHING])[:, 0].tolist()
    for i, row in enumerate(shown.rows):
        target = int(scores.targets[row])
        label = target if shown.labels is None else int(shown.labels[i])
        found.append(
            {
                "name": content.names[row],
                "target": content.class_name(target),
                "label": None if label == target else content.class_name(label),
                "whole": whole[i].item(),
                "right": bool(right[i] == 1),
                "said": content.class_name(named[i]) if named[i] >= 0 else "another class",
                "msi": [content.scores[method].msi[row].item() for method in content.methods],
            }
        )
    return found


def downloads(content: Content) -> list[tuple[str, str, str]]:
    """(file name, what it holds, address) of what a reader may take along."""
    found = [
        (
            "methods.csv",
            "every mean with its interval",
            numbers.address(numbers.methods_csv(content), "text/csv"),
        ),
        (
            "report.json",
            "means, comparisons and facts",
            numbers.address(numbers.json_text(content), "application/json"),
        ),
    ]
    table = numbers.images_csv(content)
    if table is not None:
        found.append(("images.csv", "every image's scores", numbers.address(table, "text/csv")))
    return found


def facts_list(content: Content) -> list[tuple[str, str]]:
    """What ran, line by line; empty lines are left out."""
    facts, schedule = content.facts, content.schedule(content.methods[0])
    fill = content.fill if isinstance(content.fill, str) else "one's own"
    searched = " (searched)" if content.first.search is not None else ""
    lines = {
        "Model": facts.model,
        "Data": facts.data,
        "Images": _counted(len(content.names), facts),
        "Score": schedule.score,
        "alpha_min": ", ".join(f"{alpha:g}" for alpha in alphas_of(content)) + searched,
        "Hidden pixels": fill,
        "Seed": str(facts.seed),
        **facts.more,
        "Command": facts.command,
        "Date": facts.date,
        "Device": facts.device,
        "Versions": ", ".join(f"{name} {number}" for name, number in facts.versions.items()),
        "Commit": facts.commit or "",
    }
    return [(name, value) for name, value in lines.items() if value]


def alphas_of(content: Content) -> list[float]:
    """Every alpha_min that methods were scored at; one, unless each was searched for itself."""
    return sorted({found.alpha_min for found in content.scores.values()})


def _counted(n: int, facts: Facts) -> str:
    skipped = f", {facts.n_skipped:,} skipped" if facts.n_skipped else ", none skipped"
    return f"{n:,} scored{skipped}"


def number(value: float | None, digits: int = 3, sign: bool = False) -> str:
    """A number with a true minus; a dash where there is none.

    >>> number(-0.5), number(float("nan")), number(float("inf")), number(0.25, 2, sign=True)
    ('\u22120.500', '\u2013', '\u221e', '+0.25')
    """
    if value is None or math.isnan(value):
        return "\u2013"
    if math.isinf(value):
        return "\u221e" if value > 0 else "\u2212\u221e"
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return typeset(text)


def typeset(text: str) -> str:
    """True minus signs before numbers, and a space that does not break before %.

    >>> typeset("from -2 to -0.5, well-known")
    'from \u22122 to \u22120.5, well-known'
    """
    text = re.sub(r"(?<![\w-])-(?=\d)", "\u2212", text)
    return re.sub(r"(?<=\d) ?%", "\u00a0%", text)


def interval(estimate: Estimate, digits: int = 3) -> str:
    """The ends of an interval; empty where there is none."""
    if math.isnan(estimate.low):
        return ""
    return f"{number(estimate.low, digits)} to {number(estimate.high, digits)}"


@cache
def _environment() -> Environment:
    found = environment().overlay()
    found.filters = found.filters | {"number": number, "interval": interval, "typeset": typeset}
    return found
