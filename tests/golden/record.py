"""Record the numbers of the engine as it was, to which later code is held.

The files in `recorded` were made by commit 622b2ae, in one thread on a CPU; `made_with.json` names
the versions of Python, torch and numpy and the instructions of the CPU. To make them again, check
that commit out somewhere and run, with its `src` in front of the path:

    PYTHONPATH=OLD/src python tests/golden/record.py [CASE ...]

COMMANDS are spelled as that commit has them and stay so. IN stands for the folder of inputs that
make_inputs.py writes. How the pictures themselves were drawn is in `draw_pictures`.
"""

import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from gathering_results import Result, gather
from make_inputs import PICTURES, hills, pictures, write_all

COMMIT = "622b2ae"
RECORDED = Path(__file__).with_name("recorded")
LAX = Path(__file__).with_name("lax")  # sufficit:digits as it was then
CAMS = "gradcam,gradcam++,layercam,kpca-cam,finer-cam"
DIGITS = "--model sufficit:digits --device cpu"
COARSE = "--value-step 0.1 --percent-step 0.2"
FEW = f"{DIGITS} {COARSE} --no-alpha-curve --methods gradcam,layercam"
COMMANDS = {
    "compare": f"compare {DIGITS} --data IN/images-8 --methods {CAMS} --lax sufficit:digits"
    f" {COARSE}",
    "default-steps": f"compare {DIGITS} --data IN/images-4 --methods gradcam,layercam"
    " --lax sufficit:digits --no-alpha-curve",
    "evaluate": f"evaluate {DIGITS} --data IN/images-12 --heatmaps IN/hills.npz --leak"
    " --held-out-fill blur --score confidence --value-step 0.05 --percent-step 0.1",
    "evaluate-search": f"evaluate {DIGITS} --data IN/images-6 --heatmaps IN/hills.npz --normalize"
    f" --alpha-min search {COARSE}",
    "search": f"compare {DIGITS} --data IN/images-6 --methods gradcam,layercam"
    f" --lax sufficit:digits --alpha-min search {COARSE}",
    "many": f"compare {DIGITS} {COARSE} --data IN/images-16 --methods gradcam,layercam,kpca-cam"
    " --no-alpha-curve --no-controls --no-leak",
    "held-out-noise": f"compare {FEW} --data IN/images-6 --held-out-fill noise --seed 5",
    "fill-mean": f"compare {FEW} --data IN/images-6 --fill mean --targets prediction",
    "shards": f"compare {FEW} --data IN/shards/{{0..1}}.tar",
    "broken": f"compare {FEW} --data IN/images-broken --no-leak",
    "save-heatmaps": f"compare {FEW} --data IN/images-4 --no-controls --no-leak --save-heatmaps",
    "explain": "explain IN/images-4 --model sufficit:digits --device cpu"
    " --method gradcam,finer-cam,sufficit:digits",
}


def main(wanted: list[str]) -> None:
    """Record the cases that are named, or all."""
    torch.set_num_threads(1)
    RECORDED.mkdir(exist_ok=True)
    if not PICTURES.exists():
        draw_pictures()
    with tempfile.TemporaryDirectory() as folder:
        inputs = write_all(Path(folder) / "in")
        for name in wanted or [*COMMANDS, "api"]:
            begun = time.monotonic()
            if name == "api":
                api().save(RECORDED, name)
            else:
                out = Path(folder) / "out" / name
                command(COMMANDS[name].replace("IN/", f"{inputs}/").split(), out)
                gather(out).save(RECORDED, name)
            print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    (RECORDED / "made_with.json").write_text(json.dumps(made_with(), indent=1) + "\n")


def draw_pictures() -> None:
    """The sixteen pictures, drawn once; whatever becomes of synthetic_digits, they stay."""
    from sufficit.data.digits import synthetic_digits

    digits = synthetic_digits(16, seed=39)
    pixels = (digits.images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    np.savez_compressed(PICTURES, pixels=pixels, labels=digits.labels.numpy())


def command(words: list[str], out: Path) -> None:
    """Run a command of sufficit in this process, with its printing put aside."""
    from sufficit.cli import main as run

    printed = open(os.devnull, "w")  # noqa: PTH123, SIM115  # closed below
    streams = patch("sys.stdout", printed), patch("sys.stderr", printed)
    argv = patch("sys.argv", ["sufficit", *words, "--out", str(out)])
    with printed, streams[0], streams[1], argv:
        try:
            run()
        except SystemExit as ended:
            code = ended.code or 0
    if code:
        raise RuntimeError(f"{words} ended with {code}")


def api() -> Result:
    """Values of explain, evaluate and leak on six images, as the library gives them."""
    from sufficit import Classifier, Lax, evaluate, explain, leak

    classifier, adapter = Classifier.load("sufficit:digits"), Lax.from_pretrained(LAX)
    pixels, labels, _ = pictures(6)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    targets = torch.tensor(labels)
    steps = {"value_step": 0.1, "percent_step": 0.2, "progress": False}
    result = Result()
    for name in (*CAMS.split(","), "random", "center", "lax"):
        maps = explain(classifier, images, targets, adapter if name == "lax" else name)
        result.maps[f"explain/{name}"] = maps[:, 1::3, 1::3].numpy()
        result.maps[f"explain-mean/{name}"] = maps.double().mean((1, 2)).numpy()
        if name not in ("gradcam", "lax"):
            continue
        for alpha in (0.5, 0.37, "search"):
            scores = evaluate(classifier, images, maps, targets, alpha_min=alpha, **steps)
            keep_scores(result, f"evaluate/{name}/{alpha}", scores)
        found = leak(classifier, images, maps, targets, donors=5, progress=False)
        for column, values in {**found.columns, "calls": found.calls}.items():
            result.maps[f"leak/{name}/{column}"] = values.numpy()
        result.told[f"leak/{name}"] = {"ratio": found.ratio, "mean": found.mean()}
    wide = torch.nn.functional.interpolate(torch.from_numpy(hills(6))[:, None], size=(64, 64))[:, 0]
    asked = {"score": "confidence", "fill": "blur", "held_out_fill": "mean", "leak_donors": 4}
    keep_scores(
        result, "evaluate/hills", evaluate(classifier, images, wide, None, **asked, **steps, seed=3)
    )
    return result


def keep_scores(result: Result, place: str, scores: object) -> None:
    """Every column, curve, count and mean of some scores."""
    for column, values in scores.columns.items():
        result.maps[f"{place}/{column}"] = values.numpy()
    facts = {"calls": scores.calls, "targets": scores.targets, "clean": scores.clean}
    result.maps |= {f"{place}/{fact}": values.numpy() for fact, values in facts.items()}
    result.told[place] = {"alpha_min": scores.alpha_min, "mean": scores.mean()}
    if scores.search is not None:
        result.maps[f"{place}/search"] = scores.search.msi.numpy()
        result.told[place]["search"] = {
            "alphas": list(scores.search.alphas),
            "best": scores.search.best,
            "means": scores.search.means.tolist(),
        }


def made_with() -> dict[str, object]:
    """What the numbers come from."""
    return {
        "commit": COMMIT,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
