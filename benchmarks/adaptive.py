"""What adaptive curves save and what they miss: calls, and errors against the exact curves.

OMP_NUM_THREADS=1 python benchmarks/adaptive.py --out benchmarks/results/adaptive-cpu.json
python benchmarks/adaptive.py --device cuda --images 2000
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from sufficit import Classifier, Lax, Scores, evaluate, explain
from sufficit.data.digits import synthetic_digits
from sufficit.provenance import provenance


def errors(exact: Scores, found: Scores) -> dict[str, dict[str, float]]:
    """By column, the error of the mean, and the mean and largest error of an image."""
    apart = {name: (found[name] - values).abs() for name, values in exact.columns.items()}
    return {
        name: {
            "of_the_mean": abs(float((found[name] - exact[name]).mean())),
            "per_image_mean": float(distance.mean()),
            "per_image_largest": float(distance.max()),
        }
        for name, distance in apart.items()
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--images", type=int, default=60)
    words.add_argument("--device", default="cpu")
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    digits, classifier = synthetic_digits(asked.images), Classifier.load("sufficit:digits")
    classifier.to(asked.device)
    results = []
    for method in ("lax", "gradcam"):
        how = Lax.from_pretrained("sufficit:digits") if method == "lax" else method
        heatmaps = explain(classifier, digits.images, digits.labels, method=how)
        for score in ("accuracy", "confidence"):
            exact, found = (
                evaluate(
                    classifier,
                    digits.images,
                    heatmaps,
                    digits.labels,
                    score=score,  # type: ignore[arg-type]
                    calls=calls,  # type: ignore[arg-type]
                )
                for calls in ("exact", "adaptive")
            )
            row = {
                "method": method,
                "score": score,
                "images": asked.images,
                "calls_exact": float(exact.calls.double().mean()),
                "calls": float(found.calls.double().mean()),
                "errors": errors(exact, found),
            }
            results.append(row)
            worst = {
                kind: max(one[kind] for one in row["errors"].values())  # type: ignore[attr-defined]
                for kind in ("of_the_mean", "per_image_mean", "per_image_largest")
            }
            base = row["errors"]["base_score"]  # type: ignore[index]
            print(method, score, row["calls_exact"], row["calls"], "base", base, "any", worst)
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, classifier.device, torch.float32)
        asked.out.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
