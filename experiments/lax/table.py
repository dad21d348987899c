"""Print rows of diagnose.py and train_order.py, one line each: python table.py results/*.json

Per fill: insertion, MSI at the common size, in hindsight, fitted with black+blur, with noise too.
"""

import json
import sys
from pathlib import Path

FILLS = ("black", "blur", "mean", "noise", "patches")
COLUMNS = ("insertion", "common", "hindsight", "fit black+blur", "fit black+blur+noise")


def line(row: dict) -> str:
    """Return one row as a line."""
    name = row.get("map") or row["arm"]
    fills = [fill for fill in FILLS if fill in row]
    cells = [
        " ".join(f"{row[fill][column]:6.3f}".replace("0.", ".") for column in COLUMNS)
        for fill in fills
    ]
    pointing = row["pointing"]
    points = [pointing] if isinstance(pointing, float) else list(pointing.values())
    leaks = [f"{mean:.2f}+-{half:.2f}" for mean, half in row["leak"].values()]
    return " | ".join(
        [
            f"{row['network'][:6]:6} {name:28.28} {row['part'][:6]:6}",
            *cells,
            f"{row['common_size']} {row['size black+blur']:.2f} {row['size black+blur+noise']:.2f}",
            " ".join(f"{point:.3f}" for point in points),
            " ".join(leaks),
        ]
    )


def main() -> None:
    """Print the rows of every file."""
    print("fills:", ", ".join(FILLS), "; each:", ", ".join(COLUMNS))
    for path in sys.argv[1:]:
        for row in json.loads(Path(path).read_text()):
            print(line(row))


if __name__ == "__main__":
    main()
