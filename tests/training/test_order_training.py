"""Training an order: what it leaves alone, that it resumes to the bit, its size, and its limits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lax_toys import Traces, classifier_of, data, loader_of, mixed_modes, weights
from small_models import small_model, small_vit
from sufficit import Classifier, Lax, UserError, explain, train_lax
from sufficit.explainers.explanation import draw_all
from sufficit.explainers.size_head import SizeHead, described
from sufficit.sources.asked import SIZES
from sufficit.training import OrderRecipe
from sufficit.training.lax_training import mirrors_keep_classes
from sufficit.training.level_sets import level_sets

SHORT = OrderRecipe(steps=9, width=8, cells=8)


def train(classifier: Classifier | None = None, loader: Any = None, **options: Any) -> Lax:
    given = {"recipe": SHORT, "progress": False} | options
    loader = loader_of() if loader is None else loader
    return train_lax(classifier or classifier_of(), loader, **given)


def test_the_classifier_is_bit_for_bit_the_same_after_training() -> None:
    classifier = classifier_of()
    mixed_modes(classifier.model)
    traces = Traces(classifier.model)
    lax = train(classifier)
    traces.check()
    assert not torch.equal(weights(lax), weights(train(epochs=1)))


class StoppedError(Exception):
    pass


def stop_after(epochs: int):
    """A progress that interrupts in the epoch after these."""

    def tick(done: int, total: int, note: str = "") -> None:
        if done > epochs * total // 3:
            raise StoppedError

    return tick


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path: Path, epochs: int) -> None:
    whole = train()
    with pytest.raises(StoppedError):
        train(out=tmp_path, progress=stop_after(epochs))
    found = train(out=tmp_path)
    assert torch.equal(weights(found), weights(whole))
    assert found.size == whole.size
    kept = Lax.from_pretrained(tmp_path)
    assert torch.equal(weights(kept), weights(whole))
    assert kept.config == found.config
    images, labels = data()
    maps = [explain(classifier_of(), images, labels, lax) for lax in (whole, kept)]
    assert torch.equal(*maps)
    again = train(out=tmp_path)  # it is finished
    assert torch.equal(weights(again), weights(whole))
    with pytest.raises(UserError, match=r"Cannot resume .*: `recipe.rest` was 0.5, now 1.0"):
        train(out=tmp_path, recipe=replace(SHORT, rest=1.0))


def test_the_last_weights_are_kept_and_looks_are_few() -> None:
    lax = train(epochs=8)
    rows = lax.trained["history"]
    assert [row["epoch"] for row in rows if "size" in row] == [2, 4, 6, 8]
    assert all(row["kept"] for row in rows)
    assert [row["steps"] for row in rows] == [3] * 8
    assert lax.size == rows[-1]["size"]
    assert lax.size in SIZES


def test_the_steps_of_the_recipe_decide_the_epochs() -> None:
    assert train().trained["epochs"] == 3  # of 3 batches
    assert train(recipe=replace(SHORT, steps=10)).trained["epochs"] == 4
    few = train(recipe=replace(SHORT, steps=2)).trained  # an epoch ends early
    assert (few["epochs"], few["history"][0]["steps"]) == (1, 2)
    assert train(epochs=2).trained["epochs"] == 2


def test_the_size_is_the_best_of_the_24_on_the_validation_images() -> None:
    classifier, (images, labels) = classifier_of(), data()
    lax = train(validation=[(images, labels)], validation_images=24)
    drawn = draw_all(classifier, images, labels, {"lax": lax}, progress=False)["lax"]
    order = torch.nn.functional.interpolate(drawn.maps[:, None], (8, 8), mode="bilinear")[:, 0]
    scores = []
    with torch.no_grad():
        empty = classifier(torch.zeros(1, 3, 8, 8)).argmax(1)
        for size in SIZES:  # a slow second writing of MSI at a size
            total = 0.0
            for image, label, one in zip(images, labels, order, strict=True):
                inside = torch.zeros(64)
                inside[one.flatten().argsort(descending=True)[: round(size * 64)]] = 1
                mask = inside.view(8, 8)
                kept, rest = (
                    classifier((image * part)[None]).argmax(1) == label for part in (mask, 1 - mask)
                )
                total += 0.5 * (int(kept) - int(rest)) + 0.5 * (int(kept) - int(empty == label))
            scores.append(total / 24 - size)
    best = max(range(24), key=lambda k: (round(scores[k], 9), -k))
    assert lax.size == SIZES[best]
    assert lax.trained["history"][-1]["msi"] == pytest.approx(max(scores), abs=1e-6)


def test_a_wanted_area_is_the_size() -> None:
    lax = train(area=0.25)
    assert lax.size == 0.25
    images, labels = data()
    maps = explain(classifier_of(), images, labels, lax)
    assert ((maps >= 0.5).sum((1, 2)) == 16).all()


def test_level_sets_by_hand() -> None:
    """A model that names class 1 where pixel 0 is shown: its order of one pixel suffices."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(10.0))

        def forward(self, images: Tensor) -> Tensor:
            seen = images[:, 0, 0, 0] - 0.5
            return torch.stack([-self.scale * seen, self.scale * seen], 1)

    classifier, images = Classifier(First()), torch.ones(2, 1, 10, 10)
    orders = torch.zeros(2, 10, 10)
    orders[0, 0, 0] = 1.0  # the pixel comes first
    orders[1] = 1.0
    orders[1, 0, 0] = 0.0  # the pixel comes last
    found = level_sets(classifier, images, torch.tensor([1, 1]), orders)
    assert found.kept[0].all()
    assert not found.rest[0].any()
    assert not found.kept[1].any()
    assert found.rest[1].all()
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    torch.testing.assert_close(found.msi[0], 1 - sizes)
    torch.testing.assert_close(found.msi[1], -0.5 - sizes)
    assert found.everything.tolist() == [0, 0]
    assert found.insertion.tolist() == pytest.approx([1 - 0.01, 0.025])
    assert found.size == SIZES[0]


def test_images_are_mirrored_only_where_their_classes_stay() -> None:
    symmetric = torch.rand(8, 3, 8, 4)
    symmetric = torch.cat([symmetric, symmetric.flip(3)], 3)
    assert mirrors_keep_classes(classifier_of(), symmetric)

    class LeftOrRight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(9.0))

        def forward(self, images: Tensor) -> Tensor:
            left = images[..., :4].mean((1, 2, 3)) - images[..., 4:].mean((1, 2, 3))
            return torch.stack([left, -left], 1) * self.scale

    assert not mirrors_keep_classes(Classifier(LeftOrRight()), data()[0])


@pytest.mark.parametrize("target", ["label", "prediction"])
@pytest.mark.parametrize("net", ["vit", "flattened"])
def test_other_heads_are_trained_too(net: str, target: str) -> None:
    torch.manual_seed(0)
    model = small_vit() if net == "vit" else small_model(classes=4)
    images = torch.rand(16, 3, 32, 32)
    with torch.no_grad():  # answers that differ
        head = model.heads.head if net == "vit" else model[-1]
        nn.init.normal_(head.weight)
        head.bias -= model.eval()(images).mean(0)
    loader = DataLoader(TensorDataset(images, torch.arange(16) % 4), batch_size=8)
    classifier = Classifier(model.eval())
    lax = train(classifier, loader, target=target, validation_images=16)
    assert lax.head.kind == ("token" if net == "vit" else "gradient")
    assert lax.passes == (1 if net == "vit" else 3)
    assert lax.trained["evidence"] == lax.head.words
    maps = explain(classifier, images, method=lax)
    assert ((maps >= 0.5).double().mean((1, 2)) - lax.size).abs().max() < 0.01


def test_parts_that_an_order_has_not_are_refused() -> None:
    for name, part in (("net", nn.Conv2d(9, 1, 1)), ("loss", lambda step: 0.0), ("patience", 3)):
        with pytest.raises(UserError, match=f"the recipe robust has no {name}: leave it out"):
            train(**{name: part})
    with pytest.raises(UserError, match="leave out class_free"):
        train(class_free=True)


def test_a_loss_that_is_not_finite_is_an_error(monkeypatch) -> None:
    from sufficit.training import order_step

    monkeypatch.setattr(order_step, "order_loss", lambda kept, *_: kept.sum() * torch.nan)
    with pytest.raises(UserError, match=r"the loss became nan in epoch 1.*No epoch was finished"):
        train()


def test_how_long_it_takes_is_announced_and_changes_nothing() -> None:
    said: list[str] = []
    lax = train(announce=said.append)
    assert len(said) == 1
    assert said[0].startswith("Training takes 9 steps in 3 epochs and about ")
    assert "the weights of '8', applied to every cell of '4'" in said[0]
    assert torch.equal(weights(lax), weights(train()))


def test_the_map_of_a_class_that_was_never_shown_follows_the_classifier() -> None:
    """Classes 0 and 1 are trained on; the untrained evidence for class 3 is in the net's input."""
    images, labels = data()
    some = labels < 2
    loader = DataLoader(TensorDataset(images[some], labels[some]), batch_size=6)
    classifier = classifier_of()
    lax = train(classifier, loader)
    asked = [explain(classifier, images, torch.full((24,), k), lax) for k in (2, 3)]
    assert not torch.equal(*asked)


def test_a_head_of_sizes_that_is_better_is_kept(tmp_path: Path, monkeypatch) -> None:
    def always(orders: Tensor, scores: Tensor) -> tuple[SizeHead, dict[str, float]]:
        head = SizeHead(SIZES).fit(described(orders), scores, 0.1)
        return head, {"msi_one_size": 0.1, "msi_predicted_sizes": 0.2}

    monkeypatch.setattr("sufficit.training.lax_training.choose_size", always)
    lax = train(out=tmp_path)
    assert lax.size_head is not None
    row = lax.trained["history"][-1]
    assert row["predicts_size"]
    assert lax.size == row["mean_size"]
    assert "predicted for each" in lax.marks
    kept = Lax.from_pretrained(tmp_path)
    images, labels = data()
    maps = [explain(classifier_of(), images, labels, one) for one in (lax, kept)]
    assert torch.equal(*maps)
    assert len((maps[0] >= 0.5).sum((1, 2)).unique()) > 1
    assert torch.equal(weights(train(out=tmp_path)), weights(lax))  # it is finished
    assert train(area=0.25).size_head is None
