"""train_lax: what it leaves untouched, that it can be repeated and resumed, and how it stops."""

import importlib.metadata
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchvision.models import VisionTransformer

from lax_toys import (
    QUICK,
    Traces,
    classifier_of,
    data,
    loader_of,
    mixed_modes,
    small_net,
    train,
    weights,
)
from sufficit import Classifier, Lax, UserError, explain, train_lax
from sufficit.training import TrainingStep, cache_features, recipe_loss
from sufficit.training.feed import Feed
from sufficit.training.lax_training import LOSS, TrainingError, best_of, class_weights
from sufficit.training.training_batch import TrainingBatch
from sufficit.training.validation import ValidationScores, ValidationSet

# The classifier, the caller's randomness and the caller's net are left alone


class Failing:
    """A loader that breaks in the second epoch."""

    def __init__(self) -> None:
        self.times = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        for number, batch in enumerate(loader_of()):
            if self.times == 3 and number == 1:  # the first time is a look at the images
                raise ZeroDivisionError("a broken file")
            yield batch


@pytest.mark.parametrize("fails", [False, True])
def test_the_classifier_is_bit_for_bit_the_same_after_training(fails: bool) -> None:
    classifier = classifier_of()
    mixed_modes(classifier.model)
    traces = Traces(classifier.model)
    grads = [None if t.grad is None else t.grad.clone() for t in traces.tensors]
    if fails:
        with pytest.raises(ZeroDivisionError):
            train(Failing(), classifier)
    else:
        train(classifier=classifier)
    traces.check()
    for tensor, grad in zip(traces.tensors, grads, strict=True):
        assert (tensor.grad is None) == (grad is None)
        assert grad is None or torch.equal(tensor.grad, grad)
    assert classifier.layer == "4"


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_randomness_is_where_it_was(fails: bool) -> None:
    classifier, loader = classifier_of(), Failing() if fails else loader_of()
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    if fails:
        with pytest.raises(ZeroDivisionError):
            train_lax(classifier, loader, recipe=QUICK, progress=False)
    else:
        train_lax(classifier, loader, recipe=QUICK, epochs=1, progress=False)
        cache_features(classifier, loader)
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_callers_net_is_copied_and_gradients_may_be_off() -> None:
    net, classifier = small_net(), classifier_of()
    traces = Traces(net)
    one = train(classifier=classifier, net=net)
    traces.check()
    assert not torch.equal(weights(one), weights(Lax(9, net=net)))
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            again = train(classifier=classifier, net=net)
        assert torch.equal(weights(again), weights(one))


# Again, and on


def test_the_seed_decides_the_weights() -> None:
    one, again, another = (train(seed=seed, net=None, epochs=1) for seed in (0, 0, 1))
    assert torch.equal(weights(one), weights(again))
    assert not torch.equal(weights(one), weights(another))
    assert one.trained["seed"] == 0
    assert another.trained["seed"] == 1


def test_an_adapter_knows_by_which_versions_and_where_it_was_trained(tmp_path: Path) -> None:
    train(epochs=1, net=None, out=tmp_path / "lax")
    told = Lax.from_pretrained(tmp_path / "lax").trained
    assert told["versions"]["torch"] == importlib.metadata.version("torch")
    assert told["device"] == {"type": "cpu", "name": ANY, "dtype": "torch.float32"}
    assert {"commit", "time", "batches"} <= told.keys()


def test_the_seed_decides_the_order_too() -> None:
    one, another = (train(seed=seed) for seed in (0, 1))  # the net is given
    assert not torch.equal(weights(one), weights(another))


class Augmented(TensorDataset):
    """Draws from all three generators at each image."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image, label = super().__getitem__(index)
        shade = random.random() * np.random.rand() * torch.rand(())  # noqa: NPY002
        return image * shade, label


def own_generator() -> DataLoader[Any]:
    return loader_of(generator=torch.Generator().manual_seed(random.randrange(10**6)))


def own_sampler() -> DataLoader[Any]:
    dataset = TensorDataset(*data())
    generator = torch.Generator().manual_seed(random.randrange(10**6))
    return DataLoader(dataset, batch_size=8, sampler=RandomSampler(dataset, generator=generator))


def own_batches() -> DataLoader[Any]:
    dataset = TensorDataset(*data())
    generator = torch.Generator().manual_seed(random.randrange(10**6))
    sampler = RandomSampler(dataset, generator=generator)
    return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 8, drop_last=False))


LOADERS = {
    "shuffling": loader_of,
    "own generator": own_generator,
    "own sampler": own_sampler,
    "own batches": own_batches,
    "augmenting": lambda: DataLoader(Augmented(*data()), batch_size=8, shuffle=True),
    "cached": lambda: cache_features(classifier_of(), loader_of()),
}


class StoppedError(Exception):
    pass


def stop_after(epochs: int):
    """A progress that interrupts in the epoch after these."""

    def tick(done: int, total: int, note: str = "") -> None:
        if done > epochs * total // QUICK.epochs:
            raise StoppedError

    return tick


@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_interrupted_in_any_epoch_ends_as_if_it_had_not_been(kind: str, tmp_path) -> None:
    whole = train(LOADERS[kind]())
    for epochs in range(QUICK.epochs):
        out = tmp_path / str(epochs)
        with pytest.raises(StoppedError):
            train(LOADERS[kind](), out=out, progress=stop_after(epochs))
        assert (out / "checkpoint.pt").exists() == (epochs > 0)
        found = train(LOADERS[kind](), out=out)
        assert torch.equal(weights(found), weights(whole))
        rows = [
            [{k: v for k, v in row.items() if k != "seconds"} for row in lax.trained["history"]]
            for lax in (found, whole)
        ]
        assert rows[0] == rows[1]
        assert torch.equal(weights(Lax.from_pretrained(out, net=small_net())), weights(whole))


MOSAICS = replace(QUICK, stages=3, absent=1.0, mosaics=1.0)


def test_a_run_with_mosaics_is_resumed_to_the_bit(tmp_path: Path) -> None:
    whole = train(net=None, recipe=MOSAICS)
    with pytest.raises(StoppedError):
        train(net=None, recipe=MOSAICS, out=tmp_path, progress=stop_after(1))
    found = train(net=None, recipe=MOSAICS, out=tmp_path)
    assert torch.equal(weights(found), weights(whole))
    again = Lax.from_pretrained(tmp_path)
    assert again.evidence
    assert torch.equal(weights(again), weights(whole))
    other = train(net=None, recipe=replace(MOSAICS, mosaics=2.0))
    assert not torch.equal(weights(other), weights(whole))  # the term counts


def test_contrast_changes_the_finished_map_and_not_the_training(tmp_path: Path) -> None:
    images, labels = data()
    plain = replace(MOSAICS, epochs=1, alpha_min=0.3)  # one epoch, so none is selected
    sharp = replace(plain, contrast=4.0)
    soft, crisp = (train(net=None, recipe=recipe) for recipe in (plain, sharp))
    with torch.no_grad():
        stages, _ = classifier_of().stages(images, soft.layers)
        before, after = (lax.logits(stages, labels) for lax in (soft, crisp))
    at_level = math.log(0.3 / 0.7)
    torch.testing.assert_close(after - at_level, 4 * (before - at_level), rtol=1e-4, atol=1e-5)
    # The epoch is scored as it is kept, and a second call, which resumes, sharpens no further.
    row = crisp.trained["history"][0]
    judged = Feed(classifier_of(), loader_of(), "label", 0).first_images(256)
    found = ValidationSet.of(classifier_of(), *judged).score(classifier_of(), crisp, 0.3)
    assert row["msi"] == pytest.approx(found.means["msi"], abs=1e-6)
    assert row["msi"] != soft.trained["history"][0]["msi"]
    for _ in range(2):
        assert torch.equal(weights(train(net=None, recipe=sharp, out=tmp_path)), weights(crisp))
    assert torch.equal(weights(Lax.from_pretrained(tmp_path)), weights(crisp))


def test_the_weights_of_classes_are_those_of_a_linear_classifier() -> None:
    classifier, (images, _) = classifier_of(), data()
    found = class_weights(classifier, images, "4")
    torch.testing.assert_close(found, classifier.bare[8].weight.detach() / 16)  # a mean of 4 x 4
    classifier.bare[8] = nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 4))
    first, last = classifier.bare[8][0], classifier.bare[8][2]
    with torch.no_grad():
        pooled = classifier.stages(images, ("4",))[0][0].mean((2, 3))
        slopes = 1 - first(pooled).tanh() ** 2  # [N,5]
        wanted = torch.stack([last.weight @ (row[:, None] * first.weight) for row in slopes])
    torch.testing.assert_close(class_weights(classifier, images, "4"), wanted.mean(0) / 16)


def test_a_net_that_was_given_in_eval_mode_is_resumed_as_it_went_on(tmp_path: Path) -> None:
    def net() -> nn.Module:
        norm = nn.BatchNorm2d(9)
        return nn.Sequential(norm, nn.Dropout(0.3), small_net()).eval()

    whole = train(net=net())
    with pytest.raises(StoppedError):
        train(net=net(), out=tmp_path, progress=stop_after(1))
    assert torch.equal(weights(train(net=net(), out=tmp_path)), weights(whole))
    assert whole.net[0].num_batches_tracked == 9


def test_a_finished_run_is_read_and_not_trained_again(tmp_path: Path) -> None:
    one = train(out=tmp_path)
    loader = Failing()
    loader.times = 1  # would break at the first epoch's second batch
    assert torch.equal(weights(train(loader, out=tmp_path)), weights(one))


LOST = [("model.safetensors",), ("config.json",), ("model.safetensors", "config.json")]


def lose(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).unlink()


@pytest.mark.parametrize("names", LOST)
def test_a_finished_run_writes_an_adapter_that_was_lost(tmp_path: Path, names) -> None:
    one = train(out=tmp_path)
    lose(tmp_path, names)
    again = train(out=tmp_path)
    kept = Lax.from_pretrained(tmp_path, net=small_net())
    assert torch.equal(weights(kept), weights(one))
    assert torch.equal(weights(again), weights(one))
    assert kept.trained == one.trained


@pytest.mark.parametrize("names", LOST)
def test_a_stopped_run_writes_a_lost_adapter_though_no_epoch_is_better(
    monkeypatch, tmp_path: Path, names
) -> None:
    seen = judged(monkeypatch, [0.5, 0.1, 0.2])
    with pytest.raises(StoppedError):
        train(out=tmp_path, progress=stop_after(1))
    lose(tmp_path, names)
    with pytest.raises(StoppedError):  # after the second epoch, which is worse than the first
        train(out=tmp_path, progress=stop_after(2))
    assert torch.equal(weights(Lax.from_pretrained(tmp_path, net=small_net())), seen[0])


def test_an_adapter_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    train(out=tmp_path)
    before = (tmp_path / "model.safetensors").stat()
    train(out=tmp_path)
    after = (tmp_path / "model.safetensors").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"epochs": 5},
        {"target": "prediction"},
        {"alpha_min": 0.4},
        {"about": {"data": "birds"}},
        {"validation_images": 8},
    ],
)
def test_another_run_is_not_gone_on_with_unless_told_to_begin_anew(tmp_path, other) -> None:
    train(out=tmp_path, epochs=1)
    with pytest.raises(UserError, match=r"Cannot resume .*: `[\w.]+` was .*, now .*--overwrite"):
        train(out=tmp_path, **{"epochs": 1} | other)
    found = train(out=tmp_path, **{"epochs": 1} | other, overwrite=True)
    assert torch.equal(weights(found), weights(train(**{"epochs": 1} | other)))
    with pytest.raises(UserError, match=r"Cannot resume .*: `[\w.]+` was .*, now .*--overwrite"):
        train(out=tmp_path, epochs=1)


def test_a_training_with_other_formulas_of_the_loss_is_not_resumed(tmp_path, monkeypatch) -> None:
    with pytest.raises(StoppedError):
        train(out=tmp_path, progress=stop_after(2))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("sufficit.training.lax_training.LOSS", LOSS + 1)
        words = r"Cannot resume .*: another version of Sufficit started it.* Use another --out"
        for recipe in (QUICK, replace(QUICK, size=2.0)):  # the version is named before a weight
            with pytest.raises(UserError, match=words):
                train(out=tmp_path, recipe=recipe)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert torch.equal(weights(train(out=tmp_path)), weights(train()))


# Which epoch is kept, and when it ends


def judged(
    monkeypatch, worths: list[float], values: list[list[float]] | None = None
) -> list[Tensor]:
    """Let the epochs be worth these, their images these values; the weights each had."""
    seen: list[Tensor] = []

    def score(own: object, classifier: Classifier, lax: Lax, alpha_min: float) -> ValidationScores:
        seen.append(weights(lax).clone())
        number = len(seen) - 1
        scores = None if values is None else {"msi": torch.tensor(values[number])}
        means = {"msi": worths[number], "leak": 0.1, "leak_chance": 0.1}
        return ValidationScores(means, scores)

    monkeypatch.setattr(ValidationSet, "score", score)
    return seen


def test_the_best_epoch_is_kept(monkeypatch, tmp_path: Path) -> None:
    seen = judged(monkeypatch, [0.1, 0.5, 0.3, 0.5, 0.2])
    found = train(epochs=5, out=tmp_path)
    assert torch.equal(weights(found), seen[3])  # of equals the one that has learned longer
    assert not torch.equal(seen[1], seen[3])
    assert torch.equal(weights(Lax.from_pretrained(tmp_path, net=small_net())), seen[3])
    assert [row["msi"] for row in found.trained["history"]] == [0.1, 0.5, 0.3, 0.5, 0.2]
    assert best_of(found.trained["history"])["epoch"] == 4


def test_a_later_epoch_is_kept_unless_it_is_worse_by_more_than_a_standard_error(
    monkeypatch, tmp_path: Path
) -> None:
    # Differences to the best epoch, the second, on two images: their mean has a standard error of
    # 0.1 in the third and fourth epoch and none in the fifth, which is worse on both alike.
    start = [0.5, 0.3]
    shifts = [(-0.4, -0.4), (0.0, 0.0), (-0.21, -0.01), (-0.19, 0.01), (-0.05, -0.05)]
    values = [[a + b for a, b in zip(start, shift, strict=True)] for shift in shifts]
    worths = [sum(each) / 2 for each in values]
    assert worths == pytest.approx([0.0, 0.4, 0.29, 0.31, 0.35])
    seen = judged(monkeypatch, worths, values)
    found = train(epochs=5, out=tmp_path)
    history = found.trained["history"]
    assert [row["kept"] for row in history] == [True, True, False, True, False]
    assert best_of(history)["epoch"] == 4
    assert torch.equal(weights(found), seen[3])
    assert torch.equal(weights(Lax.from_pretrained(tmp_path, net=small_net())), seen[3])


def test_a_validation_image_without_a_score_does_not_stop_the_selection(monkeypatch) -> None:
    nan = float("nan")
    values = [[0.1, 0.2, nan], [0.3, 0.4, nan], [0.5, nan, 0.7]]
    seen = judged(monkeypatch, [0.15, 0.35, 0.6], values)
    found = train(epochs=3)
    assert [row["kept"] for row in found.trained["history"]] == [True, True, True]
    assert torch.equal(weights(found), seen[2])


def test_a_resumed_training_compares_with_the_best_epoch_of_before(
    monkeypatch, tmp_path: Path
) -> None:
    values = [[0.5, 0.3], [0.31, 0.31], [0.3, 0.1]]
    worths = [0.4, 0.31, 0.2]  # 0.09 lower at a standard error of 0.1; 0.2 lower at 0
    judged(monkeypatch, worths, values)
    whole = train(epochs=3)
    seen = judged(monkeypatch, [*worths[:2], float("nan")], values)
    with pytest.raises(TrainingError, match="epoch 2 is kept"):
        train(epochs=3, out=tmp_path)
    judged(monkeypatch, worths[2:], values[2:])
    found = train(epochs=3, out=tmp_path)
    assert [row["kept"] for row in found.trained["history"]] == [True, True, False]
    assert torch.equal(weights(found), weights(whole))
    assert torch.equal(weights(found), seen[1])


@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (2, 6), (3, 7), (None, 9)])
def test_training_ends_when_nothing_becomes_better(monkeypatch, patience, epochs) -> None:
    judged(monkeypatch, [0.1, 0.2, 0.2, 0.3, 0.1, 0.3, 0.0, 0.4, 0.0])
    found = train(epochs=9, patience=patience)
    assert [row["epoch"] for row in found.trained["history"]] == list(range(1, epochs + 1))


@pytest.mark.parametrize(("steps", "epochs"), [(750, 9), (20, 8), (9, 6)])
def test_patience_is_counted_in_steps_but_at_least_five_epochs(monkeypatch, steps, epochs) -> None:
    monkeypatch.setattr("sufficit.training.trainer.STALE_STEPS", steps)
    judged(monkeypatch, [0.9 - number / 10 for number in range(9)])
    found = train(epochs=9, patience="auto")  # epochs of 3 steps; the first one is the best
    assert found.trained["batches"] == 3
    assert len(found.trained["history"]) == epochs


def test_worth_is_msi_less_the_distance_of_the_leakage_from_chance() -> None:
    def worth(leak: float, chance: float) -> float:
        return ValidationScores({"msi": 0.5, "leak": leak, "leak_chance": chance}).worth

    assert worth(0.3, 0.1) == pytest.approx(0.3)
    assert worth(0.1, 0.3) == pytest.approx(0.3)
    assert worth(0.2, 0.2) == 0.5
    assert worth(float("nan"), 0.3) == 0.5


def test_history_tells_what_the_returned_adapter_scores() -> None:
    classifier, images_and_labels = classifier_of(), data(16, seed=3)
    found = train(classifier=classifier, validation=[images_and_labels], epochs=1)
    row = found.trained["history"][0]
    again = ValidationSet(*images_and_labels).score(classifier, found, 0.5)
    assert {name: row[name] for name in again.row} == again.row
    heatmaps = explain(classifier, images_and_labels[0], method=found)
    assert row["mask_penalty"] == pytest.approx((heatmaps >= 0.5).float().mean().item(), abs=1e-6)


# Cached features


class InTheSameOrder:
    """What cache_features gives, without features."""

    def __init__(self, batch: int) -> None:
        self.images, self.labels = data()
        self.batch = batch

    def __len__(self) -> int:
        return len(self.labels) // self.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.labels)).split(self.batch):
            yield self.images[rows], self.labels[rows]


@pytest.mark.parametrize("target", ["label", "prediction"])
def test_cached_features_change_nothing_where_batches_agree(target: str) -> None:
    classifier, kept = classifier_of(), data()
    cached = cache_features(classifier, [kept], target)
    cached.batch_size = 8
    found = train(cached, classifier, target=target, validation=[kept])
    wanted = train(InTheSameOrder(8), classifier, target=target, validation=[kept])
    assert torch.equal(weights(found), weights(wanted))


def test_a_cache_holds_every_image_once_with_its_features_and_target() -> None:
    classifier, (images, labels) = classifier_of(), data()
    cached = cache_features(classifier, loader_of(batch=5, shuffle=False))
    assert (len(cached), cached.batch_size) == (5, 5)
    torch.manual_seed(0)
    batch = TrainingBatch.joined([*cached])
    order = [int((images == image).flatten(1).all(1).nonzero()) for image in batch.images]
    assert sorted(order) == list(range(24)) != order
    assert torch.equal(batch.targets, labels[order])
    with torch.no_grad():
        stages, logits = classifier.stages(images[order], ("4",))
    torch.testing.assert_close(batch.features, stages)
    assert torch.equal(batch.first, logits.argsort(1, descending=True)[:, :2])
    assert batch.layers == ("4",)
    torch.manual_seed(0)  # the same order
    said = cache_features(classifier, loader_of(batch=5, shuffle=False), "prediction")
    assert torch.equal(torch.cat([one.targets for one in said]), logits.argmax(1))


def test_cached_features_of_other_layers_are_refused() -> None:
    classifier, loader = classifier_of(), loader_of(batch=8, shuffle=False)
    options = {"net": None, "recipe": replace(QUICK, stages=2), "epochs": 1}
    named = cache_features(classifier, loader, layers=("0", "3"))
    with pytest.raises(UserError, match=r"cached features are of 0, 3, but the adapter reads 4"):
        train(named, classifier, **options)
    lax = train(named, classifier, layers=("0", "3"), **options)
    assert (lax.layers, lax.channels) == (("0", "3"), (6, 9))
    # Of more layers than it reads it takes the last ones.
    assert train(named, classifier, layers=("3",), **options).layers == ("3",)
    assert train(named, classifier, layers="3", **options).layers == ("3",)


@pytest.mark.parametrize("class_free", [False, True])
def test_the_default_adapter_is_top_down_and_takes_a_class(class_free: bool) -> None:
    recipe = replace(QUICK, stages=3, absent=1.0, epochs=1)
    lax = train(net=None, recipe=recipe, class_free=class_free)
    assert (lax.layers, lax.channels) == (("4",), (9,))  # this net has one resolution
    assert lax.classes == (None if class_free else 4)


def small_masks(step: TrainingStep) -> dict[str, Tensor]:
    """Masks are to be small, whatever the classifier says."""
    return {"size": step.cells.mean(), "edges": 0.1 * step.masks.diff().abs().mean()}


def test_a_loss_of_ones_own_is_what_training_lowers(tmp_path: Path) -> None:
    recipe = replace(QUICK, epochs=4, lr=0.05)
    found = train(recipe=recipe, loss=small_masks, out=tmp_path)
    rows = found.trained["history"]
    assert rows[-1]["loss_size"] < 0.8 * rows[0]["loss_size"]
    assert rows[-1]["loss_size"] == pytest.approx(rows[-1]["area"], abs=0.01)
    for row in rows:
        assert row["loss"] == pytest.approx(row["loss_size"] + row["loss_edges"], rel=1e-5)
    assert found.trained["own loss"]["name"] == "small_masks"
    with pytest.raises(UserError, match="Cannot resume"):
        train(recipe=recipe, out=tmp_path)


def test_the_loss_of_the_recipe_given_as_ones_own_trains_the_same_adapter() -> None:
    wanted = train(epochs=2)
    found = train(epochs=2, loss=lambda step: recipe_loss(step, QUICK))
    assert torch.equal(weights(found), weights(wanted))


def test_a_loss_takes_the_step() -> None:
    with pytest.raises(UserError, match=r"a loss takes \(step\)"):
        train(loss=lambda: 0.0)


def test_a_deterministic_training_leaves_torch_as_it_was() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    one, two = (train(epochs=1, deterministic=True) for _ in range(2))
    assert torch.equal(weights(one), weights(two))
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == before


def test_a_deterministic_training_keeps_that_the_user_wants_warnings_only() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(epochs=1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_layers_that_name_none_are_refused() -> None:
    with pytest.raises(UserError, match="layers must name one layer or more, got none"):
        train(net=None, layers=[])


def test_layers_in_the_wrong_order_are_refused() -> None:
    halves = [nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, 2, 1)]
    model = nn.Sequential(*halves, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    loader = [(torch.rand(8, 3, 16, 16), torch.arange(8) % 3)]
    with pytest.raises(UserError, match=r"the coarsest last, got 2 \(4 x 4\), 0 \(8 x 8\)"):
        train_lax(Classifier(model.eval()), loader, epochs=1, layers=["2", "0"])


def test_stages_of_one_size_are_joined() -> None:
    torch.manual_seed(0)
    sizes = {"num_layers": 6, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16, "num_classes": 3}
    vit = VisionTransformer(image_size=16, patch_size=4, **sizes)
    loader = [(torch.rand(8, 3, 16, 16), torch.arange(8) % 3)]
    lax = train_lax(Classifier(vit.eval()), loader, recipe="crisp", epochs=1)
    assert (len(lax.layers), lax.joined, len(lax.net.merges)) == (3, 3, 1 + lax.steps)
