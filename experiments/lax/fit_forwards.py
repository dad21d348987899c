"""Count the forward passes that the fit's own definition needs, from saved answers.

    python experiments/lax/fit_forwards.py FOLDER [--part choose]

A size that cannot win need not be asked: kept is at most 1 and rest at least 0, so 1 - size bounds
the score of a size that nothing is known of. In rounds, each image asks about the size with the
highest bounds: first whether they suffice, then what the score of the first still needs. The
region is the one of the full rule; this is checked for every image.
"""

import argparse
from pathlib import Path

import measure
import numpy as np
import torch

COUNT = len(measure.SIZES)
NEIGHBOURS = [[max(j - 1, 0), j, min(j + 1, COUNT - 1)] for j in range(COUNT)]
THOUSANDTHS = [round(1000 * size) for size in measure.SIZES]


def lazily(
    kept: np.ndarray, rest: np.ndarray, wide: int, fill_by_fill: bool
) -> tuple[int, int, int]:
    """Fit one image: kept and rest bool [fills,24] -> the size's number, forwards and rounds.

    Each round asks about the `wide` most promising sizes at once; with `fill_by_fill` whether a
    size suffices is asked for one fill after the other, and not further after a miss.
    """
    fills = len(kept)
    known_kept = np.zeros((fills, COUNT), bool)
    known_rest = np.zeros((fills, COUNT), bool)
    unit = 3 * fills

    def bound(j: int) -> int:
        around = NEIGHBOURS[j]
        most = sum(int((kept[:, i] | ~known_kept[:, i]).sum()) for i in around)
        least = sum(int((rest[:, i] & known_rest[:, i]).sum()) for i in around)
        return 1000 * (2 * most - least) - 2 * unit * THOUSANDTHS[j]

    def refuted(j: int) -> bool:
        return bool((known_kept[:, j] & ~kept[:, j]).any())

    def ask_more(j: int) -> bool:
        """Ask the next thing about a size; False if all is known."""
        around = NEIGHBOURS[j]
        if not known_kept[:, j].all():
            if fill_by_fill:
                known_kept[known_kept[:, j].argmin(), j] = True
            else:
                known_kept[:, j] = True
        elif not known_kept[:, around].all():
            known_kept[:, around] = True
        elif not known_rest[:, around].all():
            known_rest[:, around] = True
        else:
            return False
        return True

    rounds = 0
    while True:
        best = sorted((-bound(j), j) for j in range(COUNT) if not refuted(j))[:wide]
        forwards = int(known_kept.sum() + known_rest.sum())
        if not best:
            return COUNT, forwards, rounds
        if not ask_more(best[0][1]):
            return best[0][1], forwards, rounds
        for _, j in best[1:]:
            if not known_kept[:, j].all():  # beyond the first only whether it suffices
                ask_more(j)
        rounds += 1


WAYS = {
    "one size": (1, False),
    "one, by fill": (1, True),
    "four": (4, False),
    "four, by fill": (4, True),
}


def main() -> None:
    """Print forwards and rounds for every network's Grad-CAM and trained order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", default="choose")
    parser.add_argument("--maps", default="gradcam,E2")
    args = parser.parse_args()
    for path in sorted(args.folder.rglob("*.npz")):
        arrays = dict(np.load(path))
        keys = [key for key in arrays if key.endswith(f"/{args.part}/black/kept")]
        for prefix in sorted(key.removesuffix("/black/kept") for key in keys):
            if prefix.split("/")[1] not in args.maps.split(","):
                continue
            answers = measure.Answers.read(arrays, prefix)
            for name, fills in measure.FITS.items():
                kept, rest = (
                    torch.stack([getattr(answers, kind)[fill] for fill in fills], 1).numpy()
                    for kind in ("kept", "rest")
                )
                right = measure.fit(answers, fills)
                for way, (wide, fill_by_fill) in WAYS.items():
                    found = [
                        lazily(k, r, wide, fill_by_fill) for k, r in zip(kept, rest, strict=True)
                    ]
                    assert [j for j, _, _ in found] == right.tolist()
                    forwards, rounds = np.array([row[1:] for row in found], float).T
                    print(
                        f"{prefix:34} {name:18} {way:14} {forwards.mean():6.1f} of",
                        f"{48 * len(fills)} forwards, 9 in 10 within",
                        f"{np.quantile(forwards, 0.9):.0f}; rounds {rounds.mean():.1f},",
                        f"9 in 10 within {np.quantile(rounds, 0.9):.0f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
