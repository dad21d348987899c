"""Record the rows of what the engine could do at commit 44fb57b and `record.py` does not cover.

`recorded_44fb57b` holds all cases in three files: `rows.parquet` with one row per case, source and
image, `facts.json` with what run.json and summary.json say, and `made_with.json`. They were made in
one thread on a CPU. To make them again, check that commit out somewhere and run, with its `src` in
front of the path and SPELLING = as_then below:

    PYTHONPATH=OLD/src python tests/golden/frozen.py [CASE ...]

CASES are written in the words that stay: `fills` for all fills, the first one without a suffix, and
`checks` for what is measured besides. A spelling turns these options into those of a version:
`as_then` for commit 44fb57b, `as_now` for the version this file lies in. Python and the command
line take the same names.
"""

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas
import torch
from gathering_results import Result
from make_inputs import pictures, write_all
from PIL import Image
from record import made_with
from torch import Tensor, nn

COMMIT = "44fb57b"
RECORDED = Path(__file__).with_name("recorded_44fb57b")
LAX = Path(__file__).with_name("lax")

# What a user would write in a file of their own, beside the images.
OWN = '''
import torch
from torch import nn
from torchvision.models import VisionTransformer

from sufficit import Classifier

CLASSES = [str(digit) for digit in range(10)]


def noisy(model, share, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight += share * weight.std().nan_to_num(0) * noise
    return model.eval()


def twin():
    """The model with noise on its weights."""
    digits = Classifier.load("sufficit:digits")
    noisy(digits.model, 0.3, 1)
    return digits


def vit():
    model = VisionTransformer(
        image_size=64, patch_size=16, num_layers=2, num_heads=2, hidden_dim=24, mlp_dim=48,
        num_classes=10,
    )
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
        if name.endswith(("ln.weight", "ln_1.weight", "ln_2.weight")):
            weight.data += 1
    return Classifier(model.eval(), classes=CLASSES)


def low_digits(logits):
    """A score per image: how much speaks for one of the first three digits."""
    return logits.softmax(1)[:, :3].sum(1) + 0.1


def brightness(classifier, images, targets):
    """A heatmap: how bright each pixel is."""
    maps = images.mean(1)
    return maps / maps.amax((1, 2), keepdim=True)
'''

Options = dict[str, Any]
DEFAULT_CHECKS = ["fill", "leak", "alpha-curve", "controls"]
COARSE: Options = {"value_step": 0.1, "percent_step": 0.2}
TWO: Options = {"methods": ["gradcam", "layercam"]}
SMALL: Options = {
    "model": "sufficit:digits",
    "device": "cpu",
    "data": "IN/images-8",
    "unit_size": 5,
    "checks": [],
    **COARSE,
    **TWO,
}
# More images than the first look of a run with `within` takes, and few masks for each.
MANY: Options = {
    **SMALL,
    "data": "IN/images-many",
    "methods": ["gradcam"],
    "unit_size": 40,  # the first look, at 200 images, is at the end of a unit
    "calls": "exact",
    "value_step": 0.25,
    "percent_step": 0.5,
}

COMMANDS: dict[str, Options] = {
    "default-checks": {**SMALL, "checks": DEFAULT_CHECKS, "value_step": 0.05, "percent_step": 0.1},
    "alpha-curve": {
        **SMALL,
        "data": "IN/images-6",
        "methods": ["gradcam"],
        "checks": ["alpha-curve"],
        "value_step": 0.02,
        "percent_step": 0.05,
    },
    "fills": {**SMALL, "fills": ["black", "blur"], "checks": ["controls", "leak"]},
    "four-fills": {
        **SMALL,
        "data": "IN/images-6",
        "methods": ["gradcam"],
        "fills": ["mean", "noise", "blur", "black"],
        "seed": 3,
    },
    "twin": {**SMALL, "twin": "python:IN/own.py:twin", "checks": ["controls"]},
    "twin-and-fills": {
        **SMALL,
        "data": "IN/images-6",
        "twin": "python:IN/own.py:twin",
        "fills": ["black", "blur"],
    },
    "calls": {
        **SMALL,
        "data": "IN/images-12",
        "calls": 26,
        "checks": ["fill", "leak", "controls"],
        "value_step": 0.02,
        "percent_step": 0.05,
    },
    "calls-twin-and-fills": {
        **SMALL,
        "calls": 26,
        "twin": "python:IN/own.py:twin",
        "fills": ["black", "mean"],
        "value_step": 0.05,
        "percent_step": 0.1,
        "seed": 7,
    },
    "columns": {**SMALL, "columns": ["all"]},
    "columns-and-fills": {
        **SMALL,
        "data": "IN/images-6",
        "methods": ["layercam"],
        "columns": ["all"],
        "fills": ["black", "blur"],
        "truth": "IN/truth",
    },
    "few-columns": {**SMALL, "columns": ["msi", "srg", "sufficient_share"], "checks": ["leak"]},
    "ceiling": {**SMALL, "data": "IN/images-2", "checks": ["ceiling"], "unit_size": 2},
    "road": {**SMALL, "data": "IN/images-4", "fills": ["road"]},
    "road-and-black": {
        **SMALL,
        "data": "IN/images-4",
        "methods": ["gradcam"],
        "fills": ["black", "road"],
    },
    "drop": {
        **SMALL,
        "model": "python:IN/own.py:vit",
        "fills": ["drop"],
        "methods": ["gradcam", "rollout"],
        "targets": "prediction",
        "score": "confidence",
        "checks": ["fill"],
    },
    "black-and-drop": {
        **SMALL,
        "model": "python:IN/own.py:vit",
        "data": "IN/images-4",
        "fills": ["black", "drop"],
        "methods": ["gradcam", "rollout"],
        "targets": "prediction",
    },
    "own-score": {
        **SMALL,
        "score": "python:IN/own.py:low_digits",
        "targets": "prediction",
        "checks": ["fill", "controls"],
    },
    "own-method": {
        **SMALL,
        "methods": ["gradcam", "bright=python:IN/own.py:brightness"],
        "checks": ["leak"],
    },
    "truth": {**SMALL, "truth": "IN/truth"},
    "within-all": {
        **SMALL,
        "data": "IN/images-16",
        "within": 0.001,
        "unit_size": 2,
        "checks": ["controls"],
    },
    "within-some": {**MANY, "within": 0.5, "checks": ["controls"]},
    "within-calls": {
        **MANY,
        **COARSE,
        "within": 0.5,
        "calls": 26,
        "fills": ["blur"],
        "seed": 4,
    },
    "search": {**SMALL, "alpha_min": "search", "checks": ["leak", "controls"]},
    "search-and-fills": {
        **SMALL,
        "data": "IN/images-6",
        "alpha_min": "search",
        "fills": ["blur", "black"],
    },
    "predictions": {
        **SMALL,
        "targets": "prediction",
        "score": "confidence",
        "checks": ["fill", "leak"],
    },
    "head": {**SMALL, "checks": ["head"]},
    "broken-file": {**SMALL, "data": "IN/images-broken", "checks": ["leak", "controls"]},
    "drawn": {**SMALL, "data": "IN/images-16", "images": 5, "seed": 11},
}


# Spellings: from the options above to those of a version.


def as_then(options: Options) -> Options:
    """The options as commit 44fb57b spells them."""
    found = dict(options)
    checks = found.pop("checks", DEFAULT_CHECKS)
    fills = found.pop("fills", ["black"])
    if len(fills) == 1:
        found["fill"] = fills[0]
    else:
        found["fills"] = fills
    found["held_out_fill"] = "auto" if "fill" in checks else "none"
    found["leak"] = "leak" in checks
    found["alpha_curve"] = "alpha-curve" in checks
    found["controls"] = "controls" in checks
    found["ceiling"] = "ceiling" in checks
    found["sanity"] = "head" in checks
    return found


def as_now(options: Options) -> Options:
    """The options as they are written above, an empty list of checks as the word none."""
    return {**options, "checks": options.get("checks", DEFAULT_CHECKS) or "none"}


SPELLING: Callable[[Options], Options] = as_now


def as_words(options: Options) -> list[str]:
    """Spelled options as words of the command line."""
    words = ["compare"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = ",".join(value) if isinstance(value, list) else str(value)
            words += [f"--{flag}", text]
    return words


def command_words(name: str, inputs: Path) -> list[str]:
    """The words of a case in COMMANDS, without --out."""
    words = as_words(SPELLING(COMMANDS[name]))
    return [word.replace("IN/", f"{inputs}/") for word in words]


# Cases that only Python can give: own models, functions and tensors.


@dataclass(frozen=True)
class PythonCase:
    """What is handed to compare: makers, because models and images are made when they are run."""

    options: Options
    count: int = 8  # images
    labels: bool = True
    model: Callable[[], Any] | None = None  # None: sufficit:digits
    methods: Callable[[], Any] | None = None
    objects: Callable[[], Options] | None = None  # further arguments


def digits_model() -> Any:
    from sufficit import Classifier

    return Classifier.load("sufficit:digits")


def images_and_labels(count: int) -> tuple[Tensor, Tensor]:
    """The first pictures as a tensor [N,3,64,64] in 0..1, and their labels [N]."""
    pixels, labels, _ = pictures(count)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    return images, torch.tensor(labels)


class OddOne(nn.Module):
    """A model that fails on one image: its input, its logits or its gradients become NaN."""

    def __init__(self, inner: nn.Module, spread: Tensor, where: str) -> None:
        super().__init__()
        self.inner = inner
        self.spread = float(spread)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        odd = (x.flatten(1).std(1) - self.spread).abs() < 1e-5
        if self.where == "input":
            return self.inner(torch.where(odd[:, None, None, None], torch.nan, x))
        if self.where == "logits":
            return torch.where(odd[:, None], torch.nan, self.inner(x))
        features = self.inner.features(x)
        logits = self.inner.head(features.mean((2, 3)))
        zero = (features * 0).flatten(1).sum(1).abs()
        # The root has the slope infinity at 0: times 0 this is a gradient of NaN.
        zero = torch.where(odd, zero, torch.ones_like(zero)).sqrt() * odd
        return logits + zero[:, None]


def odd_model(where: str) -> Callable[[], Any]:
    """A maker of the digits' model that gives NaN for the fifth picture."""

    def make() -> Any:
        from sufficit import Classifier

        digits = digits_model()
        images, _ = images_and_labels(8)
        spread = digits.normalize(images)[4].std()
        model = OddOne(digits.model, spread, where)
        layer = "inner.features"
        return Classifier(model, layer=layer, mean=digits.mean, std=digits.std)

    return make


def brightness(classifier: Any, images: Tensor, targets: Tensor) -> Tensor:
    """A heatmap: how bright each pixel is."""
    maps = images.mean(1)
    return maps / maps.amax((1, 2), keepdim=True)


def first_three(logits: Tensor) -> Tensor:
    """A score per image."""
    return logits[:, :3].exp().sum(1)


def own_sources() -> Options:
    given = torch.rand(8, 64, 64, generator=torch.Generator().manual_seed(2))
    return {"mine": brightness, "given": given, "gradcam": "gradcam"}


def with_adapter() -> Options:
    from sufficit import Lax

    return {"lax": Lax.from_pretrained(LAX), "gradcam": "gradcam"}


def truth_masks() -> Options:
    return {"truth": torch.from_numpy(objects(8)) > 0}


def twin_model() -> Options:
    twin = digits_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in twin.model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(0.3 * weight.std().nan_to_num(0) * noise)
    return {"twin": twin}


PYTHON_OPTIONS: Options = {**COARSE, "unit_size": 5, "checks": []}
PYTHON: dict[str, PythonCase] = {
    "python-functions": PythonCase({**PYTHON_OPTIONS, "checks": ["leak"]}, methods=own_sources),
    "python-adapter": PythonCase(
        {**PYTHON_OPTIONS, "checks": ["leak", "controls", "fill"]}, methods=with_adapter
    ),
    "python-nan-input": PythonCase(PYTHON_OPTIONS, model=odd_model("input")),
    "python-nan-logits": PythonCase(
        {**PYTHON_OPTIONS, "fills": ["black", "blur"]}, model=odd_model("logits")
    ),
    "python-nan-gradients": PythonCase(PYTHON_OPTIONS, model=odd_model("gradients")),
    "python-truth": PythonCase({**PYTHON_OPTIONS, "columns": ["all"]}, objects=truth_masks),
    "python-twin": PythonCase(
        {**PYTHON_OPTIONS, "calls": 26, "value_step": 0.05, "percent_step": 0.1},
        objects=twin_model,
    ),
    "python-score": PythonCase(
        {**PYTHON_OPTIONS, "checks": ["fill"]},
        labels=False,
        objects=lambda: {"score": first_three},
    ),
}
CASES = (*COMMANDS, *PYTHON)


def run_python(name: str, out: Path) -> None:
    """Run a case of PYTHON."""
    from sufficit import compare

    case = PYTHON[name]
    images, labels = images_and_labels(case.count)
    compare(
        digits_model() if case.model is None else case.model(),
        images,
        ["gradcam", "layercam"] if case.methods is None else case.methods(),
        labels if case.labels else None,
        out=out,
        progress=False,
        **SPELLING(case.options),
        **({} if case.objects is None else case.objects()),
    )


# Inputs beyond those of make_inputs.py.


def objects(count: int) -> np.ndarray:
    """Where the digits are: bright pixels, and no pixel in the third and sixth picture."""
    pixels, _, _ = pictures(count)
    found = (pixels.mean(3) > 128).astype(np.uint8) * 255
    found[[2, 5]] = 0
    return found


def write_many(folder: Path, copies: int = 15) -> None:
    """The sixteen pictures again and again, each copy moved down by two pixels more."""
    pixels, labels, _ = pictures()
    for copy in range(copies):
        for number, (label, content) in enumerate(zip(labels, pixels, strict=True)):
            path = folder / str(label) / f"{copy:02d}-{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.roll(content, 2 * copy, axis=0)).save(path)


def write_inputs(folder: Path) -> Path:
    """Everything that the cases read."""
    from make_inputs import write_folder

    write_all(folder)
    write_folder(folder / "images-2", 2)
    write_many(folder / "images-many")
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    masks = objects(8)
    for name, mask in zip(pictures(8)[2], masks, strict=True):
        if mask.any():  # without a file the truth of an image is unknown
            path = folder / "truth" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(mask).save(path)
    return folder


# What is kept of a run.

FACTS = ("n", "n_skipped", "targets", "clean_accuracy", "alpha_min", "controls", "leak_ratio")
FACTS = (*FACTS, "rank_shares")
CURVES_OF = ("default-checks", "fills", "calls", "drop", "own-score", "python-adapter")
"""The cases whose mean curves are kept; those of others would say the same."""
DROPPED = ("grid_energy",)
"""Columns that leave the product."""


def rows_of(out: Path) -> pandas.DataFrame:
    """One row per source and image, with all numeric columns."""
    found = []
    for path in sorted(out.glob("*/scores.parquet")):
        frame = pandas.read_parquet(path).sort_values("image", ignore_index=True)
        frame = frame.drop(columns=[name for name in DROPPED if name in frame])
        numbers = frame.drop(columns="image").astype(float)
        numbers.insert(0, "image", frame["image"].astype(str))
        numbers.insert(0, "source", path.parent.name)
        found.append(numbers)
    return pandas.concat(found, ignore_index=True)


def facts_of(name: str, out: Path) -> dict[str, Any]:
    """What run.json, summary.json and curves.json say that is no matter of time or machine."""
    run = json.loads((out / "run.json").read_text(encoding="utf-8"))
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    facts = {key: run[key] for key in FACTS if key in run}
    facts["skipped"] = sorted(one["name"] for one in run["skipped"])
    facts["means"] = {
        source: {
            column: one["mean"]
            for column, one in own.items()
            if column not in DROPPED and isinstance(one, dict) and "mean" in one
        }
        for source, own in summary.items()
        if (out / source).is_dir()
    }
    if search := run.get("search"):
        facts["own_alpha_min"] = search["own_alpha_min"]
        facts["search"] = {key: search[key] for key in ("alphas", "mean_msi")}
    sources = {name: own for name, own in summary.items() if (out / name).is_dir()}
    if searched := [own["ceiling"]["mean"] for own in sources.values() if "ceiling" in own]:
        facts["ceiling"] = {"searched": searched[0]}
        facts["ceiling"]["msi"] = {
            name: own["msi_ceiling"]["mean"] for name, own in sources.items()
        }
    if run.get("alpha_curve"):
        facts["alpha_curve"] = {
            key: run["alpha_curve"][key] for key in ("alphas", "images", "mean_msi")
        }
    head = {
        name: own["random_head"]["mean"] for name, own in sources.items() if "random_head" in own
    }
    if head:
        facts["head"] = head
    if run.get("within"):
        facts["within"] = {key: run["within"][key] for key in ("reached", "images", "half_width")}
    if name in CURVES_OF:
        facts["curves"] = json.loads((out / "curves.json").read_text(encoding="utf-8"))
    return facts


def differences(place: str, now: Any, then: Any, tolerance: float) -> list[str]:
    """Where a fact is missing or another number; further keys are allowed."""
    if isinstance(then, dict) and isinstance(now, dict):
        found = []
        for key, value in then.items():
            if key in now:
                found += differences(f"{place}/{key}", now[key], value, tolerance)
            else:
                found.append(f"{place}/{key} is missing")
        return found
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = enumerate(zip(now, then, strict=True))
        return [w for i, (n, t) in pairs for w in differences(f"{place}/{i}", n, t, tolerance)]
    numbers = isinstance(then, float | int) and isinstance(now, float | int)
    if numbers and np.isclose(now, then, rtol=0, atol=tolerance, equal_nan=True):
        return []
    return [] if now == then else [f"{place}: {now}, recorded {then}"]


def row_differences(
    now: pandas.DataFrame, then: pandas.DataFrame, tolerance: float, changed: tuple[str, ...] = ()
) -> list[str]:
    """Where rows differ, by column; further columns are allowed, and `changed` ones not compared.

    Sources and images are matched by name, so that their order may be another.
    """
    keys = ["source", "image"]
    now = now.sort_values(keys, ignore_index=True)
    then = then.sort_values(keys, ignore_index=True)
    if not now[keys].equals(then[keys]):
        return [f"rows of {now[keys].values.tolist()}, recorded {then[keys].values.tolist()}"]
    found = []
    for column in then.columns.drop(keys):
        if column in changed:
            continue
        if column not in now:
            found.append(f"{column} is missing")
            continue
        apart = ~np.isclose(now[column], then[column], rtol=0, atol=tolerance, equal_nan=True)
        if apart.any():
            gap = float(np.nanmax(np.abs(now[column] - then[column]), initial=0))
            found.append(f"{column}: {apart.sum()} of {len(then)} values, up to {gap:.3g}")
    return found


def result_of(name: str, out: Path) -> Result:
    """The rows and facts of a finished run."""
    return Result(scores=rows_of(out), told=facts_of(name, out))


def recorded() -> dict[str, Result]:
    """What was recorded of every case."""
    rows = pandas.read_parquet(RECORDED / "rows.parquet")
    facts = json.loads((RECORDED / "facts.json").read_text(encoding="utf-8"))
    found = {}
    for name, told in facts.items():
        told.pop("model_calls", None)  # whole images count once since, not for each fill
        told.get("ceiling", {}).pop("images", None)
        told.get("ceiling", {}).pop("fill", None)
        if "alpha_curve" in told:  # as run.json has it now
            told["alpha_curve"]["images"] = len(told["alpha_curve"]["images"])
        own = rows[rows["case"] == name].drop(columns="case")
        # A case has no values in the columns that only others have.
        found[name] = Result(own.dropna(axis=1, how="all").reset_index(drop=True), told=told)
    return found


def save(results: dict[str, Result]) -> None:
    """Write the rows of all cases to one table and their facts to one file."""
    RECORDED.mkdir(exist_ok=True)
    frames = []
    for name, result in results.items():
        frame = result.scores.copy()
        frame.insert(0, "case", name)
        frames.append(frame)
    rows = pandas.concat(frames, ignore_index=True)
    rows.to_parquet(RECORDED / "rows.parquet", index=False, compression="zstd")
    facts = {name: result.told for name, result in results.items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in facts.items())
    (RECORDED / "facts.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    made = {**made_with(), "commit": COMMIT}
    (RECORDED / "made_with.json").write_text(json.dumps(made, indent=1) + "\n")


def main(wanted: list[str]) -> None:
    """Record the cases that are named, or all."""
    from record import command

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = recorded() if (RECORDED / "facts.json").exists() else {}
    undrawn = patch("sufficit.cli.compare.write_pictures", lambda *_: None)
    with tempfile.TemporaryDirectory() as folder, undrawn:
        inputs = write_inputs(Path(folder) / "in")
        for name in wanted or CASES:
            begun = time.monotonic()
            out = Path(folder) / "out" / name
            if name in PYTHON:
                run_python(name, out)
            else:
                command(command_words(name, inputs), out)
            results[name] = result_of(name, out)
            print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    save({name: results[name] for name in CASES if name in results})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
