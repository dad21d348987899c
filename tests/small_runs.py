"""Small runs: photos in class folders, a model for them, and ways to interrupt a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from PIL import Image

from own_model import MODEL
from sufficit.runs.config import RunConfig, config_from
from sufficit.runs.engine import run
from sufficit.runs.job import make_job
from sufficit.runs.results import RunResults
from sufficit.runs.store import UNIT, Store
from sufficit.runs.unit_rows import Rows

CLASSES = ("ant", "bee", "cat")
STEPS = {"value_step": 0.25, "percent_step": 0.25}
FLAGS = ("--value-step", "0.25", "--percent-step", "0.25", "--device", "cpu")


class StopError(BaseException):
    """As if the power had failed."""


def write_photos(place: Path, n: int = 11, seed: int = 0, model: str = MODEL) -> Path:
    """n images of 12 x 10 pixels in class folders, and model.py for them; the folder of images."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.py").write_text(model)
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 12, 10, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        path = place / "photos" / CLASSES[i % 3] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return place / "photos"


def config_for(photos: Path, **more: Any) -> RunConfig:
    """A fast run of two methods on the photos."""
    usual = {"model": f"python:{photos.parent / 'model.py'}:make", "data": str(photos)}
    usual |= {"methods": ["gradcam", "layercam"], "donors": 3, "device": "cpu", **STEPS}
    return config_from({**usual, **more})


def run_small(config: RunConfig, out: Path | None, unit: int = 4, **more: Any) -> RunResults:
    """A run in units of few images, in this process. `more` is for the job."""
    return run(make_job(config, unit=unit, **more), out, progress=False)


def rows(out: Path, method: str) -> pandas.DataFrame:
    """The rows of a source."""
    return pandas.read_parquet(out / method / "scores.parquet")


def assert_same_rows(one: Path, other: Path, methods: tuple[str, ...]) -> None:
    """Every number of two runs is the same, to the bit."""
    for method in methods:
        pandas.testing.assert_frame_equal(rows(one, method), rows(other, method), check_exact=True)
        both = [place / method / "curves.parquet" for place in (one, other)]
        assert both[0].exists() == both[1].exists()
        if both[0].exists():  # all masks were asked
            pandas.testing.assert_frame_equal(*map(pandas.read_parquet, both), check_exact=True)


def interrupted(
    go: Callable[[], Any], after: int = 1, kind: str = UNIT, *, searching: bool = False
) -> None:
    """Start a run and end it by force once so many units of a kind are done.

    With `searching`, those of the first run, which finds alpha_min.
    """
    whole = Store.write

    def write(self: Store, rows: Rows, now: str = UNIT) -> None:
        here = now == kind and (self.folder.name == "search") == searching
        if here and len(self.done(kind)) == after:
            raise StopError
        whole(self, rows, now)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Store, "write", write)
        with pytest.raises(StopError):
            go()
