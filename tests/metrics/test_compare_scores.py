"""Methods compared on the same images, and the table that shows it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats
from torch import nn

import sufficit
from reference import small_net
from sufficit import Classifier, Scores, UserError, compare_scores, evaluate
from sufficit.metrics.compare_scores import Pair, Standing, compare_values
from sufficit.resampling import bootstrap, holm, sign_flip
from sufficit.results import Estimate, save_json, save_pairs, summarise
from sufficit.tables import legend, mark, methods_table, ranked

NAN = float("nan")
COLUMNS = ("msi", "deletion_percent", "mask_penalty")


def three_methods(n: int = 40) -> dict[str, np.ndarray]:
    """b is a little worse than a, and c much worse, image by image."""
    random = np.random.default_rng(0)
    images = random.normal(0, 3, n)
    return {
        "c": images - 1 + random.normal(0, 0.1, n),
        "a": images + random.normal(0, 0.1, n),
        "b": images - 0.01 + random.normal(0, 0.1, n),
    }


@pytest.fixture(scope="module")
def scores() -> dict[str, Scores]:
    torch.manual_seed(0)
    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3)))
    images = torch.rand(9, 3, 8, 8)
    return {
        name: evaluate(classifier, images, torch.rand(9, 8, 8), columns=COLUMNS)
        for name in ("one", "two", "three")
    }


def pair_of(standing: Standing, *names: str) -> Pair:
    return next(pair for pair in standing.pairs if {pair.first, pair.second} == set(names))


def test_pairing_tells_what_the_intervals_of_the_means_do_not() -> None:
    values = three_methods()
    standing = compare_values(values)
    assert (standing.best, standing.tied) == ("a", ("b",))
    assert standing.ranking == ("a", "b", "c")
    # The images differ so much more than the methods that the means' intervals overlap.
    low, high = bootstrap(np.stack([values["a"], values["c"]], axis=1))
    assert low[0] < high[1]
    far = pair_of(standing, "a", "c")
    assert 0.9 < far.low < far.difference < far.high < 1.1
    assert far.p_corrected == pytest.approx(3 / 10_001)


def test_a_pair_is_the_bootstrap_and_the_sign_flip_of_its_differences() -> None:
    values = three_methods()
    standing = compare_values(values, seed=3, resamples=500, draws=700)
    tests = []
    for pair in standing.pairs:
        difference = values[pair.first] - values[pair.second]
        low, high = bootstrap(difference[:, None], resamples=500, seed=3)
        assert pair.difference == pytest.approx(difference.mean())
        assert (pair.low, pair.high) == pytest.approx((low[0], high[0]))
        assert (pair.p, pair.exact) == sign_flip(difference, draws=700, seed=3)
        assert (pair.n, pair.n_nan) == (40, 0)
        tests.append(pair.p)
    assert [pair.p_corrected for pair in standing.pairs] == holm(np.array(tests)).tolist()
    assert asdict(standing.chance) == {
        "seed": 3, "resamples": 500, "draws": 700, "correction": "holm", "level": 0.05,
    }  # fmt: skip


def test_intervals_of_differences_agree_with_scipys_paired_bootstrap() -> None:
    values = three_methods()
    pair = pair_of(compare_values(values, resamples=20_000), "a", "c")
    peer = stats.bootstrap(
        (values["a"], values["c"]), lambda a, c, axis: np.mean(a - c, axis=axis),
        paired=True, n_resamples=20_000, method="percentile", rng=1,
    ).confidence_interval  # fmt: skip
    width = peer.high - peer.low
    assert (pair.low, pair.high) == pytest.approx((peer.low, peer.high), abs=0.03 * width)


def test_lower_may_be_better() -> None:
    standing = compare_values(three_methods(), "deletion_percent", higher_is_better=False)
    assert standing.ranking == ("c", "b", "a")
    assert (standing.best, standing.tied) == ("c", ())
    assert pair_of(standing, "a", "c").difference < 0


def test_what_is_tied_depends_on_the_number_of_pairs() -> None:
    better, worse = [1.0] * 6, [0.0] * 6  # p = 2 / 64 = 0.03125
    assert compare_values({"x": better, "y": worse}).tied == ()
    three = compare_values({"x": better, "y": worse, "z": [0.0] * 6})
    assert pair_of(three, "x", "y").p == 1 / 32
    assert pair_of(three, "x", "y").p_corrected == 3 / 32
    assert three.tied == ("y", "z")


def test_images_where_either_has_no_value_are_left_out_and_counted() -> None:
    standing = compare_values(
        {"x": [4.0, 3, 2, NAN], "y": [1.0, 2, NAN, 9], "z": [NAN, NAN, NAN, NAN]}
    )
    pair = pair_of(standing, "x", "y")
    # Their own means are 3 and 4; where both have a value x is ahead by 3 and by 1.
    assert standing.means == pytest.approx({"y": 4, "x": 3, "z": NAN}, nan_ok=True)
    assert (pair.first, pair.difference, pair.n, pair.n_nan) == ("y", -2, 2, 2)
    assert (pair.low, pair.high, pair.p) == (-3, -1, 0.5)
    nothing = pair_of(standing, "x", "z")
    assert (nothing.n, nothing.n_nan, nothing.p) == (0, 4, 1)
    assert np.isnan([nothing.difference, nothing.low, nothing.high]).all()
    assert standing.ranking == ("y", "x", "z")
    assert standing.tied == ("x",)  # what has no value is not marked as good


@given(st.lists(st.tuples(*[st.floats(-2, 1)] * 2), min_size=2, max_size=30), st.integers(0, 9))
def test_swapping_two_methods_or_the_direction_changes_signs_alone(
    rows: list[tuple[float, float]], seed: int
) -> None:
    a, b = (list(values) for values in zip(*rows, strict=True))
    few = {"seed": seed, "resamples": 50, "draws": 50}
    (one,) = compare_values({"x": a, "y": b}, **few).pairs
    (swapped,) = compare_values({"x": b, "y": a}, **few).pairs
    (turned,) = compare_values({"x": a, "y": b}, higher_is_better=False, **few).pairs
    assert one.p == swapped.p == turned.p == one.p_corrected
    # The method with the better mean comes first, x where they are equal.
    sign = -1 if swapped.first == one.first else 1
    assert swapped.difference == sign * one.difference
    sign = 1 if turned.first == one.first else -1
    assert turned.difference == sign * one.difference
    mirrored = (turned.low, turned.high) if sign == 1 else (-turned.high, -turned.low)
    assert mirrored == pytest.approx((one.low, one.high), abs=1e-12)


@given(st.lists(st.floats(-2, 1), min_size=1, max_size=40))
def test_identical_methods_differ_by_0_with_p_1(values: list[float]) -> None:
    standing = compare_values({"x": values, "y": values}, resamples=20)
    (pair,) = standing.pairs
    assert (pair.difference, pair.p, pair.p_corrected) == (0, 1, 1)
    assert standing.tied == ("y",)
    if len(values) > 1:
        assert (pair.low, pair.high) == (0, 0)


@pytest.mark.parametrize("factor", [0.125, 3.0, 1e-9])
def test_a_standing_does_not_depend_on_the_unit(factor: float) -> None:
    values = three_methods()
    one = compare_values(values)
    other = compare_values({name: factor * found + 5 * factor for name, found in values.items()})
    assert (other.ranking, other.tied) == (one.ranking, one.tied)
    for a, b in zip(one.pairs, other.pairs, strict=True):
        assert (b.p, b.p_corrected) == (a.p, a.p_corrected)
        assert (b.difference, b.low, b.high) == pytest.approx(
            tuple(factor * v for v in (a.difference, a.low, a.high)), abs=1e-9 * factor
        )


def test_scores_are_compared_by_any_column_in_its_direction(scores: dict[str, Scores]) -> None:
    standing = compare_scores(scores, column="deletion_percent", seed=2)
    assert not standing.higher_is_better
    means = {name: found.mean()["deletion_percent"] for name, found in scores.items()}
    assert standing.means == pytest.approx(means)
    assert standing.best == min(means, key=lambda name: means[name])
    assert (standing.n, standing.chance.seed) == (9, 2)
    assert compare_scores(scores).column == "msi"
    assert sufficit.Standing is Standing


def test_the_frame_has_a_row_a_pair(scores: dict[str, Scores]) -> None:
    standing = compare_scores(scores)
    frame = standing.frame()
    assert list(frame)[:8] == [
        "first", "second", "difference", "low", "high", "p", "p_corrected", "n",
    ]  # fmt: skip
    assert frame["p"].tolist() == [pair.p for pair in standing.pairs]
    assert len(frame) == 3
    assert list(compare_scores({"one": scores["one"]}).frame()) == list(frame)


def test_sentences_say_who_is_best_and_who_is_tied() -> None:
    values = three_methods()
    mean = values["a"].mean()
    assert compare_values(values).sentence() == (
        f"By msi (higher is better) over 40 images a is best at {mean:.3f}; not distinguishable"
        " from it: b (level 0.05, Holm's correction for 3 pairs)."
    )
    two = compare_values({name: values[name] for name in "ac"})
    assert "and differs from every other (level 0.05, Holm's correction for 1 pair)" in (
        two.sentence()
    )
    assert "nothing to compare it with" in compare_values({"a": values["a"]}).sentence()


def part(scores: Scores, n: int) -> Scores:
    """The first images of some scores."""
    answers = replace(scores.answers, targets=scores.targets[:n])
    return replace(scores, answers=answers, columns={k: v[:n] for k, v in scores.columns.items()})


def test_methods_scored_on_other_images_are_refused(scores: dict[str, Scores]) -> None:
    one, two = scores["one"], scores["two"]
    with pytest.raises(UserError, match=r"same images.*number of images is 9 for x and 7 for y"):
        compare_scores({"x": one, "y": part(two, 7)})
    targets = two.targets.clone()
    targets[4] += 1
    moved = replace(two, answers=replace(two.answers, targets=targets))
    t = int(one.targets[4])
    with pytest.raises(UserError, match=f"target of image 4 is {t} for x and {t + 1} for y"):
        compare_scores({"x": one, "y": moved})
    names = [f"{i}.png" for i in range(9)]
    renamed = [*names[:8], "other.png"]
    assert compare_scores({"x": one, "y": two}, names={"x": names, "y": names}).n == 9
    with pytest.raises(UserError, match=r"name of image 8 is '8\.png' for x and 'other\.png' for"):
        compare_scores({"x": one, "y": two}, names={"x": names, "y": renamed})
    with pytest.raises(UserError, match="y has 9 images and 0 names"):
        compare_scores({"x": one, "y": two}, names={"x": names})


def test_methods_scored_in_another_way_are_refused(scores: dict[str, Scores]) -> None:
    one, two = scores["one"], scores["two"]
    with pytest.raises(UserError, match=r"alpha_min is 0\.5 for x and 0\.3 for y; score"):
        compare_scores({"x": one, "y": replace(two, alpha_min=0.3)})
    schedule = replace(two.plan.schedules[0], score="confidence")
    other = replace(two, plan=replace(two.plan, schedules=(schedule,)))
    with pytest.raises(UserError, match="score is 'accuracy' for x and 'confidence' for y"):
        compare_scores({"x": one, "y": other})


def test_what_can_not_be_compared_is_refused(scores: dict[str, Scores]) -> None:
    with pytest.raises(UserError, match=r"Unknown column 'msii'\. Did you mean 'msi'"):
        compare_scores(scores, column="msii")
    with pytest.raises(UserError, match="one or more, got none"):
        compare_scores({})
    with pytest.raises(UserError, match=r"got Tensor for x: .*compare_values"):
        compare_scores({"x": torch.ones(3)})  # type: ignore[dict-item]
    with pytest.raises(UserError, match=r"must be \[N\], one an image, got \[2, 2\] for x"):
        compare_values({"x": np.ones((2, 2))})


def test_pairs_on_disk_carry_what_they_were_made_with(tmp_path: Path) -> None:
    standing = compare_values(three_methods(), seed=4, draws=300)
    save_pairs(tmp_path / "pairs.csv", standing)
    frame = pandas.read_csv(tmp_path / "pairs.csv")
    assert frame["difference"].tolist() == pytest.approx([p.difference for p in standing.pairs])
    assert frame[["column", "seed", "resamples", "draws", "correction"]].drop_duplicates().to_dict(
        "records"
    ) == [{"column": "msi", "seed": 4, "resamples": 2000, "draws": 300, "correction": "holm"}]
    save_json(tmp_path / "a.json", asdict(standing))
    stored = json.loads((tmp_path / "a.json").read_text())
    assert (stored["best"], stored["tied"], stored["ranking"]) == ("a", ["b"], ["a", "b", "c"])
    assert stored["chance"]["draws"] == 300
    assert stored["pairs"][0]["p_corrected"] == standing.pairs[0].p_corrected


def summaries_of(values: Mapping[str, np.ndarray]) -> dict[str, dict[str, Estimate]]:
    return {
        name: {
            "msi": Estimate(float(found.mean()), -0.5, 0.5, len(found), 0, True),
            "deletion_percent": Estimate(0.25, NAN, NAN, 1, 0, False),
        }
        for name, found in values.items()
    }


def printed(values: Mapping[str, np.ndarray], standing: Standing) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(methods_table(summaries_of(values), standing, "Means"))
    return capture.get().splitlines()


def test_the_table_marks_the_best_and_those_not_significantly_different() -> None:
    values = three_methods()
    table = printed(values, compare_values(values))
    rows = {line.split()[0]: line.split() for line in table if line.strip()}
    assert list(rows)[3:6] == ["a", "b", "c"]
    assert rows["a"][1:4] == ["0.250", f"{values['a'].mean():.3f}", "*"]
    assert rows["b"][1:4] == ["0.250", f"{values['b'].mean():.3f}", "="]
    assert rows["c"][1:4] == ["0.250", f"{values['c'].mean():.3f}", "-0.50"]
    assert rows["method"][1:5] == ["del.", "%", "↓", "MSI"]
    text = " ".join(" ".join(table).split())
    assert "* best MSI of 3; = not significantly different (n = 40): paired sign-flip test" in text
    assert "(10,000 draws), level 0.05, Holm correction for 3 pairs" in text
    assert "2,000 resamples, seed 0." in text


@pytest.mark.parametrize("values", [{"a": [1, NAN], "b": [NAN, 0]}, {"a": [NAN] * 2, "b": [0, 1]}])
def test_methods_without_a_common_image_cannot_be_told_apart(values) -> None:
    standing = compare_values(values)
    best, other = standing.ranking
    assert standing.sentence().endswith(f"; no image has values of it and of {other}.")
    assert f"{best} is best" in standing.sentence()
    assert standing.tied == ()


def test_infinite_values_are_refused() -> None:
    with pytest.raises(UserError, match="finite or NaN, got inf for b"):
        compare_values({"a": [0.0, 1.0], "b": [0.0, float("inf")]})


def test_scores_of_other_images_or_of_another_model_are_refused() -> None:
    images, others = torch.rand(2, 12, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    heatmaps, labels = images.mean(1), torch.arange(12) % 3
    options = {"columns": ("msi",), "value_step": 0.25}
    one, two = (Classifier(small_net(seed=seed)) for seed in (2, 3))
    first = evaluate(one, images, heatmaps, labels, **options)
    again = evaluate(one, images, heatmaps.flip(1), labels, batch_size=5, **options)
    assert compare_scores({"a": first, "b": again}).n == 12
    for found in (
        evaluate(one, others, heatmaps, labels, **options),
        evaluate(two, images, heatmaps, labels, **options),
    ):
        with pytest.raises(UserError, match="what it says of the whole images is not the same"):
            compare_scores({"a": first, "b": found})


def test_a_mean_of_nothing_is_a_dash_in_the_table() -> None:
    values = three_methods()
    summaries = summaries_of(values)
    summaries["b"] = summaries["b"] | {"deletion_percent": Estimate(NAN, NAN, NAN, 0, 3, False)}
    table = methods_table(summaries, compare_values(values), "Means")
    assert list(table.columns[1].cells) == ["0.250", "-", "0.250"]


def test_controls_are_in_the_table_and_not_in_the_contest() -> None:
    values = three_methods()
    standing = compare_values({name: values[name] for name in "bc"})
    table = methods_table(summaries_of(values), standing, "Means")
    assert ranked(summaries_of(values), standing) == ["a", "b", "c"]
    assert [row.style for row in table.rows] == ["dim", "bold", None]
    assert [mark(name, standing) for name in "abc"] == [" ", "*", " "]
    assert "all others differ (n = 40)" in legend(standing)
    assert legend(compare_values({"a": values["a"]})).startswith("* best MSI of 1. Interval")


def test_a_table_by_another_column_has_its_interval_and_ranks_by_it(
    scores: dict[str, Scores],
) -> None:
    standing = compare_scores(scores, column="mask_penalty")
    summaries = {name: summarise(found) for name, found in scores.items()}
    table = methods_table(summaries, standing, "Means", ["msi"])
    assert [column.header.strip() for column in table.columns] == [
        "method", "MSI ↑", "penalty ↓", "95 % interval",
    ]  # fmt: skip
    means = [summaries[name]["mask_penalty"].mean for name in ranked(summaries, standing)]
    assert means == sorted(means)
    best = summaries[standing.best]["mask_penalty"]
    assert next(iter(table.columns[3].cells)) == f"{best.low:.2f} .. {best.high:.2f}"
