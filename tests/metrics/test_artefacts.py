"""Grid energy and fragments: planted grids, slow second implementations, counts by hand."""

import cmath
import math

import pytest
import torch
from torch import Tensor, nn

from small_models import Spy
from sufficit import Classifier, UserError, evaluate
from sufficit.metrics import Evaluation
from sufficit.metrics.artefacts import Cell, fragments, grid_energy, smoothed


def blob(side: int, middle: tuple[float, float], sigma: float) -> Tensor:
    """A Gaussian hill: [side,side]."""
    y, x = (torch.exp(-(((torch.arange(side) - m) / sigma) ** 2) / 2) for m in middle)
    return y[:, None] * x


def waves(side: int, period: float, kind: str, shift: tuple[int, int] = (0, 0)) -> Tensor:
    """A pattern of one period, in 0..1: [side,side]."""
    y, x = (torch.cos(2 * math.pi * (torch.arange(side) + s) / period) for s in shift)
    found = {
        "stripes": x.expand(side, side),
        "beams": y[:, None].expand(side, side),
        "dots": (1 + y[:, None]) * (1 + x) / 2 - 1,
        "checks": y[:, None] * x,
    }
    return (1 + found[kind]) / 2


def slowly(heatmap: Tensor, cell: Cell) -> float:
    """Grid energy by its definition, one frequency and one pixel at a time."""
    h, w = heatmap.shape
    py, px = cell
    window = [
        [math.sin(math.pi * i / h) ** 2 * math.sin(math.pi * k / w) ** 2 for k in range(w)]
        for i in range(h)
    ]
    weight = sum(map(sum, window))
    mean = sum(window[i][k] * heatmap[i, k].item() for i in range(h) for k in range(w)) / weight
    seen = [[window[i][k] * (heatmap[i, k].item() - mean) for k in range(w)] for i in range(h)]
    total = h * w * sum(v * v for row in seen for v in row)
    ways = [1, 1]
    for axis, (side, period) in enumerate(((h, py), (w, px))):
        while side / period * ways[axis] < 8:
            ways[axis] *= 2

    def share(fy: float, fx: float) -> float:
        fy, fx = round(fy * h * ways[0]) / (h * ways[0]), round(fx * w * ways[1]) / (w * ways[1])
        turn = -2j * math.pi
        found = sum(
            seen[i][k] * cmath.exp(turn * (fy * i + fx * k)) for i in range(h) for k in range(w)
        )
        return abs(found) ** 2 / total

    energy = expected = 1e-4
    for directions in (((1, 0), (0, 1)), ((1, 1), (1, -1))):
        for number in range(1, int(max(cell) / 2) + 1):
            clear = min(h / py, w / px) * (number - 0.5) >= 3
            if not clear and 0 in directions[0]:
                continue
            on, around, lines = 0.0, 0.0, ([], [])
            for dy, dx in directions:
                fy, fx = dy * number / py, dx * number / px
                if max(abs(fy), abs(fx)) > 0.5:
                    continue
                ring = []
                for a in range(96):
                    angle, radius = (a + 0.5) * math.pi / 96, math.hypot(fy, fx)
                    ry, rx = radius * math.sin(angle), radius * math.cos(angle)
                    away = math.hypot(
                        (ry - round(ry * py) / py) * h, (rx - round(rx * px) / px) * w
                    )
                    if away >= 1.5 and max(abs(ry), abs(rx)) <= 0.5:
                        ring.append((ry, rx))
                if len(ring) < 3:
                    continue
                on += share(fy, fx)
                around += sum(share(*point) for point in ring) / len(ring)
                for line, shift in zip(lines, (-0.5, 0.5), strict=True):
                    line.append((fy * (number + shift) / number, fx * (number + shift) / number))
            fits = all(abs(f) <= 0.5 for point in lines[1] for f in point)
            if lines[0] and fits and clear:
                low, high = (sum(share(*point) for point in line) for line in lines)
                around = max(around, math.sqrt(low * high))
            energy, expected = energy + on, expected + around
    return energy / expected


@pytest.mark.parametrize(
    ("size", "cell"),
    [
        ((16, 16), (4.0, 4.0)),
        ((24, 18), (4.0, 3.0)),
        ((20, 23), (3.3, 3.7)),
        ((19, 35), (2.0, 4.0)),  # half a cycle per pixel is between two frequencies
    ],
)
def test_grid_energy_is_its_definition(size: tuple[int, int], cell: Cell) -> None:
    drawn = torch.Generator().manual_seed(4)
    maps = torch.rand(2, *size, generator=drawn)
    maps[1] += 0.4 * (torch.arange(size[1]) % round(cell[1]) == 0)
    assert grid_energy(maps, cell).tolist() == pytest.approx(
        [slowly(one, cell) for one in maps], rel=1e-9
    )


@pytest.mark.parametrize(
    ("side", "period"), [(64, 8), (64, 4), (67, 8), (75, 4), (224, 16), (224, 32), (32, 8)]
)
def test_smooth_maps_have_about_1(side: int, period: int) -> None:
    places = [(0.5, 0.5), (0.33, 0.6), (0.7, 0.41)]
    sigmas = (period / 2, period, side / 6)
    maps = torch.stack(
        [blob(side, (side * y, side * x), sigma) for y, x in places for sigma in sigmas]
    )
    found = grid_energy(maps, period)
    assert found.min() > 0.75
    assert found.max() < 1.1


@pytest.mark.parametrize("kind", ["stripes", "beams", "dots", "checks"])
@pytest.mark.parametrize(("side", "period"), [(64, 8), (64, 4), (224, 16), (224, 32)])
def test_a_planted_grid_shows_and_more_so_the_stronger_it_is(
    side: int, period: int, kind: str
) -> None:
    hill = blob(side, (side * 0.45, side * 0.55), side / 6)
    strengths = (0.02, 0.05, 0.1, 0.3)  # peak to peak, of the hill's height
    maps = [hill * (1 - s + s * waves(side, period, kind)) for s in strengths]
    found = grid_energy(torch.stack(maps), period)
    assert (found.diff() > 0).all()
    assert found[1] > 1.3
    assert found[2] > 2.5
    assert found[3] > 10
    # Its copy without the grid.
    assert grid_energy(smoothed(maps[3][None], (period, period)), period).item() < 1.1


@pytest.mark.parametrize("side", [32, 40, 48])
def test_shapes_without_a_grid_have_at_most_1_with_few_cells(side: int) -> None:
    drawn = torch.Generator().manual_seed(3)
    low = side / 2 * torch.rand(200, 2, 1, generator=drawn)
    high = low + side * (0.35 + 0.5 * torch.rand(200, 2, 1, generator=drawn))
    line = torch.arange(side) + 0.5
    edges = (line - low).sigmoid() * (high - line).sigmoid()  # [N,2,side]
    boxes = edges[:, 0, :, None] * edges[:, 1, None]
    ways = 2 * (line - (low + high) / 2) / (high - low)
    discs = (8 * (1 - ways[:, 0, :, None].hypot(ways[:, 1, None]))).sigmoid()
    for maps in (boxes, discs):
        assert grid_energy(maps, 8).mean().item() < 1.05


@pytest.mark.parametrize("kind", ["lines", "dots"])
def test_a_grid_of_4_cells_per_side_shows_too(kind: str) -> None:
    hill, line = blob(32, (15.0, 17.0), 6), (torch.arange(32) % 8 == 0).float()
    lines = 1 - torch.maximum(line[:, None], line)
    grid = {"lines": lines, "dots": waves(32, 8, "dots")}[kind]
    strengths = (0.05, 0.1, 0.3)
    plain, *found = grid_energy(
        torch.stack([hill, *(hill * (1 - s + s * grid) for s in strengths)]), 8
    ).tolist()
    assert plain == pytest.approx(1, abs=0.1)
    assert found == sorted(found)
    assert found[0] > 1.1
    assert found[2] > 2


def test_the_place_of_the_grid_changes_nothing() -> None:
    hill = blob(64, (32.0, 32.0), 11)
    shifts = [(0, 0), (1, 2), (3, 5), (7, 4)]
    maps = torch.stack([hill * (0.9 + 0.1 * waves(64, 8, "dots", s)) for s in shifts])
    found = grid_energy(maps, 8)
    assert found.min() > 3
    assert found.tolist() == pytest.approx([found[0].item()] * 4, rel=0.01)


def test_a_grid_of_another_period_does_not_count() -> None:
    hill = blob(64, (32.0, 32.0), 11)
    other = hill * (0.9 + 0.1 * waves(64, 64 / 11, "stripes"))
    own = hill * (0.9 + 0.1 * waves(64, 8, "stripes"))
    assert grid_energy(torch.stack([other, own]), 8)[0].item() < 1.1
    assert grid_energy(torch.stack([other, own]), 8)[1].item() > 4


def test_harmonics_count() -> None:
    hill = blob(64, (32.0, 32.0), 11)
    thirds = hill * (0.9 + 0.1 * waves(64, 8 / 3, "stripes"))
    assert grid_energy(thirds[None], 8).item() > 3


def test_a_rectangle_with_sharp_edges_is_no_grid() -> None:
    maps = torch.zeros(12, 64, 64)
    for i in range(12):
        maps[i, 8 + i : 33 + i, 10 + 2 * i : 24 + 3 * i] = 1
    assert grid_energy(maps, 8).mean().item() < 1.5


def test_noise_and_a_disc_have_about_1() -> None:
    noise = torch.rand(64, 64, 64, generator=torch.Generator().manual_seed(0))
    assert grid_energy(noise, 8).mean().item() == pytest.approx(0.95, abs=0.15)
    y = torch.arange(64.0)[:, None]
    disc = ((y - 30) ** 2 + (y.T - 34) ** 2 < 15**2).float()
    assert 0.3 < grid_energy(disc[None], 8).item() < 1.2


def test_a_scale_and_an_offset_change_nothing_and_a_constant_map_has_1() -> None:
    maps = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert grid_energy(0.2 + 0.5 * maps, 4).tolist() == pytest.approx(
        grid_energy(maps, 4).tolist(), rel=1e-5
    )
    assert grid_energy(torch.full((2, 32, 32), 0.7), 4).tolist() == [1, 1]
    assert grid_energy(torch.zeros(0, 32, 32), 4).shape == (0,)


@pytest.mark.parametrize("period", [1, 9, (4.0, 17.0)])
def test_periods_that_do_not_fit_are_refused(period: int | Cell) -> None:
    with pytest.raises(UserError, match="period must be 4 pixels or more and fit 4 times"):
        grid_energy(torch.rand(1, 32, 64), period)


def test_few_small_cells_are_refused_because_no_harmonic_is_left() -> None:
    grid_energy(torch.rand(1, 12, 12), 2)
    with pytest.raises(UserError, match="or 2 and 6 times, got 2"):
        grid_energy(torch.rand(1, 8, 8), 2)


def test_fragments_counts_connected_parts_and_corners_connect() -> None:
    picture = [
        "#..#....",
        ".#..#..#",
        "........",
        "##.#.#.#",
        "##..#...",
    ]  # by eye: two diagonals, a dot, a square, a zigzag, a dot
    one = torch.tensor([[0.9 * (c == "#") for c in line] for line in picture])
    maps = torch.stack([one, torch.zeros(5, 8), torch.ones(5, 8), one * 0.5])
    assert fragments(maps, 0.5).tolist() == [6, 0, 1, 0]
    assert fragments(torch.full((1, 2, 2), 0.5), 0.5).item() == 1  # at alpha_min counts


def net() -> nn.Module:
    """Features of 8 x 8 cells of 4 pixels."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 4, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(4, 3))


def test_the_columns_read_the_cell_from_the_model() -> None:
    drawn = torch.Generator().manual_seed(2)
    images, maps = torch.rand(5, 3, 32, 32, generator=drawn), torch.rand(5, 32, 32, generator=drawn)
    maps[1] = blob(32, (16.0, 16.0), 5) * (0.8 + 0.2 * waves(32, 4, "dots"))
    given = {"columns": ("msi", "grid_energy", "fragments"), "alpha_min": 0.4, "value_step": 0.5}
    scores = evaluate(Classifier(net()), images, maps, **given)
    assert scores.grid_energy.tolist() == pytest.approx(grid_energy(maps, 4).tolist())
    assert scores.fragments.tolist() == fragments(maps, 0.4).tolist()
    metric = Evaluation(Classifier(net()), **given)
    metric.update(images[:2], maps[:2])
    metric.update(images[2:], maps[2:])
    found = metric.compute()
    assert found["grid_energy"].item() == pytest.approx(scores.grid_energy.mean().item())
    assert found["fragments"].item() == pytest.approx(scores.fragments.mean().item())


def test_a_model_without_a_grid_has_no_grid_energy() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))
    images, maps = torch.rand(2, 3, 16, 16), torch.rand(2, 16, 16)
    scores = evaluate(Classifier(flat), images, maps, columns=("grid_energy", "fragments"))
    assert scores.grid_energy.isnan().all()
    assert scores.nan_counts() == {"grid_energy": 2, "fragments": 0}


def test_other_columns_need_no_features() -> None:
    spy = Spy(net())
    images, maps = torch.rand(2, 3, 32, 32), torch.rand(2, 32, 32)
    evaluate(Classifier(spy), images, maps, columns=("fragments",))
    assert sum(spy.sizes) == 2  # the whole images
