"""What sampled curves cost in certainty: standard errors of exact and sampled scores side by side.

    OMP_NUM_THREADS=1 python benchmarks/sampled.py --out benchmarks/results/sampled-cpu.json
    python benchmarks/sampled.py --device cuda --images 2000 --search 500

Every mask of synthetic digits is asked once. The sampling is then replayed on the predictions with
many seeds: the standard error of a mean over the images, and how far it is from the exact mean.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from sufficit import Classifier, Lax, explain
from sufficit.data.digits import synthetic_digits
from sufficit.evaluation import batch_of, schedules_for
from sufficit.metrics.columns import ALPHA_GRID, metrics_named
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.perturbation.predictions import Predictions, ScoreKind
from sufficit.probes.band import BandProbe
from sufficit.probes.standard import Scoring
from sufficit.provenance import provenance

CALLS = (10, 18, 26, 50, 100)
SEARCH_CALLS = (26, 50, 100, 200)
PICKED = ("named", "confidences")


def probe_of(
    classifier: Classifier,
    alphas: Sequence[float],
    columns: Sequence[str] | None,
    score: ScoreKind = "accuracy",
    calls: int | None = None,
) -> BandProbe:
    """The probe of the columns' bands at each alpha_min; of MSI alone it is that of a search."""
    schedules = schedules_for(alphas, score, 0.01, 0.02)
    metrics = metrics_named(columns, {}, truth=False, sampled=calls is not None)
    found = [replace(c, schedules=tuple(schedules)) for c in Scoring(metrics, schedules[0]).columns]
    return BandProbe(MaskedModel(classifier), tuple(found), most=calls)


def replayed(predictions: Predictions, few: BandProbe, seed: int) -> Predictions:
    """What a probe with few calls would have answered, from the predictions of all."""
    assert few.drawing is not None
    assert (EVERYTHING, *few.bands) == predictions.bands
    names = [str(i) for i in range(len(predictions.targets))]
    drawn = torch.nn.functional.pad(few.drawing.draw(names, seed) + 1, (1, 0))  # the whole image
    picked = {part: getattr(predictions, part).gather(1, drawn.long()) for part in PICKED}
    calls = torch.tensor([len(row.unique()) for row in drawn])
    counts = few.drawing.counts_with_whole
    return replace(predictions, drawn=drawn, counts=counts, calls=calls, **picked)


def errors(predictions: Predictions, few: BandProbe, draws: int) -> dict[str, Any]:
    """Standard errors of the exact and of the sampled mean, and the rms error of the latter."""
    exact, n = few.values(predictions), len(predictions.targets)
    spread, error, calls = dict.fromkeys(exact, 0.0), dict.fromkeys(exact, 0.0), 0.0
    for seed in range(draws):
        found = replayed(predictions, few, seed)
        calls += float(found.calls.double().mean()) / draws
        for name, values in few.values(found).items():
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
    return {"calls": few.most, "asked": calls, "standard_errors": rows}


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
    cases: list[tuple[float | str, int, Sequence[int], list[str] | None]] = [
        (0.5, asked.images, CALLS, None),
        ("search", asked.search, SEARCH_CALLS, ["msi"]),
    ]
    for alpha_min, n, budgets, columns in cases:
        alphas = ALPHA_GRID if isinstance(alpha_min, str) else [alpha_min]
        probe = probe_of(classifier, alphas, columns)
        batch = batch_of(classifier, digits.images[:n], digits.labels[:n])
        for method, heatmaps in maps.items():
            found = probe.answers(batch, {method: heatmaps[:n]})
            masks = len(found.bands)
            print(f"{method}, alpha_min {alpha_min}, {n} images, {masks} masks", flush=True)
            for score in get_args(ScoreKind):
                for calls in budgets:
                    few = probe_of(classifier, alphas, columns, score, calls)
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
