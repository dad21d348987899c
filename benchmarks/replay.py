"""Images, calls and seconds until MSI of several methods is known within 0.01, from stored rows.

    python benchmarks/replay.py rows --model MODEL --data FOLDER --device cuda --out R.npz
    python benchmarks/replay.py replay R.npz --rate 23000 --out benchmarks/results/replay.json
    python benchmarks/replay.py values ROWS.parquet --method map --column msi_black \\
        --where "way=as it is" --masks 26 --rate 19461 --compile 15 --out FILE.json
    python benchmarks/replay.py simulate --out benchmarks/results/stopping-cpu.json

`rows` asks the model every mask of every image and stores whether each answer was the target.
`replay` draws 50,000 images from them, with masks drawn anew for each, and stops where a run would:
with all masks or some, by looks that double and share the error (the rule before the one in use),
and by the rule in use. `values` does the same with the MSI that some run gave each image, from any
number of masks. Images, spread and calls are those of the rows; seconds are calls over a measured
rate. `share` is how often the interval at the end holds the mean of the rows, `all at once` is with
the error shared by the methods. `simulate` stops on made-up values whose mean is known, one method
at a time: values like MSI, a method that fails on nine images in ten, and one that fails on one in
a hundred, which narrow intervals do not see.
"""

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bands import band_probe
from compiled import classifier_of
from coverage import CASES
from sufficit import Classifier, explain_all
from sufficit.data.images import list_images
from sufficit.evaluation import batch_of
from sufficit.metrics.columns import HEADINGS
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.predictions import Predictions
from sufficit.probes.band import BandProbe
from sufficit.provenance import provenance
from sufficit.runs.job import look_sizes
from sufficit.runs.probes_of import CHECKED
from sufficit.runs.stopping import UNMET
from sufficit.sums import LEVEL, moments

METHODS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam", "random", "center")
WITHIN, IMAGES, UNIT = 0.01, 50_000, 32
BESIDES = 13 + 8  # masked images per image and method: leakage with 4 donors, the held-out fill
ONCE = 1 + 4  # per image: the whole image; five CAMs by one forward and 1.5 backward passes
Floats = npt.NDArray[np.float64]


def make_rows(asked: argparse.Namespace) -> None:
    """Ask for every mask, and store the hits."""
    classifier = classifier_of(asked.model, asked.side, asked.device)
    files = list_images(asked.data)[: asked.images]
    with ThreadPoolExecutor(8) as pool:
        images = torch.stack(list(pool.map(lambda one: one.read(classifier.view), files)))
    targets = torch.tensor([int(one.folder or 0) for one in files])
    probe = band_probe(classifier)
    hits, shares = [], []
    for place in range(0, len(images), UNIT):
        part = slice(place, place + UNIT)
        some = images[part].to(asked.device)
        maps = explain_all(classifier, some, targets[part], METHODS, seed=place, progress=False)
        batch = batch_of(classifier, some, targets[part])
        found = probe.answers(batch, maps)
        right = (found.named == found.targets[:, None]).view(len(METHODS), len(some), -1)
        hits.append(right.numpy())
        shares.append(found.shares.view(len(METHODS), len(some), -1).numpy())
        print(f"{place + len(some)} images", flush=True)
    whole = np.concatenate(hits, axis=1)
    print(f"right on {whole[0, :, 0].mean():.1%} of the whole images", flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        asked.out, hits=np.packbits(whole, axis=2), bands=whole.shape[2],
        shares=np.concatenate(shares, axis=1), model=asked.model,
    )  # fmt: skip


@dataclass
class Stored:
    """The hits of every method, image and band."""

    hits: npt.NDArray[np.bool_]  # [M,N,B]
    shares: Floats  # [M,N,S]

    @staticmethod
    def read(path: Path) -> "Stored":
        with np.load(path) as found:
            bands = int(found["bands"])
            hits = np.unpackbits(found["hits"], axis=2)[:, :, :bands].astype(bool)
            return Stored(hits, found["shares"])

    def answers(self, method: int, images: npt.NDArray[np.int64], probe: BandProbe) -> Predictions:
        """The answers for some images, as if the target were class 0."""
        hits = torch.from_numpy(self.hits[method, images])
        return Predictions(
            bands=(EVERYTHING, *probe.bands),
            named=1 - hits.to(torch.int32),
            confidences=torch.zeros(hits.shape),
            weighed=probe.sizes,
            shares=torch.from_numpy(self.shares[method, images]),
            targets=torch.zeros(len(images), dtype=torch.long),
            calls=torch.zeros(len(images), dtype=torch.long),
        )


def drawn_msi(
    stored: Stored, calls: int | None, images: npt.NDArray[np.int64], seed: int
) -> Floats:
    """MSI of every method on these images, each by masks of its own: [M,n]."""
    classifier = Classifier(torch.nn.Linear(1, 1))
    every = band_probe(classifier)
    probe = every if calls is None else band_probe(classifier, calls=calls)
    found = []
    for method in range(len(METHODS)):
        values = []
        for start in range(0, len(images), 2048):
            answers = stored.answers(method, images[start : start + 2048], every)
            if calls is not None:
                answers = sampled(answers, probe, seed, start)
            column = next(one for one in probe.columns if one.name == "msi")
            values.append(column.values(answers)["msi"].numpy())
        found.append(np.concatenate(values))
    return np.stack(found)


def sampled(answers: Predictions, probe: BandProbe, seed: int, start: int) -> Predictions:
    """What a probe with few calls would have been answered."""
    drawing = probe.drawing
    assert drawing is not None
    names = [str(start + k) for k in range(len(answers.targets))]
    drawn = torch.nn.functional.pad(drawing.draw(names, seed) + 1, (1, 0)).long()
    return replace(
        answers,
        named=answers.named.gather(1, drawn),
        confidences=answers.confidences.gather(1, drawn),
        drawn=drawn,
        counts=drawing.counts_with_whole,
    )


# The rules


def widths(values: Floats, level: float, unmet: int = 0) -> tuple[Floats, Floats]:
    """The ends of the intervals of all methods: [M,n] -> [M], [M]."""
    ends = np.repeat(HEADINGS["msi"].limits, unmet)
    known = np.concatenate([values, np.broadcast_to(ends, (len(values), len(ends)))], axis=1).T
    return moments(known, np.ones_like(known, np.int64)).interval(level)


def sequential(
    values: Floats, within: float, level: float = LEVEL, unmet: int = UNMET
) -> tuple[int, Floats, Floats]:
    """Images until the rule in use stops, and the intervals there."""
    total = values.shape[1]
    for units in look_sizes(total, UNIT):
        n = min(units * UNIT, total)
        low, high = widths(values[:, :n], level, unmet)
        if (high - low).max() / 2 <= within:
            break
    return n, *widths(values[:, :n], level)


def doubling(values: Floats, within: float, level: float = LEVEL) -> tuple[int, Floats, Floats]:
    """The same by looks at 200, 400, 800, ... images that share the error."""
    total = values.shape[1]
    counts = [200 * 2**k for k in range(20) if 200 * 2**k < total] + [total]
    for count in counts:
        n = min(-(-count // UNIT) * UNIT, total)
        low, high = widths(values[:, :n], level / len(counts))
        if (high - low).max() / 2 <= within:
            break
    return n, low, high


RULES: dict[str, Callable[[Floats, float, float], tuple[int, Floats, Floats]]] = {
    "doubling looks": doubling,
    "sequential": sequential,
}


def replay(asked: argparse.Namespace) -> dict[str, Any]:
    """Every rule with every number of masks."""
    stored = Stored.read(asked.rows)
    count = stored.hits.shape[1]
    truth = drawn_msi(stored, None, np.arange(count), 0).mean(1)
    least = band_probe(Classifier(torch.nn.Linear(1, 1)), calls=26).least
    bands = stored.hits.shape[2]
    results: dict[str, Any] = {"images of the rows": count, "least": least, "masks": bands}
    for calls in (None, 50, 26, least):
        each = bands if calls is None else calls
        runs: dict[str, list[tuple[int, npt.NDArray[np.bool_]]]] = {}
        spread: list[Floats] = []
        for seed in range(asked.draws):
            random = np.random.default_rng(seed)
            most = IMAGES if asked.most is None else asked.most
            values = drawn_msi(stored, calls, random.integers(0, count, most), seed)
            spread.append(values.std(axis=1, ddof=1))
            for rule, stop in RULES.items():
                for words, level in (("each", LEVEL), ("all at once", LEVEL / len(METHODS))):
                    n, low, high = stop(values, WITHIN, level)
                    inside = (low <= truth) & (truth <= high)
                    runs.setdefault(f"{rule}, {words}", []).append((n, inside))
        key = "exact" if calls is None else str(calls)
        results[key] = {"std": np.mean(spread, axis=0).tolist()}
        for name, found in runs.items():
            n = float(np.mean([images for images, _ in found]))
            inside = np.stack([one for _, one in found])
            scoring = n * len(METHODS) * each
            whole = scoring + n * (len(METHODS) * BESIDES + ONCE)
            results[key][name] = {
                "images": n,
                "calls": scoring,
                "seconds": scoring / asked.rate,
                "seconds_with_checks": whole / asked.rate,
                "share": float(inside.mean()),
                "share_all": float(inside.all(1).mean()),
            }
            print(
                f"{key:>6} masks, {name:30} {n:8,.0f} images {scoring:12,.0f} calls"
                f" {scoring / asked.rate:7.1f} s {whole / asked.rate:7.1f} s with checks,"
                f" holds {inside.mean():.3f}, all {inside.all(1).mean():.3f}",
                flush=True,
            )
    return results


def values(asked: argparse.Namespace) -> dict[str, Any]:
    """Every rule, on 50,000 images drawn from the rows of a run."""
    import pandas

    rows = pandas.read_parquet(asked.rows)
    for one in asked.where:
        name, _, wanted = one.partition("=")
        rows = rows[rows[name] == wanted]
    known = rows.pivot(index=asked.method, columns="image", values=asked.column).dropna(axis=1)
    stored = known.to_numpy()
    methods, count = stored.shape
    truth = stored.mean(1)
    results: dict[str, Any] = {
        "methods": [*known.index],
        "images of the rows": count,
        "std": stored.std(1, ddof=1).tolist(),
        "masks": asked.masks,
        "rate": asked.rate,
    }
    for words, level in (("each", LEVEL), ("all at once", LEVEL / methods)):
        for rule, stop in RULES.items():
            ends = []
            for seed in range(asked.draws):
                drawn = np.random.default_rng(seed).integers(0, count, IMAGES)
                n, low, high = stop(stored[:, drawn], WITHIN, level)
                ends.append((n, (low <= truth) & (truth <= high)))
            n = float(np.mean([images for images, _ in ends]))
            inside = np.stack([one for _, one in ends])
            scoring = n * methods * asked.masks
            # These checks look at no more images than that, since they were limited.
            checked = min(n, CHECKED) if rule == "sequential" else n
            whole = scoring + checked * methods * BESIDES + n * ONCE
            results[f"{rule}, {words}"] = {
                "images": n,
                "calls": scoring,
                "calls_with_checks": whole,
                "seconds": asked.compile + scoring / asked.rate,
                "seconds_with_checks": asked.compile + whole / asked.rate,
                "share": float(inside.mean()),
                "share_all": float(inside.all(1).mean()),
            }
            print(f"{rule}, {words}: {results[f'{rule}, {words}']}", flush=True)
    return results


def failing(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """One image in 100 fails."""
    return np.where(random.random(shape) < 0.01, -1.0, random.normal(0.5, 0.1, shape))


def simulate(asked: argparse.Namespace) -> dict[str, Any]:
    """Images of every rule, and how often its interval holds the known mean."""
    cases = {name: CASES[name] for name in ("MSI", "few decide")} | {"failing": (failing, 0.485)}
    rules = RULES | {"sequential, nothing unmet": partial(sequential, unmet=0)}
    results: dict[str, Any] = {}
    for name, (draw, truth) in cases.items():
        for within in (0.01, 0.02, 0.03):
            random = np.random.default_rng(0)
            found: dict[str, list[tuple[int, bool]]] = {rule: [] for rule in rules}
            for _ in range(asked.trials):
                values = draw(random, (1, IMAGES))
                for rule, stop in rules.items():
                    n, low, high = stop(values, within, LEVEL)
                    found[rule].append((n, bool(low[0] <= truth <= high[0])))
            rows = {
                rule: {"images": float(np.mean([n for n, _ in ends])),
                       "share": float(np.mean([inside for _, inside in ends]))}
                for rule, ends in found.items()
            }  # fmt: skip
            results[f"{name}, {within}"] = rows
            print(f"{name}, {within}: {rows}", flush=True)
    return results


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = words.add_subparsers(dest="kind", required=True)
    rows = kinds.add_parser("rows")
    rows.add_argument("--model", default="resnet18")
    rows.add_argument("--data", type=Path, required=True)
    rows.add_argument("--images", type=int, default=256)
    rows.add_argument("--side", type=int, default=224)
    rows.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    rows.add_argument("--out", type=Path, required=True)
    again = kinds.add_parser("replay")
    again.add_argument("rows", type=Path)
    again.add_argument("--rate", type=float, required=True, help="calls per second, measured")
    again.add_argument("--draws", type=int, default=20)
    again.add_argument("--most", type=int, help=f"images, {IMAGES:,} by default")
    again.add_argument("--out", type=Path)
    given = kinds.add_parser("values")
    given.add_argument("rows", type=Path)
    given.add_argument("--method", default="source", help="the column that names the method")
    given.add_argument("--column", default="msi")
    given.add_argument("--where", action="append", default=[], help="COLUMN=VALUE")
    given.add_argument("--masks", type=int, required=True, help="per image and method")
    given.add_argument("--rate", type=float, required=True, help="calls per second, measured")
    given.add_argument("--compile", type=float, default=0.0, help="seconds, measured")
    given.add_argument("--draws", type=int, default=40)
    given.add_argument("--out", type=Path)
    made_up = kinds.add_parser("simulate")
    made_up.add_argument("--trials", type=int, default=1000)
    made_up.add_argument("--out", type=Path)
    asked = words.parse_args()
    if asked.kind == "rows":
        make_rows(asked)
        return
    found = {"replay": replay, "values": values, "simulate": simulate}[asked.kind](asked)
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, torch.device("cpu"), torch.float32)
        asked.out.write_text(json.dumps(facts | {"results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
