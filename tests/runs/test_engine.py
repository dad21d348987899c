"""A run scores every source on every image, once, and its numbers are those of the library."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from own_model import MODEL
from reference import COLUMNS, one_at_a_time, reference_columns
from small_models import Traces
from small_runs import (
    CLASSES,
    STEPS,
    assert_same_rows,
    config_for,
    interrupted,
    rows,
    run_small,
    write_photos,
)
from sufficit import Classifier, Lax, UserError, evaluate, explain, leak
from sufficit.data.heatmap_files import HeatmapFile, write_heatmaps
from sufficit.data.images import ImageFile, list_images, read_image
from sufficit.provenance import save_json
from sufficit.runs import probes_of
from sufficit.runs.engine import run
from sufficit.runs.job import make_job
from sufficit.runs.results import OWN_BEST, RunResults
from sufficit.runs.store import HELD, MAPS
from sufficit.runs.table import write_results
from sufficit.sources import kinds, noise, sources_of

LEAKS = ("leak", "leak_chance", "leak_grey", "leak_grey_chance", "leak_noise", "leak_noise_chance")


def model_of(photos: Path) -> Classifier:
    return Classifier.load(f"python:{photos.parent / 'model.py'}:make")


def inputs_of(photos: Path, names: list[str]) -> tuple[Tensor, Tensor]:
    """Images and labels in the order of the names."""
    images = torch.stack([read_image(photos / name, None) for name in names])
    return images, torch.tensor([CLASSES.index(name[:3]) for name in names])


def heatmaps_of(
    photos: Path, names: list[str], seed: int = 0, methods: tuple[str, ...] = ("gradcam",)
) -> dict[str, Tensor]:
    """The heatmaps of methods and controls, drawn without a run."""
    images, labels = inputs_of(photos, names)
    found = {m: explain(model_of(photos), images, labels, m) for m in (*methods, "center")}
    return found | {"random": noise((12, 10), seed, range(len(names)))}


# Numbers


def test_rows_are_what_explain_evaluate_and_leak_return(photos: Path, tmp_path: Path) -> None:
    results = run_small(config_for(photos, seed=3, checks="controls,fill,leak"), tmp_path / "out")
    names = [image.name for image in list_images(photos)]
    assert results.names == names
    assert set(results.methods) == {"gradcam", "layercam", "everything", "random", "center"}
    classifier, (images, labels) = model_of(photos), inputs_of(photos, names)
    for method, found in heatmaps_of(photos, names, 3, ("gradcam", "layercam")).items():
        expected = evaluate(classifier, images, found, labels, held_out_fill="blur", **STEPS)
        leaked = leak(classifier, images, found, labels, donors=3, seed=3)
        frame = rows(tmp_path / "out", method)
        assert frame["image"].tolist() == names
        assert frame["target"].tolist() == labels.tolist()
        for name, values in {**expected.columns, **leaked.columns}.items():
            assert frame[name].to_numpy() == pytest.approx(values.numpy(), abs=1e-6), name
        assert frame["calls"].tolist() == (expected.calls + leaked.calls).tolist()
        assert results.summaries[method]["msi"].mean == pytest.approx(expected.mean()["msi"])
        assert results.record.leak_ratio[method] == pytest.approx(leaked.ratio)
    assert results.record.model_calls == sum(f["calls"].sum() for f in results.rows.values())


@pytest.mark.parametrize("score", ["accuracy", "confidence"])
def test_columns_are_those_computed_one_mask_at_a_time(
    photos: Path, tmp_path: Path, score: str
) -> None:
    results = run_small(config_for(photos, score=score, checks="controls"), tmp_path / "out")
    names = results.names
    images, labels = inputs_of(photos, names)
    drawn = heatmaps_of(photos, names, methods=("gradcam", "layercam"))
    logits_of = one_at_a_time(model_of(photos).model)
    for method, number in (("gradcam", 0), ("layercam", 4), ("random", 10)):
        expected = reference_columns(
            logits_of, images[number], drawn[method][number], int(labels[number]),
            score=score, **STEPS,
        )  # fmt: skip
        row = results.rows[method].iloc[number]
        for name in COLUMNS:
            assert row[name] == pytest.approx(expected[name], abs=1e-5), (method, name)


def test_the_leak_of_more_images_than_the_pool_is_that_of_the_library_with_that_pool(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sufficit import Pool

    monkeypatch.setattr(probes_of, "POOL", 5)
    made = make_job(config_for(photos, seed=2), unit=3)
    (leaking,) = (probe for probe in made.probes if probe.key == "leak")
    some = sorted(leaking.holds)
    results = run(made, tmp_path / "out", progress=False)
    assert len(some) == 5
    images, labels = inputs_of(photos, results.names)
    for method, found in heatmaps_of(photos, results.names, 2).items():
        pool = Pool(images[some], found[some], labels[some])
        expected = leak(model_of(photos), images, found, labels, donors=3, seed=2, pool=pool)
        for name, values in expected.columns.items():
            assert results.rows[method][name].to_numpy() == pytest.approx(values.numpy()), name
        # Maps of donors, which are drawn first, are back in the order of the images.
        marked = (found >= 0.5).double().mean((1, 2)).numpy()
        assert results.rows[method]["mask_penalty"].to_numpy() == pytest.approx(marked)
    known = [number in some for number in range(len(images))]
    mixed = [known[start : start + 3] for start in range(0, len(images), 3)]
    assert any(unit != sorted(unit, reverse=True) for unit in mixed), "a new one before a donor"


def test_a_searched_alpha_min_is_best_for_the_mean_of_the_ranked_sources(
    photos: Path, tmp_path: Path
) -> None:
    results = run_small(config_for(photos, alpha_min="search", checks="controls"), tmp_path / "out")
    images, labels = inputs_of(photos, results.names)
    tried = [i / 20 for i in range(1, 20)]
    drawn = heatmaps_of(photos, results.names, methods=("gradcam", "layercam"))
    own = {
        method: [
            evaluate(
                model_of(photos), images, drawn[method], labels, alpha_min=a, columns=["msi"],
                **STEPS,
            ).mean()["msi"]
            for a in tried
        ]
        for method in ("gradcam", "layercam")
    }  # fmt: skip
    together = np.mean([own["gradcam"], own["layercam"]], axis=0)
    assert results.alpha_min == tried[int(together.argmax())]
    assert results.record.search is not None
    best = results.record.search.own_alpha_min
    assert best["gradcam"] == tried[int(np.argmax(own["gradcam"]))]
    assert results.summaries["gradcam"][OWN_BEST].mean == pytest.approx(max(own["gradcam"]))
    at_best = own["layercam"][int(together.argmax())]
    assert results.summaries["layercam"]["msi"].mean == pytest.approx(at_best)
    assert results.record.search.mean_msi["layercam"] == pytest.approx(own["layercam"])


def test_a_resumed_run_has_the_leak_of_sources_after_a_control(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maps of a control are not stored but drawn again."""
    from sufficit import Pool

    monkeypatch.setattr(probes_of, "POOL", 4)
    brightest = Classifier(nn.Sequential(nn.AdaptiveAvgPool2d((3, 1)), nn.Flatten()))
    config = config_for(photos, targets="prediction", checks="leak")
    sources = sources_of({"own": brightness, "center": "center"}, controls=False)
    more: Any = {"classifier": brightest, "sources": sources}
    whole = run_small(config, tmp_path / "whole", unit=2, **more)
    interrupted(lambda: run_small(config, tmp_path / "out", unit=2, **more), after=1)
    run_small(config, tmp_path / "out", unit=2, **more)
    assert_same_rows(tmp_path / "whole", tmp_path / "out", ("center", "own"))
    chances = {name: rows(tmp_path / "out", name)["leak_chance"].tolist() for name in whole.rows}
    assert chances["own"] != chances["center"]
    # Each source has the masks of its own donors.
    (leaking,) = (one for one in make_job(config, unit=2, **more).probes if one.key == "leak")
    some = sorted(leaking.holds)
    images, _ = inputs_of(photos, whole.names)
    targets = brightest(images).argmax(1)
    for name, found in {
        "own": images.mean(1),
        "center": explain(brightest, images, targets, "center"),
    }.items():
        pool = Pool(images[some], found[some], targets[some])
        wanted = leak(brightest, images, found, targets, donors=3, pool=pool)
        assert chances[name] == pytest.approx(wanted.donors_chance.numpy()), name


def brightness(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    return images.mean(1)


def test_the_leak_at_a_searched_alpha_min_is_that_of_the_library_there(
    photos: Path, tmp_path: Path
) -> None:
    results = run_small(config_for(photos, alpha_min="search", seed=1), tmp_path / "out")
    assert results.alpha_min != 0.5
    images, labels = inputs_of(photos, results.names)
    for method, found in heatmaps_of(photos, results.names, 1, ("gradcam", "layercam")).items():
        expected = leak(
            model_of(photos), images, found, labels, donors=3, seed=1, alpha_min=results.alpha_min
        )
        for name, values in expected.columns.items():
            assert results.rows[method][name].to_numpy() == pytest.approx(values.numpy()), name


@pytest.mark.parametrize("options", [{"value_step": 0.05, "fills": "mean"}, {"batch_size": 5}])
@pytest.mark.parametrize("score", ["accuracy", "confidence"])
def test_msi_over_alpha_min_is_that_of_a_search_on_the_sample(
    tmp_path: Path, score: str, options: dict[str, Any]
) -> None:
    photos = write_photos(tmp_path, 19)
    checks = "controls,fill,alpha-curve"
    config = config_for(photos, score=score, checks=checks, seed=3, **options)
    made = make_job(config, unit=5)
    (curve,) = (probe for probe in made.probes if probe.key == "alpha-curve")
    results = run(made, tmp_path / "out", progress=False)
    saved = results.record.alpha_curve
    assert saved is not None
    sample = sorted(curve.images or ())
    assert (sample, saved["images"]) == ([0, 9], 2)
    assert 2 * (curve.calls + 1) <= 19 * (made.probes[0].calls)
    assert saved["value_step"] == config.value_step
    images, labels = inputs_of(photos, [results.names[row] for row in sample])
    drawn = heatmaps_of(photos, results.names, 3, ("gradcam", "layercam"))
    for method in ("gradcam", "layercam", "random"):
        expected = evaluate(
            model_of(photos), images, drawn[method][sample], labels, alpha_min="search",
            value_step=config.value_step, fill=config.fills[0], columns=["msi"], score=score,
        )  # fmt: skip
        assert expected.search is not None
        assert saved["alphas"] == list(expected.search.alphas)
        wanted = expected.search.means.tolist()
        assert saved["mean_msi"][method] == pytest.approx(wanted, abs=1e-6)
    searched = config_for(photos, alpha_min="search", checks=checks)
    assert run_small(searched, tmp_path / "searched").record.alpha_curve is None


def test_without_labels_the_models_predictions_are_scored(photos: Path, tmp_path: Path) -> None:
    results = run_small(
        config_for(photos, targets="prediction", checks="controls"), tmp_path / "out"
    )
    images, _ = inputs_of(photos, results.names)
    predicted = model_of(photos)(images).argmax(1)
    assert results.rows["gradcam"]["target"].tolist() == predicted.tolist()
    assert results.rows["gradcam"]["clean_accuracy"].tolist() == [1.0] * 11
    assert results.record.targets == "prediction"


def test_only_the_columns_that_are_asked_for_are_computed(photos: Path, tmp_path: Path) -> None:
    whole = run_small(config_for(photos, checks="controls"), tmp_path / "whole")
    config = config_for(photos, checks="controls", columns=["mask_penalty", "insertion_pixel"])
    some = run_small(config, tmp_path / "some")
    frame = some.rows["gradcam"]
    facts = ["image", "target", "clean_accuracy", "calls"]
    assert list(frame) == [*facts, "mask_penalty", "insertion_pixel"]
    assert frame["insertion_pixel"].equals(whole.rows["gradcam"]["insertion_pixel"])
    assert frame["calls"].sum() < whole.rows["gradcam"]["calls"].sum()
    assert some.standing is None
    with pytest.raises(UserError, match="a report shows MSI"):
        some.content()


# Units


def test_a_compiled_copy_scores_alike_and_explains_nothing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, made = torch.compile, []

    def traced(model: Any, **more: Any) -> Any:
        made.append(model)
        return whole(model, backend="eager", **more)

    monkeypatch.setattr(torch, "compile", traced)
    plain = run_small(config_for(photos, batch_size=64), tmp_path / "plain")
    fast = run_small(config_for(photos, batch_size=64, compile="on"), tmp_path / "fast")
    assert len(made) == 1
    for method in plain.methods:
        rows = fast.rows[method], plain.rows[method]
        pandas.testing.assert_frame_equal(*rows, atol=1e-4, rtol=0)
    interrupted(lambda: run_small(config_for(photos), tmp_path / "other"))
    with pytest.raises(UserError, match="`compiled` was False, now True"):
        run_small(config_for(photos, compile="on"), tmp_path / "other")


def test_corrupt_images_are_named_and_change_no_other_row(photos: Path, tmp_path: Path) -> None:
    whole = run_small(config_for(photos, checks="controls"), tmp_path / "whole")
    (photos / "bee" / "04.png").write_bytes(b"")
    (photos / "bee" / "07.png").write_bytes(b"nonsense")
    results = run_small(config_for(photos, checks="controls"), tmp_path / "out")
    assert {name: why[:17] for name, why in results.skipped.items()} == {
        "bee/04.png": "the file is empty",
        "bee/07.png": "not a readable im",
    }
    assert (results.n, results.record.n_skipped) == (9, 2)
    for method in whole.methods:
        before = whole.rows[method].set_index("image").loc[results.names].reset_index()
        pandas.testing.assert_frame_equal(results.rows[method], before, atol=1e-6, rtol=0)
    with pytest.raises(UserError, match=r"Cannot read bee/04\.png: the file is empty\. Fix it"):
        run_small(config_for(photos, on_error="stop"), tmp_path / "stopped")
    again = run_small(config_for(photos), tmp_path / "stopped")  # what was done is kept
    assert again.names == results.names


NO_NUMBERS = """
class Fragile(torch.nn.Module):
    def forward(self, images):
        return images.masked_fill(images.amax((1, 2, 3), keepdim=True) == 0, torch.nan)

def fragile():
    made = make()
    return Classifier(nn.Sequential(Fragile(), *made.model), layer="2", classes=made.classes)
"""


def test_images_the_model_gives_nan_for_are_skipped_and_change_no_other_row(
    photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL + NO_NUMBERS)
    config = config_for(photos, model=f"python:{tmp_path / 'model.py'}:fragile", fills="mean")
    whole = run_small(config, tmp_path / "whole")
    black = ("cat/11.png", "cat/12.png", "cat/13.png")
    for name in black:  # the last ones, so that the others keep their numbers
        Image.new("RGB", (10, 12)).save(photos / name)
    results = run_small(config, tmp_path / "out")
    assert results.skipped == dict.fromkeys(black, "the model gives NaN or infinite values for it")
    assert results.names == whole.names
    for method in whole.methods:
        now, then = (
            one.rows[method].drop(columns=[*LEAKS], errors="ignore") for one in (results, whole)
        )
        pandas.testing.assert_frame_equal(
            now.drop(columns="calls"), then.drop(columns="calls"), atol=1e-6, rtol=0
        )
    stopping = config_for(photos, model=config.model, fills="mean", on_error="stop")
    with pytest.raises(UserError, match=r"cat/1\d\.png: the model gives NaN.*--precision"):
        run_small(stopping, tmp_path / "stopped")


def test_a_function_that_returns_nan_is_an_error_that_names_the_image(
    photos: Path, tmp_path: Path
) -> None:
    Image.new("RGB", (10, 12)).save(photos / "cat" / "08.png")
    (tmp_path / "mine.py").write_text(
        "def own(model, images, targets):\n"
        "    return images.mean(1) / images.amax((1, 2, 3))[:, None, None]\n"
    )
    config = config_for(photos, methods=[f"python:{tmp_path / 'mine.py'}:own"])
    with pytest.raises(UserError, match=r"method own: .*NaN.*, or leave out image cat/08\.png$"):
        run_small(config, tmp_path / "out")


@pytest.mark.parametrize("options", [{}, {"alpha_min": "search"}, {"calls": 18}])
def test_controls_alone_skip_the_images_the_model_gives_nan_for(
    photos: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    (tmp_path / "model.py").write_text(MODEL + NO_NUMBERS)
    model = f"python:{tmp_path / 'model.py'}:fragile"
    config = config_for(photos, model=model, methods=["center", "random"], fills="mean", **options)
    whole = run_small(config, tmp_path / "whole")
    for name in ("cat/11.png", "cat/12.png"):
        Image.new("RGB", (10, 12)).save(photos / name)
    results = run_small(config, tmp_path / "out")
    reason = "the model gives NaN or infinite values for it"
    assert results.skipped == {"cat/11.png": reason, "cat/12.png": reason}
    for method in whole.methods:
        now, then = (
            one.rows[method].drop(columns=[*LEAKS], errors="ignore") for one in (results, whole)
        )
        pandas.testing.assert_frame_equal(now, then, atol=1e-6, rtol=0)
    stopping = replace(config, on_error="stop")
    with pytest.raises(UserError, match=r"cat/11\.png: the model gives NaN.*--precision"):
        run_small(stopping, tmp_path / "stopped")


def test_a_run_without_any_good_image_is_one_error(photos: Path, tmp_path: Path) -> None:
    for path in (photos / "ant").iterdir():
        path.write_bytes(b"")
    results = run_small(config_for(photos), tmp_path / "out")  # a whole unit is skipped
    assert {name.split("/")[0] for name in results.names} == {"bee", "cat"}
    assert "leak" in results.rows["gradcam"]
    for path in photos.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"all 11 images were skipped; the first, ant/00\.png"):
        run_small(config_for(photos), tmp_path / "none")
    assert not (tmp_path / "none" / "units").exists()  # a run on repaired images starts anew


def test_images_of_several_sizes_need_a_size(photos: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(photos / "cat" / "08.png")
    with pytest.raises(UserError, match=r"images differ in size .*cat/08.* give --size"):
        run_small(config_for(photos), tmp_path / "out")
    assert len(run_small(config_for(photos, size="12"), tmp_path / "sized").names) == 11
    apart = config_for(photos, checks="controls")  # alone in its unit it is scored at its own size
    assert len(run_small(apart, tmp_path / "apart", unit=1).names) == 11


def test_one_image_is_scored_without_leakage(photos: Path, tmp_path: Path) -> None:
    for path in sorted(photos.rglob("*.png"))[1:]:
        path.unlink()
    results = run_small(config_for(photos, targets="prediction"), tmp_path / "out")
    assert len(results.names) == 1
    assert "leak" not in results.rows["gradcam"]
    assert any("Leakage was not measured" in remark for remark in results.remarks())


def test_controls_alone_are_ranked(photos: Path, tmp_path: Path) -> None:
    results = run_small(config_for(photos, methods=["center"], checks="controls"), tmp_path / "out")
    assert results.standing is not None
    assert set(results.standing.ranking) == {"everything", "random", "center"}
    assert results.controls == ()


# Every image is explained once by each source


class Counts:
    """How often each image is explained by each source."""

    def __init__(self, photos: Path, patch: pytest.MonkeyPatch) -> None:
        self.explained = Counter[tuple[str, str]]()
        self.names: dict[bytes, str] = {}
        for path in photos.rglob("*.png"):
            key = read_image(path, None).numpy().tobytes()
            self.names[key] = path.relative_to(photos).as_posix()
        patch.setattr(kinds, "draw_all", self.explaining(kinds.draw_all))

    def explaining(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def draw(
            classifier: Classifier, images: Tensor, targets: Tensor, methods: Any, **more: Any
        ) -> Any:
            names = [self.names[image.numpy().tobytes()] for image in images]
            self.explained.update((method, name) for method in methods for name in names)
            return whole(classifier, images, targets, methods, **more)

        return draw

    def check(self, names: list[str]) -> None:
        """These images were explained by each source once, no others at all."""
        assert self.explained == Counter((method, name) for method in DRAWN for name in names)


ALL = ("gradcam", "kpca-cam", "adapter", "own", "file", "everything", "random", "center")
DRAWN = ("gradcam", "kpca-cam", "adapter", "own")


def every_source(photos: Path, **more: Any) -> Any:
    """A config with a source of each kind, and everything that a run may do beside."""
    place = photos.parent
    torch.manual_seed(0)
    adapter = Lax(6)
    adapter.belong_to(model_of(photos), "1")
    adapter.save_pretrained(place / "adapter")
    (place / "mine.py").write_text("def own(model, images, targets): return images.mean(1)")
    maps = {image.name: torch.rand(4, 5) for image in list_images(photos)}
    write_heatmaps(place / "file.npz", maps)
    words = ["gradcam", "kpca-cam", str(place / "adapter"), f"python:{place / 'mine.py'}:own"]
    methods = [*words, str(place / "file.npz")]
    return config_for(photos, methods=methods, save_heatmaps=True, **more)


def test_a_donor_is_decoded_once_before_images_are_shown(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: Counter[str] = Counter()
    read = ImageFile.read
    monkeypatch.setattr(
        ImageFile, "read", lambda self, view: (decoded.update([self.name]), read(self, view))[1]
    )
    before_shown: Counter[str] = Counter()
    monkeypatch.setattr(
        "sufficit.runs.engine.write_results",
        lambda *given, **named: (before_shown.update(decoded), write_results(*given, **named))[1],
    )
    run_small(config_for(photos, checks=("leak",)), tmp_path / "out")
    assert before_shown
    assert set(before_shown.values()) == {1}


POOLS = pytest.mark.parametrize("pool", [256, 4], ids=["all are donors", "few are donors"])


@POOLS
@pytest.mark.parametrize("alpha_min", [0.5, "search"])
def test_each_image_is_explained_once_by_each_source(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: int, alpha_min: Any
) -> None:
    monkeypatch.setattr(probes_of, "POOL", pool)
    config = every_source(photos, alpha_min=alpha_min)
    counts = Counts(photos, monkeypatch)
    results = run_small(config, tmp_path / "out", unit=3)
    assert results.shown is not None
    assert set(results.methods) == set(ALL)
    assert (results.record.alpha_curve is not None) == (alpha_min == 0.5)
    assert set(LEAKS) <= set(results.rows["own"])
    with HeatmapFile(tmp_path / "out" / "adapter" / "heatmaps.npz") as kept:
        assert set(kept.keys) == set(results.names)
    if alpha_min == 0.5:
        counts.check(results.names)
    else:  # the first run draws its own, on a sample
        assert {*counts.explained.values()} == {2}


@POOLS
def test_a_resumed_run_explains_only_what_is_missing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: int
) -> None:
    monkeypatch.setattr(probes_of, "POOL", pool)
    config = every_source(photos)
    whole = run_small(config, tmp_path / "whole", unit=3)
    (leaking,) = (probe for probe in make_job(config, unit=3).probes if probe.key == "leak")
    for kind, after in (("held", 0), ("unit", 0), ("unit", 2)):
        out = tmp_path / f"{kind}-{after}"
        with monkeypatch.context() as patch:
            interrupted(lambda out=out: run_small(config, out, unit=3), after, kind)
            donors = set() if kind == HELD else {whole.names[number] for number in leaking.holds}
            missing = [name for name in whole.names[3 * after :] if name not in donors]
            counts = Counts(photos, patch)
            run_small(config, out, unit=3)
            counts.check(missing)
        assert_same_rows(tmp_path / "whole", out, ALL)


# What methods of the user's do to a run

SALIENCY = """
import torch

def saliency(classifier, images, targets):
    images = images.clone().requires_grad_()
    classifier.model(images).gather(1, targets[:, None]).sum().backward()
    found = images.grad.abs().sum(1)
    return found / found.amax((1, 2), keepdim=True)

def noisy(classifier, images, targets):
    return torch.rand(len(images), *images.shape[2:])

def hooking(classifier, images, targets):
    classifier.model[3].register_forward_hook(lambda module, given, output: output * 0)
    return images.mean(1)
"""
NORMED = MODEL.replace(
    "nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(),",
    "nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(6),",
)


@pytest.fixture
def mine(photos: Path) -> str:
    """A file of methods, and a model with statistics that training mode would move."""
    (photos.parent / "mine.py").write_text(SALIENCY)
    (photos.parent / "model.py").write_text(NORMED)
    return f"python:{photos.parent / 'mine.py'}"


@pytest.mark.parametrize("unit", [2, 11])
def test_a_method_that_calls_the_model_changes_no_others_scores(
    photos: Path, tmp_path: Path, mine: str, unit: int
) -> None:
    assert model_of(photos).model.training, "as it is loaded"
    checks = {"checks": "controls"}
    alone = run_small(config_for(photos, methods=["gradcam"], **checks), tmp_path / "alone", unit)
    methods = [f"{mine}:saliency", "gradcam"]
    beside = run_small(config_for(photos, methods=methods, **checks), tmp_path / "beside", unit)
    for method in ("gradcam", "random", "center"):
        pandas.testing.assert_frame_equal(beside.rows[method], alone.rows[method], check_exact=True)


def test_a_method_that_leaves_a_hook_behind_stops_the_run(
    photos: Path, tmp_path: Path, mine: str
) -> None:
    config = config_for(photos, methods=[f"{mine}:hooking", "gradcam"], checks="none")
    with pytest.raises(UserError, match="^method hooking changed the model: hooks of layer '3'"):
        run_small(config, tmp_path / "out")
    assert not (tmp_path / "out" / "units").exists()


@pytest.mark.parametrize("checks", ["none", "leak"])
def test_a_method_that_draws_random_numbers_has_the_same_rows_after_a_kill(
    photos: Path, tmp_path: Path, mine: str, checks: str
) -> None:
    config = config_for(photos, methods=[f"{mine}:noisy", "gradcam"], checks=checks)
    whole = run_small(config, tmp_path / "whole", unit=2)
    interrupted(lambda: run_small(config, tmp_path / "out", unit=2), after=2)
    torch.rand(5)
    run_small(config, tmp_path / "out", unit=2)
    assert_same_rows(tmp_path / "whole", tmp_path / "out", ("noisy", "gradcam"))
    other = run_small(config, tmp_path / "other", unit=5)
    pandas.testing.assert_frame_equal(other.rows["noisy"], whole.rows["noisy"], atol=1e-6, rtol=0)
    again = run_small(replace(config, seed=1), tmp_path / "seed", unit=5)
    assert not again.rows["noisy"].equals(other.rows["noisy"])


# What a run leaves


def test_a_finished_run_is_read_and_not_computed_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = config_for(photos), tmp_path / "out"
    first = run_small(config, out)
    with monkeypatch.context() as patched:
        patched.setattr("sufficit.runs.engine.score_missing", None)
        again = run_small(config, out)
        assert again.record == first.record
        pandas.testing.assert_frame_equal(again.rows["gradcam"], first.rows["gradcam"])
        for other, unit in ((config_for(photos, seed=1), 4), (config, 3)):
            with pytest.raises(UserError, match="a finished run of other settings or images"):
                run_small(other, out, unit=unit)
        assert run_small(config, out).names == first.names
        with pytest.raises(UserError, match="choose another --out, or --overwrite"):
            run_small(replace(config, save_heatmaps=True), out)  # they are not there


@pytest.mark.parametrize("text", ["[]", "{", '{"n": 3}'])
def test_a_run_whose_record_is_broken_is_computed_again(
    photos: Path, tmp_path: Path, text: str
) -> None:
    config, out = config_for(photos, checks="none"), tmp_path / "out"
    run_small(config, out)
    (out / "run.json").write_text(text)
    if text != "{":
        with pytest.raises(UserError, match="other settings or images"):
            run_small(config, out)
    run(make_job(config, unit=4), out, overwrite=True, progress=False)
    assert RunResults.read(out).n == 11


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_left_on_the_model(photos: Path, tmp_path: Path, training: bool) -> None:
    classifier = model_of(photos)
    model = classifier.model.train(training)
    model[0].weight.requires_grad_(False)
    model[4].bias.grad = torch.ones(3)
    traces = Traces(model)
    config = every_source(photos, alpha_min="search")
    run_small(config, tmp_path / "out", classifier=classifier)
    traces.check()
    interrupted(lambda: run_small(config, tmp_path / "stopped", classifier=classifier))
    traces.check()
    bad = config_for(photos, size="12", methods=["gradcam", "rollout"])
    with pytest.raises(UserError, match="rollout needs a transformer"):
        run_small(bad, tmp_path / "bad", classifier=classifier)
    traces.check()


def test_precision_reaches_the_model_and_the_record(photos: Path, tmp_path: Path) -> None:
    columns = ["fid_minus_percent"]
    full, half = (
        run_small(
            config_for(photos, precision=precision, columns=columns, checks="controls"),
            tmp_path / precision,
        )
        for precision in ("fp32", "bf16")
    )
    means = [one.summaries["gradcam"]["fid_minus_percent"].mean for one in (full, half)]
    assert means[0] != means[1]
    assert means[0] == pytest.approx(means[1], abs=0.05)
    assert half.record.made["device"]["dtype"] == "torch.bfloat16"


def test_the_folder_of_a_run_holds_what_the_docs_say(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = run_small(config_for(photos, save_heatmaps=True), out)
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    kinds = ("scores.parquet", "curves.parquet", "heatmaps.npz")
    each = {f"{method}/{kind}" for method in results.methods for kind in kinds}
    units = {f"{MAPS}/unit-{k:06d}.safetensors" for k in range(3)}
    top = {"RUN.toml", "summary.json", "curves.json", "pairs.csv", "run.json", "shown.safetensors"}
    assert written == each | units | top
    record = results.record
    assert (record.n, record.n_skipped, record.targets) == (11, 0, "label")
    assert record.class_folders == {"ant": 0, "bee": 1, "cat": 2}
    assert RunResults.read(out).names == results.names


def test_progress_counts_images_times_methods(photos: Path, tmp_path: Path) -> None:
    ticks: list[tuple[float, float]] = []
    made = make_job(config_for(photos, checks="controls"), unit=4)
    run(made, tmp_path / "out", progress=lambda done, total, *_: ticks.append((done, total)))
    done = [share for share, _ in ticks]
    assert done == sorted(done)
    assert ticks[-1] == (55, 55)
    assert len(done) > 3


def test_a_kill_while_the_results_are_written_leaves_a_run_to_resume(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = config_for(photos, checks="controls"), tmp_path / "out"
    whole = run_small(config, tmp_path / "whole")

    def killed(path: Path, content: Any) -> None:
        if path.name == "run.json":
            raise KeyboardInterrupt
        save_json(path, content)

    monkeypatch.setattr("sufficit.runs.table.save_json", killed)
    with pytest.raises(KeyboardInterrupt):
        run_small(config, out)
    monkeypatch.undo()
    with pytest.raises(UserError, match="run the same command again"):
        RunResults.read(out)
    with pytest.raises(UserError, match=r"`alpha_min` was 0.5, now 0.3"):
        run_small(replace(config, alpha_min=0.3), out)
    run_small(config, out)
    assert_same_rows(tmp_path / "whole", out, whole.methods)


def test_images_of_an_earlier_run_are_not_shown_as_those_of_a_run_that_shows_none(
    photos: Path, tmp_path: Path
) -> None:
    config, out = config_for(photos, checks="controls"), tmp_path / "out"
    assert run_small(config, out).shown is not None
    job = make_job(replace(config, columns=("insertion_pixel",)), unit=4)
    found = run(job, out, overwrite=True, progress=False)
    assert found.shown is None
    assert not (out / "pairs.csv").exists()
