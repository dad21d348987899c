r"""Put the adapter of a public network into the package, with its card.

    PYTHONPATH=src:experiments/lax python tools/ship_imagenet_lax.py NETWORK FOLDER --weights ROOT

FOLDER is what `tools/train_imagenet_lax.py` wrote. `--weights` are those of the networks, of which
the fingerprint is compared. The numbers of the card come from experiments/regions/results.
"""

import argparse
import json
import os
from pathlib import Path

from sufficit import Lax
from sufficit.classifier.fingerprint import fingerprint, same

ASSETS = Path(__file__).parents[1] / "src" / "sufficit" / "assets" / "lax"
MOST = 3_000_000  # bytes
MODELS = {"mobilenet_v2": "torchvision:mobilenet_v2@IMAGENET1K_V1"}
VERDICTS = {
    "mobilenet_v2": (
        "on 500 ImageNet photographs that neither trained nor chose anything (report), with the"
        " model's predictions as targets: MSI 0.168 by black and 0.229 by blur, marking 43 % of"
        " each. Grad-CAM -0.112 and -0.114 as it is, 0.129 and 0.164 at its best common size;"
        " marking everything -0.010. Fitted 0.441 and 0.438 (Grad-CAM 0.397 and 0.381). The peak"
        " is on the object in 0.884 (Grad-CAM 0.882). Its outlines say a little of the class: on"
        " images of other classes they lift its log probability by 0.11 (0.02 to 0.20) more than"
        " Grad-CAM's do"
    )
}
DATA = (
    "2,000 photographs of ImageNet's validation set (learn), without labels; 500 others (choose)"
    " decided the size"
)
LICENCE = "the weights were trained on ImageNet photographs: for research"


def main() -> None:
    """Check it, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    args = parser.parse_args()
    os.environ["LAX_WEIGHTS"] = str(args.weights)
    import classifiers  # reads the folder

    lax = Lax.from_pretrained(args.folder)
    assert lax.fingerprint is not None
    if not same(lax.fingerprint, fingerprint(classifiers.NAMES[args.network]())):
        raise SystemExit("the adapter is of other weights")
    lax.trained["about"] = {
        "model": MODELS[args.network],
        "data": DATA,
        "verdict": VERDICTS[args.network],
        "licence": LICENCE,
    }
    out = ASSETS / args.network
    lax.save_pretrained(out, half=True)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config) + "\n")  # on one line, a third of the bytes
    size = sum(path.stat().st_size for path in out.iterdir())
    if size > MOST:
        raise SystemExit(f"{out} has {size:,} bytes, more than {MOST:,}")
    print(f"{out}: {size:,} bytes")


if __name__ == "__main__":
    main()
