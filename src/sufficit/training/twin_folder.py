"""Train a twin on a folder of images, from files to files."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sufficit.classifier.checkpoint import check_saving
from sufficit.classifier.classifier import Classifier
from sufficit.data.image_files import ignore_image_warnings
from sufficit.files import place, read_json, writing
from sufficit.provenance import plain, save_json
from sufficit.training.folder_images import ReadingOptions, open_folder
from sufficit.training.processes import fabric_for
from sufficit.training.twin_training import EPOCHS, LR, RUN, TwinTarget, train_twin

if TYPE_CHECKING:
    from lightning.fabric import Fabric

SHARED = ("target", "epochs", "lr", "patience", "seed", "overwrite", "progress")
"""The options of a folder that `train_twin` has too."""


@dataclass(frozen=True)
class TwinOptions(ReadingOptions):
    """How to train a twin on a folder: the options of `train_twin`, and how files are read."""

    target: TwinTarget = "model"
    epochs: int = EPOCHS
    lr: float = LR


def train_twin_folder(
    classifier: Classifier,
    data: str | Path,
    out: str | Path,
    options: TwinOptions | None = None,
    *,
    fabric: "Fabric | None" = None,
    config: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Train a twin on the images below a folder; return what run.json holds.

    `out` gets the twin, history.csv and run.json. The same call resumes an interrupted run. With
    several processes, which `fabric` starts, only the first returns a record.
    """
    options, out, start = options or TwinOptions(), place(out), time.monotonic()
    check_saving(classifier)
    fabric = fabric or fabric_for(classifier.device)
    with ignore_image_warnings():
        wanted: Any = "label" if options.target == "label" else "auto"
        found = open_folder(classifier, data, wanted, options, fabric)
        held = found.held_out
        labelled = found.folder.target == "label"
        given: dict[str, Any] = {name: getattr(options, name) for name in SHARED}
        given |= {"validation": [(held.images, held.targets) if labelled else held.images]}
        given |= {"validation_images": len(held.names), "about": found.about, "fabric": fabric}
        train_twin(classifier, found.images, out=out, **given)
        skipped = found.skipped(out, fabric)
    if not fabric.is_global_zero:
        return None
    import pandas

    record: dict[str, Any] = read_json(out / RUN)
    with writing(out / "history.csv") as path:
        pandas.DataFrame(record["history"]).to_csv(path, index=False)
    settings = {**(config or {}), "data": str(data), "options": replace(options, progress=None)}
    record |= {
        "config": plain(record["config"] | settings),
        "n_trained_on": found.count(skipped),
        "validation_images": list(held.names),
        "n_skipped": len(skipped),
        "skipped": skipped,
        "seconds": time.monotonic() - start,
    }
    save_json(out / RUN, record)
    return record
