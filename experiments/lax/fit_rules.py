"""Compare rules of the fit from saved answers; no network is asked.

    python experiments/lax/fit_rules.py FOLDER --part choose [--out results/fit-rules-choose.json]

Which fills are asked, and whether a region must keep half of the whole image's probability.
"""

import argparse
import json
from pathlib import Path

import measure
import numpy as np
from diagnose import rounded

RULES = {
    "black": (("black",), 0.0),
    "black+blur": (("black", "blur"), 0.0),
    "black+blur, half the confidence": (("black", "blur"), 0.5),
    "black+noise": (("black", "noise"), 0.0),
    "blur+noise": (("blur", "noise"), 0.0),
    "black+blur+noise": (("black", "blur", "noise"), 0.0),
    "black+blur+noise, half the confidence": (("black", "blur", "noise"), 0.5),
    "black+blur+mean+noise": (("black", "blur", "mean", "noise"), 0.0),
}


def rows_of(path: Path, part: str) -> list[dict[str, object]]:
    """Return a row per map and rule for the answers in one file."""
    arrays = dict(np.load(path))
    prefixes = sorted(
        {"/".join(key.split("/")[:-2]) for key in arrays if key.endswith("/black/kept")}
    )
    rows = []
    for prefix in prefixes:
        if not prefix.endswith("/" + part):
            continue
        answers = measure.Answers.read(arrays, prefix)
        for name, (asked, share) in RULES.items():
            if share and not answers.kept_p:
                continue
            chosen = measure.fit(answers, asked, share)
            scores = {fill: measure.msi_at(answers, fill, chosen) for fill in answers.kept}
            means = {fill: score.mean().item() for fill, score in scores.items()}
            rows.append(
                {
                    "map": prefix,
                    "rule": name,
                    "n": len(chosen),
                    "forwards": 48 * len(asked),
                    "size": measure.size_at(chosen).mean().item(),
                    "found": (chosen < len(measure.SIZES)).double().mean().item(),
                    "msi": means,
                    "not asked": {fill: mean for fill, mean in means.items() if fill not in asked},
                    "mean of five": sum(means.values()) / len(means),
                    "worst but patches": min(
                        mean for fill, mean in means.items() if fill != "patches"
                    ),
                }
            )
    return rows


def main() -> None:
    """Print a row per map and rule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", default="choose")
    parser.add_argument("--maps", default="gradcam,center,E2")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for path in sorted(args.folder.glob("*.npz")):
        rows += [
            row
            for row in rows_of(path, args.part)
            if row["map"].split("/")[1] in args.maps.split(",")
        ]
    for row in rows:
        cells = "  ".join(f"{fill} {value:.3f}" for fill, value in sorted(row["msi"].items()))
        print(
            f"{row['map']:34} {row['rule']:38} size {row['size']:.2f}  {cells}",
            f"mean {row['mean of five']:.3f} worst {row['worst but patches']:.3f}",
        )
    if args.out:
        args.out.write_text(json.dumps(rounded(rows), indent=1))


if __name__ == "__main__":
    main()
