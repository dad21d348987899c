"""How long a run takes is said before it starts; images drawn, quick runs and a cheap curve."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import Spy
from small_runs import config_for, run_small, write_photos
from sufficit import Classifier, UserError, compare
from sufficit.data.images import drawn, open_images
from sufficit.runs import forecast as module
from sufficit.runs.config import QUICK, Workers, config_from
from sufficit.runs.forecast import forecast
from sufficit.runs.job import make_job


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that answers for two images per second."""
    monkeypatch.setattr(module, "images_per_second", lambda job: 2.0)


@pytest.mark.usefixtures("still")
def test_a_forecast_counts_what_the_run_then_asks(photos: Path, tmp_path: Path) -> None:
    config = config_for(photos, checks=["controls", "fill", "alpha-curve"])
    found = forecast(make_job(config))
    assert found is not None
    asked = run_small(config, tmp_path / "out").record.model_calls
    # Repeated masks are asked once, so that a run asks less than it could.
    assert 0.5 * found.calls < asked < found.calls
    assert found.seconds == found.calls / 2
    assert f"{found.calls:,} images through the model, which does 2.0 per second" in found.words
    halved = forecast(make_job(config), workers=Workers(count=2))
    assert halved is not None
    assert halved.seconds == found.seconds / 2
    assert forecast(make_job(config), workers=Workers(address="auto")) is None
    leaking = forecast(make_job(replace(config, checks=(*config.checks, "leak"))))
    assert leaking is not None
    assert leaking.calls - found.calls == 11 * 5 * (2 * config.donors + 5)


@pytest.mark.usefixtures("still")
def test_what_is_done_is_not_forecast_again(photos: Path, tmp_path: Path) -> None:
    from small_runs import interrupted

    config = config_for(photos, checks=["controls"])
    interrupted(lambda: run_small(config, tmp_path / "out", unit=4), after=1)
    whole, rest = forecast(make_job(config)), forecast(make_job(config), tmp_path / "out")
    assert whole is not None
    assert rest is not None
    assert rest.calls < whole.calls


@pytest.mark.usefixtures("still")
@pytest.mark.usefixtures("undrawn")
def test_the_command_says_how_long_and_what_shortens_it(sufficit, photos: Path) -> None:
    words: list[Any] = ["compare", "--model", f"python:{photos.parent / 'model.py'}:make"]
    words += ["--data", photos, "--methods", "gradcam,layercam", "--out", photos.parent / "out"]
    words += ["--value-step", 0.25, "--percent-step", 0.5]
    run = sufficit(*words)
    assert run.code == 0, run.err
    told = " ".join(run.err.split())
    assert "This takes about " in told
    assert "Shorter: --quick (a first look), fewer --methods, --checks none." in told
    assert "This takes" not in sufficit(*words, "--json", "--overwrite").err


def test_the_timed_batch_is_of_the_data_and_leaves_the_model_as_it_is(photos: Path) -> None:
    job = make_job(config_for(photos))
    spy = Spy(job.classifier.bare).train()
    found = module.images_per_second(replace(job, classifier=Classifier(spy, layer="model.0")))
    assert found is not None
    assert found > 0
    assert spy.sizes[:2] == [1, 4]
    assert set(spy.sizes[1:]) == {4}
    assert spy.training
    assert all(weight.grad is None for weight in spy.parameters())


def test_a_small_network_is_timed_for_longer_than_one_batch(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    takes = iter([9.0, 0.064, 0.008, 0.008, 0.008, 0.016])  # the first is not timed

    def slow(*_: object) -> None:
        nonlocal now
        now += next(takes)

    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    job = make_job(config_for(photos))
    job.classifier.bare.register_forward_hook(slow)
    assert module.images_per_second(job) == pytest.approx(5 * 4 / 0.104)


def test_images_are_drawn_by_seed_and_name_in_their_order(photos: Path) -> None:
    names = [image.name for image in open_images(photos)]
    some = [image.name for image in drawn(open_images(photos), 5, seed=1)]
    assert len(some) == 5
    assert some == [name for name in names if name in some]
    assert some == [i.name for i in drawn(reversed([*open_images(photos)]), 5, seed=1)][::-1]
    assert some != [image.name for image in drawn(open_images(photos), 5, seed=2)]
    assert {*some} < {image.name for image in drawn(open_images(photos), 7, seed=1)}
    shares = dict.fromkeys(names, 0)
    for seed in range(300):
        for image in drawn(open_images(photos), 5, seed):
            shares[image.name] += 1
    assert all(90 < count < 185 for count in shares.values()), "136 each, with an error of 8.6"


def test_a_run_on_some_images_has_the_rows_and_labels_of_the_whole(
    photos: Path, tmp_path: Path
) -> None:
    quick = {"checks": ["controls"]}
    whole = run_small(config_for(photos, **quick), tmp_path / "whole")
    some = run_small(config_for(photos, **quick, images=3, seed=5), tmp_path / "some")
    assert some.n == 3
    rows = whole.rows["gradcam"].set_index("image")
    for row in some.rows["gradcam"].to_dict("records"):
        assert row["target"] == rows.loc[row["image"], "target"], "also where a class is missing"
        assert row["msi"] == pytest.approx(rows.loc[row["image"], "msi"])
    assert run_small(config_for(photos, **quick, images=99), tmp_path / "all").n == 11


def test_heatmaps_in_memory_are_not_drawn_from(photos: Path) -> None:
    images, maps = torch.rand(4, 3, 12, 12), torch.rand(4, 12, 12)
    job = make_job(config_for(photos))
    with pytest.raises(UserError, match="images are drawn from data on disk"):
        compare(job.classifier, images, {"mine": maps}, draw=2)


def test_quick_is_what_is_not_said_otherwise() -> None:
    given = {"model": "m", "data": "d", "quick": True}
    found = config_from(given | {"checks": ["leak"], "images": 8})
    assert (found.calls, found.checks, found.images) == (26, ("leak",), 8)
    assert all(getattr(config_from(given), name) == value for name, value in QUICK.items())
    assert config_from(given | {"quick": False}).images is None


@pytest.mark.parametrize(("columns", "calls"), [(None, "exact"), (("msi",), "exact"), (None, 18)])
def test_the_curve_over_alpha_min_costs_less_than_the_scores(
    tmp_path: Path, columns: tuple[str, ...] | None, calls: Any
) -> None:
    photos = write_photos(tmp_path, 24)
    checks = ["controls", "alpha-curve"]
    config = config_for(photos, checks=checks, columns=columns, calls=calls)
    with_curve = run_small(config, tmp_path / "with").record
    alone = run_small(replace(config, checks=("controls",)), tmp_path / "alone").record
    assert with_curve.model_calls < 2 * alone.model_calls
    job = make_job(config)
    (curve,) = [probe for probe in job.probes if probe.key == "alpha-curve"]
    assert curve.images is not None
    assert with_curve.alpha_curve is not None
    assert 0 < len(curve.images) == with_curve.alpha_curve["images"] <= 16
    scores = 24 * sum(probe.calls for probe in job.probes if probe.images is None)
    share = 1 if len(curve.images) == 1 else 2  # half of the scores, but at least one image
    assert share * len(curve.images) * curve.calls <= scores


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "--methods", "gradcam", "-m", "layercam"], "--methods is given twice"),
        (["evaluate", "--heatmaps", "a.npz", "--heatmaps", "b.npz"], "--heatmaps is given twice"),
        (["compare", "--json", "--json"], "--json is given twice: give it once"),
        (["demo", "--images", "4", "--images", "5"], "--images is given twice"),
        (["sanity", "--seed", "1", "--seed=1"], "--seed is given twice"),
        (["train-lax", "--epochs", "1", "--epochs", "2"], "--epochs is given twice"),
    ],
)
def test_no_option_is_taken_twice_silently(sufficit, words: list[str], message: str) -> None:
    run = sufficit(*words, literally=True)
    assert run.code == 2
    assert message in run.err
    assert ("commas" in run.err) == ("--methods" in message)


def test_options_that_take_several_still_do(sufficit) -> None:
    run = sufficit("serve", "--allow-host", "a", "--allow-host", "b", literally=True)
    assert "given twice" not in run.err


@pytest.mark.usefixtures("still")
def test_a_method_whose_cost_is_a_formula_has_a_forecast(photos: Path) -> None:
    assert forecast(make_job(config_for(photos, methods=("gradcam", "scorecam")))) is not None


def test_what_a_model_gives_belongs_to_the_key_of_a_run(photos: Path) -> None:
    job = make_job(config_for(photos))
    model, options = job.classifier.bare, {"layer": job.classifier.layer}
    keys = [
        replace(job, classifier=Classifier(model, output=output, **options)).key()
        for output in ("logits", "probabilities")
    ]
    assert keys[0] != keys[1]
