"""`compare` in Python: any classifier, images in memory or on disk, any heatmap sources."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor

from small_models import Traces, rand
from small_runs import FLAGS, STEPS, config_for, interrupted, rows, write_photos
from sufficit import Classifier, Lax, UserError, View, evaluate, explain
from sufficit.comparison import compare
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import list_images, read_image
from sufficit.metrics.metric import MapMetric
from sufficit.runs.job import make_job
from sufficit.sources import MapFile

QUICK: dict[str, Any] = {**STEPS, "donors": 2, "progress": False}


def brightness(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    return images.mean(1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, a model, an adapter, a function and heatmap files."""
    place = tmp_path_factory.mktemp("sources")
    photos = write_photos(place, 6)
    torch.manual_seed(0)
    adapter = Lax(6)
    adapter.belong_to(Classifier.load(config_for(photos).model), "1")
    adapter.save_pretrained(place / "adapter")
    (place / "mine.py").write_text("def own(model, images, targets): return images.mean(1)")
    names = [image.name for image in list_images(photos)]
    maps = dict(zip(names, rand(6, 4, 5), strict=True))
    write_heatmaps(place / "maps.npz", maps)
    from safetensors.torch import save_file

    save_file({name: one.clone() for name, one in maps.items()}, place / "maps.safetensors")
    return place


@pytest.fixture
def classifier(place: Path) -> Classifier:
    return Classifier.load(config_for(place / "photos").model)


def images_of(place: Path) -> tuple[list[str], Tensor, Tensor]:
    names = [image.name for image in list_images(place / "photos")]
    images = torch.stack([read_image(place / "photos" / name, None) for name in names])
    return names, images, torch.tensor([("ant", "bee", "cat").index(n[:3]) for n in names])


def test_every_kind_of_source_is_scored_as_evaluate_scores_its_maps(
    place: Path, classifier: Classifier
) -> None:
    names, images, labels = images_of(place)
    adapter = Lax.from_pretrained(place / "adapter")
    given = rand(6, 4, 5)
    sources = {
        "gradcam": "gradcam",
        "trained": adapter,
        "saved": str(place / "adapter"),
        "function": brightness,
        "word": f"python:{place / 'mine.py'}:own",
        "npz": str(place / "maps.npz"),
        "tensors": str(place / "maps.safetensors"),
        "file": MapFile("file", place / "maps.npz"),
        "tensor": given,
    }
    results = compare(classifier, images, sources, labels, names=names, **QUICK)
    assert set(results.methods) == {*sources, "everything", "random", "center"}
    assert results.names == names
    resized = torch.nn.functional.interpolate(given[:, None], (12, 10), mode="bilinear")[:, 0]
    expected = {
        "gradcam": explain(classifier, images, labels),
        "trained": explain(classifier, images, labels, adapter),
        "saved": explain(classifier, images, labels, adapter),
        "function": images.mean(1),
        "word": images.mean(1),
        **dict.fromkeys(("npz", "tensors", "file", "tensor"), resized.clamp(0, 1)),
    }
    for name, maps in expected.items():
        scores = evaluate(classifier, images, maps, labels, **STEPS)
        for column, values in scores.columns.items():
            found = results.rows[name][column].to_numpy()
            assert found == pytest.approx(values.numpy(), abs=1e-6), (name, column)
    assert results.rows["npz"].equals(results.rows["tensor"])


@pytest.mark.usefixtures("undrawn")
def test_the_command_line_takes_the_same_sources(sufficit, place: Path, tmp_path: Path) -> None:
    words = [
        "gradcam", str(place / "adapter"), f"python:{place / 'mine.py'}:own",
        str(place / "maps.npz"), f"again={place / 'maps.safetensors'}",
        f"b=python:{place}/mine.py:own",
    ]  # fmt: skip
    model = ("--model", f"python:{place / 'model.py'}:make", "--data", place / "photos")
    given = ("--methods", ",".join(words), "--out", tmp_path / "out", *FLAGS)
    run = sufficit("compare", *model, *given)
    assert run.code == 0, run.err
    found = {path.parent.name for path in (tmp_path / "out").glob("*/scores.parquet")}
    assert found == {
        "gradcam",
        "adapter",
        "own",
        "maps",
        "again",
        "b",
        "everything",
        "random",
        "center",
    }
    pandas.testing.assert_frame_equal(rows(tmp_path / "out", "own"), rows(tmp_path / "out", "b"))
    both = [rows(tmp_path / "out", name) for name in ("maps", "again")]
    pandas.testing.assert_frame_equal(*both)


def test_a_folder_is_scored_as_its_images_are(place: Path, classifier: Classifier) -> None:
    names, images, labels = images_of(place)
    options: dict[str, Any] = {"methods": ["gradcam", "center"], **QUICK}
    folder = compare(classifier, place / "photos", **options)
    tensor = compare(classifier, images, targets=labels, names=names, **options)
    for method in folder.methods:
        pandas.testing.assert_frame_equal(folder.rows[method], tensor.rows[method])
    assert folder.config.data == str(place / "photos")
    assert tensor.config.data == "images in memory"
    assert folder.config.model == "Sequential"
    loaded = Classifier.load("sufficit:digits")
    run = compare(loaded, rand(2, 3, 64, 64), ["center"], checks="none", **QUICK)
    assert run.config.model == "sufficit:digits"


def test_images_without_targets_are_scored_for_the_prediction(classifier: Classifier) -> None:
    images = rand(4, 3, 12, 10)
    results = compare(classifier, images, {"mine": brightness}, checks="controls,fill", **QUICK)
    predicted = classifier(images).argmax(1)
    assert results.rows["mine"]["target"].tolist() == predicted.tolist()
    assert results.record.targets == "prediction"
    assert len(set(results.names)) == 4
    table = results.table()
    assert list(table.index) == ["mine", "everything", "random", "center"]
    assert np.isfinite(table["msi"]).all()


def test_a_classifier_with_a_view_takes_images_as_they_are(place: Path) -> None:
    from own_model import SIZED

    made: dict[str, Any] = {}
    exec(SIZED, made)
    classifier = made["make"]()
    assert classifier.view == View((12, 10))
    images = rand(3, 3, 12, 10)
    results = compare(classifier, images, {"mine": brightness}, checks="controls,fill", **QUICK)
    assert results.shown is not None
    assert torch.equal(results.shown.images, images[list(results.shown.rows)])


def test_options_are_those_of_the_command(classifier: Classifier) -> None:
    images = rand(4, 3, 12, 10)
    options = {"checks": "fill", "alpha_min": 0.3, "columns": ["msi"], "seed": 5}
    results = compare(classifier, images, ["gradcam"], **options, **QUICK)
    assert results.methods == ("gradcam",)
    assert (results.alpha_min, results.config.seed) == (0.3, 5)
    assert list(results.rows["gradcam"])[4:] == ["msi", "msi_held_out", "fill_drop"]
    with pytest.raises(UserError, match=r"Unknown option 'alpha_mim'\. Did you mean 'alpha_min'"):
        compare(classifier, images, alpha_mim=0.5)


def test_an_interrupted_comparison_resumes_and_a_finished_one_is_not_replaced(
    classifier: Classifier, tmp_path: Path
) -> None:
    images, calls = rand(40, 3, 12, 10), []

    def counted(model: Classifier, images: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(images))
        return images.mean(1)

    options: dict[str, Any] = {"methods": {"mine": counted}, "checks": "controls,fill", **QUICK}
    whole = compare(classifier, images, **options)
    calls.clear()
    interrupted(lambda: compare(classifier, images, out=tmp_path / "out", **options))
    assert calls == [32, 8]
    calls.clear()
    results = compare(classifier, images, out=tmp_path / "out", **options)
    assert calls == [8]
    pandas.testing.assert_frame_equal(results.rows["mine"], whole.rows["mine"])
    calls.clear()
    finished = compare(classifier, images, out=tmp_path / "out", **options)
    assert calls == []  # the results are read
    pandas.testing.assert_frame_equal(finished.rows["mine"], whole.rows["mine"])
    with pytest.raises(UserError, match="holds a finished run of other .*: choose another --out"):
        compare(classifier, images, out=tmp_path / "out", **{**options, "seed": 1})
    again = compare(classifier, images[:3], out=tmp_path / "out", overwrite=True, **options)
    assert len(again.names) == 3


def test_wrong_arguments_are_refused_before_any_work(
    place: Path, classifier: Classifier, tmp_path: Path
) -> None:
    images = rand(4, 3, 12, 10)
    with pytest.raises(UserError, match="wrap the model first"):
        compare(classifier.model, images)  # type: ignore[arg-type]  # the point
    with pytest.raises(UserError, match="targets go with images in memory"):
        compare(classifier, place / "photos", targets=torch.tensor([0]))
    with pytest.raises(UserError, match=r"\[N,h,w\] with N = 4 images, got \[3, 4, 5\]"):
        compare(classifier, images, {"mine": rand(3, 4, 5)})
    with pytest.raises(UserError, match="Did you mean 'gradcam'"):
        compare(classifier, images, ["gradcm"])
    with pytest.raises(UserError, match="name one or more"):
        compare(classifier, images, [])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no images in"):
        compare(classifier, tmp_path / "empty")
    with pytest.raises(UserError, match="inside"):
        compare(classifier, place / "photos", out=place / "photos" / "out")
    other = Classifier(torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), *classifier.model[1:]), "1")
    adapter = Lax.from_pretrained(place / "adapter")
    with pytest.raises(UserError, match="another"):
        compare(other, images, {"adapter": adapter})


@pytest.mark.parametrize(
    ("images", "came"),
    [
        (np.zeros((2, 3, 12, 10), np.float32), "ndarray: call torch.from_numpy"),
        (["a.png", "b.png"], "list: stack them, or give the folder"),
    ],
)
def test_images_are_a_tensor_or_a_folder(classifier: Classifier, images: Any, came: str) -> None:
    with pytest.raises(UserError, match=rf"a tensor \[N,C,H,W\] or a folder, got {came}"):
        compare(classifier, images, **QUICK)


@pytest.mark.parametrize("workers", ["two", 2.5, True])
def test_workers_are_a_whole_number(classifier: Classifier, workers: Any) -> None:
    with pytest.raises(UserError, match=rf"whole number or Workers\(...\), got {workers!r}: as in"):
        compare(classifier, rand(2, 3, 12, 10), workers=workers, **QUICK)


@pytest.mark.parametrize("methods", [[torch.mean], torch.mean, [("finer-cam", {"nearest": 5})], 3])
def test_methods_without_a_name_are_refused(classifier: Classifier, methods: Any) -> None:
    with pytest.raises(UserError, match=r"a dict that names .*as in dict\(mine=my_method\)"):
        compare(classifier, rand(2, 3, 12, 10), methods, **QUICK)


@pytest.mark.parametrize("labels", [torch.tensor([0, 1]), np.array([0, 1]), [0, 1]])
@pytest.mark.parametrize("options", [{}, {"methods": ["gradcam"]}])
def test_labels_in_third_place_are_refused(
    classifier: Classifier, labels: Any, options: dict[str, Any]
) -> None:
    words = r"third argument of compare is methods, got .*0, 1\]\)?: give labels by name, as in"
    with pytest.raises(UserError, match=words):
        compare(classifier, rand(2, 3, 12, 10), labels, **options)


def test_methods_in_one_text_are_read_as_on_the_command_line(classifier: Classifier) -> None:
    options = {"checks": "none", "columns": ["msi"], **QUICK}
    for words, names in [("gradcam", ["gradcam"]), ("gradcam, center", ["gradcam", "center"])]:
        results = compare(classifier, rand(2, 3, 12, 10), words, **options)
        assert list(results.methods) == names


def test_a_target_that_the_model_does_not_have_is_named(classifier: Classifier) -> None:
    with pytest.raises(UserError, match=r"targets must lie in 0..2, .* 3 classes, got 7: use its"):
        compare(classifier, rand(2, 3, 12, 10), "gradcam", torch.tensor([0, 7]), **QUICK)


@pytest.mark.parametrize(
    "name", ["units", "overlays", "run.json", "report.html", "a/b", "..", "random", "everything"]
)
def test_no_source_takes_the_place_of_a_file_of_the_run(
    classifier: Classifier, tmp_path: Path, name: str
) -> None:
    with pytest.raises(UserError, match=r"is a file of every|can't be the name|of a control"):
        compare(classifier, rand(2, 3, 12, 10), {name: brightness}, out=tmp_path / "out", **QUICK)
    assert not (tmp_path / "out").exists()


def test_the_model_is_left_as_it_was(classifier: Classifier) -> None:
    classifier.model.train()
    traces = Traces(classifier.model)
    compare(
        classifier, rand(3, 3, 12, 10), ["gradcam", "kpca-cam"], checks="controls,fill", **QUICK
    )
    traces.check()


def test_a_control_under_another_name_is_drawn_as_it_was_scored(
    classifier: Classifier, tmp_path: Path
) -> None:
    images = rand(4, 3, 12, 10)
    sources = {"middle": "center", "chance": "random", "heatmaps": brightness}
    options: dict[str, Any] = {"checks": "controls,fill", "out": tmp_path / "out", **QUICK}
    results = compare(classifier, images, sources, **options)
    assert results.shown is not None
    rows = list(results.shown.rows)
    kept = results.heatmaps(rows, ["middle", "center", "chance", "random", "heatmaps"])
    for one, other in (("middle", "center"), ("chance", "random")):
        assert torch.equal(results.shown.heatmaps[one], results.shown.heatmaps[other])
        assert torch.equal(kept[one], kept[other])
        assert results.rows[one].equals(results.rows[other])
    assert torch.equal(kept["heatmaps"], images[rows].mean(1))


def test_options_of_a_method_belong_to_the_run_and_are_recorded(
    place: Path, classifier: Classifier, tmp_path: Path
) -> None:
    _, images, labels = images_of(place)
    given = (classifier, images)
    options: dict[str, Any] = {**QUICK, "checks": "fill", "out": tmp_path / "run"}
    few = {"fine": ("finer-cam", {"nearest": 1}), "cam": "gradcam"}
    results = compare(*given, few, labels, **options)
    wanted = evaluate(
        *given, explain(*given, labels, "finer-cam:nearest=1"), labels, alpha_min=0.5, **STEPS
    )
    assert results.rows["fine"]["msi"].tolist() == pytest.approx(wanted.msi.tolist(), abs=1e-6)
    recorded = results.record.sources["fine"]
    assert recorded.method == "finer-cam:nearest=1"
    assert recorded.options == {"nearest": 1, "reading": "weighted"}
    assert (recorded.sign, recorded.class_agnostic, recorded.passes) == ("positive", False, 3)
    config = config_for(place / "photos")
    keys = [
        make_job(replace(config, methods=(f"fine={word}",))).key()["methods"]["fine"]
        for word in ("finer-cam:nearest=2", "finer-cam", "finer-cam:3", "finer-cam:reading=mean")
    ]
    assert keys[1] == keys[2] == "finer-cam:nearest=3:reading=weighted"
    assert len({*keys}) == 3


def test_a_metric_of_ones_own_counts_whatever_it_computes_from(place: Path, tmp_path: Path) -> None:
    """A run resumes with the same code only, also where a metric reads the heatmap alone."""
    config = config_for(place / "photos")
    keys = []
    for name in ("amax", "amin"):
        path = tmp_path / f"{name}.py"
        path.write_text(f"def measures(schedule):\n    return lambda m, _: m.{name}((1, 2))\n")
        made: dict[str, Any] = {}
        exec(compile(path.read_text(), path, "exec"), made)
        metric = MapMetric(True, made["measures"])
        keys.append(make_job(config, metrics={"own": metric}).key()["metrics"]["own"])
    assert len({*keys}) == 2
    assert all(keys)
