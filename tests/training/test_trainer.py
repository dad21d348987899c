"""Where train_lax stops: losses that are no numbers, loaders and images it cannot use; bfloat16."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lax_toys import Traces, classifier_of, data, loader_of, small_net, train, weights
from sufficit import Classifier, Lax, UserError, explain
from sufficit.training import LaxRecipe, TrainingError
from sufficit.training.feed import Feed
from sufficit.training.processes import fabric_for
from sufficit.training.trainer import Trainer, TrainingState, read_checkpoint
from sufficit.training.validation import ValidationSet


class Poisoned:
    """A loader that gives a NaN in one batch of one epoch."""

    def __init__(self, epoch: int, batch: int, batches: int = 3) -> None:
        self.epoch, self.batch, self.batches, self.times = epoch, batch, batches, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, self.times = self.times, self.times + 1  # the first time is a look at the images
        for number in range(1, self.batches + 1):
            images, labels = data(8, seed=number)
            if (epoch, number) == (self.epoch, self.batch):
                images[3, 0, 0, 0] = torch.nan
            yield images, labels


def test_a_nan_names_epoch_and_batch_and_the_last_good_adapter_survives(tmp_path: Path) -> None:
    classifier = classifier_of()
    traces = Traces(classifier.model)
    words = r"nan in epoch 2, batch 3 of 3.*epoch 1 is kept in"
    with pytest.raises(TrainingError, match=words) as caught:
        train(Poisoned(2, 3), classifier, epochs=4, out=tmp_path)
    traces.check()
    found = caught.value.lax
    assert found is not None
    assert weights(found).isfinite().all()
    assert len(found.trained["history"]) == 1
    kept = Lax.from_pretrained(tmp_path, net=small_net())
    assert torch.equal(weights(kept), weights(found))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md", "checkpoint.pt", "config.json", "model.safetensors",
    ]  # fmt: skip
    assert explain(classifier, data(4)[0], method=kept).isfinite().all()
    # The same call goes on once the images are mended, as if nothing had been.
    again = train(Poisoned(9, 9), classifier, epochs=4, out=tmp_path)
    assert torch.equal(weights(again), weights(train(Poisoned(9, 9), epochs=4)))


@pytest.mark.parametrize(("batches", "batch"), [(50, 1), (50, 20), (50, 21), (50, 47), (3, 2)])
def test_the_batch_is_named_though_losses_are_looked_at_now_and_then(batches, batch) -> None:
    poisoned = Poisoned(1, batch, batches)  # with images to validate on, epochs begin at 0
    with pytest.raises(TrainingError, match=f"epoch 2, batch {batch} of {batches}") as caught:
        train(poisoned, validation=[data()])
    assert caught.value.lax is not None
    assert weights(caught.value.lax).isfinite().all()


def test_a_nan_in_the_first_epoch_leaves_no_adapter_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"epoch 1, batch 2.*No epoch was finished") as caught:
        train(Poisoned(1, 2), out=tmp_path)
    assert caught.value.lax is None
    assert list(tmp_path.iterdir()) == []


class Spoiled(nn.Module):
    """A net whose gradient becomes NaN in the second epoch, though its map does not."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.steps = small_net(), 0

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.net(features)
        self.steps += self.training
        return found + torch.sqrt(found * 0) if self.steps == 2 and self.training else found


def test_a_gradient_of_nan_in_the_last_batch_keeps_the_last_good_adapter(tmp_path: Path) -> None:
    words = r"gives NaN after the last batch of an epoch.*epoch 1 is kept in"
    with pytest.raises(TrainingError, match=words) as caught:
        train([data(8)], net=Spoiled(), epochs=3, validation_images=8, out=tmp_path)
    assert caught.value.lax is not None
    assert weights(caught.value.lax).isfinite().all()
    assert Lax.from_pretrained(tmp_path, net=Spoiled()).trained["history"]


# What a loader must give


def test_images_of_float64_train_the_same_adapter() -> None:
    images, labels = data(16)
    single, double = ([(some, labels)] for some in (images, images.double()))
    wanted = train(single, epochs=1, validation_images=8)
    assert torch.equal(weights(train(double, epochs=1, validation_images=8)), weights(wanted))


class Standardised(nn.Module):
    """Brings each image to mean 0 and deviation 1, so that a black one is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier_of().model

    def forward(self, images: Tensor) -> Tensor:
        middle, spread = images.mean((1, 2, 3), keepdim=True), images.std((1, 2, 3), keepdim=True)
        found: Tensor = self.net((images - middle) / spread)
        return found


@pytest.mark.parametrize("kept", [False, True])
def test_a_classifier_that_says_nan_of_hidden_images_is_told(kept: bool, tmp_path: Path) -> None:
    layer = f"net.{classifier_of().layer}"
    classifier = Classifier(Standardised(), layer)
    words, counted = r"gives NaN for masked images.*No epoch was finished", "24 of 24 images"
    with pytest.raises(TrainingError, match=words), pytest.warns(RuntimeWarning, match=counted):
        train(classifier=classifier, epochs=2, out=tmp_path / "out" if kept else None)
    assert not (tmp_path / "out").exists()


class Blinking(nn.Module):
    """NaN for an image with the mark of the first one that is neither whole nor black."""

    def __init__(self, mark: Tensor) -> None:
        super().__init__()
        self.net, self.mark = classifier_of().model, mark

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.net(images)
        marked = (images == self.mark[:, None, None]).all(1).flatten(1)
        hidden = (images == -2).all(1).flatten(1).any(1)
        return torch.where((marked.any(1) & hidden)[:, None], torch.nan, found)


def test_nan_of_masked_images_is_warned_of_once_per_training() -> None:
    images, labels = data(8, seed=1)
    images[0] = images[0, :, :1, :1]  # one colour, which no image of the training has
    net = Blinking((images[0, :, 0, 0] - 0.5) / 0.25)
    classifier = Classifier(net, f"net.{classifier_of().layer}", mean=(0.5,) * 3, std=(0.25,) * 3)
    validation = ValidationSet(images, labels)
    for _ in range(2):  # a second training warns again
        with pytest.warns(RuntimeWarning, match="in 1 of 8 images") as caught:
            found = train(classifier=classifier, epochs=3, validation=validation, alpha_min=0.4)
        assert len(caught) == 1
        assert len(found.trained["history"]) == 3
    with pytest.warns(RuntimeWarning, match="in 1 of 8 images"):  # and so in the last epoch
        last = validation.score(classifier, found, 0.4)
    assert last.scores.nan_counts()["msi"] == 1


class Remembering(nn.Module):
    """A net that keeps what it drew last, with its gradient, so that it can't be copied then."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
        self.last: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        self.last = self.net(features)
        return self.last


def test_a_net_of_ones_own_may_keep_tensors_of_the_last_step() -> None:
    assert torch.equal(*(train(net=net)(rand_features()) for net in (Remembering(), small_net())))


def rand_features() -> Tensor:
    return torch.rand(2, 9, 4, 4, generator=torch.Generator().manual_seed(3))


def test_images_alone_are_enough_to_explain_predictions() -> None:
    classifier, (images, _) = classifier_of(), data()
    with torch.no_grad():
        said = classifier(images).argmax(1)
    alone = train(list(images.split(8)), classifier, target="prediction")
    labelled = train(list(zip(images.split(8), said.split(8), strict=True)), classifier)
    wrong = [(part, torch.zeros(8).long()) for part in images.split(8)]
    ignored = train(wrong, classifier, target="prediction")
    assert torch.equal(weights(alone), weights(labelled))
    assert torch.equal(weights(alone), weights(ignored))


def generator_of() -> Iterator[tuple[Tensor, Tensor]]:
    yield data()


class Spent(list[Any]):
    """Gives its batches once."""

    def __iter__(self) -> Iterator[Any]:
        while self:
            yield self.pop()


BROKEN: dict[str, tuple[Any, str]] = {
    "labels missing": ([data()[0]], 'target="prediction"'),
    "one-shot": (generator_of(), "start again at each epoch"),
    "an iterator": (iter([data()]), "start again at each epoch"),
    "spent": (Spent([data()]), "start again at each epoch"),
    "empty": ([], "no images"),
    "a tensor": (data()[0], "got Tensor"),
    "a path": ("images", "got str"),
    "a number": (3, "got int"),
    "dicts": ([{"image": data()[0]}], "dict"),
    "words": ([("a", "b")], "tuple of str"),
    "one class": (
        [(data()[0], torch.ones(24).long())],
        "All 24 validation images have class 1",
    ),
    "label too high": ([(data()[0], torch.arange(24) % 5)], r"0\.\.3.*got 4"),
    "label below 0": ([(data()[0], torch.arange(24) % 4 - 1)], "0 or more"),
    "labels of floats": ([(data()[0], torch.rand(24))], "class numbers"),
    "too few labels": ([(data()[0], torch.arange(4))], r"\[24\]"),
    "images as bytes": ([((255 * data()[0]).byte(), data()[1])], "divide by 255"),
    "images normalised": ([(4 * data()[0] - 2, data()[1])], r"0\.\.1"),
    "images of NaN": ([(data()[0] * torch.nan, data()[1])], r"0\.\.1"),
    "images without channels": ([(data()[0][:, 0], data()[1])], r"\[N,C,H,W\]"),
}


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("kind", BROKEN)
def test_what_a_loader_must_not_give_is_told(kind: str, validated: bool, tmp_path: Path) -> None:
    loader, words = BROKEN[kind]
    if validated and kind in ("one class", "one-shot", "an iterator", "spent"):
        return  # one class is then the examination's business; the others are spent
    if validated and kind == "empty":
        words = "no batches"
    classifier = classifier_of()
    traces = Traces(classifier.model)
    with pytest.raises(UserError, match=words):
        train(loader, classifier, out=tmp_path, validation=[data()] if validated else None)
    traces.check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "robst"}, "Did you mean 'robust'"),
        ({"recipe": 3}, "LaxRecipe"),
        ({"target": "labels"}, "prediction"),
        ({"epochs": 0}, "1 or more"),
        ({"epochs": 1.5}, "whole number"),
        ({"area": 1.2}, "between 0 and 1"),
        ({"alpha_min": 1.0}, "alpha_min"),
        ({"patience": 0}, "patience must be 1 epoch or more, None for no limit, or auto, got 0"),
        ({"patience": "5"}, "None for no limit, or auto, got '5': leave it out for auto"),
        ({"validation_images": 0}, "validation_images"),
        ({"validation": []}, "no images"),
        ({"seed": -1}, "seed must be a whole number, 0 or more, got -1"),
        ({"recipe": LaxRecipe(schedule="onecycle")}, "Did you mean 'one-cycle'"),
        ({"recipe": LaxRecipe(size=-1)}, "size must be a number, 0 or more, got -1"),
        ({"recipe": LaxRecipe(keep=float("nan"))}, "keep must be a number, 0 or more, got nan"),
        ({"recipe": LaxRecipe(size=1, area=-1)}, "area must be between 0 and 1, got -1"),
    ],
)
def test_options_that_make_no_sense_are_told(options, words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(**options)


def test_a_bare_model_is_told_to_be_wrapped() -> None:
    with pytest.raises(UserError, match="wrap the model first"):
        train(classifier=classifier_of().model)  # type: ignore[arg-type]


def test_a_map_of_one_cell_is_refused() -> None:
    classifier = Classifier(classifier_of().model, layer="5")
    with pytest.raises(UserError, match=r"1 x 1.*earlier layer"):
        train(classifier=classifier)


def test_a_lone_last_image_is_trained_on_too() -> None:
    found = train(loader_of(n=17), epochs=1, validation=[data()])
    assert weights(found).isfinite().all()


# Precision


def bright_half(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Which half is bright: the class."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.4 * torch.rand(n, 1, 8, 8, generator=generator)
    labels = torch.randint(2, (n,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, :, 4 * label : 4 * label + 4] += 0.5
    return images, labels


def half_teller() -> Classifier:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1, bias=False), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(), nn.Linear(4, 2)
    )
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, -1.0])[:, None, None, None])
        model[3].weight.copy_(torch.tensor([[8.0, -8, 0, 0], [-8, 8, 0, 0]]))
        model[3].bias.zero_()
    return Classifier(model, layer="0")


@pytest.mark.parametrize("how", ["float32", "bf16-mixed", "bf16 classifier"])
def test_it_learns_in_bfloat16_too(how: str) -> None:
    classifier = half_teller()
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed") if "mix" in how else None
    if how == "bf16 classifier":
        classifier.to(dtype=torch.bfloat16)
    images, labels = bright_half(128, 0)
    batches = list(zip(images.split(16), labels.split(16), strict=True))
    recipe = LaxRecipe(size=1, lr=0.05)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    found = train(batches, classifier, recipe=recipe, epochs=6, net=net, fabric=fabric)
    losses = [row["loss"] for row in found.trained["history"]]
    assert losses[-1] < 0.8 * losses[0]
    assert next(found.parameters()).dtype == torch.float32
    heatmaps = explain(classifier, images[:32], labels[:32], found)
    pairs = zip(heatmaps, labels[:32].tolist(), strict=True)
    bright = torch.stack([h[:, 4 * y : 4 * y + 4].mean() for h, y in pairs])
    assert (bright > heatmaps.mean((1, 2))).all()


def test_a_feed_without_a_length_still_tells_its_batches() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            return iter(loader_of())

    assert len(Feed(classifier_of(), Endless(), "label", 0)) == 0
    found = train(Endless())
    assert [row["epoch"] for row in found.trained["history"]] == [1, 2, 3]


# Checkpoints that are corrupt or untrusted

STATE = vars(TrainingState(epoch=1, best={}, best_worth=0.0, history=[{"epoch": 1, "worth": 0.0}]))


@pytest.mark.parametrize(
    "content",
    [
        {"settings": {}, "state": STATE | {"epoch": 5}},
        {"settings": {}, "state": STATE | {"epoch": "x"}},
        {"settings": {}, "state": STATE | {"best": None}},
        {"settings": {}, "state": STATE | {"more": 1}},
        {"settings": {}, "state": STATE | {"history": 3}},
        {"settings": [1], "state": STATE},
        {"state": STATE},
        [],
    ],
)
def test_a_checkpoint_that_tells_nonsense_is_one_line(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "checkpoint.pt")
    with pytest.raises(UserError, match=r"Cannot read .*checkpoint\.pt"):
        read_checkpoint(tmp_path, {})


def test_a_checkpoint_that_tells_sense_is_read(tmp_path: Path) -> None:
    torch.save({"settings": {}, "state": STATE}, tmp_path / "checkpoint.pt")
    found = read_checkpoint(tmp_path, {})
    assert found is not None
    assert found["state"] == STATE


def test_a_checkpoint_of_another_adapter_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    train(out=tmp_path, epochs=1)
    whole = torch.load(path, weights_only=True)
    first = next(iter(whole["model"]))
    for changes in (
        {"model": {**whole["model"], first: torch.zeros(1)}},
        {"model": 3},
        {"optimizer": {}},
        {"state": whole["state"] | {"best": {first: torch.zeros(1)}}},
    ):
        torch.save(whole | changes, path)
        with pytest.raises(UserError, match=r"checkpoint\.pt in .* does not fit"):
            train(out=tmp_path, epochs=1)
    torch.save(whole, path)
    assert len(train(out=tmp_path, epochs=1).trained["history"]) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": 3},
        {"state": {"epoch": 9, "history": []}},
        {"state": 3},
        {"model": {}},
        {"optimizer": {}},
    ],
)
def test_a_checkpoint_of_another_classifier_is_one_line(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    model, path = torch.nn.Linear(2, 2), tmp_path / "checkpoint.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = {
        "settings": {"a": 1},
        "state": {"epoch": 1, "history": [{"epoch": 1}]},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }

    def resume() -> Trainer:
        fabric = fabric_for(torch.device("cpu"))
        parts = (model, optimizer, fabric, lambda _: [], lambda *_: {})
        options = {"total": 0, "epochs": 1, "rate": float, "settings": {"a": 1}}
        return Trainer(*parts, **options, out=tmp_path)

    torch.save(whole, path)
    assert resume().state.epoch == 1
    torch.save(whole | changes, path)
    words = r"Cannot (read|resume) .*|checkpoint\.pt in .* does not fit"
    with pytest.raises(UserError, match=words):
        resume()
