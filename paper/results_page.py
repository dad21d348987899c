"""Write docs/results.md from the rows in results/: no number in it is typed.

    python paper/results_page.py             # results/TABLE/ -> docs/results.md, README's place
    python paper/results_page.py FOLDER OUT  # FOLDER/TABLE/ -> OUT, another page

The prose is results_template.md, where `{{cifar10 table}}` is the table of results/cifar10, and
what is between `{{if cifar10}}` and `{{end}}` is left out where it has no rows or no commit. The
file claims.json of the results says where each number comes from, `tools/check_results.py` checks
it. Figures are drawn from the rows too.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ledger import Ledger, Rows, half_width
from tables import CAMS, COLUMNS, PAPERS_NETWORKS, TABLES, TITLES

ROOT = Path(__file__).parent.parent
TEMPLATE = Path(__file__).with_name("results_template.md")
NOT_YET = "*Not run yet.*"
IMAGENET = "imagenet"
FIRST_NETWORK = "resnet50"  # of ImageNet, in the first table
WEIGHTS = {"none": "random weights", "default": "torchvision's ImageNet weights"}
NETWORKS = {
    **{"small-resnet18": "ResNet18", "resnet18": "ResNet18", "resnet50-v1": "ResNet50"},
    **{"deit-tiny": "DeiT-tiny", "resnet50": "ResNet50", "mobilenet_v2": "MobileNetV2"},
    **{"efficientnet_lite0": "EfficientNet-Lite0", "deit_tiny": "DeiT-tiny"},
}
LAX = ("lax-robust", "lax")  # the default recipe, in the paper's tables and in ImageNet's
TRUST = {
    "msi_rank": "by rank ↑",
    "msi_held_out": "held-out fill ↑",
    "msi_twin": "twin ↑",
    "iou": "IoU ↑",
    "pointing": "pointing ↑",
}
IMAGENET_COLUMNS = {
    "msi": "black",
    "msi_blur": "blur",
    "msi_mean_fill": "mean",
    "msi_noise": "noise",
    "mask_penalty": "size",
    "pointing": "pointing",
}
WAYS = {
    "as-is": "as it is",
    "common": "common",
    "fitted": "fitted",
    "few": "usual",
    "equal": "equal",
}
README_START, README_END = "<!-- results: first -->", "<!-- end of results -->"
MSI = "msi"
CLAIMS = "claims.json"


class Page:
    """The places of the template, filled in their order, so that claims are in that order too."""

    def __init__(self, results: Path) -> None:
        self.ledger = Ledger(results)

    def rows(self, table: str) -> Rows:
        """The rows of a table."""
        return self.ledger.rows(table)

    def filled(self, template: str) -> str:
        """Fill every place."""

        def fill(found: re.Match[str]) -> str:
            name, _, place = found[1].rpartition(" ")
            if name in ("", "all"):
                return PAGE_PLACES[place](self)
            table = name.split()[0]
            if not self.rows(table).is_complete:
                return NOT_YET if place in ("setup", "table") else ""
            return PLACES[place](self, *name.split())

        def kept(found: re.Match[str]) -> str:
            return found[2] if self.rows(found[1]).is_complete else ""

        template = re.sub(r"\{\{if (\S+)\}\}\n(.*?)\{\{end\}\}", kept, template, flags=re.DOTALL)
        text = re.sub(r"\{\{([^{}]+)\}\}", fill, template)
        return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"

    def estimate(self, rows: Rows, method: str, column: str = MSI, **where: str) -> str:
        """A mean with half its interval."""
        return self.ledger.estimate(rows, method, column, where)

    # The first table

    def first(self) -> str:
        """One row per table: zero line, center, best CAM, LAX, LAX on the twin, its leak."""
        heads = [
            "data, network",
            "images",
            "everything",
            "center",
            "best CAM",
            "LAX",
            "LAX, twin",
            "leak",
        ]
        lines = [*head_lines(heads, numbers_from=1)]
        for table in TABLES:
            rows = self.rows(table)
            if rows.is_complete:
                lines.append(self._first_row(rows, f"{TABLES[table].title}, {network_of(rows)}"))
        rows = self.rows(IMAGENET)
        if rows.is_complete and FIRST_NETWORK in rows.facts["networks"]:
            title = f"ImageNet, {NETWORKS[FIRST_NETWORK]}"
            lines.append(self._first_row(rows, title, network=FIRST_NETWORK, way="as-is"))
        return "\n".join(lines) if len(lines) > 2 else NOT_YET

    def _first_row(self, rows: Rows, title: str, **where: str) -> str:
        best, lax = best_cam(rows, **where), lax_of(rows, **where)
        n = len(rows.values(best, MSI, where))
        title_link = f"[{title}](#{anchor(rows, title)})"
        cells = [title_link, f"{n:,}"]
        cells += [self.estimate(rows, name, **where) for name in ("everything", "center")]
        cells.append(f"{TITLES.get(best, best)} {self.estimate(rows, best, **where)}")
        cells.append(self.estimate(rows, lax, **where))
        cells.append(self.estimate(rows, lax, "msi_twin", **where))
        cells.append(self.ledger.ratio(rows, lax, where))
        return line(cells)

    def commits(self) -> str:
        """Of which commit the tables are, and whether they may be compared."""
        found: dict[str, list[str]] = {}
        for name in (*TABLES, IMAGENET, "rise-protocol", "beside-torchcam"):
            rows = self.rows(name)
            if rows.is_complete:
                found.setdefault(rows.facts["commit"], []).append(name)
        if len(found) == 1:
            return f"All tables are of commit `{next(iter(found))[:9]}`."
        listed = [f"`{commit[:9]}` ({', '.join(names)})" for commit, names in found.items()]
        return (
            f"**The tables are of {len(found)} commits**: {'; '.join(listed)}. Compare within a"
            " table only."
        )

    # What fails

    def fails(self) -> str:
        """Where it fails, one bullet per finding, from the rows."""
        found = [*self._twins(), *self._below(), *self._leaks(), *self._noise()]
        return "\n".join(f"- {one}" for one in found) or NOT_YET

    def complete(self) -> list[Rows]:
        """The paper's tables that there are."""
        return [rows for rows in map(self.rows, TABLES) if rows.is_complete]

    def _twins(self) -> list[str]:
        found = []
        for rows in self.complete():
            lax, cam = lax_of(rows), best_cam(rows)
            if rows.values(lax, "msi_twin").empty:
                continue
            own = f"LAX has {self.estimate(rows, lax)} with the model"
            twin = f"{self.estimate(rows, lax, 'msi_twin')} with its twin"
            lead = self.ledger.difference(rows, lax, cam, MSI)
            left = self.ledger.difference(rows, lax, cam, "msi_twin")
            found.append(
                f"**The twin**, {TABLES[rows.name].title}: {own} and {twin}. Its lead over"
                f" {TITLES[cam]} goes from {lead} to {left}."
            )
        return found

    def _below(self) -> list[str]:
        found = []
        for rows in self.complete():
            cams = [name for name in (*CAMS, "rollout") if name in rows.methods()]
            for control in ("everything", "center"):
                if control not in rows.methods():
                    continue
                level = rows.values(control, MSI).mean()
                below = [TITLES[name] for name in cams if rows.values(name, MSI).mean() < level]
                if len(below) == len(cams):
                    found.append(
                        f"**No CAM reaches `{control}`** in {TABLES[rows.name].title}:"
                        f" {TITLES[best_cam(rows)]} {self.estimate(rows, best_cam(rows))}, the"
                        f" control {self.estimate(rows, control)}."
                    )
        return found

    def _leaks(self) -> list[str]:
        found = []
        for rows in self.complete():
            for name in rows.methods():
                leak, chance = (rows.values(name, one) for one in ("leak", "leak_chance"))
                if not chance.empty and chance.mean() and leak.mean() > 1.5 * chance.mean():
                    found.append(
                        f"**Leakage**, {TABLES[rows.name].title}: masks of {TITLES[name]} turn"
                        " images of other classes into their own class"
                        f" {self.ledger.ratio(rows, name)} times as often as chance."
                    )
        return found

    def _noise(self) -> list[str]:
        rows = self.rows(IMAGENET)
        if not rows.is_complete:
            return []
        where = {"network": FIRST_NETWORK, "way": "fitted"}
        black = self.estimate(rows, "lax", **where)
        noise = self.estimate(rows, "lax", "msi_noise", **where)
        return [
            f"**Fills**, ImageNet, ResNet50: LAX, fitted, has {black} with black and {noise} with"
            " noise."
        ]

    # A table of the paper

    def setup(self, table: str) -> str:
        """Say in one paragraph what was trained and scored, where and by which commit."""
        rows = self.rows(table)
        run, classifier, device = rows.facts, rows.facts["classifier"], rows.facts["device"]
        plan = run["config"]
        start = WEIGHTS.get(plan["weights"], f"the weights of `{Path(plan['weights']).name}`")
        accuracy = self.ledger.fact(rows, "classifier", "test_accuracy", percent=True)
        scored = f"{run['n']:,} test images, the same number per class"
        if run["n"] == classifier["test_images"]:
            scored = f"all {run['n']:,} test images"
        minutes = ""
        if "gpu_minutes" in run:
            minutes = f", {self.ledger.fact(rows, 'gpu_minutes')} minutes of the device in all"
        return (
            f"{classifier['data']}; {network_of(rows)} at {plan['side']} px from {start}, trained"
            f" for {plan['epochs']} epochs on {classifier['train_images']:,} images: {accuracy} %"
            f" right of {classifier['test_images']:,} test images. {plan['seeds']} trainings of LAX"
            f" per recipe. Scored: {scored}, `alpha_min` `{run['alpha_min']:g}`, curves in steps of"
            f" `{plan['step']:g}`. {device['name']}, {device['dtype'].removeprefix('torch.')},"
            f" torch {run['versions']['torch']}, commit `{run['commit'][:9]}`{minutes}."
        )

    def table(self, table: str) -> str:
        """Our rows, the paper's under each."""
        rows = self.rows(table)
        printed = TABLES[rows.name].printed
        trust = {k: v for k, v in TRUST.items() if k in rows.frame}
        cost = rows.facts.get("cost", {})
        heads = [
            "method",
            *COLUMNS.values(),
            "±",
            "leak",
            *trust.values(),
            *["passes"] * bool(cost),
        ]
        lines = [*head_lines(heads, numbers_from=1)]
        for method in [name for name in TITLES if name in rows.methods()]:
            cells = [TITLES[method], *(self.ledger.mean(rows, method, name) for name in COLUMNS)]
            cells.append(self.ledger.half(rows, method, MSI))
            cells.append(self.ledger.ratio(rows, method))
            cells += [self.ledger.mean(rows, method, name, digits=2) for name in trust]
            if cost:
                cells.append(self.ledger.fact(rows, "cost", rows.trainings(method)[0]))
            lines.append(line(cells))
            theirs = "lax" if method == "lax-paper" else method
            if theirs in printed:
                cells = [f"*{self.ledger.paper(rows.name, theirs, name)}*" for name in COLUMNS]
                lines.append(line(["*paper*", *cells, *[""] * (len(heads) - len(cells) - 1)]))
        return "\n".join(lines)

    def tests(self, table: str) -> str:
        """LAX against every other method, paired, with its trainings."""
        rows = self.rows(table)
        lax = lax_of(rows)
        others = [name for name in TITLES if name in rows.methods() and name != lax]
        lines = [*head_lines([f"MSI of {TITLES[lax]} less that of", "difference"], numbers_from=1)]
        lines += [
            line([TITLES[name], self.ledger.difference(rows, lax, name, MSI)]) for name in others
        ]
        return "\n".join([*lines, "", *self._trainings(rows)])

    def _trainings(self, rows: Rows) -> list[str]:
        parts = []
        for stem in [name for name in TITLES if len(rows.trainings(name)) > 1]:
            names = rows.trainings(stem)
            means = [self.ledger.training(rows, name, MSI) for name in names]
            parts.append(f"{TITLES[stem]} {', '.join(means)}")
        return [f"MSI of each training: {'; '.join(parts)}."] if parts else []

    def against(self) -> str:
        """The paper's MSI and ours, with the networks; no ranking."""
        heads = ["table", "our network", "best CAM", "LAX `paper`", "LAX", "the paper's network"]
        heads += ["its best CAM", "its LAX"]
        lines = [*head_lines(heads, numbers_from=2)]
        for rows in self.complete():
            table = rows.name
            cams = [name for name in TABLES[table].printed if name != "lax"]
            best = max(cams, key=lambda name: TABLES[table].printed[name][MSI])
            cells = [TABLES[table].title, network_of(rows)]
            cells += [self.estimate(rows, best_cam(rows)), self.estimate(rows, "lax-paper")]
            cells += [self.estimate(rows, lax_of(rows)), PAPERS_NETWORKS[table]]
            cells += [self.ledger.paper(table, name, MSI) for name in (best, "lax")]
            lines.append(line(cells))
        return "\n".join(lines)

    def figure(self, table: str) -> str:
        """A picture of MSI with intervals, which `draw` makes."""
        return f"![MSI of all methods with intervals, {table}](../results/{table}/msi.png)"

    # ImageNet

    def networks(self, table: str) -> str:
        """The table of each network: every map in three ways, then the methods that search."""
        rows = self.rows(table)
        parts = []
        for network, facts in rows.facts["networks"].items():
            right = self.ledger.fact(rows, "networks", network, "right", percent=True)
            parts += [
                f"### ImageNet, {NETWORKS[network]}",
                f"{facts['n']:,} photographs; the network is right about {right} % of them.",
                self._ways(rows, network, ("as-is", "common", "fitted")),
                "Methods that search, with their usual passes, and with those of the fitted"
                " Grad-CAM:",
                self._ways(rows, network, ("few", "equal")),
            ]
        return "\n\n".join(parts)

    def _ways(self, rows: Rows, network: str, ways: Sequence[str]) -> str:
        heads = ["map", "way", *IMAGENET_COLUMNS.values(), "passes"]
        lines = [*head_lines(heads, numbers_from=2)]
        passes: Mapping[str, Any] = rows.facts["networks"][network]["steps"][f"{network}-passes"]
        for way in ways:
            where = {"network": network, "way": way}
            for method in rows.methods(where):
                cells = [f"`{method}`", WAYS[way]]
                for column in IMAGENET_COLUMNS:
                    one = self.ledger.estimate if column == MSI else self.ledger.mean
                    cells.append(one(rows, method, column, where, digits=2))
                kind = "fitted" if way == "fitted" else "drawn"
                name = method if method in passes[kind] else f"{method}-0"
                path = ("networks", network, "steps", f"{network}-passes", kind, name)
                cells.append(self.ledger.fact(rows, *path) if name in passes[kind] else "-")
                lines.append(line(cells))
        return "\n".join(lines)

    # Beside published tables

    def rise(self, table: str) -> str:
        """RISE's protocol: our rows, and what was published."""
        rows = self.rows(table)
        network = NETWORKS[rows.facts["network"]]
        lines = [*head_lines([f"map, {network}", "deletion ↓", "insertion ↑"], numbers_from=1)]
        for method in rows.methods():
            cells = [f"`{method}`"]
            cells += [
                self.ledger.estimate(rows, method, one, digits=4)
                for one in ("deletion", "insertion")
            ]
            lines.append(line(cells))
        published = rows.facts["published"]
        for place, classes in enumerate(("0 to 99", "100 to 199")):
            cells = [f"*RISE, published, classes {classes}*"]
            for name in ("deletion", "insertion"):
                cells.append(f"*{self.ledger.published(f'{published[name][place]:.4f}', 'RISE')}*")
            lines.append(line(cells))
        return "\n".join(lines)

    def torchcam(self, table: str) -> str:
        """What torchcam and Sufficit say of the same maps, and the largest difference."""
        rows = self.rows(table)
        columns = (
            "average_drop",
            "increase_in_confidence",
            "deletion_percent",
            "insertion_percent",
        )
        lines = [
            *head_lines(["map", "by", *(f"`{one}`" for one in columns), "`msi`"], numbers_from=2)
        ]
        for method in rows.methods():
            for by, start in (("torchcam", "torchcam_"), ("Sufficit", "")):
                cells = [f"`{method}`", by]
                cells += [self.ledger.mean(rows, method, start + one, digits=4) for one in columns]
                cells.append(self.ledger.mean(rows, method, MSI) if not start else "")
                lines.append(line(cells))
        largest = ceiling(max(rows.facts["largest_difference"].values()))
        said = (
            f"The largest difference on any of {rows.facts['n']} photographs is below `{largest}`."
        )
        return "\n".join([*lines, "", said])


def ceiling(value: float) -> str:
    """Return the power of ten above a value.

    >>> ceiling(6.6e-7), ceiling(0.0)
    ('1e-06', '1e-12')
    """
    power = -12
    while 10.0**power < value:
        power += 1
    return f"{10.0**power:g}"


def line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def head_lines(heads: Sequence[str], *, numbers_from: int) -> tuple[str, str]:
    """Return the heads of a table and the line below."""
    marks = ["---"] * numbers_from + ["---:"] * (len(heads) - numbers_from)
    return line(heads), f"|{'|'.join(marks)}|"


def anchor(rows: Rows, title: str) -> str:
    """Return the anchor of a table's section."""
    heading = TABLES[rows.name].title if rows.name in TABLES else title
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def network_of(rows: Rows) -> str:
    """Return our network in words, with what its weights were before."""
    plan = rows.facts["config"]
    name = plan.get("network") or plan["model"]
    start = "random weights" if plan["weights"] == "none" else "ImageNet weights"
    return f"{NETWORKS.get(name, name)} from {start}"


def best_cam(rows: Rows, **where: str) -> str:
    """Return the CAM with the highest mean MSI."""
    known = [name for name in (*CAMS, "rollout") if name in rows.methods(where)]
    return max(known, key=lambda name: rows.values(name, MSI, where).mean())


def lax_of(rows: Rows, **where: str) -> str:
    """Return the name of LAX by its default recipe."""
    return next(name for name in LAX if name in rows.methods(where))


def draw(rows: Rows, path: Path) -> None:
    """Draw MSI of all methods with intervals, the zero line, and MSI with the twin."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in TITLES if name in rows.methods()]
    names.sort(key=lambda name: rows.values(name, MSI).mean())
    figure, axes = plt.subplots(figsize=(7, 0.32 * len(names) + 1))
    for column, marker, label in ((MSI, "o", "model"), ("msi_twin", "D", "twin")):
        found = [rows.values(name, column) for name in names]
        places = [place for place, one in enumerate(found) if not one.empty]
        if not places:
            continue
        means = [found[place].mean() for place in places]
        halves = [half_width(found[place].to_numpy()) for place in places]
        hollow = "white" if column == "msi_twin" else None
        axes.errorbar(
            means, places, xerr=halves, fmt=marker, label=label, color="#1f5a8a",
            markerfacecolor=hollow, markersize=5, capsize=2,
        )  # fmt: skip
    if "everything" in names:
        axes.axvline(rows.values("everything", MSI).mean(), color="#999999", linewidth=0.8)
    axes.set_yticks(range(len(names)), [TITLES[name] for name in names])
    axes.set_xlabel("MSI, 95 % interval over images; the line is `everything`")
    axes.legend(frameon=False, loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


PAGE_PLACES: dict[str, Callable[[Page], str]] = {
    "first": Page.first,
    "commits": Page.commits,
    "fails": Page.fails,
    "against": Page.against,
}
PLACES: dict[str, Callable[..., str]] = {
    "setup": Page.setup,
    "table": Page.table,
    "tests": Page.tests,
    "figure": Page.figure,
    "networks": Page.networks,
    "rise": Page.rise,
    "torchcam": Page.torchcam,
}


def page(results: Path, template: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the page and its claims."""
    made = Page(results)
    return made.filled(template), made.ledger.claims


def readme_part(results: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the first table for README, and its claims."""
    made = Page(results)
    text = made.first().replace("](#", "](docs/results.md#")
    return f"{README_START}\n\n{text}\n\n{README_END}", made.ledger.claims


def in_readme(text: str, part: str) -> str:
    """Return README with the first table, if it has a place for it."""
    place = re.escape(README_START) + r".*?" + re.escape(README_END)
    return re.sub(place, lambda _: part, text, flags=re.DOTALL)


def main(results: Path, out: Path, readme: Path | None) -> None:
    """Fill the template, draw the figures, and write the claims."""
    text, claims = page(results, TEMPLATE.read_text())
    part, own = readme_part(results)
    out.write_text(text)
    stored = (("page", claims), ("readme", own))
    lines = [f'"{name}":[\n' + ",\n".join(map(json.dumps, some)) + "\n]" for name, some in stored]
    (results / CLAIMS).write_text("{" + ",\n".join(lines) + "}\n")
    if readme is not None:
        readme.write_text(in_readme(readme.read_text(), part))
    for table in TABLES:
        rows = Rows(results / table)
        if rows.is_complete:
            draw(rows, results / table / "msi.png")
    print(f"written: {out}")


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:3]]
    if given:
        main(given[0], given[1], None)
    else:
        main(ROOT / "results", ROOT / "docs" / "results.md", ROOT / "README.md")
