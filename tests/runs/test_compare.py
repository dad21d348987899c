"""Methods compared on a folder of images."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sufficit.compare import _summary, compare_folder, score_folder, scores_at_one_alpha
from sufficit.comparing import groups
from sufficit.comparing.groups import Found
from sufficit.comparing.jobs import load
from sufficit.comparing.outcome import OWN_BEST
from sufficit.comparing.settings import (
    METHODS,
    Settings,
    read_run,
    settings_from,
    write_run,
)
from sufficit.comparing.showing import choose
from sufficit.comparing.telling import content_of, sentences, warnings_of
from sufficit.comparing.toml import as_toml
from sufficit.scored import Options

from own_model import MODEL
from sufficit import Classifier, Lax, UserError, evaluate, explain, leak, scoring
from sufficit.data.digits import synthetic_digits
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.data.images import list_images, read_image
from sufficit.explainers import CAMS
from sufficit.metrics.plan import make_plan
from sufficit.perturbation.predictions import Predictions

FAST = {"value_step": 0.25, "percent_step": 0.25, "donors": 3}


class StoppedError(Exception):
    """The run was stopped from outside."""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eleven small pictures in class folders, and a model that names the classes."""
    (tmp_path / "model.py").write_text(MODEL)
    pixels = np.random.default_rng(0).integers(0, 256, (11, 12, 10, 3), dtype=np.uint8)
    for i, picture in enumerate(pixels):
        path = tmp_path / "photos" / ("ant", "bee", "cat")[i % 3] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    return tmp_path / "photos"


def wanted(photos: Path, **more: object) -> Settings:
    """Settings of a fast run of two methods on the small pictures."""
    usual = {"model": f"python:{photos.parent / 'model.py'}:make", "data": str(photos)}
    return settings_from({**usual, **FAST, "methods": ["gradcam", "layercam"], **more})


def rows(out: Path, method: str) -> pandas.DataFrame:
    return pandas.read_parquet(out / method / "scores.parquet")


def stop_after(share: float, bars: int = 1) -> Callable[[float, float], None]:
    """Progress that stops the run once so much of the last of so many bars is done."""
    begun = [0, float("inf")]

    def told(done: float, total: float) -> None:
        if done < begun[1]:
            begun[0] += 1
        begun[1] = done
        if begun[0] >= bars and done / total >= share:
            raise StoppedError

    return told


def test_rows_are_what_explain_and_evaluate_and_leak_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sufficit.comparing.saving._save_sheet", lambda *_: None)  # it takes long
    made = synthetic_digits(24, seed=2)
    for i, (image, label) in enumerate(zip(made.images, made.labels.tolist(), strict=True)):
        path = tmp_path / "digits" / str(label) / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()).save(path)
    settings = settings_from(
        {**FAST, "model": "sufficit:digits", "data": str(tmp_path / "digits"), "seed": 3}
        | {"methods": ["gradcam", "kpca-cam"], "device": "cpu"}
    )
    found = compare_folder(settings, tmp_path / "out", group=10)

    names = sorted(str(p.relative_to(tmp_path / "digits")) for p in tmp_path.rglob("digits/*/*"))
    classifier = Classifier.load("sufficit:digits")
    images = torch.stack([read_image(tmp_path / "digits" / name, None) for name in names])
    labels = torch.tensor([int(name[0]) for name in names])
    noise = [np.random.default_rng([3, i]).random((64, 64), np.float32) for i in range(24)]
    maps = {"random": torch.from_numpy(np.stack(noise))}
    for method in ("gradcam", "kpca-cam", "center"):
        drawn = [
            explain(classifier, part, goals, method)
            for part, goals in zip(images.split(10), labels.split(10), strict=True)
        ]
        maps[method] = torch.cat(drawn)
    assert list(found.scores) == ["gradcam", "kpca-cam", "random", "center"]
    assert found.names == tuple(names)
    for method, heatmaps in maps.items():
        expected = evaluate(
            classifier, images, heatmaps, labels, value_step=0.25, percent_step=0.25
        )
        leaked = leak(classifier, images, heatmaps, labels, donors=3, seed=3)
        frame = rows(tmp_path / "out", method)
        assert frame["image"].tolist() == names
        assert frame["target"].tolist() == labels.tolist()
        for name, values in {**expected.columns, **leaked.columns}.items():
            assert frame[name].to_numpy() == pytest.approx(values.numpy(), abs=1e-6), name
        assert frame["calls"].tolist() == (expected.calls + leaked.calls).tolist()
        assert found.summaries[method]["msi"].mean == pytest.approx(expected.mean()["msi"])
    assert found.standing.ranking == ("kpca-cam", "gradcam")
    assert found.outside == ("random", "center")
    shown = found.shown
    assert sorted(shown.numbers) == list(range(24))
    assert shown.images.equal(images[list(shown.numbers)])
    assert shown.class_names == tuple(str(k) for k in labels[list(shown.numbers)].tolist())
    for method, heatmaps in maps.items():
        assert shown.heatmaps[method] == pytest.approx(heatmaps[list(shown.numbers)], abs=1e-5)


def test_the_folder_of_results_holds_what_it_promises(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = compare_folder(wanted(photos, save_heatmaps=True), out, group=4)
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    kinds = ("scores.parquet", "curves.parquet", "heatmaps.npz")
    per_method = {f"{m}/{kind}" for m in found.scores for kind in kinds}
    beside = {"RUN.toml", "summary.json", "pairs.csv", "curves.png", "sheet.png", "run.json"}
    assert written == per_method | beside | {"report.html"}
    best = found.standing.best
    assert f"{found.summaries[best]['msi'].mean:.3f}" in (out / "report.html").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["standing"]["best"] == found.standing.best
    assert summary["layercam"]["msi"]["mean"] == found.summaries["layercam"]["msi"].mean
    assert len(pandas.read_csv(out / "pairs.csv")) == 1
    record = json.loads((out / "run.json").read_text())
    assert (record["n"], record["n_skipped"], record["targets"]) == (11, 0, "label")
    assert record["class_folders"] == {"ant": 0, "bee": 1, "cat": 2}
    assert record["model_calls"] == sum(rows(out, m)["calls"].sum() for m in found.scores)
    classifier = found.classifier
    with HeatmapFile(out / "gradcam" / "heatmaps.npz") as maps:
        for name, label in (("ant/00.png", 0), ("bee/10.png", 1)):
            image = read_image(photos / name, classifier.view)[None]
            expected = explain(classifier, image, torch.tensor([label]), "gradcam")[0]
            assert maps.read(name) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("share", "bars"), [(0.45, 1), (0.5, 2)], ids=["scores", "leak"])
def test_a_run_that_was_stopped_goes_on_and_ends_the_same(
    photos: Path, tmp_path: Path, share: float, bars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = wanted(photos, save_heatmaps=True, held_out_fill="blur")
    whole = compare_folder(settings, tmp_path / "whole", group=3)
    with pytest.raises(StoppedError):
        compare_folder(settings, tmp_path / "out", group=3, progress=stop_after(share, bars))
    kept = [path.name for path in (tmp_path / "out" / "parts").iterdir()]
    left = {stage: 4 - sum(name.startswith(stage) for name in kept) for stage in ("scores", "leak")}
    assert left == ({"scores": 3, "leak": 4} if bars == 1 else {"scores": 0, "leak": 2})
    asked = dict.fromkeys(("ask", "measure_methods"), 0)

    def counted(name: str) -> None:
        own = getattr(groups, name)

        def call(*args: object, **more: object) -> object:
            asked[name] += 1
            return own(*args, **more)

        monkeypatch.setattr(groups, name, call)

    counted("ask")
    counted("measure_methods")
    again = compare_folder(settings, tmp_path / "out", group=3)
    assert asked == {"ask": left["scores"], "measure_methods": left["leak"]}
    assert not (tmp_path / "out" / "parts").exists()
    assert again.names == whole.names
    for method in whole.scores:
        for name in ("scores", "curves"):
            files = [tmp_path / o / method / f"{name}.parquet" for o in ("whole", "out")]
            assert files[0].read_bytes() == files[1].read_bytes()
        assert again.scores[method].answers.named.equal(whole.scores[method].answers.named)
    for name in ("summary.json", "pairs.csv", "RUN.toml"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_that_was_killed_goes_on_and_ends_the_same(photos: Path, tmp_path: Path) -> None:
    settings = wanted(photos)
    write_run(tmp_path / "RUN.toml", settings)
    script = """
import os, signal, sys
from pathlib import Path
from sufficit.compare import _summary, compare_folder, score_folder, scores_at_one_alpha
from sufficit.comparing import groups
from sufficit.comparing.groups import Found
from sufficit.comparing.settings import read_run, settings_from

def told(done, total):
    if done / total > 0.5:
        os.kill(os.getpid(), signal.SIGKILL)

compare_folder(settings_from(read_run(Path("RUN.toml"))), Path("out"), group=2, progress=told)
"""
    source = str(Path(sys.modules["sufficit"].__file__ or "").parents[1])
    killed = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "out" / "parts").glob("scores-*.safetensors"))) in (2, 3)
    assert not (tmp_path / "out" / "run.json").exists()
    compare_folder(settings, tmp_path / "out", group=2)
    compare_folder(settings, tmp_path / "whole", group=2)
    for method in ("gradcam", "layercam", "random", "center"):
        pandas.testing.assert_frame_equal(
            rows(tmp_path / "out", method), rows(tmp_path / "whole", method), check_exact=True
        )


def test_a_run_does_not_go_on_with_other_settings(photos: Path, tmp_path: Path) -> None:
    settings, out = wanted(photos), tmp_path / "out"
    with pytest.raises(StoppedError):
        compare_folder(settings, out, group=3, progress=stop_after(0.5))
    with pytest.raises(UserError, match=r"alpha_min was 0\.5 and is now 0\.4.*--overwrite"):
        compare_folder(replace(settings, alpha_min=0.4), out, group=3)
    with pytest.raises(UserError, match="methods was"):
        compare_folder(replace(settings, methods=("gradcam",)), out, group=3)
    (tmp_path / "model.py").write_text(MODEL.replace("manual_seed(0)", "manual_seed(1)"))
    with pytest.raises(UserError, match="model's fingerprint was"):
        compare_folder(settings, out, group=3)
    (tmp_path / "model.py").write_text(MODEL)
    first = photos / "ant" / "00.png"
    kept = first.read_bytes()
    first.write_bytes(kept + b" ")
    with pytest.raises(UserError, match=r"ant/00\.png is no longer the file"):
        compare_folder(settings, out, group=3)
    first.write_bytes(kept)
    Image.new("RGB", (10, 12)).save(photos / "ant" / "0.png")
    with pytest.raises(UserError, match=r"first image was 'ant/00\.png' and is now 'ant/0\.png'"):
        compare_folder(settings, out, group=3)


def test_what_is_all_scored_is_written_out_on_another_machine(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, out = wanted(photos), tmp_path / "out"
    compare_folder(settings, tmp_path / "whole", group=3)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ImportError):
            compare_folder(settings, out, group=3)
    with pytest.raises(StoppedError):
        compare_folder(settings, tmp_path / "half", group=3, progress=stop_after(0.5))
    for place in (out, tmp_path / "half"):
        note = place / "parts" / "begun.json"
        begun = json.loads(note.read_text()) | {"device": "cuda:0", "torch": "2.11.0"}
        note.write_text(json.dumps(begun))
    with pytest.raises(UserError, match="device was 'cuda:0' and is now 'cpu'"):
        compare_folder(settings, tmp_path / "half", group=3)
    with pytest.raises(UserError, match="alpha_min was"):
        compare_folder(replace(settings, alpha_min=0.4), out, group=3)

    moved = tmp_path / "moved" / "photos"
    shutil.copytree(photos, moved)
    found = compare_folder(replace(settings, data=str(moved)), out, group=3)
    assert list(found.scores) == ["gradcam", "layercam", "random", "center"]
    for method in found.scores:
        pandas.testing.assert_frame_equal(rows(out, method), rows(tmp_path / "whole", method))


def test_some_columns_of_some_images_are_scored_alone(photos: Path, tmp_path: Path) -> None:
    whole = compare_folder(wanted(photos), tmp_path / "whole", group=3)
    chosen = [p for p in list_images(photos) if p.folder != "bee"]
    some = score_folder(
        wanted(photos, leak=False),
        tmp_path / "out",
        group=3,
        columns=("msi", "mask_penalty"),
        pictures=chosen,
    )
    assert some.found.names == tuple(picture.name for picture in chosen)
    kept = [whole.names.index(name) for name in some.found.names]
    for method in ("gradcam", "layercam"):
        assert list(some.scores[method].columns) == ["msi", "mask_penalty"]
        assert torch.equal(some.scores[method].msi, whole.scores[method].msi[kept])
    assert not (tmp_path / "out" / "run.json").exists()
    with pytest.raises(UserError, match=r"columns was \['msi', 'mask_penalty'\]"):
        score_folder(
            wanted(photos, leak=False), tmp_path / "out", group=3, columns=["msi"], pictures=chosen
        )


def test_an_unreadable_part_is_named(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        compare_folder(wanted(photos), tmp_path / "out", group=3, progress=stop_after(0.5))
    part = tmp_path / "out" / "parts" / "scores-000000.safetensors"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(UserError, match=r"scores-000000\.safetensors can't be read .* delete it"):
        compare_folder(wanted(photos), tmp_path / "out", group=3)


def test_a_searched_alpha_min_is_one_for_all_and_best_for_the_methods_mean(
    photos: Path, tmp_path: Path
) -> None:
    found = compare_folder(wanted(photos, alpha_min="search", leak=False), tmp_path / "out")
    tried = [i / 20 for i in range(1, 20)]
    own = {}
    for method in ("gradcam", "layercam"):
        drawn = [
            (read_image(photos / name, found.classifier.view), k)
            for name, k in zip(found.names, found.scores[method].targets.tolist(), strict=True)
        ]
        images, labels = torch.stack([x for x, _ in drawn]), torch.tensor([k for _, k in drawn])
        maps = explain(found.classifier, images, labels, method)
        own[method] = [
            evaluate(
                found.classifier, images, maps, labels, alpha_min=a, columns=["msi"],
                value_step=0.25, percent_step=0.25,
            ).mean()["msi"]
            for a in tried
        ]  # fmt: skip
    together = np.mean([own["gradcam"], own["layercam"]], axis=0)
    assert found.alpha_min == tried[int(together.argmax())]
    assert {scores.alpha_min for scores in found.scores.values()} == {found.alpha_min}
    assert found.own_alphas()["gradcam"] == tried[int(np.argmax(own["gradcam"]))]
    assert found.summaries["gradcam"][OWN_BEST].mean == pytest.approx(max(own["gradcam"]))
    at_best = own["layercam"][int(together.argmax())]
    assert found.summaries["layercam"]["msi"].mean == pytest.approx(at_best)
    assert any("best for it alone" in sentence for sentence in sentences(found))


def test_controls_have_no_part_in_the_search_and_each_methods_own_best_stands_beside() -> None:
    plan = make_plan("search", value_step=0.25, percent_step=0.25, columns=["msi"])

    def answers(marked: dict[float, float]) -> Predictions:
        """Of a model that is never right: MSI is what is marked, with a minus."""
        n, tried = 2, [s.alpha_min for s in plan.schedules]
        shares = torch.tensor([marked.get(a, marked[0.0]) for a in tried], dtype=torch.float64)
        never = torch.zeros(n, len(plan.asks))
        whole = torch.zeros(n, dtype=torch.long)
        wrong = torch.ones(n, len(plan.asks), dtype=torch.int32)
        return Predictions(plan.asks, wrong, never, plan.weighs, shares.expand(n, -1), whole, whole)

    found = Found(
        names=("one", "two"),
        answers={
            "a": answers({0.2: 0.0, 0.4: 0.1, 0.0: 0.5}),
            "b": answers({0.6: 0.0, 0.4: 0.1, 0.0: 0.5}),
            "random": answers({0.8: 0.0, 0.0: 1.0}),
        },
        held_out={},
        skipped=(),
        empty={},
        counts=(2,),
    )
    job = SimpleNamespace(plan=plan, methods=list(found.answers))
    scores = scores_at_one_alpha(job, found, ["a", "b"])  # type: ignore[arg-type]
    assert {method: one.alpha_min for method, one in scores.items()} == dict.fromkeys(scores, 0.4)
    assert {m: one.msi.tolist() for m, one in scores.items()} == {
        "a": [-0.1, -0.1], "b": [-0.1, -0.1], "random": [-1.0, -1.0]
    }  # fmt: skip
    assert {m: one.search.best for m, one in scores.items()} == {"a": 0.2, "b": 0.6, "random": 0.8}
    assert [_summary(scores[m], 0)[OWN_BEST].mean for m in scores] == [0, 0, 0]


def test_bad_files_are_named_and_left_out_or_fatal(photos: Path, tmp_path: Path) -> None:
    without = compare_folder(wanted(photos, controls=False), tmp_path / "without", group=4)
    (photos / "bee" / "04.png").write_bytes(b"")
    (photos / "ant" / "broken.png").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"ant/broken\.png: not a readable image"):
        compare_folder(wanted(photos, on_error="stop"), tmp_path / "stopped", group=4)
    found = compare_folder(wanted(photos, controls=False), tmp_path / "out", group=4)
    assert {s.name: s.reason[:17] for s in found.skipped} == {
        "ant/broken.png": "not a readable im",
        "bee/04.png": "the file is empty",
    }
    assert len(found.names) == 10
    kept = [i for i, name in enumerate(without.names) if name != "bee/04.png"]
    for column in ("msi", "insertion_percent"):
        before = without.scores["gradcam"][column][kept].numpy()
        assert found.scores["gradcam"][column].numpy() == pytest.approx(before)


def test_a_group_of_bad_files_alone_stops_nothing(photos: Path, tmp_path: Path) -> None:
    for path in (photos / "ant").iterdir():
        path.write_bytes(b"")
    found = compare_folder(wanted(photos), tmp_path / "out", group=4)
    assert {name.split("/")[0] for name in found.names} == {"bee", "cat"}
    assert found.scores["gradcam"].leaked is not None
    for path in photos.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"all 11 images were skipped; the first, ant/00\.png"):
        compare_folder(wanted(photos), tmp_path / "none", group=4)


def test_images_of_different_sizes_are_refused_also_after_a_stop(
    photos: Path, tmp_path: Path
) -> None:
    with pytest.raises(StoppedError):
        compare_folder(wanted(photos), tmp_path / "out", group=5, progress=stop_after(0.95))
    pixels = np.random.default_rng(1).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(photos / "cat" / "08.png")  # alone in the last group
    for out in ("out", "anew"):
        with pytest.raises(UserError, match=r"images differ in size .*cat/08.* give --size"):
            compare_folder(wanted(photos), tmp_path / out, group=5)
        assert not (tmp_path / out / "parts" / "scores-000002.safetensors").exists()
    assert len(compare_folder(wanted(photos, size="12"), tmp_path / "sized").names) == 11


def test_one_image_is_enough(photos: Path, tmp_path: Path) -> None:
    for path in list(photos.rglob("*.png"))[1:]:
        path.unlink()
    with pytest.warns(UserWarning, match="no leak: all images that were scored are of one class"):
        found = compare_folder(wanted(photos), tmp_path / "out")
    assert len(found.names) == 1
    assert found.standing.best in ("gradcam", "layercam")
    assert len(found.shown.names) == 1


def test_without_labels_the_models_prediction_is_explained(photos: Path, tmp_path: Path) -> None:
    settings = wanted(photos, targets="prediction", leak=False, held_out_fill="mean")
    found = compare_folder(settings, tmp_path / "out", group=4)
    images = torch.stack([read_image(photos / n, found.classifier.view) for n in found.names])
    said = found.classifier(images).argmax(1)
    assert found.scores["gradcam"].targets.tolist() == said.tolist()
    assert found.target_kind == "prediction"
    maps = explain(found.classifier, images, said, "gradcam")
    scores = evaluate(
        found.classifier, images, maps, said, value_step=0.25, percent_step=0.25,
        held_out_fill="mean",
    )  # fmt: skip
    for name, values in scores.columns.items():
        assert rows(tmp_path / "out", "gradcam")[name].to_numpy() == pytest.approx(values.numpy())


def test_an_adapter_is_named_after_its_folder(photos: Path, tmp_path: Path) -> None:
    settings = wanted(photos, lax=[str(tmp_path / "my-lax")], leak=False, methods=["gradcam"])
    classifier = Classifier.load(settings.model)
    torch.manual_seed(0)
    adapter = Lax(6)
    adapter.belong_to(classifier, "1")
    adapter.save_pretrained(tmp_path / "my-lax")
    found = compare_folder(settings, tmp_path / "out")
    assert list(found.scores) == ["gradcam", "my-lax", "random", "center"]
    name = found.shown.names[0]
    image = read_image(photos / name, found.classifier.view)[None]
    expected = explain(found.classifier, image, method=adapter)[0]
    assert found.shown.heatmaps["my-lax"][0] == pytest.approx(expected, abs=1e-5)
    twice = replace(settings, lax=(*settings.lax, *settings.lax))
    with pytest.raises(UserError, match="two methods would be called 'my-lax'"):
        compare_folder(twice, tmp_path / "twice")
    adapter.save_pretrained(tmp_path / "gradcam")
    with pytest.raises(UserError, match="two methods would be called 'gradcam'"):
        compare_folder(replace(settings, lax=(str(tmp_path / "gradcam"),)), tmp_path / "twice")


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"held_out_fill": "black"}, "another fill than fill, both are 'black'"),
        ({"batch_size": -1}, "batch_size must be 1 or more"),
        ({"donors": 0}, "donors must be a whole number, 1 or more"),
    ],
)
def test_what_is_wrong_with_fills_and_numbers_is_said(
    photos: Path, tmp_path: Path, more: dict[str, Any], error: str
) -> None:
    with pytest.raises(UserError, match=error):
        compare_folder(replace(wanted(photos), **more), tmp_path / "out")
    assert "donors" in more or not (tmp_path / "out").exists(), (
        "it is said before anything is begun"
    )


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"held_out_fill": "black"}, "another fill than fill, both are 'black'"),
        ({"held_out_fill": "mean", "columns": ("insertion_pixel",)}, 'add "msi" to columns'),
        ({"batch_size": -1}, "batch_size must be 1 or more"),
    ],
)
def test_what_is_wrong_is_said_of_heatmaps_in_a_file_too(
    photos: Path, tmp_path: Path, more: dict[str, Any], error: str
) -> None:
    names = [picture.name for picture in list_images(photos)]
    np.savez(tmp_path / "maps.npz", **dict.fromkeys(names, np.eye(16)))
    classifier = load(wanted(photos))
    with pytest.raises(UserError, match=error):
        scoring.score_folder(classifier, photos, tmp_path / "maps.npz", Options(**more))


def test_wrong_methods_and_empty_folders_are_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'gradcam'"):
        compare_folder(wanted(photos, methods=["gradcm"]), tmp_path / "out")
    with pytest.raises(UserError, match="give its folder with --lax"):
        compare_folder(wanted(photos, methods=["lax"]), tmp_path / "out")
    with pytest.raises(UserError, match="at least one method"):
        compare_folder(wanted(photos, methods=[]), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no images in"):
        compare_folder(wanted(photos, data=str(tmp_path / "empty")), tmp_path / "out")
    with pytest.raises(UserError, match=r"alpha_min must lie in 0\.\.1"):
        compare_folder(wanted(photos, alpha_min=2), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_controls_alone_are_compared_with_each_other(photos: Path, tmp_path: Path) -> None:
    found = compare_folder(wanted(photos, methods=["center"], leak=False), tmp_path / "out")
    assert set(found.standing.ranking) == {"random", "center"}
    assert found.outside == ()


def test_shown_images_are_the_best_the_worst_the_disputed_and_some_by_chance() -> None:
    random = np.random.default_rng(0)
    msi = {name: random.uniform(-1, 1, 60) for name in "abc"}
    msi["a"][7] = np.nan
    chosen = choose(msi, most=12, seed=5)
    mean = {i: np.mean([msi[m][i] for m in msi]) for i in range(60) if i != 7}
    by_mean = sorted(mean, key=lambda i: -mean[i])
    best, worst = by_mean[:3], by_mean[::-1][:3]
    spread = {i: np.ptp([msi[m][i] for m in msi]) for i in mean if i not in {*best, *worst}}
    disputed = sorted(spread, key=lambda i: -spread[i])[:3]
    assert list(chosen)[:9] == [*best, *worst, *disputed]
    assert list(chosen.values()) == [
        reason for reason in ("best", "worst", "most disputed", "drawn by seed") for _ in range(3)
    ]
    assert len(chosen) == 12
    assert choose(msi, most=12, seed=6) != chosen == choose(msi, most=12, seed=5)
    assert list(choose({"a": np.array([0.5])})) == [0]


def test_words_say_who_loses_to_the_controls(photos: Path, tmp_path: Path) -> None:
    found = compare_folder(wanted(photos), tmp_path / "out")
    means = {m: found.summaries[m]["msi"].mean for m in found.scores}
    losers = [
        m for m in found.standing.ranking if means[m] <= max(means["random"], means["center"])
    ]
    told = " ".join(sentences(found))
    assert ("All methods score above the controls" in told) == (not losers)
    assert all(f"{m}" in told.split("Not above the controls")[1] for m in losers)
    clean = found.scores["gradcam"].clean.mean().item()
    assert any("of its own task" in w for w in warnings_of(found)) == (clean < 0.5)


def test_the_report_says_first_what_makes_scores_worthless(photos: Path, tmp_path: Path) -> None:
    found = compare_folder(wanted(photos), tmp_path / "out")
    worthless = replace(
        found,
        settings=replace(found.settings, weights="none"),
        empty={"gradcam": 3, "layercam": 0},
        summaries=found.summaries
        | {"random": {"msi": replace(found.summaries["random"]["msi"], mean=1.0)}},
    )
    assert content_of(worthless).remarks == [
        "The model has random weights: its scores mean nothing.",
        f"All-zero heatmaps, which mark nothing, of {len(found.names)} images: gradcam 3.",
    ]
    beaten = " and ".join(found.standing.ranking)
    center = found.summaries["center"]["msi"].mean
    assert any(
        f"Not above the controls in MSI (random 1.00, center {center:.2f}): {beaten}." in warning
        for warning in warnings_of(worthless)
    )


def test_classes_without_names_are_called_by_their_folders(photos: Path, tmp_path: Path) -> None:
    made = Classifier.load(wanted(photos).model)
    nameless = Classifier(made.model, layer=made.layer, view=made.view)
    found = compare_folder(wanted(photos), tmp_path / "out", classifier=nameless)
    folders = sorted({name.split("/")[0] for name in found.names})
    assert found.class_names() == folders
    text = (tmp_path / "out" / "report.html").read_text()
    assert f"scored for {folders[0]}" in text
    assert "scored for class" not in text


# RUN.toml


def test_the_usual_methods_are_the_cams() -> None:
    assert METHODS == CAMS


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]+", fullmatch=True),
        text | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False)
        | st.lists(text, max_size=3),
        max_size=6,
    )
)  # fmt: skip
def test_whatever_is_written_as_toml_is_read_back(content: dict[str, object]) -> None:
    assert tomllib.loads(as_toml(content)) == content


def test_toml_keeps_quotes_backslashes_and_signs_of_control() -> None:
    hard = 'C:\\photos\\"new"\n\t\x00\x1f\x7f é 猫 🐈'
    assert tomllib.loads(as_toml({"data": hard, "lax": [hard, ""]})) == {
        "data": hard,
        "lax": [hard, ""],
    }
    assert as_toml({"size": None, "seed": 1}) == "seed = 1\n"
    with pytest.raises(UserError, match="can't be written as UTF-8"):
        as_toml({"data": "\udcff"})


def test_a_run_file_repeats_its_settings(photos: Path, tmp_path: Path) -> None:
    settings = wanted(photos, alpha_min="search", lax=['a "b"'], size="12x10", seed=4)
    write_run(tmp_path / "RUN.toml", settings)
    assert settings_from(read_run(tmp_path / "RUN.toml")) == settings


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("alpha_mim = 0.5", "Unknown setting in RUN.toml 'alpha_mim'. Did you mean 'alpha_min'?"),
        ('alpha_min = "serch"', "alpha_min must be a number or search, got 'serch'"),
        ("seed = true", "seed must be a whole number, got True"),
        ("seed = -1", "seed must be 0 or more, got -1"),
        ("donors = 0", "donors must be 1 or more, got 0"),
        ('methods = "gradcam"', "methods must be a list of names"),
        ("methods = [1]", "methods must be a list of names"),
        ('score = "acuracy"', "Unknown score 'acuracy'. Did you mean 'accuracy'?"),
        ("leak = 1", "leak must be true or false, got 1"),
        ("size = 224", "size must be text, got 224"),
        ("seed = ", "is not TOML"),
    ],
)
def test_what_is_wrong_in_a_run_file_is_said(tmp_path: Path, line: str, error: str) -> None:
    (tmp_path / "RUN.toml").write_text(line + "\n")
    with pytest.raises(UserError) as raised:
        read_run(tmp_path / "RUN.toml")
    assert error in str(raised.value)
    with pytest.raises(UserError, match="no settings at"):
        read_run(tmp_path / "none.toml")


# The command


def words(photos: Path, *more: object) -> list[object]:
    steps = ["--value-step", "0.25", "--percent-step", "0.25", "--donors", 3]
    model = f"python:{photos.parent / 'model.py'}:make"
    return [
        "compare", "--model", model, "--data", photos, "--methods", "gradcam, layercam", *steps,
        "--out", photos.parent / "out", *more,
    ]  # fmt: skip


def test_the_command_prints_the_table_and_where_to_look(
    sufficit, photos: Path, monkeypatch
) -> None:
    run = sufficit(*words(photos))
    assert run.code == 0, run.err
    summary = json.loads((photos.parent / "out" / "summary.json").read_text())
    for method in ("gradcam", "layercam", "random", "center"):
        assert f"{summary[method]['msi']['mean']:.3f}" in run.words
    assert "Means over 11 images, alpha_min 0.5" in run.words
    assert "* best MSI of 2" in run.words
    assert "sheet.png" in run.words
    monkeypatch.setenv("SLURM_PROCID", "3")  # one of several tasks that share nothing
    again = sufficit(*words(photos))
    assert again.code == 2
    assert "holds an earlier run" in again.err


def test_the_command_repeats_a_run_from_its_file_and_flags_win(sufficit, photos: Path) -> None:
    first = sufficit(*words(photos, "--no-leak", "--no-controls", "--seed", 3))
    assert first.code == 0, first.err
    folder = photos.parent
    repeat = ["compare", "--config", folder / "out" / "RUN.toml"]
    run = sufficit(*repeat, "--out", folder / "again", "--json")
    assert run.code == 0, run.err
    printed = json.loads(run.out)
    frames = [rows(folder / name, "layercam") for name in ("out", "again")]
    pandas.testing.assert_frame_equal(*frames, check_exact=True)
    assert (folder / "again" / "RUN.toml").read_text() == (folder / "out" / "RUN.toml").read_text()
    assert printed["columns"]["layercam"]["msi"]["mean"] == frames[0]["msi"].mean()
    assert printed["standing"]["chance"]["seed"] == 3
    other = sufficit(*repeat, "--methods", "kpca-cam", "--seed", 1, "--out", folder / "other")
    assert other.code == 0, other.err
    stored = read_run(folder / "other" / "RUN.toml")
    assert (stored["methods"], stored["seed"], stored["controls"]) == (("kpca-cam",), 1, False)


def test_overwriting_leaves_nothing_of_the_earlier_run(sufficit, photos: Path) -> None:
    assert sufficit(*words(photos, "--no-leak")).code == 0
    out = photos.parent / "out"
    (out / "notes.txt").write_text("mine")
    run = sufficit(*words(photos, "--no-leak", "--no-controls", "--overwrite"))
    assert run.code == 0, run.err
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"gradcam", "layercam"}
    assert (out / "notes.txt").read_text() == "mine"


def test_what_is_missing_or_misplaced_is_said(sufficit, photos: Path) -> None:
    run = sufficit("compare", "--data", photos)
    assert run.code == 2
    assert "give --model, or model in a --config RUN.toml" in run.err
    inside = sufficit(*words(photos, "--out", photos / "results"))
    assert inside.code == 2
    assert "is inside" in inside.err
    mistyped = sufficit(*words(photos, "--alpha-min", "half"))
    assert "alpha_min must be a number or search, got 'half'" in mistyped.err
    unknown = sufficit(*words(photos, "--methods", "gradcam,layrcam"))
    assert "Did you mean 'layercam'?" in unknown.err
    assert not (photos.parent / "out").exists()


NO_NUMBERS = """
class Fragile(torch.nn.Module):
    def forward(self, images):
        return images.masked_fill(images.amax((1, 2, 3), keepdim=True) == 0, torch.nan)

def fragile():
    made = make()
    return Classifier(nn.Sequential(Fragile(), *made.model), layer="2", classes=made.classes)
"""


def test_images_the_model_has_no_number_for_are_counted_and_named(
    sufficit, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL + NO_NUMBERS)
    settings = wanted(photos, model=f"python:{tmp_path / 'model.py'}:fragile", fill="mean")
    fine = compare_folder(settings, tmp_path / "fine", group=4)
    for name in ("ant/black.png", "cat/black.png", "cat/black2.png"):
        Image.new("RGB", (10, 12)).save(photos / name)
    found = compare_folder(settings, tmp_path / "out", group=4)
    assert found.names == fine.names
    reason = "the model gives NaN or infinite values for it"
    assert {s.name: s.reason for s in found.skipped} == dict.fromkeys(
        ("ant/black.png", "cat/black.png", "cat/black2.png"), reason
    )
    for method in ("gradcam", "layercam", "center"):  # random goes by an image's number
        assert found.scores[method].msi.tolist() == fine.scores[method].msi.tolist()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["n"], record["n_skipped"]) == (11, 3)
    words = ["--config", tmp_path / "out" / "RUN.toml", "--out", tmp_path / "again"]
    run = sufficit("compare", *words)
    assert f"ant/black.png: {reason}" in run.err
    assert "3 images skipped" in run.err
    stopped = sufficit("compare", *words, "--overwrite", "--on-error", "stop")
    assert stopped.code == 2
    assert f"ant/black.png: {reason}. Try another --precision" in stopped.err


def test_a_folder_the_model_has_no_number_for_is_one_clear_line(
    photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL + NO_NUMBERS)
    for path in photos.rglob("*.png"):
        Image.new("RGB", (10, 12)).save(path)
    settings = wanted(photos, model=f"python:{tmp_path / 'model.py'}:fragile", fill="mean")
    with pytest.raises(UserError, match=r"all 11 images were skipped; the first, ant/00\.png"):
        compare_folder(settings, tmp_path / "out", group=4)
