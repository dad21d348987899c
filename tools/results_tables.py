"""docs/results.md from the results of `sufficit reproduce`: no number in it is typed.

    python tools/results_tables.py             # results/TABLE/ -> docs/results.md
    python tools/results_tables.py FOLDER OUT  # FOLDER/TABLE/ -> OUT

The prose is tools/results_template.md, where `{{cifar10 table}}` is the table of results/cifar10
and `{{cifar10 reference}}` that of results/reference/cifar10.json.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measured_tables

from sufficit import plots
from sufficit.reproduce.paper_tables import TITLES, table_named
from sufficit.reproduce.pipeline import SEARCH_STEP
from sufficit.reproduce.table_results import number, table_lines

ROOT = Path(__file__).parent.parent
TEMPLATE = Path(__file__).with_name("results_template.md")
NOT_YET = "*Not run yet.*"


def page(results: Path, template: str, pictures: str = "../results") -> str:
    """The template with every place filled from files."""

    def fill(found: re.Match[str]) -> str:
        table, what = found.groups()
        if what not in (known := [*PLACES, *ELSEWHERE]):
            raise SystemExit(f"the template asks for {what!r}: known are {', '.join(known)}")
        folder = results / table
        if what in ELSEWHERE:
            return ELSEWHERE[what](folder, f"{pictures}/reference/{table}.png")
        if not (folder / "summary.json").exists():
            return NOT_YET if what == "setup" else ""
        return PLACES[what](folder, f"{pictures}/{table}")

    filled = re.sub(r"\{\{(\S+) (\S+)\}\}", fill, template)
    return re.sub(r"\n{3,}", "\n\n", filled).rstrip() + "\n"


def read(folder: Path, name: str) -> dict[str, Any]:
    """A file of results."""
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def table(folder: Path, _: str) -> str:
    """Our rows, the paper's under each."""
    return "\n".join(table_lines(folder.name, read(folder, "summary.json")["methods"]))


def setup(folder: Path, _: str) -> str:
    """What was trained and scored, where and by which commit, in one paragraph."""
    run = read(folder, "run.json")
    plan, classifier, device = run["config"], run["classifier"], run["device"]
    weights = Path(plan["weights"]).name
    begun = {"none": "random weights", "default": "torchvision's ImageNet weights"}.get(
        weights, f"the weights of {weights}"
    )
    scored = f"{run['n']:,} test images, the same number per class (seed {plan['seed']})"
    if run["n"] == classifier["test_images"]:
        scored = f"all {run['n']:,} test images"
    return (
        f"{classifier['data']}; {plan['model']} at {plan['side']} px from {begun}, trained for"
        f" {plan['epochs']} epochs on {classifier['train_images']:,} images:"
        f" accuracy {classifier['test_accuracy']:.1%} on {classifier['test_images']:,} test images."
        f" LAX: {plan['lax_epochs']} epochs, {plan['seeds']} seeds. Scored: {scored},"
        f" curves in steps of {plan['step']},"
        f" {run['model_calls']:,} model calls,"
        f" {device['name']}, {device['dtype'].removeprefix('torch.')}, torch"
        f" {run['versions']['torch']}, commit {_short(run['commit'])},"
        f" {sum(run['seconds'].values()) / 60:.1f} minutes in all."
    )


def _short(commit: str | None) -> str:
    """A commit as people write it, and whether there were changes."""
    known, _, changes = (commit or "unknown").partition("+")
    return known[:7] + (f" with {changes}" if changes else "")


def seeds(folder: Path, _: str) -> str:
    """How far the seeds of each recipe are apart."""
    found = read(folder, "summary.json")["seeds"]
    parts = [
        f"{TITLES[f'lax-{recipe}']}: {', '.join(number(v) for v in told['msi'])}"
        f" (standard deviation {number(told['sd'])})"
        for recipe, told in found.items()
    ]
    return f"MSI of each seed. {'; '.join(parts)}." if parts else ""


def alpha(folder: Path, _: str) -> str:
    """Each method's MSI at the alpha_min that is best for it."""
    if not (folder / "alpha.json").exists():
        return ""
    found, usual = read(folder, "alpha.json"), read(folder, "run.json")["alpha_min"]
    lines = [f"| method | MSI at {usual:g} | best alpha_min | MSI there |", "|---|---:|---:|---:|"]
    for method, best in found["best"].items():
        values = dict(zip(found["alphas"], found["mean_msi"][method], strict=True))
        cells = (number(values[usual]), f"{best:g}", number(values[best]))
        lines.append(f"| {TITLES.get(method, method)} | {' | '.join(cells)} |")
    told = (
        f"Computed on {found['n']} images with step {SEARCH_STEP:g}, so values differ from the"
        " table above. The best alpha_min was selected on the same images and is slightly"
        " optimistic:"
    )
    return "\n".join([told, "", *lines])


def gap(folder: Path, _: str) -> str:
    """How far our MSI is from the paper's."""
    summary, paper = read(folder, "summary.json")["methods"], table_named(folder.name)
    parts = [
        f"{TITLES[method]} {found['msi']['mean'] - printed['msi']:+.3f}"
        for method, found in summary.items()
        if (printed := paper.printed_row(method))
    ]
    return f"MSI, ours minus the paper's: {', '.join(parts)}."


def figures(folder: Path, place: str) -> str:
    """The pictures, where there are any."""
    told = {"sheet.png": "Images and every method's heatmap", "alpha.png": "MSI over alpha_min"}
    return "\n\n".join(f"![{w}]({place}/{n})" for n, w in told.items() if (folder / n).exists())


def reference(folder: Path, place: str) -> str:
    """All methods that fit the network, as a table and a figure, where they were compared."""
    made = measured_tables.reference(folder.name, folder.parent)
    if not made:
        return ""
    figure = measured_tables.reference_figure(folder.name, folder.parent)
    assert figure is not None  # there is a table
    plots.save(figure, folder.parent / "reference" / f"{folder.name}.png")
    return f"### All methods\n\n{made}\n\n![MSI of all methods under three conditions]({place})"


def twins(folder: Path, _: str) -> str:
    """Model and twin of every table, where they were measured."""
    made = measured_tables.twins(folder.parent)
    if not made:
        return ""
    words = (
        "Each model's twin (`sufficit train-twin`, [gaming](gaming.md#the-twin)): accuracy on all"
        " whole test images, and on held-out images under random masks; the range of MSI over"
        " black, blur, noise and mean colour, averaged over the five CAMs and LAX; the rank"
        " correlation of the methods' order on the model and on the twin, with black; the best"
        " method on each."
    )
    return f"## Twins\n\n{words}\n\n{made}"


def orders(folder: Path, _: str) -> str:
    """How alike the methods' orders are under the three conditions."""
    return measured_tables.orders(folder.parent)


ELSEWHERE: dict[str, Callable[[Path, str], str]] = {
    "reference": reference,
    "twins": twins,
    "orders": orders,
}
PLACES: dict[str, Callable[[Path, str], str]] = {
    "table": table,
    "setup": setup,
    "seeds": seeds,
    "alpha": alpha,
    "gap": gap,
    "figures": figures,
}


def main(results: Path, out: Path) -> None:
    """Fill the template."""
    out.write_text(page(results, TEMPLATE.read_text()))
    print(f"written: {out}")


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:3]]
    main(*(given + [ROOT / "results", ROOT / "docs" / "results.md"][len(given) :]))
