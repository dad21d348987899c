"""The tables of these pages from the rows of measurements: no number in them is typed.

    python research/fill_tables.py

A page has places such as `<!-- measured: check cub200 -->` ... `<!-- end of measured -->`; what is
between them comes from results/ and benchmarks/results/. Where there are no rows, there is nothing.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "paper"))  # for the rows of its tables
from ledger import Rows  # found by the line above

ROOT = Path(__file__).parent.parent
RESULTS, BENCHMARKS = ROOT / "results", ROOT / "benchmarks" / "results"
PAGES = (
    "benchmarks/README.md",
    "research/check-metric.md",
    "research/comparison.md",
    "research/gaming.md",
    "research/leakage.md",
    "research/measurements.md",
)
TITLES = {  # of the methods that have another name in a table than their word
    "gradcam": "Grad-CAM",
    "gradcam++": "Grad-CAM++",
    "layercam": "Layer-CAM",
    "kpca-cam": "KPCA-CAM",
    "finer-cam": "Finer-CAM",
    "rollout": "Attention rollout",
    "lax-paper": "LAX, paper's recipe",
    "lax-robust": "LAX, robust recipe",
    "lax-crisp": "LAX, crisp recipe",
    "random": "random (control)",
    "center": "center (control)",
}
CONDITIONS = {"msi": "model, black", "msi_held_out": "model, blur (held out)", "msi_twin": "twin"}
TABLES = {
    "synthetic-mnist": "Synthetic MNIST, ResNet18",
    "cub200": "CUB-200, ResNet50",
    "cifar10": "CIFAR-10, ResNet18",
    "cifar10-vit": "CIFAR-10, DeiT-tiny",
}
CHECKED = {"synthetic-mnist": "the digit's pixels", "cub200": "the box of the bird"}
ADAPTER_SCORES = {
    "msi": "model, black",
    "msi_blur": "model, blur",
    "msi_black_twin": "twin, black",
    "msi_blur_twin": "twin, blur",
    "msi_smoothed": "smoothed map",
}
FILLS = ("", "_blur", "_noise", "_mean_fill")
GAMED = {  # of a row of results/gaming
    "model_black": "model, black",
    "model_blur": "model, blur (held out)",
    "twin_black": "twin, black",
    "twin_blur": "twin, blur",
    "mask_penalty": "area",
    "leak_ratio": "leak ratio",
    "calls": "calls per image",
    "n": "images",
}
LEAKS = {"leak": "over other images", "leak_grey": "over grey", "leak_noise": "over noise"}
LETTERS = {"C": "cifar10", "M": "synthetic-mnist"}  # of the first rounds


def reference(table: str, results: Path = RESULTS) -> str:
    """Every method of a table, best first: scores under three conditions, leakage, cost."""
    found = _read(results / "reference" / f"{table}.json")
    if "methods" not in found:
        return ""
    first = next(iter(found["methods"].values()))
    truth = [name for name in ("iou", "pointing") if name in first]
    heads = [*CONDITIONS.values(), "MSI by rank", "area", "leak / chance", *truth, "calls", "ms"]
    lines = [f"| method | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for name, one in found["methods"].items():
        cost = found.get("cost", {}).get(name, {})
        cells = [_interval(one["msi"]), *(_mean(one.get(c)) for c in [*CONDITIONS][1:])]
        cells += [_mean(one.get("msi_rank")), _mean(one["mask_penalty"])]
        cells += [_mean(one.get("leak_ratio"), 2), *(_mean(one[c], 2) for c in truth)]
        cells += [f"{cost['calls']:,.0f}", f"{1000 * cost['seconds']:.1f}"] if cost else ["-", "-"]
        lines.append(f"| {TITLES.get(name, f'`{name}`')} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _reference_words(found)])


def _reference_words(found: Mapping[str, Any]) -> str:
    """What was scored and how, and which methods failed."""
    budgets = [f"`{w}`" for n, w in found["words"].items() if ":" in w and n != "refine"]
    failed = [n for n, one in found["cost"].items() if "failed" in one]
    held = next((one for one in found["conditions"] if one["key"] == "held_out"), None)
    device = found["device"]
    fewer = f" ({held['masks']} with blur)" if held else ""
    commit = f", commit {found['commit'][:7]}" if found["commit"] else ""
    words = (
        f"{found['n']} test images, {found['calls']} masks per image and method{fewer}, alpha_min"
        f" {found['alpha_min']:g}, {device['name']}, {device['dtype'].removeprefix('torch.')}"
        f"{commit}. MSI with its 95 % interval. Calls: forward passes per"
        " image, a backward pass counted as two; ms: milliseconds per image to"
        f" explain, {found['config']['cost_images']} at a time."
    )
    if budgets:
        words += f" Smaller budgets than the defaults: {', '.join(budgets)}."
    if failed:
        words += f" Failed, and left out: {', '.join(failed)}."
    pairs = {(one["first"], one["second"]): one["spearman"] for one in found["rank_correlations"]}
    known = [("held_out", "with blur"), ("twin", "for the twin")]
    orders = [f"{w} {pairs['', k]:.2f}" for k, w in known if pairs.get(("", k)) is not None]
    return words + (f" Rank correlation with the order above: {', '.join(orders)}." * bool(orders))


def orders(results: Path = RESULTS) -> str:
    """How alike the methods' orders are under the three conditions, for every table."""
    known = {
        ("", "held_out"): "black, blur",
        ("", "twin"): "model, twin",
        ("held_out", "twin"): "blur, twin",
    }
    lines = [f"| table | methods | {' | '.join(known.values())} |", "|---|---:|---:|---:|---:|"]
    for table, title in TABLES.items():
        found = _read(results / "reference" / f"{table}.json")
        if "methods" in found:
            pairs = {(c["first"], c["second"]): c for c in found["rank_correlations"]}
            cells = [_mean({"mean": pairs[key]["spearman"]}, 2) for key in known]
            count = len(found["conditions"][0]["ranking"])
            lines.append(f"| {title} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def twins(results: Path = RESULTS) -> str:
    """Model and twin of each table: accuracy, and how far scores hang on the fill."""
    heads = ["whole test images: model", "twin", "under masks: model", "twin"]
    heads += ["MSI by fill differs, model", "twin", "order, model to twin", "best: model", "twin"]
    lines = [f"| table | {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 2)}---|---|"]
    for table, title in TABLES.items():
        found = _read(results / "twins" / f"{table}.json")
        if "methods" not in found or "twin" not in found:
            continue
        told, one = found["twin"], {c["key"]: c for c in found["conditions"]}
        right = [told["test_accuracy"][who] for who in ("model", "twin")]
        masked = [told[who]["masked_accuracy"] for who in ("original", "twin")]
        spread = [_spread(found, who) for who in ("msi", "msi_twin")]
        order = next(
            c["spearman"]
            for c in found["rank_correlations"]
            if (c["first"], c["second"]) == ("", "twin")
        )
        cells = [*(f"{v:.1%}" for v in (*right, *masked)), *(f"{v:.3f}" for v in spread)]
        cells += [
            f"{order:.2f}",
            *(TITLES.get(n, n) for n in (one[k]["ranking"][0] for k in ("", "twin"))),
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _spread(found: Mapping[str, Any], column: str) -> float:
    """The range of a method's MSI over the fills, averaged over the methods that are ranked."""
    names = found["conditions"][0]["ranking"]
    means = [[float(found["methods"][n][f"{column}{end}"]["mean"]) for end in FILLS] for n in names]
    return mean(max(one) - min(one) for one in means)


def twin_orders(table: str, results: Path = RESULTS) -> str:
    """MSI of each method with every fill, on the model and on the twin."""
    found = _read(results / "twins" / f"{table}.json")
    if "methods" not in found:
        return ""
    columns = [f"{who}{end}" for who in ("msi", "msi_twin") for end in FILLS]
    names = ("black", "blur", "noise", "mean")
    heads = [f"{who}, {fill}" for who in ("model", "twin") for fill in names]
    lines = [f"| method | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for name, one in found["methods"].items():
        cells = " | ".join(_mean(one.get(column)) for column in columns)
        lines.append(f"| {TITLES.get(name, name)} | {cells} |")
    return "\n".join(lines)


def check(table: str, results: Path = RESULTS) -> str:
    """The share of pairs that each column orders rightly, best first."""
    found = _read(results / "check" / f"{table}.json")
    if not found:
        return ""
    kinds = ("noise", "shift", "erode", "dilate")
    shares = {(one["column"], one["kind"]): one for one in found["checks"]}
    whole = {c: one["by_mean"] for (c, kind), one in shares.items() if kind == "all"}
    lines = [
        f"## {TABLES[table]}",
        "",
        f"{found['n']} test images, the truth ({CHECKED[table]}) made worse in five levels.",
        "",
        f"| column | by means | 95 % | {' | '.join(kinds)} | by image |",
        f"|---|{'---:|' * (len(kinds) + 3)}",
    ]
    for column in sorted(whole, key=lambda c: -_number(whole[c]["mean"])):
        one = whole[column]
        known = one["low"] is not None and one["high"] is not None
        ends = f"{one['low']:.2f} to {one['high']:.2f}" if known else "-"
        each = [f"{_number(shares[column, kind]['by_mean']['mean']):.2f}" for kind in kinds]
        image = f"{_number(shares[column, 'all']['by_image']['mean']):.2f}"
        lines.append(f"| `{column}` | {one['mean']:.2f} | {ends} | {' | '.join(each)} | {image} |")
    return "\n".join(lines)


def adapters(results: Path = RESULTS) -> str:
    """The adapters of results/adapters, one row each."""
    heads = ["day", "epochs", "images", *(f"MSI: {who}" for who in ADAPTER_SCORES.values())]
    heads += ["area", "leak / chance", "grid energy (smoothed)", "fragments"]
    lines = [f"| table, arm, seed | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for table, title in TABLES.items():
        for one in _read(results / "adapters" / f"{table}.json", []):
            cells = [one["time"][8:10], f"{one['config']['epochs']}"]
            cells.append(f"{one['config']['images']:,}")
            cells += [f"{one[c]:.3f}" if c in one else "-" for c in ADAPTER_SCORES]
            cells += [f"{one['mask_penalty']:.3f}", f"{one['leak_ratio']:.2f}"]
            cells += [f"{one['grid_energy']:.2f} ({one['grid_energy_smoothed']:.2f})"]
            cells += [f"{one['fragments_mean']:.2f}"]
            lines.append(f"| {title}, `{one['arm']}`, {one['seed']} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def certainty(*names: str, results: Path = BENCHMARKS) -> str:
    """What each way of scoring takes to an interval of +-0.01, by measurement."""
    heads = ["columns", "calls per image", "images", "calls", "seconds"]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for name in names:
        title, _, stem = name.partition("=")
        found = _read(results / f"certainty-{stem}.json")
        for way, one in found.get("results", {}).items():
            spent = one["all its columns"]
            cells = (
                str(len(one["columns"])), f"{one['calls_per_image']:.0f}",
                f"{spent['images']:,.0f}", f"{spent['calls']:,.0f}", f"{spent['seconds']:,.1f}",
            )  # fmt: skip
            lines.append(f"| {title.replace('_', ' ')}: {way} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def gaming(name: str, results: Path = RESULTS) -> str:
    """Methods and searched boxes, scored on a model and on its twin."""
    found = _read(results / "gaming" / f"{name}.json")
    lines = [f"| maps | {' | '.join(GAMED.values())} |", f"|---|{'---:|' * len(GAMED)}"]
    for method, row in found["rows"].items():
        cells = []
        for column in GAMED:
            if column in ("calls", "n"):
                cells.append(f"{row[column]}")
            elif column == "leak_ratio":
                cells.append(f"{row[column]:.2f}")
            else:
                half = row.get(f"{column}_half")
                cells.append(f"{row[column]:.3f}" + (f" ± {half:.2f}" if half else ""))
        lines.append(f"| {TITLES.get(method, method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def leakage(table: str, *methods: str, results: Path = RESULTS) -> str:
    """MSI and every kind of leakage of some methods of a table, with chance beside it."""
    rows = Rows(results / table)
    heads = ["MSI", "ratio", *(f"{name} | by chance" for name in LEAKS.values())]
    lines = [f"| masks | {' | '.join(heads)} |", f"|---|{'---:|' * 8}"]
    for method in methods:
        names = ("msi", *LEAKS, *(f"{column}_chance" for column in LEAKS))
        means = {name: rows.values(method, name).mean() for name in names}
        cells = [f"{means['msi']:.3f}", f"{means['leak'] / means['leak_chance']:.2f}"]
        for column in LEAKS:
            cells += [f"{means[column]:.3f}", f"{means[f'{column}_chance']:.3f}"]
        lines.append(f"| {TITLES.get(method, method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def arms(name: str, results: Path = RESULTS) -> str:
    """A row per arm of an ablation: means over its seeds, and MSI and leakage of each."""
    rows = [_renamed(row) for row in _read(results / "lax" / f"{name}.json")["rows"]]
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["arm"]), []).append(row)
    lines = ["| data | arm | seeds | base | penalty | MSI | leak | chance | ratio |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for (task, arm), found in groups.items():
        names = ("base_score", "mask_penalty", "msi", "leak", "leak_chance")
        means = {name: mean(row[name] for row in found) for name in names}
        cells = [f"{means[name]:.3f}" for name in names]
        ratio = means["leak"] / means["leak_chance"] if means["leak_chance"] else math.nan
        cells.append(f"{ratio:.2f}")
        if len(found) > 1:
            cells[2] += f" ({', '.join(format(row['msi'], '.3f') for row in found)})"
            cells[-1] += f" ({', '.join(format(row['leak_ratio'], '.2f') for row in found)})"
        lines.append(f"| {task} | {arm} | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _renamed(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row under the names of today."""
    if "task" in row:
        return row
    letter, _, arm = row["arm"].partition(" ")
    older = {"base": "base_score", "penalty": "mask_penalty", "chance": "leak_chance"}
    older |= {"ratio": "leak_ratio"}
    known = {older.get(name, name): value for name, value in row.items()}
    return known | {"task": LETTERS[letter], "arm": arm}


def _interval(one: Mapping[str, float]) -> str:
    return f"{one['mean']:.3f} ± {(one['high'] - one['low']) / 2:.2f}"


def _mean(one: Mapping[str, Any] | None, digits: int = 3) -> str:
    value = math.nan if one is None else _number(one["mean"])
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _read(path: Path, missing: Any = MappingProxyType({})) -> Any:
    return json.loads(path.read_text()) if path.exists() else missing


PLACES: dict[str, Callable[..., str]] = {
    "reference": reference,
    "twins": twins,
    "twin-orders": twin_orders,
    "check": check,
    "adapters": adapters,
    "certainty": certainty,
    "orders": orders,
    "gaming": gaming,
    "leakage": leakage,
    "arms": arms,
}


def filled(text: str) -> str:
    """The page with every place filled."""

    def fill(found: re.Match[str]) -> str:
        name, *given = found[2].split()
        if name not in PLACES:
            raise SystemExit(f"the page asks for {name!r}: known are {', '.join(PLACES)}")
        made = PLACES[name](*given)
        return "\n".join([found[1], *(["", made, ""] if made else []), found[3]])

    place = r"(<!-- measured: (.+?) -->)\n(?:.*?\n)??(<!-- end of measured -->)"
    return re.sub(place, fill, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text()))
