"""Write docs/results.md from the results of the tables: no number in it is typed.

    python paper/results_page.py             # results/TABLE/ -> docs/results.md
    python paper/results_page.py FOLDER OUT  # FOLDER/TABLE/ -> OUT

The prose is results_template.md, where `{{cifar10 table}}` is the table of results/cifar10.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from table_results import number, table_lines
from tables import TABLES, TITLES

ROOT = Path(__file__).parent.parent
TEMPLATE = Path(__file__).with_name("results_template.md")
NOT_YET = "*Not run yet.*"
WEIGHTS = {"none": "random weights", "default": "torchvision's ImageNet weights"}


def page(results: Path, template: str) -> str:
    """Fill every place of the template from files."""

    def fill(found: re.Match[str]) -> str:
        folder = results / found[1]
        if not (folder / "summary.json").exists():
            return NOT_YET if found[2] == "setup" else ""
        return PLACES[found[2]](folder)

    filled = re.sub(r"\{\{(\S+) (\S+)\}\}", fill, template)
    return re.sub(r"\n{3,}", "\n\n", filled).rstrip() + "\n"


def read(folder: Path, name: str) -> dict[str, Any]:
    """Read a file of results."""
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def table(folder: Path) -> str:
    """Return our rows, the paper's under each."""
    return "\n".join(table_lines(folder.name, read(folder, "summary.json")["methods"]))


def setup(folder: Path) -> str:
    """Say in one paragraph what was trained and scored, where and by which commit."""
    run = read(folder, "run.json")
    plan, classifier, device = run["config"], run["classifier"], run["device"]
    network = plan["network"] if "network" in plan else plan["model"]
    start = WEIGHTS.get(plan["weights"], f"the weights of {Path(plan['weights']).name}")
    scored = f"{run['n']:,} test images, the same number per class (seed {plan['seed']})"
    if run["n"] == classifier["test_images"]:
        scored = f"all {run['n']:,} test images"
    commit, _, changes = (run["commit"] or "unknown").partition("+")
    return (
        f"{classifier['data']}; {network} at {plan['side']} px from {start}, trained for"
        f" {plan['epochs']} epochs on {classifier['train_images']:,} images:"
        f" accuracy {classifier['test_accuracy']:.1%} on {classifier['test_images']:,} test images."
        f" LAX: {plan['lax_epochs']} epochs, {plan['seeds']} seeds. Scored: {scored},"
        f" curves in steps of {plan['step']},"
        f" {run['model_calls']:,} model calls,"
        f" {device['name']}, {device['dtype'].removeprefix('torch.')}, torch"
        f" {run['versions']['torch']}, commit {commit[:7]}{' with changes' if changes else ''},"
        f" {sum(run['seconds'].values()) / 60:.1f} minutes in all."
    )


def seeds(folder: Path) -> str:
    """Say how far the seeds of each recipe are apart."""
    parts = []
    for recipe, found in read(folder, "summary.json")["seeds"].items():
        values = ", ".join(number(value) for value in found["msi"])
        spread = number(found["sd"])
        parts.append(f"{TITLES[f'lax-{recipe}']}: {values} (standard deviation {spread})")
    return f"MSI of each seed. {'; '.join(parts)}." if parts else ""


def alpha(folder: Path) -> str:
    """Return each method's MSI at the alpha_min that is best for it."""
    if not (folder / "alpha.json").exists():
        return ""
    found, usual = read(folder, "alpha.json"), read(folder, "run.json")["alpha_min"]
    lines = [f"| method | MSI at {usual:g} | best alpha_min | MSI there |", "|---|---:|---:|---:|"]
    for method, best in found["best"].items():
        values = dict(zip(found["alphas"], found["mean_msi"][method], strict=True))
        cells = (number(values.get(usual)), f"{best:g}", number(values[best]))
        lines.append(f"| {TITLES.get(method, method)} | {' | '.join(cells)} |")
    words = (
        f"Computed on {found['n']} images, so values differ from the table above. The best"
        " alpha_min was selected on the same images and is slightly optimistic:"
    )
    return "\n".join([words, "", *lines])


def gap(folder: Path) -> str:
    """Say how far our MSI is from the paper's."""
    parts = []
    for method, found in read(folder, "summary.json")["methods"].items():
        printed = TABLES[folder.name].printed_row(method)
        if printed:
            parts.append(f"{TITLES[method]} {found['msi']['mean'] - printed['msi']:+.3f}")
    return f"MSI, ours minus the paper's: {', '.join(parts)}."


def figures(folder: Path) -> str:
    """Show the pictures, where there are any."""
    known = {"sheet.png": "Images and every method's heatmap", "alpha.png": "MSI over alpha_min"}
    shown = [name for name in known if (folder / name).exists()]
    return "\n\n".join(f"![{known[name]}](../results/{folder.name}/{name})" for name in shown)


PLACES: dict[str, Callable[[Path], str]] = {
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
