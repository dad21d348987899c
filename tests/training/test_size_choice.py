"""One size or a predicted one: a head by ridge regression, chosen on images it has not seen."""

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from sufficit import Lax
from sufficit.explainers.size_head import LEVELS, NUMBERS, SizeHead, described
from sufficit.sources.asked import SIZES
from sufficit.training.size_choice import at_one_size, at_predicted_sizes, choose_size, folds


def discs(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Orders that are high on a disc of some size, and the shares of these discs."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
    distance = ((y - 6.5) ** 2 + (x - 6.5) ** 2).sqrt()
    radius = 1.5 + 5 * torch.rand(n, 1, 1, generator=generator)
    inside = (distance < radius).float()
    noise = torch.rand(n, 14, 14, generator=generator)
    return inside + 0.3 * noise, inside.mean((1, 2))


def scores_for(needed: Tensor) -> Tensor:
    """MSI of regions that suffice from the needed size on, and whose rest then does not."""
    sizes = torch.tensor(SIZES)
    return torch.where(sizes >= needed[:, None], 1.0, -0.5) - sizes


def test_where_orders_show_the_size_it_is_predicted() -> None:
    orders, needed = discs(200)
    head, row = choose_size(orders, scores_for(needed))
    assert head is not None
    assert row["msi_predicted_sizes"] > row["msi_one_size"] + 0.1
    fresh, wanted = discs(100, seed=1)
    found = head(fresh)
    assert {*found.tolist()} <= {*torch.tensor(SIZES).tolist()}
    assert np.corrcoef(found, wanted)[0, 1] > 0.9
    scores = scores_for(wanted)
    places = [min(range(24), key=lambda k: abs(SIZES[k] - size)) for size in found.tolist()]
    predicted = scores[torch.arange(100), torch.tensor(places)].mean()
    assert predicted > scores.mean(0).max() + 0.1


def test_where_orders_say_nothing_of_the_size_one_is_kept() -> None:
    orders, _ = discs(200)
    needed = discs(200, seed=7)[1]
    head, row = choose_size(orders, scores_for(needed))
    assert head is None
    assert row["msi_predicted_sizes"] < row["msi_one_size"] + 0.05


def test_of_few_images_nothing_is_predicted() -> None:
    orders, needed = discs(49)
    head, row = choose_size(orders, scores_for(needed))
    assert head is None
    assert [*row] == ["msi_one_size"]


def test_the_fit_is_the_ridge_regression_of_the_normal_equations() -> None:
    generator = Generator().manual_seed(0)
    numbers, scores = torch.rand(30, NUMBERS, generator=generator), torch.rand(30, 24)
    head = SizeHead(SIZES).fit(numbers, scores, penalty=0.2)
    x = numbers.double().numpy()
    x = (x - x.mean(0)) / x.std(0)
    y = scores.double().numpy()
    # As a plain least squares problem with rows of its own for the penalty.
    rows = np.vstack([x, np.sqrt(0.2 * 30) * np.eye(NUMBERS)])
    goals = np.vstack([y - y.mean(0), np.zeros((NUMBERS, 24))])
    weight = np.linalg.lstsq(rows, goals, rcond=None)[0]
    np.testing.assert_allclose(head.weight.numpy(), weight, atol=1e-5)
    np.testing.assert_allclose(head.curves(numbers).numpy(), x @ weight + y.mean(0), atol=1e-5)


def test_what_describes_an_order_by_hand() -> None:
    order = torch.rand(1, 5, 5, generator=Generator().manual_seed(3)) * 4 - 1
    found = described(order)[0].tolist()
    values = sorted(order.flatten().tolist(), reverse=True)
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    for k in range(LEVELS):
        place = round((k + 0.5) / LEVELS * 24)
        assert found[k] == pytest.approx((values[place] - mean) / spread, abs=1e-4)
        level = values[-1] + (k + 0.5) / LEVELS * (values[0] - values[-1])
        assert found[LEVELS + k] == pytest.approx(sum(v > level for v in values) / 25)


def test_every_image_is_scored_once_by_folds_without_it() -> None:
    seen = [unseen for _, unseen in folds(23)]
    assert sorted(torch.cat(seen).tolist()) == [*range(23)]
    assert all(not {*fit.tolist()} & {*unseen.tolist()} for fit, unseen in folds(23))
    orders, needed = discs(60)
    scores = scores_for(needed)
    numbers = described(orders)
    fit, unseen = folds(60)[2]
    best = scores[fit].mean(0).argmax()
    assert torch.equal(at_one_size(scores)[unseen], scores[unseen, best].double())
    head = SizeHead(SIZES).fit(numbers[fit], scores[fit], 0.3)
    wanted = [float(scores[i, head.curves(numbers[i : i + 1]).argmax()]) for i in unseen.tolist()]
    assert at_predicted_sizes(numbers, scores, 0.3)[unseen].tolist() == pytest.approx(wanted)


def test_an_adapter_keeps_its_head_of_sizes(tmp_path) -> None:
    head = {"kind": "none", "layer": "4"}
    lax = Lax([8, 16], cells=4, head=head, sizes=SIZES)
    orders, needed = discs(100)
    assert lax.size_head is not None
    lax.size_head.fit(described(orders), scores_for(needed), 0.1)
    lax.save_pretrained(tmp_path)
    found = Lax.from_pretrained(tmp_path)
    assert torch.equal(found.shares(orders), lax.shares(orders))
    assert len(found.shares(orders).unique()) > 3
    found.one_size(0.25)
    assert found.shares(orders).unique().tolist() == [0.25]
    found.save_pretrained(tmp_path)
    assert Lax.from_pretrained(tmp_path).size_head is None
