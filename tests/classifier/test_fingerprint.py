"""The fingerprint: the same for one classifier in any precision, another for any other."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sufficit import Classifier, Lax, UserError, explain
from sufficit.classifier import fingerprint as fingerprints
from sufficit.classifier.checkpoint import Recipe
from sufficit.classifier.digit_net import SmallNet
from sufficit.classifier.fingerprint import Fingerprint, fingerprint, same

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.2, 0.3)


def classifier_of(seed: int = 0, **options: object) -> Classifier:
    torch.manual_seed(seed)
    model = SmallNet(num_classes=5, width=8)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.running_mean)  # type: ignore[arg-type]
    given = {"layer": "features", "mean": MEAN, "std": STD} | options
    return Classifier(model.eval(), **given)  # type: ignore[arg-type]


def test_a_line_is_the_tensor_along_a_wave_by_plain_loops() -> None:
    tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    values = tensor.flatten().tolist()
    along = sum(v * math.sqrt(2) * math.cos(i) for i, v in enumerate(values, 1))
    wanted = along / math.sqrt(sum(v * v for v in values))
    model = nn.Module()
    model.weight = nn.Parameter(tensor)
    found = fingerprint(Classifier(model, mean=(0.25,), std=(0.5,)))
    length = math.log(math.sqrt(sum(v * v for v in values)))
    assert found.sketch == (round(wanted, 4), round(length, 4), 0.25, 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_is_the_same_in_another_precision(dtype: torch.dtype) -> None:
    for seed in range(3):
        one, other = classifier_of(seed), classifier_of(seed).to(dtype=dtype)
        assert same(fingerprint(one), fingerprint(other))


def test_it_is_the_same_in_another_layout() -> None:
    moved = classifier_of().to(memory_format=torch.channels_last)
    assert moved.memory_format == torch.channels_last
    assert fingerprint(moved) == fingerprint(classifier_of())


def test_it_is_the_same_saved_and_loaded(tmp_path: Path) -> None:
    classifier = classifier_of(recipe=Recipe("sufficit:digits", {"num_classes": 5, "width": 8}))
    classifier.save(tmp_path)
    assert fingerprint(Classifier.load(tmp_path)) == fingerprint(classifier)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_it_is_the_same_wrapped(wrap) -> None:
    plain = classifier_of()
    wrapped = Classifier(wrap(classifier_of().model), mean=MEAN, std=STD)
    assert wrapped.model is not wrapped.bare
    assert fingerprint(wrapped) == fingerprint(plain)


def adapter_of(classifier: Classifier) -> Lax:
    lax = Lax(32)
    lax.belong_to(classifier, "features")
    return lax


def test_another_classifier_is_refused_and_the_error_names_it_and_says_what_to_do() -> None:
    lax = adapter_of(classifier_of(0))
    lax.check(classifier_of(0))
    images = torch.rand(1, 3, 16, 16)
    with pytest.raises(UserError, match=r"another classifier than Classifier\(SmallNet.*train one"):
        explain(classifier_of(1), images, method=lax)
    for seed in range(2, 20):
        assert not same(fingerprint(classifier_of(seed)), lax.fingerprint)


def test_a_new_head_is_refused() -> None:
    lax = adapter_of(classifier_of(0))
    for seed in range(10):
        other = classifier_of(0)
        torch.manual_seed(100 + seed)
        other.model.head.reset_parameters()
        with pytest.raises(UserError, match="another classifier"):
            lax.check(other)


@pytest.mark.parametrize(
    "given",
    [
        {"mean": (0.5, 0.4, 0.2)},
        {"std": (0.25, 0.2, 0.3)},
        {"mean": None, "std": None},
        {"mean": STD, "std": MEAN},
    ],
)
def test_another_mean_or_std_is_refused(given) -> None:
    with pytest.raises(UserError, match="mean and std must be the same"):
        adapter_of(classifier_of()).check(classifier_of(**given))


def test_a_few_more_steps_of_training_are_another_classifier() -> None:
    classifier = classifier_of()
    lax = adapter_of(classifier)
    optimizer = torch.optim.SGD(classifier.model.parameters(), lr=0.3)
    images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        loss = nn.functional.cross_entropy(classifier.model(images), torch.arange(8) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with pytest.raises(UserError, match="another classifier"):
        lax.check(classifier)


def negated(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.neg_()


def negated_unseen(tensor: Tensor) -> None:
    tensor.data.neg_()  # no version is counted up


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (negated, "head.weight"),
        (negated, "features.0.1.running_mean"),
        (negated_unseen, "head.weight"),  # of parameters in the middle it would not be seen
        (negated_unseen, "features.0.0.weight"),
    ],
)
def test_the_cached_fingerprint_follows_weights_that_change_in_place(change, name) -> None:
    classifier = classifier_of()
    lax = adapter_of(classifier)
    change(classifier.model.state_dict()[name])
    with pytest.raises(UserError, match="another classifier"):
        lax.check(classifier)
    change(classifier.model.state_dict()[name])
    lax.check(classifier)


def test_a_new_mean_set_on_the_object_is_seen() -> None:
    classifier = classifier_of()
    lax = adapter_of(classifier)
    classifier.mean = (0.5, 0.4, 0.31)
    lax.check(classifier)  # within the tolerance
    classifier.mean = (0.5, 0.4, 0.4)
    with pytest.raises(UserError, match="another classifier"):
        lax.check(classifier)


def test_it_is_computed_once_as_long_as_nothing_changes(monkeypatch) -> None:
    taken: list[object] = []
    take = fingerprints._take
    monkeypatch.setattr(fingerprints, "_take", lambda *args: taken.append(1) or take(*args))
    classifier = classifier_of()
    found = {fingerprint(classifier) for _ in range(3)}
    assert len(found) == len(taken) == 1
    again = Classifier(classifier.model, mean=MEAN, std=STD)
    assert fingerprint(again) in found
    assert len(taken) == 1


def test_weights_made_under_inference_mode_have_one_too() -> None:
    with torch.inference_mode():
        classifier = classifier_of()
    assert fingerprint(classifier) == fingerprint(classifier_of())
    with torch.inference_mode():
        classifier.model.head.weight.neg_()
    assert not same(fingerprint(classifier), fingerprint(classifier_of()))


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min])
def test_a_mask_of_the_lowest_numbers_fits_in_any_precision(lowest: float) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    net.register_buffer("mask", torch.tensor([0.0, lowest, 1.0]))
    classifier = Classifier(net)
    found = fingerprint(classifier)
    assert same(found, found)
    assert same(found, fingerprint(Classifier(net.to(torch.bfloat16))))


def test_weights_of_another_scale_are_another_classifier() -> None:
    classifier = classifier_of()
    lax = adapter_of(classifier)
    with torch.no_grad():
        classifier.model.head.weight.mul_(1.5)
    with pytest.raises(UserError, match="another classifier"):
        lax.check(classifier)


def test_names_and_shapes_count_though_the_numbers_agree() -> None:
    one, other = Fingerprint("a", (0.1, 0.2)), Fingerprint("b", (0.1, 0.2))
    assert not same(one, other)
    assert not same(one, Fingerprint("a", (0.1,)))
    assert not same(one, Fingerprint("a", (0.1, math.nan)))
    assert same(one, Fingerprint("a", (0.11, 0.2)))
    assert not same(one, Fingerprint("a", (0.1, 0.23)))


def test_an_adapter_without_fingerprint_fits_every_classifier() -> None:
    Lax(32).check(classifier_of())
