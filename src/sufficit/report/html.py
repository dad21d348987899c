"""`render`: content -> the page as text. The web page shares templates, styles and viewer."""

import base64
import hashlib
import math
import re
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from sufficit import plots
from sufficit.metrics.columns import HEADINGS, ZERO_LINE
from sufficit.metrics.leakage import leaks
from sufficit.perturbation.bands import EVERYTHING
from sufficit.provenance import plain
from sufficit.report import interpretation as words
from sufficit.report.answer import badges, verdict
from sufficit.report.content import Content
from sufficit.report.readings import readings
from sufficit.report.tables import correction_words, gaps, groups_words
from sufficit.report.viewer_data import (
    NOT_DRAWN,
    SIDES,
    downloads,
    encode_images,
    viewer_data,
)
from sufficit.statistics import Estimate

HOME = "sufficit.report"
MAIN = (
    *("msi", "base_score", "mask_penalty", "insertion_percent", "deletion_percent"),
    *("leak_ratio", "leak_lift"),
)
CHART = plots.Look(width=4.2, font=10, legend=False)
SMALL_CHART = plots.Look(width=2.4, font=9.5, legend=False)


def render(content: Content) -> str:
    """Return the page as text."""
    read = readings(content)
    standing = content.standing
    main = (standing.column, *MAIN)
    known = dict.fromkeys(name for found in content.summaries.values() for name in found)
    order = dict.fromkeys((*main, *HEADINGS, *content.headings, *known))
    # Classes of the page, in the order of the charts' colours.
    colours = {m: f"m{k % len(plots.LINES)}" for k, m in enumerate(standing.ranking)}
    # The axis of the answer's chart reaches from the lowest end of an interval to the highest, and
    # always has the zero line on it.
    ends = [0.0 if math.isnan(content.zero_line) else content.zero_line]
    for method in content.methods:
        one = content.summaries[method][standing.column]
        ends += [value for value in (one.low, one.mean, one.high) if math.isfinite(value)]
    low = min(ends)
    width = (max(ends) - low) or 1.0
    # There is more than one alpha_min only where each method has its own.
    alphas = ", ".join(f"{a:g}" for a in sorted({s.alpha_min for s in content.scores.values()}))
    fill = content.shown.fill if isinstance(content.shown.fill, str) else "custom"
    remark = NOT_DRAWN.get(fill, "")
    # The viewer masks small pictures, which load fast; scores used whole ones.
    if max(content.shown.images.shape[-2:]) > SIDES[0]:
        smaller = " Masks are drawn from smaller heatmaps here; the scores used the full size."
        remark = smaller + remark
    page = environment().get_template("page.html")
    return page.render(
        content=content,
        facts=facts_list(content, alphas, fill),
        columns=[name for name in order if name in known],
        main=main,
        heading=content.heading,
        alphas=alphas,
        leaks=lambda method: leaks(content.summaries[method]),
        verdict=verdict(content),
        badges=badges(content),
        groups_words=groups_words(content),
        correction_words=correction_words(standing),
        zero_line=content.zero_line,
        gaps=gaps(content),
        notes=[*words.sentences(content), *content.made],
        orders=[*words.orders(content)],
        styles=dict.fromkeys(content.methods, "grey") | colours,  # as the charts have them
        readings=read,
        longest=max([1.0, *(1 - r.msi for r in read if not math.isnan(r.msi))]),
        cautions=words.cautions(content),
        place=lambda value: round(4 + 92 * (value - low) / width, 2),  # on the axis, in percent
        charts=charts_of(content),
        method_charts=method_charts(content),
        images=encode_images(content.shown.images),
        rows=rows_of(content),
        remark=remark,
        data=plain(viewer_data(content)),
        downloads=downloads(content),
        **look_and_feel(),
    )


def charts_of(content: Content) -> list[dict[str, Any]]:
    """Return the charts of all methods: base score over penalty, MSI over alpha_min, and curves."""
    order = [*content.standing.ranking]
    quiet = [method for method in content.methods if method not in order]
    scores = {method: content.scores[method] for method in (*order, *quiet)}
    found = []
    # A run may have scored other columns alone.
    needed = {"base_score", "mask_penalty"}
    sizes = {m: content.summaries[m] for m in scores if needed <= set(content.summaries[m])}
    if any(not math.isnan(s["base_score"].mean) for s in sizes.values()):
        figure = plots.sizes_figure(sizes, [m for m in quiet if m in sizes], CHART)
        note = "Higher is better, further left is better. Means with 95 % intervals."
        if ZERO_LINE in sizes:
            note += " Below the dashed zero line a map is worse than marking the whole image."
        found.append(_chart("sizes", "Base score over mask penalty", note, figure))
    panel = plots.alpha_panel(scores, content.alpha_curve)
    if panel is not None:
        figure = plots.lines_figure([replace(panel, title="")], quiet, CHART)
        found.append(_chart("alpha", "MSI over alpha_min", words.alpha_note(content), figure))
    for name, what in (("insertion_percent", "shown"), ("deletion_percent", "removed")):
        known = {method: one for method, one in scores.items() if name in one.curves}
        if known:
            figure = plots.lines_figure([plots.curve_panel(name, known, "")], quiet, CHART)
            kind = content.first.schedule.score
            note = f"Mean {kind} with this share of the top-ranked pixels {what}."
            found.append(_chart(name, content.heading(name).long, note, figure))
    return found


def method_charts(content: Content) -> list[dict[str, Any]]:
    """Return one chart per method of what is kept, hidden and left."""
    found = []
    for number, method in enumerate(content.methods):
        panel = plots.parts_panel(content.scores[method])
        if panel.lines:
            note = f"MSI {content.summaries[method]['msi'].mean:.3f}"
            figure = plots.lines_figure([panel], look=SMALL_CHART)
            found.append(_chart(f"parts{number}", method, note, figure))
    return found


def _chart(name: str, title: str, note: str, figure: Any) -> dict[str, Any]:
    """Return what the template needs of a chart."""
    drawn = Markup(plots.svg(figure, name, f"{title}. {note}"))
    return {"name": name, "title": title, "note": note, "svg": drawn}


def rows_of(content: Content) -> list[dict[str, Any]]:
    """Return the words for each image shown."""
    some = content.first.shown  # whole images give the same answers for every method
    whole = some.of([EVERYTHING], "confidence")[:, 0]
    right = some.of([EVERYTHING], "accuracy")[:, 0]
    named = some.classes_of([EVERYTHING])[:, 0].tolist()
    return [
        {
            "name": name,
            "target": content.class_name(int(content.first.targets[i])),
            "whole": whole[i].item(),
            "right": bool(right[i] == 1),
            "said": content.class_name(named[i]) if named[i] >= 0 else "another class",
            "msi": [content.scores[method]["msi"][i].item() for method in content.methods],
        }
        for i, name in enumerate(content.shown.names)
    ]


def facts_list(content: Content, alphas: str, fill: str) -> list[tuple[str, str]]:
    """Return what ran, line by line; empty lines are left out."""
    facts = content.facts
    searched = " (searched)" if content.first.alphas is not None else ""
    targets = {"label": "labels", "prediction": "the model's own predictions"}
    skipped = f"{facts.n_skipped:,} skipped" if facts.n_skipped else "none skipped"
    lines = {
        "Model": facts.model,
        "Data": facts.data,
        "Images": f"{content.n:,} scored, {skipped}",
        "Targets": targets.get(facts.targets, facts.targets),
        "Score": content.first.schedule.score,
        "alpha_min": alphas + searched,
        "Fill of hidden pixels": fill,
        "Seed": str(facts.seed),
        **facts.more,
        "Command": facts.command,
        "Date": facts.date,
        "Device": facts.device,
        "Versions": ", ".join(f"{name} {number}" for name, number in facts.versions.items()),
        "Commit": facts.commit or "",
    }
    return [(name, value) for name, value in lines.items() if value]


def number(value: float | None, digits: int = 3, sign: bool = False) -> str:
    """Return a number with a true minus sign; a dash for none.

    >>> number(-0.5), number(float("nan")), number(float("inf")), number(0.25, 2, sign=True)
    ('\u22120.500', '\u2013', '\u221e', '+0.25')
    """
    if value is None or math.isnan(value):
        return "\u2013"
    if math.isinf(value):
        return "\u221e" if value > 0 else "\u2212\u221e"
    return typeset(f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}")


def typeset(text: str) -> str:
    """Return text with true minus signs before numbers, and a space that does not break before %.

    >>> typeset("from -2 to -0.5, well-known")
    'from \u22122 to \u22120.5, well-known'
    """
    text = re.sub(r"(?<![\w-])-(?=\d)", "\u2212", text)
    return re.sub(r"(?<=\d) ?%", "\u00a0%", text)


def interval(estimate: Estimate) -> str:
    """Return the ends of an interval; empty where there is none."""
    return "" if math.isnan(estimate.low) else f"{number(estimate.low)} to {number(estimate.high)}"


def asset(name: str, package: str = HOME) -> str:
    """Return a file of a package as text, else the report's file of that name."""
    own = files(package).joinpath(name)
    found = own if own.is_file() else files(HOME).joinpath(name)
    return found.read_text(encoding="utf-8")


@cache
def environment(package: str = HOME) -> Environment:
    """Return the templates of a package; all that they print is escaped."""
    found = Environment(
        loader=FunctionLoader(lambda name: asset(name, package)),
        undefined=StrictUndefined,
        autoescape=True,  # names of files, methods and classes may hold anything
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"number": number, "interval": interval, "typeset": typeset}
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return found


def look_and_feel(package: str = HOME) -> dict[str, Markup | str]:
    """Return the styles, the script after the viewer's, and the script's digest for the policy."""
    # The viewer is shared; page.js is that of the report or of the live page.
    inner = asset("viewer.js") + "\n" + asset("page.js", package)
    # One script with one digest: the policy of the page allows no other.
    script = f'"use strict";\n(() => {{\n{inner}}})();\n'
    return {
        "style": Markup(asset("page.css")),
        "dark": Markup(asset("dark.css")),
        "script": Markup(script),
        "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
