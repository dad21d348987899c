"""The experiments: each runs once, and works over the public API alone."""

import ast
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas
import pytest
import torch
from torch import Generator, Tensor

import check_metric
import gaming
import grid_energy
import lax_arms
import random_labels
import refine
import rival_losses
import twin_judge
from digit_images import write_digits
from lax_toys import QUICK, Traces, classifier_of, data, loader_of, train, weights
from regions.table import half_interval, mean_of, number, paired
from sufficit import Classifier, evaluate, explain, train_lax
from sufficit.data.digits import synthetic_digits

FOLDER = Path(__file__).parents[1] / "experiments"
PUBLIC = {
    *("sufficit", "sufficit.training", "sufficit.metrics"),
    *("sufficit.data.digits", "sufficit.data.images", "sufficit.perturbation.bands"),
}


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_an_experiment_imports_public_names_alone(path: Path) -> None:
    text = path.read_text()
    tree, uses = ast.parse(text), "import sufficit" in text or "from sufficit" in text
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sufficit"):
            assert node.module in PUBLIC
            assert not any(name.name.startswith("_") for name in node.names)
        elif isinstance(node, ast.Import):
            assert all(name.name in PUBLIC or "sufficit" not in name.name for name in node.names)
        elif isinstance(node, ast.Attribute) and uses and not node.attr.startswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            assert own or not node.attr.startswith("_"), f"{path.name}: {node.attr}"


def plain_smooth(mask: list[list[float]]) -> float:
    """Squared differences to the right and below, border values squared, of one mask."""
    h, w = len(mask), len(mask[0])
    edges = sum((mask[i][k] - mask[i][k - 1]) ** 2 for i in range(h) for k in range(1, w))
    edges += sum((mask[i][k] - mask[i - 1][k]) ** 2 for i in range(1, h) for k in range(w))
    border = sum(mask[i][k] ** 2 for i in (0, h - 1) for k in range(w))
    border += sum(mask[i][k] ** 2 for i in range(h) for k in (0, w - 1))  # corners count twice
    return (edges + 0.3 * border) / 2


def test_the_terms_of_other_works_are_what_their_formulas_say() -> None:
    masks = torch.rand(3, 4, 5, generator=Generator().manual_seed(0))
    wanted = sum(plain_smooth(one.tolist()) for one in masks) / 3
    assert rival_losses.smooth(masks).item() == pytest.approx(wanted, rel=1e-5)
    logits, targets = torch.tensor([[3.0, 1.0, 0.0], [0.0, 4.0, 1.0]]), torch.tensor([0, 0])
    assert rival_losses.margin(logits, targets, 1.0).item() == pytest.approx((0 + 5) / 2)
    assert rival_losses.destroyed(logits, targets, 5.0).item() == pytest.approx((7 + 1) / 2)
    even = rival_losses.blank(torch.zeros(1, 3), torch.tensor([True]))
    assert even.item() == pytest.approx(-math.log(3))
    values = torch.randperm(64, generator=Generator().manual_seed(1)).float()[None]
    top = rival_losses.soft_bins(values)[0, :, :8].sum(1)
    clear = (values[0] - 31.5).abs() > 6
    assert ((top > 0.5) == (values[0] >= 32))[clear].all()


@pytest.mark.parametrize("name", rival_losses.FINAL)
def test_a_rival_with_its_final_settings_pays_for_size_by_the_given_factor(name: str) -> None:
    found = {}
    for size in (1.0, 3.0):
        lax = train_lax(
            classifier_of(),
            loader_of(),
            recipe=rival_losses.FINAL_RECIPES[name],
            loss=partial(rival_losses.FINAL[name], size=size),
            class_free=True,
            epochs=1,
            validation_images=8,
            progress=False,
        )
        row = lax.trained["history"][-1]
        found[size] = {k.removeprefix("loss_"): v for k, v in row.items() if k.startswith("loss_")}
    key = "sparse" if name == "rt-saliency" else "earned"
    assert {*found[1.0]} == {*found[3.0]}
    assert all(math.isfinite(value) for value in found[3.0].values())
    assert abs(found[3.0][key]) > 1.5 * abs(found[1.0][key])


def test_the_variation_of_masks_by_hand() -> None:
    masks = torch.tensor([[[0.0, 1.0], [0.0, 1.0]], [[0.5, 0.5], [0.0, 0.0]]])
    assert rival_losses.variation(masks).item() == pytest.approx((2 + 1) / 2)


@pytest.mark.parametrize("name", rival_losses.LOSSES)
def test_an_adapter_is_trained_with_the_loss_of_another_work(name: str) -> None:
    options = {"epochs": 2, "progress": False, "patience": None}
    found = rival_losses.train(name, classifier_of(), loader_of(), **options)
    assert found.classes is None
    rows = found.trained["history"]
    terms = [value for key, value in rows[-1].items() if key.startswith("loss_")]
    assert rows[-1]["loss"] == pytest.approx(sum(terms), rel=1e-4)
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_a_twin_judges_every_other_step() -> None:
    classifier, twin = classifier_of(), classifier_of(seed=5)
    calls = {"model": 0, "twin": 0}

    def count(name: str, module: object, inputs: object, output: Tensor) -> None:
        calls[name] += output.requires_grad

    for name, one in (("model", classifier), ("twin", twin)):
        one.model.register_forward_hook(partial(count, name))
    loss = twin_judge.judged_by(twin, QUICK)
    both = train(classifier=classifier, epochs=2, loss=loss)
    assert calls == {"model": 3, "twin": 3}
    assert not torch.equal(weights(both), weights(train(epochs=2)))


def test_refining_changes_the_map_and_neither_model_nor_adapter() -> None:
    classifier, (images, targets) = classifier_of(), data(8)
    lax = train_lax(
        classifier,
        loader_of(),
        recipe=replace(refine.GRADES, stages=3, absent=1.0, mosaics=0.25),
        epochs=1,
        progress=False,
    )
    before = Traces(classifier.model, lax)
    plain = explain(classifier, images, targets, lax)
    start, end = (
        explain(classifier, images, targets, partial(refine.refine, adapter=lax, steps=steps))
        for steps in (0, 30)
    )
    before.check()
    torch.testing.assert_close(start, plain, atol=3e-3, rtol=0)
    msi = [evaluate(classifier, images, maps, targets, columns=["msi"]).mean()["msi"]
           for maps in (start, end)]  # fmt: skip
    assert msi[1] > msi[0]


def test_columns_order_maps_that_are_made_worse() -> None:
    classifier, digits = Classifier.load("sufficit:digits"), synthetic_digits(3)
    maps = explain(classifier, digits.images, digits.labels, "gradcam")
    found = check_metric.check_metric(
        classifier, digits.images, maps, digits.labels, columns=["msi"], value_step=0.25
    )
    assert list(found["degradation"]) == ["noise", "shift", "erode", "dilate", "all"]
    assert found["by_mean"].between(0, 1).all()
    assert (found["by_mean_low"] <= found["by_mean_high"]).all()
    assert torch.equal(check_metric.degraded(maps, "erode", 0), maps)
    shares = [float(check_metric.degraded(maps, "erode", k).sum() / maps.sum()) for k in (1, 3)]
    assert shares == pytest.approx([0.85, 0.55], abs=0.01)


def test_a_planted_grid_has_more_energy_than_a_hill() -> None:
    hill = torch.hann_window(64).outer(torch.hann_window(64))
    grid = hill * (0.9 + 0.1 * (torch.arange(64) % 8 == 0))
    plain, planted = grid_energy.grid_energy(torch.stack([hill, grid]), 8).tolist()
    assert plain == pytest.approx(1, abs=0.1)
    assert planted > 10
    smooth = grid_energy.smoothed(grid[None], (8.0, 8.0))
    assert grid_energy.grid_energy(smooth, 8).item() < 1.1
    assert grid_energy.cell_of(classifier_of(), data(1)[0]) == (2, 2)


def test_a_copy_learns_random_labels_and_a_control_does_not_notice() -> None:
    images, labels = data(20)
    found = random_labels.random_labels(
        classifier_of(), images, labels, ["layercam", "center"], epochs=3, batch_size=8
    )
    assert found.rank_correlation["center"] == pytest.approx(1)
    assert found.rank_correlation["layercam"] < 0.99
    assert found.chance == 0.25
    assert not found.learned


@pytest.mark.slow
def test_an_arm_is_trained_and_scored(tmp_path: Path) -> None:
    photos, classifier = write_digits(tmp_path / "digits", 24), Classifier.load("sufficit:digits")
    found = lax_arms.train_arm(
        classifier, photos, tmp_path, "no-donors", 0, epochs=1, validation_share=0.5, progress=False
    )
    assert (found["arm"], found["seed"]) == ("no-donors", 0)
    assert -2 <= found["msi"] <= 1
    assert lax_arms.recipe_of_arm("no-donors").donors == 0
    assert all(lax_arms.recipe_of_arm(arm) for arm in lax_arms.CHANGES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")
def test_the_table_of_gaming_has_a_row_for_each_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--images", "4", "--calls", "18", "--step", "0.25"]
    training = ["--train-images", "16", "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["gaming.py", "--out", str(tmp_path), *sizes, *training])
    gaming.main()
    table = (tmp_path / "gaming.md").read_text().splitlines()
    assert len(table) == 2 + len(gaming.METHODS) + 1 + len(gaming.SEARCHES)


def test_the_table_of_fits_compares_the_photographs_that_both_maps_have() -> None:
    base = pandas.DataFrame({"image": ["a", "b", "c"], "msi": [0.1, 0.2, 0.9]})
    own = pandas.DataFrame({"image": ["b", "a", "d"], "msi": [0.6, 0.3, 0.0]})
    # b gains .4 and a .2: mean .3, spread .1414, so +-1.96 x .1414 / 2 ** .5.
    assert paired(own, base, "msi") == "+.300 +-.196"
    assert mean_of(pandas.Series([0.2, math.nan, 0.4])) == ".300 +-.196"
    assert [number(value) for value in (0.25, -0.25, 1.5, -1.0)] == [
        ".250",
        "-.250",
        "1.500",
        "-1.000",
    ]
    assert half_interval(pandas.Series([0.2, 0.4]).to_numpy()) == pytest.approx(0.196)
