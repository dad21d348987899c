"""What each part of the recipe `crisp` is worth: the recipe with one change, several seeds.

    python experiments/lax_arms.py --model saved/birds --data birds --out arms --arms no-donors,l1

`--data` is a folder of class folders; `train_folder` holds some images out and scores them. Each
adapter is kept in its own folder: run the same command again to resume. `arms.json` has the rows.
"""

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from sufficit import Classifier, LaxRecipe
from sufficit.training import RECIPES, FolderOptions, OrderRecipe, train_folder

CHANGES: dict[str, dict[str, Any]] = {  # of the recipe
    "crisp": {},
    "class-free": {"absent": 0.0},
    "no-mosaics": {"mosaics": 0.0},
    "no-donors": {"donors": 0.0},
    "no-masked-out": {"drop": 0.0},
    "black-alone": {"fills": ("black",)},
    "not-pushed": {"decide": 0.0},
    "two-stages": {"stages": 2},
    "pixel-shuffle": {"stages": 1, "absent": 0.0, "upsample": 4, "contrast": 1.0},
    "contrast-1": {"contrast": 1.0},
}
COLUMNS = ("base_score", "mask_penalty", "msi", "msi_held_out", "leak_ratio", "fragments")


def recipe_of_arm(arm: str) -> LaxRecipe | OrderRecipe:
    """The recipe of an arm: `crisp` with its change, or a recipe by name."""
    crisp = RECIPES["crisp"]
    assert isinstance(crisp, LaxRecipe)
    return replace(crisp, **CHANGES[arm]) if arm in CHANGES else RECIPES[arm]


def train_arm(
    classifier: Classifier, data: Path, out: Path, arm: str, seed: int, **options: Any
) -> dict[str, Any]:
    """Train an adapter of an arm, and return its scores on the images held out."""
    chosen = FolderOptions(recipe=recipe_of_arm(arm), seed=seed, **options)
    outcome = train_folder(classifier, data, out / f"{arm}-{seed}", chosen)
    assert outcome is not None  # of one process
    summary = outcome.record["summary"]["lax"]
    means = {name: summary[name].mean for name in COLUMNS if name in summary}
    return {"arm": arm, "seed": seed, "trusted": outcome.trust.trusted, **means}


def main() -> None:
    """Every arm with every seed."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--model", required=True)
    words.add_argument("--data", type=Path, required=True)
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--arms", default=",".join(CHANGES))
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--epochs", type=int)
    asked = words.parse_args()
    classifier = Classifier.load(asked.model)
    rows = []
    for seed, arm in product(range(asked.seeds), asked.arms.split(",")):
        rows.append(train_arm(classifier, asked.data, asked.out, arm, seed, epochs=asked.epochs))
        print(rows[-1], flush=True)
        (asked.out / "arms.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
