"""The reference comparison of a table, and its twin: every method that fits the network.

    python tools/reference_table.py cifar10 RUN --data ROOT --out results
    python tools/reference_table.py cifar10 RUN --data ROOT --out results --stages twin,twins

RUN is a folder of `sufficit reproduce`: the classifier, the adapters and the test images in it are
used, and those that are missing are trained or written. Stages: `twin` trains the twin of the
classifier, `cost` times every method on a few images, `compare` scores all of them (black, a
held-out fill, the twin, leakage, the truth where it is known), `twins` scores a few of them with
four fills on the model and on the twin. OUT gets reference/TABLE.json and twins/TABLE.json, after
each stage; `python tools/results_tables.py` makes tables and figures of them. Run the same command
again to resume; a method that fails is recorded, and left out of the comparison.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sufficit import Classifier, compare, explain
from sufficit.classifier.architectures import MODELS
from sufficit.data.images import list_images
from sufficit.files import make_folder, read_json
from sufficit.provenance import plain, provenance, save_json
from sufficit.reproduce.pipeline import TablePipeline
from sufficit.reproduce.table_plan import read_plan
from sufficit.runs.config import CONTROLS
from sufficit.runs.results import RunResults
from sufficit.training import train_twin
from sufficit.training.classifier_training import accuracy, augmented_loader

STAGES = ("twin", "cost", "compare", "twins")
FILLS = ("black", "blur", "noise", "mean")
CHEAP = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")
ALL = (
    *CHEAP, "hirescam", "eigencam", "input-x-gradient", "integrated-gradients",
    "expected-gradients", "smoothgrad", "scorecam", "occlusion", "rise", "kernel-shap",
    "extremal-perturbation", "region-search",
)  # fmt: skip
BY_NET = {False: ("lrp",), True: ("rollout", "generic-attribution", "attnlrp")}  # attention
BUDGETS = {  # options of methods that ask often; at 224 px less than their defaults
    False: {
        "rise": "masks=1000", "kernel-shap": "samples=500", "extremal-perturbation": "steps=200",
        "region-search": "calls=600",
    },
    True: {
        "integrated-gradients": "steps=20", "expected-gradients": "samples=20",
        "scorecam": "channels=128", "occlusion": "grid=7:window=1", "rise": "masks=300",
        "kernel-shap": "samples=200", "extremal-perturbation": "steps=50",
        "region-search": "calls=240",
    },
}  # fmt: skip
TWINS = {  # epochs, images per epoch, batch
    "synthetic-mnist": (3, 30_000, 256),
    "cifar10": (6, None, 512),
    "cub200": (40, None, 32),
    "cifar10-vit": (4, 15_000, 128),
}
COLUMNS = (
    *("msi", "msi_held_out", "msi_twin", "msi_rank", "base_score", "mask_penalty"),
    *("insertion_percent", "deletion_percent", "leak_ratio"),
    *("iou", "pointing", "energy", "mass_accuracy", "rank_accuracy"),
)


def words_of(table: TablePipeline) -> dict[str, str]:
    """Every method that fits the network, by name, as `--methods` takes it; adapters by folder."""
    plan = table.plan
    budget = BUDGETS[plan.side > 64]
    names = (*ALL, *BY_NET[MODELS[plan.model].attention])
    found = {name: ":".join([name, *filter(None, [budget.get(name)])]) for name in names}
    for recipe in plan.recipes:
        found[f"lax-{recipe}"] = str(table.out / "adapters" / f"lax-{recipe}-{plan.seed}")
    return found


def trained_twin(table: TablePipeline, options: argparse.Namespace) -> Classifier:
    """The twin in RUN/twin, or a new one."""
    epochs, images, batch = TWINS.get(table.plan.table, TWINS["cifar10"])
    train, held = table.parts
    batch = min(options.twin_batch or batch, len(train))
    return train_twin(
        table.classifier, augmented_loader(train, batch, options.twin_images or images),
        epochs=options.twin_epochs or epochs, validation=[held.part(slice(None))],
        fabric=table.fabric, out=table.out / "twin", patience=None, progress=False,
    )  # fmt: skip


@contextmanager
def counted(model: nn.Module) -> Iterator[Counter[bool]]:
    """The images that go through a model, without and with a gradient that comes back."""
    found: Counter[bool] = Counter()

    def note(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        found[bool(output.requires_grad)] += len(args[0])

    handle = model.register_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def cost_of(
    classifier: Classifier, word: Any, images: Tensor, targets: Tensor
) -> dict[str, float | str]:
    """Calls and seconds per image; a backward pass counts as two calls. Or why it failed."""
    try:
        with counted(classifier.bare) as calls:
            explain(classifier, images, targets, word, progress=False)  # also warms up
        _wait(images)
        begun = time.perf_counter()
        explain(classifier, images, targets, word, progress=False)
        _wait(images)
    except Exception as error:  # one method must not cost the others their table
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    seconds = (time.perf_counter() - begun) / len(images)
    return {"calls": (calls[False] + 3 * calls[True]) / len(images), "seconds": seconds}


def _wait(images: Tensor) -> None:
    if images.device.type == "cuda":
        torch.cuda.synchronize()


def scored(results: RunResults) -> dict[str, dict[str, Any]]:
    """Mean and interval of the columns that are shown, by method, best first."""
    return {
        name: {
            column: {"mean": one.mean, "low": one.low, "high": one.high}
            for column, one in results.summaries[name].items()
            if column in COLUMNS or column.startswith(("msi", "leak"))
        }
        for name in results.methods
    }


def ranks_of(results: RunResults) -> dict[str, Any]:
    """How the methods rank under every condition, and how far the orders agree."""
    return {
        "n": results.n,
        "calls": results.config.calls,
        "alpha_min": results.alpha_min,
        "model_calls": results.record["model_calls"],
        "conditions": [
            {
                "key": one.key, "fill": one.fill, "twin": one.twin, "masks": one.masks,
                "ranking": list(one.standing.ranking), "leader": one.standing.leader,
                "clean_accuracy": one.clean_accuracy,
            }
            for one in results.conditions
        ],
        "rank_correlations": results.record["rank_correlations"],
        "rivals": list(results.standing.rivals) if results.standing else [],
    }  # fmt: skip


def main() -> None:
    """Each stage, then what it found as JSON."""
    options, started = arguments(), time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run, data = options.run, options.data
    table = TablePipeline(read_plan(run), run, data, device, progress=False)
    if table.plan.table != options.table:
        raise SystemExit(f"{run} is of {table.plan.table}, not {options.table}: name that one")
    table.train_classifier()
    if options.stages != ["twin"]:
        table.train_adapters()
    table.write_test_images()
    words, classifier = words_of(table), table.classifier
    if options.methods:
        words = {name: words[name] for name in options.methods.split(",")}
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    facts = provenance(asked, classifier.device, classifier.dtype)
    facts |= {"table": options.table, "network": table.plan.model, "side": table.plan.side}
    places = {kind: make_folder(options.out / kind) for kind in ("reference", "twins")}
    files = {kind: place / f"{options.table}.json" for kind, place in places.items()}
    known = {kind: read_json(one) if one.exists() else {} for kind, one in files.items()}

    def keep(kind: str, **found: Any) -> None:
        known[kind] |= facts | plain(found)
        save_json(files[kind], known[kind])
        print(
            f"{options.table} {time.monotonic() - started:6.1f} s: {', '.join(found)}", flush=True
        )

    if "twin" in options.stages:
        trained_twin(table, options)
        keep("twins", twin=twin_facts(table))
    if "cost" in options.stages:
        some = list_images(run / "test")[:: max(1, table.plan.images // options.cost_images)]
        some = some[: options.cost_images]
        pixels = torch.stack([one.read(classifier.view) for one in some]).to(device)
        targets = classifier(pixels).argmax(1)
        methods = words | {name: name for name in CONTROLS}
        costs: dict[str, Any] = {}
        for name, word in methods.items():
            source = word if name not in ("lax-paper", "lax-robust") else _lax(word)
            costs[name] = cost_of(classifier, source, pixels, targets)
            print(name, costs[name], flush=True)
            keep("reference", words=_short(words, run), cost=costs)
    failed = {name for name, one in known["reference"].get("cost", {}).items() if "failed" in one}
    words = {name: word for name, word in words.items() if name not in failed}
    how: dict[str, Any] = {
        "alpha_min": table.plan.paper.alpha_min, "seed": table.plan.seed,
        "unit_size": table.plan.group, "batch_size": table.plan.batch_size, "alpha_curve": False,
        "draw": options.images, "compile": "off",
    }  # fmt: skip
    if "compare" in options.stages:
        truth = run / "truth"
        results = compare(
            classifier, run / "test", words, twin=run / "twin", calls=options.calls,
            truth=truth if truth.exists() else None, precision=table.plan.precision,
            held_out_fill="auto", out=run / "reference", device=str(device), progress=options.bar,
            **how,
        )  # fmt: skip
        keep("reference", **ranks_of(results), methods=scored(results))
    if "twins" in options.stages:
        few = {n: w for n, w in words.items() if n in CHEAP or n.startswith("lax-")}
        results = compare(
            classifier, run / "test", few, twin=run / "twin", calls=options.twins_calls,
            fills=FILLS, columns=("msi",), leak=False, precision=table.plan.precision,
            out=run / "twins", device=str(device), progress=options.bar, **how,
        )  # fmt: skip
        keep("twins", **ranks_of(results), methods=scored(results))


def twin_facts(table: TablePipeline) -> dict[str, Any]:
    """The accuracy of model and twin on all whole test images, and what run.json says of it."""
    twin = Classifier.load(table.out / "twin").to(table.device, table.classifier.dtype)
    record = read_json(table.out / "twin" / "run.json")
    told = {name: record[name] for name in ("original", "twin", "best_epoch", "history")}
    test = table.sets.test
    right = {"model": accuracy(table.classifier, test), "twin": accuracy(twin, test)}
    config = {n: v for n, v in record["config"].items() if isinstance(v, int | float | str)}
    return {"test_accuracy": right, "test_images": len(test), "config": config, **told}


def _lax(folder: str) -> Any:
    from sufficit import Lax

    return Lax.from_pretrained(folder)


def _short(words: Mapping[str, str], run: Path) -> dict[str, str]:
    """The words without the folder of the run."""
    return {name: word.replace(f"{run}/", "") for name, word in words.items()}


def arguments() -> argparse.Namespace:
    """What the command line says."""
    kind = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("table", choices=TWINS)
    parser.add_argument("run", type=Path, help="folder of `sufficit reproduce`")
    parser.add_argument("--data", type=Path, help="as `sufficit reproduce` takes it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--images", type=int, default=500, help="that are scored")
    parser.add_argument("--calls", type=int, default=26, help="masks per image and condition")
    parser.add_argument("--twins-calls", type=int, default=12)
    parser.add_argument("--cost-images", type=int, default=32)
    parser.add_argument("--twin-epochs", type=int)
    parser.add_argument("--twin-images", type=int, help="per epoch")
    parser.add_argument("--twin-batch", type=int)
    parser.add_argument("--methods", help="some of them only")
    parser.add_argument("--bar", action="store_true", help="show progress")
    options = parser.parse_args()
    options.stages = options.stages.split(",")
    if unknown := set(options.stages) - {*STAGES}:
        parser.error(f"no stage {', '.join(unknown)}: known are {', '.join(STAGES)}")
    return options


if __name__ == "__main__":
    main()
