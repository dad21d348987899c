"""Twins: copies of a classifier, tuned on randomly masked images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lax_toys import Traces, classifier_of, data, loader_of, mixed_modes
from small_models import SmallMemory
from sufficit import Classifier, UserError, evaluate, explain, train_twin
from sufficit.data.digits import synthetic_digits
from sufficit.training import twin_training
from sufficit.training.twin_training import (
    TwinValidation,
    random_masks,
    random_views,
)


def twin_of(classifier: Classifier | None = None, loader: Any = None, **options: Any) -> Classifier:
    given = {"epochs": 2, "lr": 1e-2, "validation_images": 8, "progress": False} | options
    return train_twin(classifier or classifier_of(), loader or loader_of(), **given)


def weights(classifier: Classifier) -> Tensor:
    return torch.cat([p.detach().flatten() for p in classifier.model.parameters()])


@pytest.mark.parametrize("target", ["model", "label"])
def test_the_original_is_bit_for_bit_the_same_afterwards(target: str) -> None:
    classifier = classifier_of()
    mixed_modes(classifier.model)
    before, state = Traces(classifier.model), torch.get_rng_state()
    with torch.no_grad():
        twin = twin_of(classifier, target=target)
        assert not torch.is_grad_enabled()
    before.check()
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(weights(twin), weights(classifier))
    assert not {p.data_ptr() for p in twin.model.parameters()} & {
        p.data_ptr() for p in classifier.model.parameters()
    }
    assert (twin.mean, twin.std, twin.layer) == (classifier.mean, classifier.std, classifier.layer)


def test_batch_norms_keep_the_statistics_of_the_original() -> None:
    classifier = classifier_of()
    twin = twin_of(classifier)
    norms = [one.model[1] for one in (classifier, twin)]
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(*(getattr(norm, name) for norm in norms))
    assert not torch.equal(*(norm.weight for norm in norms))
    assert not any(module.training for module in twin.model.modules())


def test_the_same_seed_gives_the_same_twin() -> None:
    assert torch.equal(weights(twin_of()), weights(twin_of()))
    assert not torch.equal(weights(twin_of()), weights(twin_of(seed=1)))


def test_a_twin_keeps_the_precision_and_works_with_images_alone() -> None:
    classifier = classifier_of().to(dtype=torch.bfloat16)
    images = data()[0]
    twin = twin_of(classifier, [images[:12], images[12:]])
    assert twin.dtype == torch.bfloat16
    assert not torch.equal(weights(twin), weights(classifier))


# What it learns


@pytest.mark.parametrize("target", ["model", "label"])
def test_the_loss_is_the_cross_entropy_of_the_target_on_masked_images(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = data(8)
    seen: list[Tensor] = []
    plain = twin_training.random_views

    def record(batch: Tensor, generator: Generator) -> Tensor:
        seen.append(plain(batch, generator))
        return seen[-1]

    monkeypatch.setattr(twin_training, "random_views", record)
    rows: list[dict[str, float]] = []
    fit = twin_training.TwinTrainer.fit

    def watched(self: Any, *args: Any) -> None:
        fit(self, *args)
        rows.extend(self.state.history)

    monkeypatch.setattr(twin_training.TwinTrainer, "fit", watched)
    classifier = classifier_of()
    twin_of(classifier, [(images, labels)], target=target, epochs=1, lr=1e-12)
    with torch.no_grad():  # the twin is still the original
        logits, whole = classifier(seen[-1]), classifier(images)
    goals = F.one_hot(labels, logits.shape[1]) if target == "label" else whole.softmax(1)
    wanted = -(goals * logits.log_softmax(1)).sum(1).mean()
    assert abs(rows[0]["loss"] - float(wanted)) < 1e-5


def test_masks_are_bands_of_random_maps_and_a_quarter_of_the_images_stay_whole() -> None:
    masks = random_masks(torch.zeros(3000, 1, 40, 40), Generator().manual_seed(0))
    shares = masks.float().mean((1, 2))
    whole = (shares == 1).float().mean()
    assert abs(whole - 0.25) < 0.02
    # Up to a rank, or from a rank on: 1/2 on average; between two ranks: 1/3.
    assert abs(shares[shares < 1].mean() - (1 / 2 + 1 / 2 + 1 / 3) / 3) < 0.02
    assert shares.min() == 0
    # Of masks that keep about half, most are blobs: neighbours agree; one in five is noise.
    half = masks[(shares > 0.4) & (shares < 0.6)]
    agree = (half[:, :, 1:] == half[:, :, :-1]).float().mean((1, 2))
    assert 0.1 < (agree < 0.65).float().mean() < 0.3
    assert (agree > 0.75).float().mean() > 0.5
    again = random_masks(torch.zeros(3000, 1, 40, 40), Generator().manual_seed(0))
    assert torch.equal(masks, again)


def test_hidden_pixels_are_black_own_colour_another_colour_or_noise() -> None:
    n = 400
    values = (torch.arange(n) + 1) / (n + 1)
    images = values[:, None, None, None].expand(n, 1, 6, 6).clone()
    views = random_views(images, Generator().manual_seed(3))
    kinds = {"black": 0, "own": 0, "another": 0, "noise": 0}
    for i, view in enumerate(views[:, 0].flatten(1)):
        hidden = view[(view - values[i]).abs() > 1e-5]
        if not len(hidden):
            kinds["own"] += 1  # or whole
        elif (hidden == 0).all():
            kinds["black"] += 1
        elif (hidden - values[i - 1]).abs().max() < 1e-5:
            kinds["another"] += 1
        else:
            assert hidden.unique().numel() > len(hidden) / 2
            kinds["noise"] += 1
    # Of three quarters: 1/5 each black, own colour and noise; 2/5 from another.
    wanted = {"own": 0.25 + 0.75 * 0.2, "black": 0.15, "another": 0.3, "noise": 0.15}
    for kind, count in kinds.items():
        assert abs(count / n - wanted[kind]) < 0.06, kinds


# Files


class StopHereError(Exception):
    pass


def test_a_run_that_was_interrupted_resumes(tmp_path: Path) -> None:
    digits, batches = Classifier.load("sufficit:digits"), _batches()

    class Stops(list):  # type: ignore[type-arg]
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            if self.passes == 4:  # one checks, one reads validation images, one trains
                raise StopHereError
            return super().__iter__()

    options: Any = {"out": tmp_path / "twin", "epochs": 2, "lr": 1e-3}
    with pytest.raises(StopHereError):
        twin_of(digits, Stops(batches), **options)
    assert not (tmp_path / "twin" / "run.json").exists()  # it is not finished
    first = Classifier.load(tmp_path / "twin")(batches[0][0])
    twin = twin_of(digits, batches, **options)
    straight = twin_of(digits, batches, epochs=2, lr=1e-3)
    assert torch.equal(weights(twin), weights(straight))
    loaded = Classifier.load(tmp_path / "twin")
    images = batches[0][0]
    assert torch.equal(loaded(images), twin(images))
    assert not torch.equal(first, twin(images))
    with pytest.raises(UserError, match="Cannot resume .*lr.* was 0.001, now 0.01"):
        twin_of(digits, batches, **(options | {"lr": 0.01}))
    record = json.loads((tmp_path / "twin" / "run.json").read_text())
    assert record["accuracy_of"] == "labels"
    assert len(record["history"]) == 2
    assert {"commit", "versions", "device"} <= record.keys()
    whole = (digits(images).argmax(1) == batches[0][1]).float().mean()
    assert abs(record["original"]["whole_accuracy"] - float(whole)) < 1e-6


def _batches() -> list[tuple[Tensor, Tensor]]:
    found = synthetic_digits(8, seed=1, held_out=False)
    return [(found.images, found.labels)]


def test_what_cannot_be_saved_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"the architecture has no name to save.*memory with train_twin\(classifier, loader\)",
    ):
        twin_of(out=tmp_path / "twin")
    assert not (tmp_path / "twin").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "prediction"}, 'target must be "model" or "label"'),
        ({"epochs": 0}, "epochs must be a whole number, 1 or more, got 0"),
        ({"lr": 0.0}, "lr must be a number above 0"),
        ({"patience": 0}, "patience must be 1 epoch or more"),
        ({"validation_images": 1}, "validation_images must be a whole number, 2 or more"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        twin_of(**options)


# What it is for


def stripes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Stripes of four directions all over the image, in noise: [N,1,16,16], [N]."""
    generator = Generator().manual_seed(seed)
    labels = torch.arange(n) % 4
    x, y = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    along = torch.stack([x, y, (x + y) / 1.41, (x - y) / 1.41])[labels]
    waves = (along * 1.6 + 6.3 * torch.rand(n, 1, 1, generator=generator)).sin()
    noise = torch.randn(n, 16, 16, generator=generator)
    return (0.5 + 0.2 * waves + 0.1 * noise).clamp(0, 1)[:, None], labels


def test_a_twin_knows_masked_images_better_and_whole_ones_nearly_as_well() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    images, labels = stripes(512, seed=0)
    adam = torch.optim.Adam(model.parameters(), lr=5e-3)
    for k in range(100):
        rows = torch.arange(k * 64, k * 64 + 64) % 512
        adam.zero_grad()
        F.cross_entropy(model((images[rows] - 0.5) / 0.25), labels[rows]).backward()
        adam.step()
    original = Classifier(model.eval(), mean=(0.5,), std=(0.25,))
    loader = DataLoader(TensorDataset(images, labels), 64, shuffle=True)
    twin = train_twin(original, loader, epochs=15, lr=5e-3, progress=False)
    fresh = TwinValidation.of(original, *stripes(256, seed=1), "model", seed=99)
    before, after = fresh.score(original), fresh.score(twin)
    assert before["whole_accuracy"] > 0.95
    assert after["whole_accuracy"] > before["whole_accuracy"] - 0.03
    assert after["masked_accuracy"] > before["masked_accuracy"] + 0.01
    assert after["validation_loss"] < 0.8 * before["validation_loss"]


@pytest.mark.slow
def test_scores_of_a_twin_hang_less_on_the_fill_on_digits() -> None:
    digits = Classifier.load("sufficit:digits")
    shown, held = synthetic_digits(192, seed=1, held_out=False), synthetic_digits(12, seed=3)
    loader = DataLoader(TensorDataset(shown.images, shown.labels), 32, shuffle=True)
    checks = [(held.images, held.labels)]
    twin = train_twin(digits, loader, epochs=3, validation=checks, progress=False)

    def gap(model: Classifier) -> float:
        """How far MSI of three methods differs between two fills."""
        total = 0.0
        options: Any = {"columns": ("msi",), "value_step": 0.1, "progress": False}
        for method in ("gradcam", "kpca-cam", "center"):
            heatmaps = explain(digits, held.images, held.labels, method, progress=False)
            values = [
                evaluate(model, held.images, heatmaps, held.labels, fill=fill, **options).mean()
                for fill in ("black", "blur")
            ]
            total += abs(values[0]["msi"] - values[1]["msi"])
        return total

    assert gap(twin) < 0.75 * gap(digits)


def test_out_of_memory_says_what_to_do() -> None:
    model = SmallMemory(classifier_of().model, 40)
    with pytest.raises(UserError, match="Out of memory: use smaller batches"):
        twin_of(Classifier(model, mean=(0.5,) * 3, std=(0.25,) * 3), loader_of(48, batch=48))


def test_a_twin_of_a_model_with_a_softmax_gives_probabilities_too() -> None:
    whole = classifier_of()
    ended = Classifier(
        nn.Sequential(whole.bare, nn.Softmax(1)), layer=f"0.{whole.layer}", output="probabilities"
    )
    twin = twin_of(ended, epochs=1, lr=1e-9)
    images = next(iter(loader_of()))[0][:4]
    assert twin.output == "probabilities"
    assert torch.allclose(twin(images).softmax(1), ended(images).softmax(1), atol=1e-4)
