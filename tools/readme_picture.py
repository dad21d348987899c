"""Draw the README's picture: three digits, every method, MSI under each.

python tools/readme_picture.py docs/demo.png
"""

import sys
from pathlib import Path

from PIL import Image

from sufficit import Classifier, evaluate, explain_all
from sufficit.cli.demo import LEARNED, TRUTH, around, train
from sufficit.data.digits import synthetic_digits
from sufficit.explainers import CAMS
from sufficit.plots import Look, save, sheet_figure

N, COLOURS, TRAINED_ON = 3, 256, 2048
METHODS = (*CAMS, "center", "random")


def main(path: Path) -> None:
    """Train the demo's adapter, explain, score, draw."""
    digits = synthetic_digits(N, seed=3)  # three that the net can read from the digit alone
    classifier = Classifier.load("sufficit:digits")
    asked = {LEARNED: train(classifier, TRAINED_ON, seed=0), **{name: name for name in METHODS}}
    maps = explain_all(classifier, digits.images, digits.labels, asked)
    maps[TRUTH] = around(digits.masks)
    given, steps = (classifier, digits.images), {"value_step": 0.02, "percent_step": 0.04}
    scores = {name: evaluate(*given, one, digits.labels, **steps) for name, one in maps.items()}
    captions = {name: [f"MSI {value:+.2f}" for value in scores[name].msi] for name in maps}
    titles = [f"a {label}" for label in digits.labels.tolist()]
    figure = sheet_figure(digits.images, maps, titles, captions, look=Look(width=11, font=9))
    save(figure, path, dpi=100, tight=False)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
