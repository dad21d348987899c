"""A comparison in a terminal: the table, and what it means in words."""

import math
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from sufficit.comparing.outcome import OWN_BEST, Comparison
from sufficit.comparing.settings import CONTROLS
from sufficit.tables import SHORT, methods_table


def table(comparison: Comparison) -> Table:
    """A row a method, best first, with marks and a legend."""
    searched = " (best for the methods' mean)" if comparison.own_alphas() else ""
    beside = {OWN_BEST: "own"} if searched else {"leak_ratio": "leak"}  # 80 columns hold one more
    title = (
        f"Means over {len(comparison.names)} images, alpha_min {comparison.alpha_min:g}{searched}"
    )
    return methods_table(comparison.summaries, comparison.standing, title, SHORT | beside)


def sentences(comparison: Comparison) -> Iterator[str]:
    """What the table means."""
    yield _about_targets(comparison)
    yield _about_the_best(comparison)
    if remark := _about_controls(comparison):
        yield remark
    if own := comparison.own_alphas():
        listed = ", ".join(f"{method} {own[method]:g}" for method in comparison.order())
        yield (
            f"All methods are compared at one alpha_min; the best for each alone is {listed}, and"
            " its MSI there stands under own: chosen on these very images, so a little"
            " flattering."
        )


def warnings_of(comparison: Comparison) -> Iterator[str]:
    """What a reader of the table must beware of."""
    clean = comparison.facts()["clean_accuracy"]
    if comparison.target_kind == "label" and clean < 0.5:
        yield "the model misses most labels: is this its own task?"
    for method, remark in comparison.leak_warnings().items():
        if method not in CONTROLS:
            yield f"{method}: {remark}"


def remarks(comparison: Comparison) -> Iterator[str]:
    """What a reader of the report must know first, beside what the scores tell."""
    if comparison.settings.weights == "none":
        yield "The model has random weights: its scores mean nothing."
    empty = [f"{method} {count}" for method, count in comparison.empty.items() if count]
    if empty:
        yield (
            f"Some heatmaps are all zeros and mark nothing, of {len(comparison.names)} images:"
            f" {', '.join(empty)}."
        )
    controls, beaten = _controls(comparison), _beaten(comparison)
    if beaten:
        yield (
            f"{_listed(beaten)} did not beat the controls, which look at nothing"
            f" ({_with_means(controls)})."
        )


def where_to_look(out: Path) -> str:
    """The files worth opening first."""
    return (
        f"Open {out / 'report.html'} in a browser; {out / 'sheet.png'} and {out / 'curves.png'} are"
        f" pictures of it, and pairs.csv has every pair of"
        " methods, METHOD/scores.parquet a row an image. To repeat this run:"
        f" sufficit compare --config {out / 'RUN.toml'} --out ANOTHER"
    )


def _about_targets(comparison: Comparison) -> str:
    clean = comparison.facts()["clean_accuracy"]
    if comparison.target_kind == "label":
        return f"Scored for the labels; of the whole images the model gets {clean:.1%} right."
    return "Scored for the model's own predictions."


def _about_the_best(comparison: Comparison) -> str:
    standing = comparison.standing
    best = comparison.summaries[standing.best]
    tied = ""
    if standing.tied:
        tied = f" These images do not tell it from {_listed(standing.tied)}."
    return (
        f"MSI is near +1 when a small region suffices and nothing else does: {standing.best} is"
        f" best here at {best['msi'].mean:.2f}, marking {best['mask_penalty'].mean:.0%} of the"
        f" image.{tied}"
    )


def _about_controls(comparison: Comparison) -> str | None:
    """Which methods do not beat a control; None where there is no control."""
    controls, beaten = _controls(comparison), _beaten(comparison)
    if not controls:
        return None
    told = _with_means(controls)
    found = f"{_listed(beaten)} did not" if beaten else "all did"
    return f"The controls look at nothing ({told}); a method must beat them in MSI, and {found}."


def _controls(comparison: Comparison) -> dict[str, float]:
    """The mean MSI of each control."""
    return {method: comparison.summaries[method]["msi"].mean for method in comparison.outside}


def _beaten(comparison: Comparison) -> list[str]:
    """The methods that are no better than a control."""
    bar = max(_controls(comparison).values(), default=-math.inf)
    means = comparison.standing.means
    return [method for method in comparison.standing.ranking if not means[method] > bar]


def _with_means(means: dict[str, float]) -> str:
    return ", ".join(f"{method} {mean:.2f}" for method, mean in means.items())


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
