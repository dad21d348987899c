"""Paired differences between two maps from saved answers, with 95 % intervals.

    python experiments/lax/compare_arms.py NETWORK PART A@FILE.npz B@FILE.npz [--out FILE]

Each is A minus B on the same photographs: insertion, MSI at each map's own common size (the size
that is best by black on the answers of `choose` in the same file), fitted, and the leak.
"""

import argparse
import json
from pathlib import Path

import measure
import numpy as np
import torch
from diagnose import rounded


def read(name: str, network: str, part: str) -> tuple[measure.Answers, int, torch.Tensor]:
    """Return the answers of MAP@FILE, its common size and its leaks [3,N]."""
    label, _, path = name.partition("@")
    arrays = dict(np.load(path))
    common = measure.common_size(measure.Answers.read(arrays, f"{network}/{label}/choose"))
    leaks = torch.from_numpy(arrays[f"{network}/{label}/{part}/leak"]).double()
    return measure.Answers.read(arrays, f"{network}/{label}/{part}"), common, leaks


def compared(a, b) -> dict[str, dict[str, tuple[float, float]]]:
    """Return by fill and column the mean difference and half its 95 % interval."""
    (first, common_a, leak_a), (second, common_b, leak_b) = a, b
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for fill in first.kept:
        columns = {
            "insertion": measure.insertion(first, fill) - measure.insertion(second, fill),
            "common": measure.msi(first, fill)[:, common_a]
            - measure.msi(second, fill)[:, common_b],
        }
        for rule, asked in measure.FITS.items():
            one, two = (measure.msi_at(x, fill, measure.fit(x, asked)) for x in (first, second))
            columns[f"fit {rule}"] = one - two
        found[fill] = {name: measure.mean_and_interval(values) for name, values in columns.items()}
    found["leak"] = {
        str(size): measure.mean_and_interval(leak_a[number] - leak_b[number])
        for number, size in enumerate(measure.LEAK_SIZES)
    }
    return found


def main() -> None:
    """Print the differences of two maps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("network")
    parser.add_argument("part")
    parser.add_argument("a")
    parser.add_argument("b")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    a, b = (read(name, args.network, args.part) for name in (args.a, args.b))
    found = compared(a, b)
    names = [name.partition("@")[0] for name in (args.a, args.b)]
    print(f"{args.network} {args.part}: {names[0]} - {names[1]}")
    for key, columns in found.items():
        print(
            f"  {key:8}",
            "  ".join(f"{name} {mean:+.3f}+-{half:.3f}" for name, (mean, half) in columns.items()),
        )
    if args.out:
        rows = json.loads(args.out.read_text()) if args.out.exists() else []
        row = {
            "network": args.network,
            "part": args.part,
            "a": names[0],
            "b": names[1],
            "n": len(a[0].whole_p),
            **found,
        }
        args.out.write_text(json.dumps([*rows, rounded(row)], indent=1))


if __name__ == "__main__":
    main()
