"""What sampled curves cost in certainty: standard errors of exact and sampled scores side by side.

    OMP_NUM_THREADS=1 python benchmarks/sampled.py --out benchmarks/results/sampled-cpu.json
    python benchmarks/sampled.py --device cuda --images 2000 --search 500

Every mask of synthetic digits is asked once. The sampling is then replayed on the predictions with
many seeds: the standard error of a mean over the images, and how far it is from the exact mean.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bands import band_probe
from sufficit import Classifier, Lax, explain
from sufficit.data.digits import synthetic_digits
from sufficit.evaluation import batch_of
from sufficit.perturbation.predictions import Predictions
from sufficit.probes.band import BandProbe
from sufficit.provenance import provenance

CALLS = (10, 18, 26, 50, 100)
SEARCH_CALLS = (26, 50, 100, 200)
PICKED = ("named", "confidences")


def replayed(predictions: Predictions, probe: BandProbe, seed: int) -> Predictions:
    """What a probe with few calls would have been answered, from the predictions of all masks."""
    sampling = probe.drawing
    assert sampling is not None
    drawn = sampling.draw([str(i) for i in range(len(predictions.targets))], seed)
    drawn = torch.nn.functional.pad(drawn + 1, (1, 0))  # the whole image comes first
    counts = torch.nn.functional.pad(sampling.counts, (1, 0), value=1.0)
    picked = {part: getattr(predictions, part).gather(1, drawn.long()) for part in PICKED}
    calls = torch.tensor([len(row.unique()) for row in drawn])
    return replace(predictions, drawn=drawn, counts=counts, calls=calls, **picked)


def errors(predictions: Predictions, probe: BandProbe, draws: int) -> dict[str, Any]:
    """Standard errors of the exact and of the sampled mean, and the rms error of the latter."""
    exact, n = probe.values(predictions), len(predictions.targets)
    spread, error, calls = dict.fromkeys(exact, 0.0), dict.fromkeys(exact, 0.0), 0.0
    for seed in range(draws):
        found = replayed(predictions, probe, seed)
        calls += float(found.calls.double().mean()) / draws
        for name, values in probe.values(found).items():
            spread[name] += float(values.var()) / draws
            error[name] += float(values.mean() - exact[name].mean()) ** 2 / draws
    rows = {
        name: {
            "exact": float(values.std()) / n**0.5,
            "sampled": (spread[name] / n) ** 0.5,
            "rms_error": error[name] ** 0.5,
        }
        for name, values in exact.items()
    }
    return {"calls": probe.most, "asked": calls, "standard_errors": rows}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--images", type=int, default=150)
    words.add_argument("--search", type=int, default=40, help="images with every mask of a search")
    words.add_argument("--draws", type=int, default=100)
    words.add_argument("--device", default="cpu")
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    digits, classifier = synthetic_digits(asked.images), Classifier.load("sufficit:digits")
    classifier.to(asked.device)
    given = (classifier, digits.images, digits.labels)
    maps = {
        "lax": explain(*given, method=Lax.from_pretrained("sufficit:digits")),
        "gradcam": explain(*given, method="gradcam"),
    }
    results: list[dict[str, Any]] = []
    for alpha_min, n, budgets, columns in (
        (0.5, asked.images, CALLS, None),
        ("search", asked.search, SEARCH_CALLS, ["msi"]),
    ):
        for method, heatmaps in maps.items():
            probe = band_probe(classifier, alpha_min=alpha_min, columns=columns)
            batch = batch_of(classifier, digits.images[:n], digits.labels[:n])
            found = probe.answers(batch, {method: heatmaps[:n]})
            masks = len(probe.bands) + 1
            print(f"{method}, alpha_min {alpha_min}, {n} images, {masks} masks", flush=True)
            for score in ("accuracy", "confidence"):
                for calls in budgets:
                    few = band_probe(
                        classifier, alpha_min=alpha_min, score=score, columns=columns, calls=calls
                    )
                    row = errors(found, few, asked.draws)
                    about = {"method": method, "alpha_min": alpha_min, "score": score, "images": n}
                    exact_calls = float(found.calls.double().mean())
                    results.append(about | {"asked_exact": exact_calls} | row)
                    ratios = {
                        name: round(one["sampled"] / max(one["exact"], 1e-12), 3)
                        for name, one in row["standard_errors"].items()
                    }
                    print(f"  {score}, {calls} calls: standard error x", ratios, flush=True)
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, classifier.device, torch.float32)
        asked.out.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
