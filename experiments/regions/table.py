"""Print the tables of worth.py from its rows, as Markdown: python table.py FOLDER

`+-` is half a 95 % interval over photographs. Differences are paired: each map against Grad-CAM
treated alike, on the same photographs.
"""

import sys
from pathlib import Path

import numpy as np
import pandas

FILLS = ("black", "blur", "mean", "noise", "patches")
WAYS = ("whole image", "as it is", "at one common size", "fitted", "fitted, black and blur")
BASE = "gradcam"
COSTLY = ("rise", "extremal-perturbation")


def number(value: float, sign: str = "") -> str:
    """A number with three digits and without a zero before the point.

    >>> number(0.5), number(-0.25, "+"), number(1)
    ('.500', '-.250', '1.000')
    """
    text = f"{value:{sign}.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def half_interval(values: np.ndarray) -> float:
    """Half the width of the 95 % interval of a mean, NaN left out.

    >>> round(half_interval(np.array([0.0, 1.0, 0.0, 1.0])), 3)
    0.566
    """
    known = values[~np.isnan(values)]
    return float(1.96 * known.std(ddof=1) / len(known) ** 0.5)


def mean_of(values: pandas.Series) -> str:
    """A mean with its interval, NaN left out."""
    return f"{number(values.mean())} +-{number(half_interval(values.to_numpy(float)))}"


def paired(rows: pandas.DataFrame, base: pandas.DataFrame, column: str) -> str:
    """The mean difference of two maps on the photographs that both have, with its interval."""
    both = rows.set_index("image")[column] - base.set_index("image")[column]
    known = both.dropna().to_numpy(float)
    return f"{number(known.mean(), '+')} +-{number(half_interval(known))}"


def with_mean(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Rows with the mean of MSI over the five fills."""
    return rows.assign(msi_all=rows[[f"msi_{fill}" for fill in FILLS]].mean(axis=1))


def line(cells: list[str]) -> str:
    """One row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def worth(rows: pandas.DataFrame) -> list[str]:
    """Every map in every way: MSI by fill, the difference, share, lift, pointing, passes."""
    heads = ["map", "treated", "share", *FILLS, "Grad-CAM's difference, black", "mean of the five"]
    heads += ["lift", "pointing", "passes", "a part suffices"]
    found = [line(heads), "|" + "---|" * 2 + "---:|" * (len(heads) - 2)]
    for way in WAYS:
        of_way = rows[rows["way"] == way]
        base = of_way[of_way["map"] == BASE]
        for name in of_way["map"].unique():
            if name in COSTLY:
                continue
            own = of_way[of_way["map"] == name]
            compared = name != BASE and len(base) > 0
            cells = [name, way, f"{own['share'].mean():.2f}"]
            cells += [mean_of(own[f"msi_{fill}"]) for fill in FILLS]
            cells += [
                paired(own, base, column) if compared else "-"
                for column in ("msi_black", "msi_all")
            ]
            has_lift = own["leak_lift"].notna().any()
            cells += [mean_of(own["leak_lift"]) if has_lift else "-"]
            cells += [number(own["pointing"].mean())]
            enough = own["enough"].mean() if "enough" in own else np.nan
            cells += [f"{own['passes'].mean():.1f}", "-" if np.isnan(enough) else f"{enough:.1%}"]
            found.append(line(cells))
    return found


def at_equal_cost(rows: pandas.DataFrame) -> list[str]:
    """The costly methods as they are, against Grad-CAM fitted with as many forward passes."""
    names = [name for name in COSTLY if (rows["map"] == name).any()]
    if not names:
        return []
    heads = ["map", "treated", "photographs", "passes", "share", *FILLS]
    heads += ["against Grad-CAM as it is, black", "against it fitted, black", "mean of the five"]
    found = ["", line(heads), "|" + "---|" * 2 + "---:|" * (len(heads) - 2)]
    of_base = rows[rows["map"] == BASE]
    plain, fitted = (of_base[of_base["way"] == way] for way in ("as it is", "fitted"))
    images = set(rows[rows["map"] == names[0]]["image"])
    shown = {(name, "as it is"): rows[rows["map"] == name] for name in names}
    shown[BASE, "as it is"] = plain[plain["image"].isin(images)]
    shown[BASE, "fitted"] = fitted[fitted["image"].isin(images)]
    for (name, way), own in shown.items():
        cells = [name, way, str(len(own)), f"{own['passes'].mean():.1f}"]
        cells += [f"{own['share'].mean():.2f}", *(mean_of(own[f"msi_{fill}"]) for fill in FILLS)]
        if name == BASE:
            cells += ["-"] * 3
        else:
            cells += [paired(own, plain, "msi_black"), paired(own, fitted, "msi_black")]
            cells.append(paired(own, fitted, "msi_all"))
        found.append(line(cells))
    return found


def main() -> None:
    """Print the tables of every network in a folder."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python table.py FOLDER, which holds rows-NETWORK.parquet")
    paths = sorted(Path(sys.argv[1]).glob("rows-*.parquet"))
    if not paths:
        raise SystemExit(f"{sys.argv[1]} holds no rows-NETWORK.parquet: run worth.py first")
    for path in paths:
        rows = with_mean(pandas.read_parquet(path))
        sizes = rows.groupby("map")["common_size"].first().dropna()
        common = ", ".join(f"{name} {size:.2f}" for name, size in sizes.items())
        print(f"\n**{rows['network'][0]}**, {rows['image'].nunique()} photographs\n")
        print("\n".join([*worth(rows), *at_equal_cost(rows)]))
        print(f"\nCommon sizes: {common}.")


if __name__ == "__main__":
    main()
