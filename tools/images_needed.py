"""How many images it takes to tell methods apart: MSI of five methods over more and more digits.

python tools/images_needed.py
"""

import torch

from sufficit import Classifier, evaluate, explain_all
from sufficit.data.digits import synthetic_digits
from sufficit.explainers import CAMS
from sufficit.statistics import Standing, compare_values

COUNTS = (8, 16, 32, 64, 128, 256)


def values(n: int) -> dict[str, torch.Tensor]:
    """MSI of every method on the same pictures: each [n]."""
    digits, classifier = synthetic_digits(n), Classifier.load("sufficit:digits")
    maps = explain_all(classifier, digits.images, digits.labels, CAMS)
    return {
        name: evaluate(classifier, digits.images, found, digits.labels, columns=["msi"]).msi
        for name, found in maps.items()
    }


def row(standing: Standing, first: str, second: str) -> str:
    """One pair at one number of images, the wanted method first."""
    pair = next(p for p in standing.pairs if {p.first, p.second} == {first, second})
    sign = 1 if pair.first == first else -1
    low, high = sorted((sign * pair.low, sign * pair.high))
    shown = f"{sign * pair.difference:.3f} | {low:.2f} .. {high:.2f} | {pair.p_corrected:.4f}"
    return f"| {first} - {second} | {pair.n} | {shown} |"


def main() -> None:
    """Print the table of the docs, and how much the differences vary from image to image."""
    found = values(max(COUNTS))
    pairs = (("kpca-cam", "gradcam"), ("kpca-cam", "layercam"), ("layercam", "gradcam++"))
    print("| pair | images | difference | 95 % interval | corrected p |\n|---|---:|---:|---:|---:|")
    standings = [compare_values({k: v[:n] for k, v in found.items()}) for n in COUNTS]
    for first, second in pairs:
        for standing in standings:
            print(row(standing, first, second))
    for first, second in pairs:
        print(f"{first} - {second}: deviation {(found[first] - found[second]).std():.3f}")
    for standing in standings:
        alike = ", ".join(standing.not_different) or "none"
        print(f"{standing.n} images: {standing.best}; not significantly different: {alike}")


if __name__ == "__main__":
    main()
