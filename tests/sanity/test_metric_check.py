"""`check-metric`: known maps made worse, and which columns notice."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

from sufficit import Classifier, UserError
from sufficit.cli.check_metric import check_table
from sufficit.data.images import ImageSource
from sufficit.data.truth import TruthMasks
from sufficit.runs.config import RunConfig
from sufficit.sanity.metric_check import DEGRADATIONS, LEVELS, check_metric, degrade, ordered
from sufficit.statistics import Estimate

SIDE = 16


class Bright(nn.Module):
    """Says class 1 where a bright square is left: its logits are 0 and the light above a bound."""

    def forward(self, images: Tensor) -> Tensor:
        light = (images > 0.9).float().sum((1, 2, 3))
        return torch.stack([torch.zeros_like(light), (light - 24) / 4], 1)


def squares(n: int = 6) -> tuple[Tensor, Tensor]:
    """Images with a bright square somewhere, and where it is."""
    drawn = np.random.default_rng(0)
    images, masks = torch.full((n, 3, SIDE, SIDE), 0.3), torch.zeros(n, SIDE, SIDE)
    for i, (y, x) in enumerate(drawn.integers(3, 7, (n, 2))):
        images[i, :, y : y + 6, x : x + 6] = 1
        masks[i, y : y + 6, x : x + 6] = 1
    return images, masks


def config(**changed: Any) -> RunConfig:
    steps = {"value_step": 0.25, "percent_step": 0.1, "unit_size": 4, "calls": "exact"}
    return RunConfig(model="bright", data="squares", **steps | changed)


def checked(out: Path, **changed: Any) -> Any:
    images, masks = squares()
    options: Any = {"classifier": Classifier(Bright()), "truth": TruthMasks(masks)}
    source = ImageSource.from_tensors(images, None, [1] * len(images))
    options |= {"images": source, "progress": False}
    own = {k: changed.pop(k) for k in ("truth", "classifier") if k in changed}
    return check_metric(config(**changed), out, **options | own)


def of(found: Any, column: str, kind: str) -> Any:
    return next(c for c in found.checks if (c.column, c.kind) == (column, kind))


def test_degradations_by_hand() -> None:
    point = torch.zeros(9, 9)
    point[4, 4] = 1
    known: Any = {"seed": 0, "name": "a"}
    wide = degrade(point, "dilate", 2, **known)
    assert wide.sum() == 25
    assert wide[2:7, 2:7].all()
    for kind in DEGRADATIONS:
        assert torch.equal(degrade(point, kind, 0, **known), point)
    first, last = (degrade(point, "noise", level, **known) for level in (1, 5))
    noise = (first - 0.85 * point) / 0.15
    wanted = 0.25 * point + 0.75 * noise
    assert last.flatten().tolist() == pytest.approx(wanted.flatten().tolist(), abs=1e-5)
    assert noise.min() < 0.2
    assert noise.max() > 0.8
    large = torch.zeros(100, 100)
    large[50, 50] = 1
    far = []
    for level in range(1, LEVELS + 1):
        moved = degrade(large, "shift", level, **known)
        assert moved.sum() == 1
        y, x = (moved.nonzero()[0] - 50).tolist()
        far.append((y**2 + x**2) ** 0.5)
    assert far == pytest.approx([6, 12, 18, 24, 30], abs=1)
    other = degrade(large, "shift", 5, seed=0, name="b")
    assert not torch.equal(other, degrade(large, "shift", 5, **known))


def test_erosion_takes_a_share_of_any_map_from_its_border() -> None:
    known: Any = {"seed": 0, "name": "a"}
    square, stroke = torch.zeros(20, 20), torch.zeros(20, 20)
    square[4:14, 5:15] = 1
    stroke[3:17, 9:11] = 1  # two pixels wide: a square around each pixel would leave nothing
    for whole, sizes in ((square, [85, 70, 55, 40, 25]), (stroke, [24, 20, 16, 12, 7])):
        levels = [degrade(whole, "erode", level, **known) for level in range(1, LEVELS + 1)]
        assert [int(one.sum()) for one in levels] == sizes  # 85, 70, ... %, rounded up
        for larger, smaller in pairwise([whole, *levels]):
            assert (smaller <= larger).all()
    core = degrade(square, "erode", 4, **known)  # 36 pixels are three or more from the border
    assert core[6:12, 7:13].sum() == 36
    assert not degrade(square, "erode", 1, **known)[[4, 4, 13, 13], [5, 14, 5, 14]].any()  # corners
    point = torch.zeros(9, 9)
    point[0, 8] = 0.4
    assert torch.equal(degrade(point, "erode", 5, **known), point)
    hill = torch.tensor([[0.0, 0.2, 0.6, 1.0, 0.6, 0.2, 0.0]]).expand(5, 7)
    peak = degrade(hill, "erode", 5, **known)
    assert peak[2, 3] == 1
    assert not peak[:, [1, 5]].any()
    assert 0.25 * 13 <= peak.sum() < 0.25 * 13 + 1  # at most a pixel more than asked
    assert not degrade(torch.zeros(3, 3), "erode", 2, **known).any()
    assert torch.ones(6, 6).sum() > degrade(torch.ones(6, 6), "erode", 5, **known).sum() == 9


def test_pairs_in_the_right_order_by_hand() -> None:
    values = np.array([[5.0, 4, 3, 3], [1, 2, 3, 4], [np.nan, 1, 2, 3]])
    found = ordered(values)
    assert found[0] == pytest.approx(5.5 / 6)
    assert found[1] == 0
    assert np.isnan(found[2])


def test_columns_of_the_truth_order_the_truth_rightly(tmp_path: Path) -> None:
    found = checked(tmp_path / "out")
    assert found.base == "truth"
    assert found.n == 6
    for column in ("iou", "mass_accuracy", "energy"):
        assert of(found, column, "dilate").by_mean.mean == 1
    assert of(found, "iou", "erode").by_mean.mean == 1
    assert of(found, "mask_penalty", "dilate").by_mean.mean == 1  # lower is better
    assert of(found, "mask_penalty", "erode").by_mean.mean == 0
    assert of(found, "mask_penalty", "shift").by_mean.mean == 0.5  # nothing changes: all ties
    assert of(found, "msi", "shift").by_mean.mean > 0.8
    whole = of(found, "iou", "all")
    each = [of(found, "iou", kind).by_mean.mean for kind in DEGRADATIONS]
    assert whole.by_mean.mean == pytest.approx(np.mean(each))
    assert isinstance(whole.by_mean, Estimate)
    assert whole.by_mean.low <= whole.by_mean.mean <= whole.by_mean.high


def test_it_writes_a_table_and_a_figure_and_resumes(tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"columns": ("msi", "srg")}
    first = checked(out, **options)
    first.save(out)
    known = json.loads((out / "check.json").read_text())
    assert (known["base"], known["n"], known["levels"]) == ("truth", 6, 5)
    rows = (out / "check.csv").read_text().splitlines()
    assert rows[0].startswith("column,degradation,by_mean,by_mean_low,by_mean_high,by_image")
    assert len(rows) == 1 + len(known["checks"])
    with Image.open(out / "check.png") as picture:
        assert min(picture.size) > 100
    changed = (out / "degraded" / "run.json").stat().st_mtime_ns
    again = checked(out, **options)
    assert again.frame().equals(first.frame())
    assert (out / "degraded" / "run.json").stat().st_mtime_ns == changed  # it was read


def test_the_terminals_table_of_all_columns_has_80_letters(tmp_path: Path) -> None:
    found = checked(tmp_path / "out")
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(check_table(found))
    table = capture.get()
    assert "\u2026" not in table, "nothing is cut"
    frame = found.frame().set_index(["column", "degradation"])
    assert "faithfulness_correlation" in table, "the longest name"
    column = "insertion_percent"
    (row,) = [line.split() for line in table.splitlines() if line.split()[:1] == [column]]
    kinds = ["all", *DEGRADATIONS]
    means = [frame.loc[(column, kind)].by_mean for kind in kinds]
    assert [float(row[1]), *map(float, row[3:7])] == pytest.approx(means, abs=0.0051)


def test_some_images_are_drawn_with_their_own_truth(tmp_path: Path) -> None:
    found = checked(tmp_path / "out", images=3, columns=("msi",))
    assert found.n == 3
    assert found.results.summaries["original"]["iou"].mean == 1


def test_without_a_truth_the_best_method_is_made_worse(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 2),
    )  # fmt: skip
    given: Any = {"truth": None, "classifier": Classifier(net, layer="1"), "columns": ("msi",)}
    found = checked(tmp_path / "out", methods=("gradcam", "layercam"), **given)
    assert found.base in ("gradcam", "layercam")
    assert {c.column for c in found.checks} == {"msi"}
    drawn = tmp_path / "out" / "methods" / found.base / "heatmaps.npz"
    written = drawn.stat().st_mtime_ns
    shutil.rmtree(tmp_path / "out" / "degraded")  # as if it was killed after the first run
    again = checked(tmp_path / "out", methods=("gradcam", "layercam"), **given)
    assert drawn.stat().st_mtime_ns == written
    assert again.frame().equals(found.frame())


def test_an_unknown_column_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Unknown column 'mssi'"):
        checked(tmp_path / "out", columns=("mssi",))
    assert not (tmp_path / "out" / "degraded" / "run.json").exists()


def test_values_that_are_equal_up_to_rounding_are_ties() -> None:
    value = 0.1 + 0.2  # not 0.3
    assert ordered(np.array([[value, 0.3], [0.3, value], [0.3001, 0.3]])).tolist() == [0.5, 0.5, 1]
