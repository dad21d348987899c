"""A table of the paper in a very small size: a run of seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import torch
from safetensors.torch import load_file

from sufficit.classifier.architectures import MODELS
from sufficit.classifier.digit_net import SmallNet
from sufficit.reproduce.pipeline import reproduce
from sufficit.reproduce.table_results import TableResults

SMALL = {
    "images": 4,
    "search_images": 3,
    "train_images": 40,
    "test_images": 20,
    "epochs": 2,
    "lax_epochs": 2,
    "step": 0.25,
    "group": 2,
    "weights": "none",
}


class StoppedError(Exception):
    """What the tests stop a run with."""


@contextmanager
def narrow_nets() -> Iterator[None]:
    """The net of --quick with a sixth of its width."""
    usual = MODELS["small-net"]
    MODELS["small-net"] = replace(usual, build=lambda classes, _: SmallNet(classes, width=4))
    try:
        yield
    finally:
        MODELS["small-net"] = usual


def small_table(out: Path, table: str = "synthetic-mnist", **more: object) -> TableResults:
    """Few images, coarse curves, a small net."""
    given = {"quick": True, "progress": False, "say": lambda line: None, **SMALL, **more}
    with narrow_nets():
        return reproduce(table, out, **given)


def assert_same_table(one: Path, other: Path) -> None:
    """Both folders have the same numbers, to the bit."""
    for name in ("table.md", "summary.json", "alpha.json"):
        texts = [(out / "results" / name).read_text() for out in (one, other)]
        assert texts[0] == texts[1], name
    rows = [pandas.read_parquet(out / "results" / "rows.parquet") for out in (one, other)]
    pandas.testing.assert_frame_equal(*rows, check_exact=True)
    for path in sorted((one / "compare" / "heatmaps").iterdir()):
        maps = [load_file(out / "compare" / "heatmaps" / path.name) for out in (one, other)]
        assert maps[0].keys() == maps[1].keys()
        assert all(torch.equal(tensor, maps[1][name]) for name, tensor in maps[0].items())
    assert np.isfinite(rows[0]["msi"]).all()
