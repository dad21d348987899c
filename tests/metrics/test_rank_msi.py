"""MSI by rank: one image at a time, and the same for any change of a map that keeps the order."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from small_probes import probe_for
from sufficit import Classifier, compare, evaluate
from sufficit.metrics import Evaluation
from sufficit.metrics.column import candidate
from sufficit.metrics.further_columns import coarse_shares, rank_curve
from sufficit.metrics.metric import Schedule
from sufficit.metrics.pooled import RankShares, halves_of
from sufficit.perturbation.sampling import uniforms

SIZE = (10, 10)
STEPS = {"value_step": 0.1, "percent_step": 0.1}
QUIET: Any = {"checks": "none"}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(300, 3)).eval()


def case(n: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Images, maps without ties whose values stay apart when changed, the net's own classes."""
    drawn = torch.Generator().manual_seed(seed)
    images = torch.rand(n, 3, *SIZE, generator=drawn)
    order = torch.stack([torch.randperm(100, generator=drawn) for _ in range(n)])
    return images, ((order + 1) / 101).view(n, *SIZE), net()(images).argmax(1)


def slow(images: Tensor, maps: Tensor, targets: Tensor, names: list[str], kind: str) -> list[float]:
    """One image, one mask, one call at a time."""
    model, shares = net(), [k / 10 for k in range(11)]
    curves = []
    for image, heatmap, target in zip(images, maps, targets, strict=True):
        order = heatmap.flatten().argsort(descending=True)
        values = []
        for share in shares:
            keep = torch.zeros(100)
            keep[order[: round(share * 100)]] = 1
            found = []
            for mask in (keep.view(SIZE), 1 - keep.view(SIZE)):
                with torch.no_grad():
                    said = model((image * mask)[None]).softmax(1)[0]
                right = float(said.argmax() == target)
                found.append(right if kind == "accuracy" else said[target].item())
            values.append(found[0] - found[1] - share)
        curves.append(values)
    halves = [uniforms(0, f"half/{name}", 1)[0] < 0.5 for name in names]
    found = []
    for i in range(len(names)):
        others = [curve for curve, half in zip(curves, halves, strict=True) if half != halves[i]]
        means = [sum(curve[k] for curve in others) / len(others) for k in range(11)]
        found.append(curves[i][means.index(max(means))])
    return found


@pytest.mark.parametrize("kind", ["accuracy", "confidence"])
def test_it_equals_one_mask_at_a_time(kind: str) -> None:
    images, maps, targets = case()
    names = [f"{i}.png" for i in range(12)]
    given: Any = {"columns": ["msi_rank"], "names": names, "score": kind, **STEPS}
    scores = evaluate(Classifier(net()), images, maps, targets, **given)
    wanted = slow(images, maps, targets, names, kind)
    assert scores.msi_rank.tolist() == pytest.approx(wanted, abs=1e-6)
    assert len({*wanted}) > 2


def test_the_share_is_chosen_on_the_other_half() -> None:
    curves = np.array(
        [
            [0, 1, 1, 4, 0],
            [0, 0, 3, 0, 0],  # the mean of these two is best at 0.5, the smaller of two
            [0, 3, 1, 1, 0],
            [0, 0, 0, 0, 0],  # and that of these at 0.25
        ],
        dtype=float,
    )
    halves = np.array([0, 0, 1, 1])
    both = candidates(curves, (0.0, 0.25, 0.5, 0.75, 1.0))
    shares = RankShares()
    for rows in ([0, 2], [1, 3]):  # in two batches
        shares.add(halves[rows], {name: values[rows] for name, values in both.items()})
    assert shares.best == (0.25, 0.5)
    # Other fills are read at the shares of the first one.
    blurred = {name.replace("rank", "rank_blur"): 10 * values for name, values in both.items()}
    found = shares.settle(halves, {**both, **blurred})
    assert found["msi_rank"].tolist() == [1, 0, 1, 0]
    assert found["msi_rank_blur"].tolist() == [10, 0, 10, 0]

    alone = RankShares()
    alone.add(halves[:2], {name: values[:2] for name, values in both.items()})
    first, second = alone.best
    assert math.isnan(first)  # there is no other half
    assert second == 0.5


def test_another_fill_is_read_at_the_share_that_the_first_one_chose() -> None:
    images, maps, targets = case()
    model, halves = Classifier(net()), halves_of([str(i) for i in range(12)], 0)
    given: Any = {"columns": ("msi_rank",), **STEPS}
    both = evaluate(model, images, maps, targets, fills=("black", "blur"), **given)
    schedule, curves = Schedule(0.5, percent_step=0.1), {}
    for fill in ("black", "blur"):
        alone = evaluate(model, images, maps, targets, fill=fill, **given)
        curves[fill] = rank_curve(alone.answers, schedule).numpy()
    shares = RankShares()
    shares.add(halves, candidates(curves["black"], schedule.shares))
    places = [schedule.shares.index(shares.best[half]) for half in halves]
    assert both["msi_rank_blur"].tolist() == curves["blur"][range(12), places].tolist()
    assert both["msi_rank"].tolist() == curves["black"][range(12), places].tolist()
    assert both["msi_rank"].tolist() != both["msi_rank_blur"].tolist()


def candidates(curves: np.ndarray, shares: Sequence[float]) -> dict[str, np.ndarray]:
    """Curves [N,P] as the columns they are chosen from."""
    return {candidate("msi_rank", share): curves[:, k] for k, share in enumerate(shares)}


@pytest.mark.parametrize(
    "change", [torch.sqrt, lambda m: m**4, lambda m: 0.2 + m / 3, lambda m: (m - m.min()).exp() / 4]
)
def test_it_is_the_same_for_any_change_that_keeps_the_order(change: Any) -> None:
    images, maps, targets = case()
    changed = change(maps)
    for one, other in zip(maps.flatten(1), changed.flatten(1), strict=True):
        apart = other[one.argsort()]
        assert all(a < b for a, b in pairwise(apart.tolist()))  # no ties from rounding
    given: Any = {"columns": ["msi_rank", "msi"], **STEPS}
    plain = evaluate(Classifier(net()), images, maps, targets, **given)
    other = evaluate(Classifier(net()), images, changed, targets, **given)
    assert torch.equal(plain.msi_rank, other.msi_rank)
    assert not torch.equal(plain.msi, other.msi)


def test_clipping_makes_ties_and_they_are_in_pixel_order() -> None:
    """A change that does not keep the order strictly may change the value."""
    images, maps, targets = case()
    given: Any = {"columns": ["msi_rank"], **STEPS}
    plain = evaluate(Classifier(net()), images, maps, targets, **given)
    clipped = evaluate(Classifier(net()), images, maps.clamp(max=0.2), targets, **given)
    assert not torch.equal(plain.msi_rank, clipped.msi_rank)


def test_halves_depend_on_seed_and_name_alone() -> None:
    names = [f"{i}" for i in range(400)]
    halves = halves_of(names, 0)
    assert 160 < int(halves.sum()) < 240
    assert np.array_equal(halves_of(names[7:9], 0), halves[7:9])
    assert not np.array_equal(halves_of(names, 1), halves)


def test_one_image_has_no_other_half() -> None:
    images, maps, targets = case(1)
    scores = evaluate(Classifier(net()), images, maps, targets, columns=["msi_rank"], **STEPS)
    assert scores.msi_rank.isnan().all()


def test_it_costs_nothing_beside_the_columns_of_the_paper() -> None:
    plain, ranked = (
        evaluate(Classifier(net()), *case(4), columns=columns, **STEPS)
        for columns in ("paper", ("paper", "msi_rank"))
    )
    assert torch.equal(plain.calls, ranked.calls)
    assert torch.equal(plain.msi, ranked.msi)


@pytest.mark.parametrize("calls", ["exact", 24])
def test_a_run_has_it_whatever_its_units_are(calls: Any) -> None:
    images, maps, targets = case()
    names = [f"{i}.png" for i in range(12)]
    sources = {"a": maps, "b": maps.flip(1)}
    steps = {"value_step": 0.05, "percent_step": 0.05}
    found = [
        compare(
            Classifier(net()), images, sources, targets, names=names, calls=calls, unit_size=unit,
            **steps, **QUIET,
        )
        for unit in (5, 32)
    ]  # fmt: skip
    for name, own in sources.items():
        given: Any = {"columns": ("paper", "msi_rank"), "names": names, "calls": calls, **steps}
        wanted = evaluate(Classifier(net()), images, own, targets, **given)
        for one in found:
            rows = one.rows[name]["msi_rank"].to_numpy()
            np.testing.assert_allclose(rows, wanted.msi_rank.numpy(), atol=1e-6)
    assert found[0].record.rank_shares == found[1].record.rank_shares


def test_where_masks_are_drawn_its_own_are_asked_for_every_image() -> None:
    images, maps, targets = case(40)
    steps = {"value_step": 0.02, "percent_step": 0.02}
    probe = probe_for(Classifier(net()), columns=("paper", "msi_rank"), calls=26)
    assert probe.drawing is not None
    assert probe.drawing.width <= 25  # beside the whole image
    given: Any = {"columns": ("paper", "msi_rank"), **steps}
    few = evaluate(Classifier(net()), images, maps, targets, calls=26, **given)
    assert few.sampled
    assert not few.msi_rank.isnan().any()
    exact = evaluate(Classifier(net()), images, maps, targets, **given)
    # The same images at the same share, of the few that all images were asked.
    coarse = coarse_shares(Schedule(0.5, percent_step=0.02))
    assert coarse == [0.04, 0.1, 0.2, 0.3, 0.5]
    schedule = Schedule(0.5, percent_step=0.02)
    halves = halves_of([str(i) for i in range(40)], 0)
    curve = rank_curve(exact.answers, schedule).numpy()
    kept = np.array([share in coarse for share in schedule.shares])
    curve[:, ~kept] = -1e9
    wanted, found = RankShares(), RankShares()
    wanted.add(halves, candidates(curve, schedule.shares))
    found.add(halves, candidates(rank_curve(few.answers, schedule).numpy(), schedule.shares))
    assert found.best == wanted.best
    assert set(found.best) <= set(coarse)
    settled = wanted.settle(halves, candidates(curve, schedule.shares))
    assert few.msi_rank.tolist() == settled["msi_rank"].tolist()


def test_a_torchmetrics_class_has_it() -> None:
    images, maps, targets = case()
    metric = Evaluation(Classifier(net()), columns=("msi", "msi_rank"), **STEPS)
    for rows in (slice(0, 5), slice(5, 12)):
        metric.update(images[rows], maps[rows], targets[rows])
    given: Any = {"columns": ("msi", "msi_rank"), **STEPS}
    wanted = evaluate(Classifier(net()), images, maps, targets, **given)
    assert torch.equal(metric.scores().msi_rank, wanted.msi_rank)
