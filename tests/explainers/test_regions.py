"""The answers of an adapter are the regions of its map: found, ordered, drawn one by one."""

import heapq
import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sufficit import Lax
from sufficit.errors import UserError
from sufficit.explainers.adapter_nets import OUTSIDE, VALLEY, TopDown, region_numbers, split


def discs(*given: tuple[float, float, float, float], side: int = 64) -> Tensor:
    """Flat discs (row, column, radius, height) on nothing: [1,1,side,side]."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    found = torch.zeros(side, side)
    for row, column, radius, height in given:
        found[(y - row) ** 2 + (x - column) ** 2 <= radius**2] = height
    return found[None, None]


# Where the regions are


def around(y: int, x: int, h: int, w: int) -> list[tuple[int, int]]:
    near = [(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    return [(i, j) for i, j in near if 0 <= i < h and 0 <= j < w]


def plain_paths(rows: list[list[float]], start: tuple[int, int]) -> list[list[float]]:
    """The lowest value along the best path from a cell to each other, the best cells first."""
    h, w = len(rows), len(rows[0])
    found = [[0.0] * w for _ in range(h)]
    waiting, seen = [(-rows[start[0]][start[1]], start)], set()
    while waiting:
        value, (y, x) = heapq.heappop(waiting)
        if (y, x) in seen:
            continue
        seen.add((y, x))
        found[y][x] = -value
        for i, j in around(y, x, h, w):
            heapq.heappush(waiting, (max(value, -rows[i][j]), (i, j)))
    return found


def plain_numbers(rows: list[list[float]], count: int) -> list[list[int]]:
    """The region that is nearest to each cell, of equally near ones that with the higher peak."""
    h, w = len(rows), len(rows[0])
    every = [(y, x) for y in range(h) for x in range(w)]
    paths: list[list[list[float]]] = []
    for _ in range(count):
        rest = {(y, x): rows[y][x] - max([p[y][x] for p in paths], default=0) for y, x in every}
        top = max(every, key=rest.__getitem__)
        if rest[top] <= VALLEY:
            break
        paths.append(plain_paths(rows, top))
    cores = [
        [(y, x) for y, x in every if all(p[y][x] > q[y][x] for q in paths if q is not p)]
        for p in paths
    ]
    nearest = {}
    for y, x in every:
        far = [min(max(abs(y - i), abs(x - j)) for i, j in core) for core in cores]
        nearest[y, x] = far.index(min(far))
    sizes = [sum(rows[y][x] for y, x in every if nearest[y, x] == k) for k in range(count)]
    order = sorted(range(count), key=lambda k: -sizes[k])
    return [[order.index(nearest[y, x]) for x in range(w)] for y in range(h)]


@pytest.mark.parametrize("count", [2, 3])
def test_regions_are_those_of_the_best_paths_written_plainly(count: int) -> None:
    noise = torch.randn(30, 1, 15, 11, generator=torch.Generator().manual_seed(count))
    maps = (12 * F.avg_pool2d(F.avg_pool2d(noise, 3, 1, 1), 3, 1, 1) - 1).sigmoid()
    found = region_numbers(maps, count)
    assert found[:, 0].tolist() == [plain_numbers(one[0].tolist(), count) for one in maps]
    assert {len(numbers.unique()) for numbers in found} >= {2, count}


def test_two_discs_are_two_regions_the_larger_first() -> None:
    maps = torch.cat(
        [discs((20, 14, 9, 0.9), (40, 48, 12, 1.0)), discs((20, 14, 12, 0.9), (40, 48, 9, 1.0))]
    )
    found = region_numbers(maps, 2)
    for row, first in ((0, 1.0), (1, 0.9)):
        shown = maps[row] > 0
        assert torch.equal(found[row][shown] == 0, maps[row][shown] == first)


def test_one_disc_or_an_empty_map_is_one_region() -> None:
    maps = torch.cat([discs((30, 30, 14, 1.0)), torch.zeros(1, 1, 64, 64), discs((9, 9, 5, 0.3))])
    assert (region_numbers(maps, 3) == 0).all()


@pytest.mark.parametrize(("between", "regions"), [(0.65, 1), (0.55, 2)])
def test_the_map_must_fall_between_two_regions(between: float, regions: int) -> None:
    line = torch.full((1, 1, 3, 12), between)
    line[..., :4] = 1
    line[..., 8:] = 1
    numbers = region_numbers(line, 2)
    assert len(numbers.unique()) == regions
    if regions == 2:  # of the valley each has the half that is nearer
        assert numbers[0, 0, 1].tolist() in ([0] * 6 + [1] * 6, [1] * 6 + [0] * 6)


def test_a_region_follows_a_winding_path() -> None:
    horseshoe = torch.zeros(1, 1, 15, 15)
    horseshoe[:, :, :, ::14] = 0.9
    horseshoe[:, :, 14] = 0.9
    horseshoe[:, :, 0, 0] = 1  # one end, from which the path to the other is the longest
    assert (region_numbers(horseshoe, 2) == 0).all()
    horseshoe[:, :, 14, 9:12] = 0
    numbers = region_numbers(horseshoe, 2)[0, 0]
    assert (numbers[:, 0] == 0).all()
    assert (numbers[:, 14] == 1).all()


def test_three_regions_are_in_the_order_of_their_sums() -> None:
    places = [(12, 12, 5, 1.0), (12, 50, 10, 0.7), (50, 30, 8, 0.8)]
    maps = discs(*places)
    found = region_numbers(maps, 3)
    assert [int(found[0, 0, y, x]) for y, x, *_ in places] == [2, 0, 1]
    # With two answers the third region belongs to the nearer one: nothing of the map is lost.
    assert len(region_numbers(maps, 2).unique()) == 2


# What an answer shows


def test_the_highest_of_the_answers_is_the_map_and_each_shows_its_region_alone() -> None:
    maps = discs((20, 14, 9, 0.9), (40, 48, 12, 0.99)).clamp(min=0.001)
    logits = maps.logit().requires_grad_()
    found = split(logits, 3)
    assert torch.equal(found.amax(1, keepdim=True), logits)
    numbers = region_numbers(maps, 3)
    for k in range(3):
        own = numbers[:, 0] == k
        assert torch.equal(found[:, k][own], logits[:, 0][own])
        assert (found[:, k][~own] <= OUTSIDE).all()
    assert (found[:, 2] <= OUTSIDE).all()
    found[:, 1].sigmoid().sum().backward()
    assert logits.grad is not None
    slopes = maps * (1 - maps) * (numbers == 1)
    torch.testing.assert_close(logits.grad, slopes, atol=1e-5, rtol=0)


def adapter(answers: int) -> tuple[Lax, list[Tensor], Tensor]:
    """An adapter whose maps have several regions, its features and its targets."""
    torch.manual_seed(1)
    lax = Lax([4, 6], classes=3, answers=answers, evidence=True)
    stages = [torch.randn(4, 4, 12, 12), torch.randn(4, 6, 6, 6)]
    lax.standardize(stages)
    with torch.no_grad():
        lax.net.head.weight.mul_(40)
    return lax, stages, torch.tensor([0, 2, 1, 1])


@pytest.mark.parametrize("answers", [2, 3])
def test_an_adapter_of_regions_is_the_one_of_one_answer_in_parts(answers: int, tmp_path) -> None:
    lax, stages, targets = adapter(answers)
    plain, _, _ = adapter(1)
    assert plain.regions == plain.config["answers"] == 1
    assert plain.state_dict().keys() == lax.state_dict().keys()
    plain.load_state_dict(lax.state_dict())
    lax.save_pretrained(tmp_path / "lax")
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            every = lax(stages, targets, every=True)
            whole = plain(stages, targets)
            assert torch.equal(lax(stages, targets), whole)
            assert every.shape[1] == answers
            assert ((every > 0.5).sum(1) <= 1).all()
            assert ((every > 0.5).flatten(2).any(2).sum(1) == answers).any()
            for k in range(answers):
                alone = lax.answer(k)
                assert alone.answers == 1
                found = alone(stages, targets)
                torch.testing.assert_close(found, every[:, k], atol=1e-7, rtol=1e-6)
                alone.save_pretrained(tmp_path / "alone")
                again = Lax.from_pretrained(tmp_path / "alone")
                assert torch.equal(again(stages, targets), found)
    again = Lax.from_pretrained(tmp_path / "lax")
    assert again.config == lax.config
    assert torch.equal(again(stages, targets, every=True), lax(stages, targets, every=True))


def test_in_bfloat16_the_regions_are_the_same_but_for_rounding() -> None:
    lax, stages, targets = adapter(2)
    with torch.no_grad():
        wanted = lax(stages, targets, every=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = lax([stage.bfloat16() for stage in stages], targets, every=True)
    assert found.dtype == torch.float32
    assert ((found > 0.5) != (wanted > 0.5)).float().mean() < 0.02


@pytest.mark.parametrize("alone", [None, 1])
def test_adapters_whose_file_has_both_numbers_load(tmp_path, alone: int | None) -> None:
    lax, stages, targets = adapter(3)
    lax = lax if alone is None else lax.answer(alone)
    lax.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"answers": lax.answers, "regions": 3, "alone": alone or 0}  # as they were once
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = Lax.from_pretrained(tmp_path)
    assert (again.answers, again.regions, again.alone) == (lax.answers, 3, alone)
    assert torch.equal(again(stages, targets, every=True), lax(stages, targets, every=True))


def test_an_adapter_with_a_net_for_each_answer_is_refused(tmp_path) -> None:
    lax, _, _ = adapter(2)
    assert isinstance(lax.net, TopDown)
    lax.net.head = nn.Conv2d(lax.net.head.in_channels, 2, 3, padding=1)
    lax.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["alone"]  # which no version with such heads wrote
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has one output per answer.*: train it again"):
        Lax.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"answers": 9}, r"answers must be a whole number in 1\.\.8, got 9"),
        ({"answers": "2"}, r"answers must be a whole number in 1\.\.8, got '2'"),
        ({"answers": 2, "alone": 2}, r"alone must be a whole number in 0\.\.1, got 2"),
        ({"alone": 1}, r"alone must be a whole number in 0\.\.0, got 1"),
        ({"answers": 2, "alone": "1"}, r"alone must be a whole number in 0\.\.1, got '1'"),
    ],
)
def test_answers_that_no_adapter_has_are_refused(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Lax([4, 4], **options)
    with pytest.raises(UserError, match="answers and steps need a top-down adapter"):
        Lax(4, answers=2)
