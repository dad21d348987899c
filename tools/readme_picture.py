"""Draw the README's picture: three digits, every method, MSI under each.

python tools/readme_picture.py docs/demo.png
"""

import sys
from pathlib import Path

from sufficit import Classifier, explain_all
from sufficit.data.digits import synthetic_digits
from sufficit.demo import METHODS, TRUTH, around, score_all
from sufficit.figures import sheet_figure

N = 3


def main(path: Path) -> None:
    """Explain, score, draw."""
    digits = synthetic_digits(N, seed=3)  # three that the net can read from the digit alone
    classifier = Classifier.load("sufficit:digits")
    maps = explain_all(classifier, digits.images, digits.labels, METHODS)
    maps[TRUTH] = around(digits.masks)
    scores = score_all(classifier, digits, maps)
    captions = {name: [f"MSI {value:+.2f}" for value in scores[name].msi] for name in maps}
    titles = [f"a {label}" for label in digits.labels.tolist()]
    figure = sheet_figure(digits.images, maps, titles, captions)
    figure.savefig(path, dpi=80, bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
