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
from torch import Tensor

from sufficit import Classifier, Lax, explain
from sufficit.data.digits import synthetic_digits
from sufficit.metrics.plan import Plan, ask, make_plan
from sufficit.metrics.scores import read
from sufficit.perturbation.predictions import Predictions
from sufficit.provenance import provenance

CALLS = (10, 18, 26, 50, 100)
SEARCH_CALLS = (26, 50, 100, 200)
PICKED = ("named", "confidences")


def replayed(predictions: Predictions, plan: Plan, seed: int) -> Predictions:
    """What `ask` would have returned for a plan with few calls, from the predictions of all."""
    assert plan.sampling is not None
    assert plan.asks == predictions.bands
    drawn = plan.sampling.draw([str(i) for i in range(len(predictions.targets))], seed)
    picked = {part: getattr(predictions, part).gather(1, drawn.long()) for part in PICKED}
    calls = torch.tensor([len(row.unique()) for row in drawn])
    return replace(predictions, drawn=drawn, counts=plan.sampling.counts, calls=calls, **picked)


def columns_of(predictions: Predictions, plan: Plan) -> dict[str, Tensor]:
    """The columns, or MSI at each alpha_min of a search: each [N]."""
    scores = read({"": predictions}, plan)
    if scores.search is None:
        return scores.columns
    names = (f"msi at {alpha:g}" for alpha in scores.search.alphas)
    return dict(zip(names, scores.search.msi.T, strict=True))


def errors(predictions: Predictions, plan: Plan, draws: int) -> dict[str, Any]:
    """Standard errors of the exact and of the sampled mean, and the rms error of the latter."""
    exact, n = columns_of(predictions, replace(plan, calls=None)), len(predictions.targets)
    spread, error, calls = dict.fromkeys(exact, 0.0), dict.fromkeys(exact, 0.0), 0.0
    for seed in range(draws):
        found = replayed(predictions, plan, seed)
        calls += float(found.calls.double().mean()) / draws
        for name, values in columns_of(found, plan).items():
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
    return {"calls": plan.calls, "asked": calls, "standard_errors": rows}


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
        plan = make_plan(alpha_min, columns=columns)  # type: ignore[arg-type]
        for method, heatmaps in maps.items():
            found = ask(classifier, digits.images[:n], heatmaps[:n], digits.labels[:n], plan)
            print(
                f"{method}, alpha_min {alpha_min}, {n} images, {len(plan.asks)} masks", flush=True
            )
            for score in ("accuracy", "confidence"):
                for calls in budgets:
                    few = make_plan(alpha_min, score, columns=columns, calls=calls)  # type: ignore[arg-type]
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
