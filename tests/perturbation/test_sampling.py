"""Bands drawn per image: how often, how many, and by what."""

import numpy as np
import pytest
import torch

from reference import small_net
from small_probes import probe_for
from sufficit import Classifier, UserError
from sufficit.perturbation.bands import EVERYTHING, Band, hide, rest, show, top
from sufficit.perturbation.sampling import Sampling, make_sampling, uniforms

CURVES = [*(show(i / 10) for i in range(11)), *(top(i / 5) for i in range(5)), rest(0.5)]
NAMES = [f"{i}.png" for i in range(20_000)]


def sampling(calls: int, sizes: dict[Band, float] | None = None) -> Sampling:
    bands = [EVERYTHING, *CURVES]
    return make_sampling(bands, dict.fromkeys(bands, 1.0) | (sizes or {}), {EVERYTHING}, calls)


@pytest.mark.parametrize("sizes", [{}, {show(0.3): 4.0, top(0.0): 0.5}], ids=["even", "uneven"])
@pytest.mark.parametrize("calls", [4, 7, 11, 16])
def test_each_band_is_drawn_as_often_as_its_count_says(
    calls: int, sizes: dict[Band, float]
) -> None:
    found = sampling(calls, sizes)
    drawn = found.draw(NAMES, seed=1)
    assert drawn.shape == (len(NAMES), calls)
    often = torch.bincount(drawn.flatten(), minlength=18) / len(NAMES)
    chance = found.counts * (1 - found.counts).clamp(min=1e-12)
    # A band over the end of a stratum may be drawn twice, which adds to the variance.
    assert ((often - found.counts).abs() <= 4.5 * (2 * chance / len(NAMES)).sqrt() + 1e-9).all()
    assert found.counts.sum() == pytest.approx(calls)


def test_a_place_on_the_line_gives_the_band_that_lies_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bands = [EVERYTHING, show(0.0), show(0.5), show(0.9), show(1.0)]
    sizes = {EVERYTHING: 1.0, show(0.0): 1.0, show(0.5): 2.0, show(0.9): 2.0, show(1.0): 1.0}
    found = make_sampling(bands, sizes, {EVERYTHING}, 3)  # two strata of width 3
    places = {"a": [0.0, 0.0], "b": [0.3, 0.6], "c": [0.4, 0.7], "d": [0.999, 0.999]}
    given = lambda seed, name, count: np.array(places[name])  # noqa: E731
    monkeypatch.setattr("sufficit.perturbation.sampling.uniforms", given)
    wanted = [[0, 1, 3], [0, 1, 3], [0, 2, 4], [0, 2, 4]]
    assert found.draw([*places], seed=0).tolist() == wanted


def test_strata_stay_within_a_curve_and_hide_curves_are_one_family() -> None:
    bands = [EVERYTHING, show(0.1), show(0.2), hide(0.1, 0.5), hide(0.1, 1), hide(0.2, 1), top(0.5)]
    lines = make_sampling(bands, dict.fromkeys(bands, 1.0), {EVERYTHING}, 4).lines
    assert sorted(line.members.tolist() for line in lines) == [[1, 2], [3, 4, 5]]  # top is alone


def test_a_band_as_wide_as_a_stratum_is_always_asked() -> None:
    found = sampling(9, {show(0.3): 20.0})
    assert found.counts[1 + CURVES.index(show(0.3))] == 1
    assert 1 + CURVES.index(show(0.3)) in found.always


def test_with_room_for_all_bands_each_is_asked_once() -> None:
    found = sampling(1 + len(CURVES))
    assert found.lines == ()
    assert sorted(found.draw(["a"], 0)[0].tolist()) == list(range(18))
    assert found.counts.tolist() == [1] * 18


def test_a_band_without_weight_is_never_asked() -> None:
    found = sampling(8, {show(0.4): 0.0})
    assert found.counts[1 + CURVES.index(show(0.4))] == 0
    assert not (found.draw(NAMES[:500], 0) == 1 + CURVES.index(show(0.4))).any()


def test_draws_depend_on_seed_and_name_only() -> None:
    found = sampling(8)
    whole = found.draw(NAMES[:50], seed=3)
    assert torch.equal(found.draw(NAMES[10:13], seed=3), whole[10:13])
    assert torch.equal(found.draw(NAMES[49::-1], seed=3), whole.flip(0))
    assert not torch.equal(found.draw(NAMES[:50], seed=4), whole)
    assert len({tuple(row) for row in whole.tolist()}) > 40


def test_uniform_numbers_are_the_same_on_every_machine() -> None:
    """Recorded once: a change would move the draws of every run that is resumed."""
    assert uniforms(0, "a.png", 2).tolist() == [0.7424572961588531, 0.6289464583485144]
    assert uniforms(7, "folder/é.png", 2).tolist() == [0.7413468918597302, 0.8610803469760518]


def test_uniform_numbers_are_uniform_and_independent_between_names() -> None:
    found = np.stack([uniforms(0, name, 4) for name in NAMES])
    assert found.min() >= 0
    assert found.max() < 1
    assert np.abs(found.mean(0) - 0.5).max() < 4.5 * (1 / 12 / len(NAMES)) ** 0.5
    apart = np.corrcoef(np.concatenate([found, found[np.r_[1 : len(found), 0]]], axis=1).T)
    assert np.abs(apart - np.eye(8)).max() < 4.5 / len(NAMES) ** 0.5


def test_too_few_calls_name_the_least_number() -> None:
    columns = ["insertion_pixel", "deletion_percent", "aopc"]
    probe = probe_for(Classifier(small_net()), columns=columns, calls=3)
    assert probe.least == 3  # the whole image, and one mask of either curve
    assert probe.drawing is not None
    assert probe.drawing.width == 2
    few = probe_for(Classifier(small_net()), columns=columns, calls=2)
    with pytest.raises(UserError, match=r"calls must be 3 or more .* got 2: ask more masks"):
        _ = few.drawing


def test_the_masks_that_decide_msi_are_always_asked() -> None:
    for alpha in (0.5, 0.337):
        probe = probe_for(Classifier(small_net()), alphas=[alpha], calls=26)
        assert probe.drawing is not None
        assert {probe.bands[i] for i in probe.drawing.always} == {show(alpha), rest(alpha)}
        assert probe.drawing.width == 25  # beside the whole image
