"""Several fills and a twin in one run: every column under every condition."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from own_model import MODEL
from reference import heatmaps_like, small_net
from small_models import Spy
from small_runs import STEPS, config_for, interrupted, rows, run_small
from sufficit import Classifier, UserError, evaluate, explain
from sufficit.data.images import read_image
from sufficit.metrics import COLUMNS, Metric
from sufficit.perturbation.bands import show
from sufficit.probes.standard import FEW, asked_models
from sufficit.runs.job import make_job
from sufficit.runs.results import RunResults

FILLS = ("black", "blur", "mean")
OTHER = MODEL.replace("manual_seed(0)", "manual_seed(1)")  # a model of the same classes


def models() -> tuple[Classifier, Classifier]:
    return Classifier(small_net(seed=2)), Classifier(small_net(seed=3))


def case(n: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    images = torch.rand(n, 3, 8, 6, generator=torch.Generator().manual_seed(1))
    return images, heatmaps_like("random", n, (8, 6)), torch.arange(n) % 3


@pytest.mark.parametrize("calls", ["exact", 20])
@pytest.mark.parametrize("score", ["accuracy", "confidence"])
def test_a_condition_has_the_columns_of_a_scoring_of_its_own(score: str, calls: Any) -> None:
    (model, twin), given, how = models(), case(), {"score": score, "calls": calls, **STEPS}
    scores = evaluate(model, *given, fills=FILLS, twin=twin, **how)
    own = {
        ("" if fill == "black" else f"_{fill}") + ("_fill" if fill == "mean" else ""): fill
        for fill in FILLS
    }
    repeated = [name for name in COLUMNS if name != "mask_penalty"]
    for end, fill in own.items():
        for one, key in ((model, end), (twin, f"_twin{end}")):
            plain = evaluate(one, *given, fill=fill, **how)
            for name in repeated:
                torch.testing.assert_close(scores[f"{name}{key}"], plain[name], rtol=0, atol=1e-6)
    wanted = {f"{name}{key}" for name in repeated for end in own for key in (end, f"_twin{end}")}
    means = {f"msi_{kind}{end}" for kind in ("mean", "worst") for end in ("", "_twin")}
    assert {*scores.columns} == wanted | means | {"mask_penalty"}


def test_mean_and_worst_are_over_the_fills_of_one_model() -> None:
    (model, twin), given = models(), case()
    scores = evaluate(model, *given, fills=FILLS, twin=twin, held_out_fill="noise", **STEPS)
    parts = torch.stack([scores.msi, scores["msi_blur"], scores["msi_mean_fill"]])
    torch.testing.assert_close(scores["msi_mean"], parts.mean(0))
    lowest = int(parts.mean(1).argmin())
    assert torch.equal(scores["msi_worst"], parts[lowest])
    assert scores.mean()["msi_worst_twin"] <= scores.mean()["msi_mean_twin"]
    assert "msi_noise" not in scores.columns
    found = scores.summary()
    assert found["msi_worst"].higher_is_better
    assert not found["deletion_pixel_twin_blur"].higher_is_better


def test_a_users_metric_is_scored_under_every_condition() -> None:
    (model, _), given = models(), case()
    metric = Metric(False, lambda _: [show(0.5)], lambda p, s: p.of([show(0.5)], s.score)[:, 0])
    how = {"columns": ["msi", "mine"], "metrics": {"mine": metric}, **STEPS}
    scores = evaluate(model, *given, fills=("black", "noise"), **how)
    other = evaluate(model, *given, fill="noise", **how)
    torch.testing.assert_close(scores["mine_noise"], other["mine"])
    assert scores.summary()["mine_noise"].higher_is_better is False


def test_targets_of_a_twin_are_the_models_predictions_and_whole_images_are_asked_once() -> None:
    images, maps, _ = case()
    spies = [Spy(small_net(seed=seed)) for seed in (2, 3)]
    scores = evaluate(
        Classifier(spies[0]), images, maps, fills=FILLS, twin=Classifier(spies[1]), **STEPS
    )
    assert scores.targets.tolist() == Classifier(small_net(seed=2))(images).argmax(1).tolist()
    assert sum(sum(spy.sizes) for spy in spies) == scores.calls.sum()
    each = [sum(spy.sizes) - len(images) for spy in spies]
    for spy in spies:
        spy.sizes.clear()
    # The same masks of both models: whole images are asked once each, however many fills there are.
    alone = evaluate(Classifier(spies[1]), images, maps, scores.targets, fills=FILLS, **STEPS)
    assert each == [alone.calls.sum() - len(images)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fills": ("black", "black")}, "two fills would be called 'black'"),
        ({"fills": ()}, "at least one fill"),
        ({"fills": "blur"}, "fills must be a list"),
        ({"fill": "blur", "fills": ("black", "mean")}, "give one of the two"),
        ({"fills": ("black", "blurr")}, "Did you mean 'blur'"),
        ({"fills": ("black", "blur"), "held_out_fill": "blur"}, "hold another fill out"),
        ({"fills": ("black", "blur"), "columns": ["mask_penalty"]}, "ask the model nothing"),
        ({"twin": torch.nn.Identity()}, "Classifier"),
        ({"twin": Classifier(small_net(), classes=["a", "b", "c"])}, "other classes"),
    ],
)
def test_contradictions_are_refused_before_the_model_is_asked(options: Any, message: str) -> None:
    spy = Spy(small_net())
    with pytest.raises(UserError, match=message):
        evaluate(Classifier(spy, classes=["x", "y", "z"]), *case(), **options)
    assert spy.sizes == []


def test_fills_name_their_columns() -> None:
    model, _ = models()
    found = asked_models(model, ["black", torch.zeros(3), torch.ones(3)])
    assert [one.key for one in found] == ["", "fill2", "fill3"]
    named = asked_models(model, ["mean", "mean", "blur"], names=["mean", "a/My Sky.png", "blur"])
    assert [one.key for one in named] == ["", "my_sky", "blur"]
    with_twin = asked_models(model, ["black", "mean"], twin=model)
    assert [one.key for one in with_twin] == ["", "mean_fill", "twin", "twin_mean_fill"]
    assert [one.words for one in with_twin] == ["", "fill mean", "twin", "twin, fill mean"]
    with pytest.raises(UserError, match="two fills would be called 'sky'"):
        asked_models(model, ["black"] * 3, names=["black", "a/sky.png", "b/sky.jpg"])


def test_headings_say_the_condition() -> None:
    (model, twin), given = models(), case()
    scores = evaluate(model, *given, fills=FILLS, twin=twin, columns=["msi"], **STEPS)
    assert scores.headings["msi_twin_mean_fill"].long == "MSI (twin, fill mean)"
    assert scores.headings["msi_blur"].long == "MSI (fill blur)"
    assert scores.headings["msi_twin_blur"].meaning.endswith("Scored with the twin, fill blur.")


# Runs


def run_twin(photos: Path, out: Path | None, **more: Any) -> RunResults:
    (photos.parent / "other.py").write_text(OTHER)
    twin = f"python:{photos.parent / 'other.py'}:make"
    options = {"fills": ["black", "blur"], "twin": twin, "checks": "controls"}
    return run_small(config_for(photos, **options | more), out)


def test_a_run_under_conditions_has_the_numbers_of_evaluate(photos: Path, tmp_path: Path) -> None:
    results = run_twin(photos, tmp_path / "out")
    model, twin = make_models(photos)
    names = results.names
    images = torch.stack([read_image(photos / name, None) for name in names])
    labels = torch.tensor([("ant", "bee", "cat").index(name[:3]) for name in names])
    for method in ("gradcam", "layercam"):
        maps = explain(model, images, labels, method)  # always of the model
        wanted = evaluate(model, images, maps, labels, fills=("black", "blur"), twin=twin, **STEPS)
        frame = rows(tmp_path / "out", method)
        for name in (name for name in wanted.columns if "worst" not in name):
            assert frame[name].to_numpy() == pytest.approx(wanted[name].numpy(), abs=1e-6), name
        assert frame["calls"].tolist() == wanted.calls.tolist()
        summary = results.summaries[method]
        assert summary["msi_worst"].mean == pytest.approx(wanted.mean()["msi_worst"])
        assert summary["msi_worst_twin"].mean == pytest.approx(wanted.mean()["msi_worst_twin"])
    found = {one.key: one for one in results.conditions}
    assert [*found] == ["", "blur", "twin", "twin_blur"]
    assert found["twin"].clean_accuracy == pytest.approx(
        (twin(images).argmax(1) == labels).double().mean().item()
    )
    assert found[""].standing == results.standing
    assert sum(one.model_calls for one in found.values()) == results.record.model_calls
    with (tmp_path / "out" / "pairs.csv").open() as file:
        columns = {row["column"] for row in csv.DictReader(file)}
    assert columns == {"msi", "msi_blur", "msi_twin", "msi_twin_blur"}
    assert len(results.record.rank_correlations) == 6
    assert results.record.twin is not None
    assert results.record.twin["clean_accuracy"] == found["twin"].clean_accuracy
    assert RunResults.read(tmp_path / "out").conditions == results.conditions


def make_models(photos: Path) -> tuple[Classifier, Classifier]:
    paths = (photos.parent / name for name in ("model.py", "other.py"))
    model, twin = (Classifier.load(f"python:{path}:make") for path in paths)
    return model, twin


def test_another_twin_is_another_run(photos: Path, tmp_path: Path) -> None:
    interrupted(lambda: run_twin(photos, tmp_path / "out"))
    with pytest.raises(UserError, match="twin"):
        run_twin(photos, tmp_path / "out", twin=f"python:{photos.parent / 'model.py'}:make")


def test_compare_holds_out_a_fill_by_default_and_asks_few_masks(
    photos: Path, tmp_path: Path
) -> None:
    fine = {"value_step": 0.02, "checks": "controls,fill"}
    results = run_small(config_for(photos, **fine), tmp_path / "out")
    first, second = results.conditions
    assert (second.key, second.fill, second.masks) == ("held_out", "blur", FEW - 1)
    assert second.model_calls < 0.1 * first.model_calls
    assert {"msi_held_out", "fill_drop"} <= {*results.summaries["gradcam"]}
    drop = results.rows["gradcam"]
    assert (drop["fill_drop"] == drop["msi"] - drop["msi_held_out"]).all()
    blurred = run_small(config_for(photos, fills="blur,mean", **fine), None)
    assert [one.fill for one in blurred.conditions] == ["blur", "mean", "noise"]
    left = run_small(config_for(photos, **fine | {"checks": "controls"}), None)
    assert len(left.conditions) == 1
    without = make_job(config_for(photos, columns=["base_score"]))
    assert [probe.conditions for probe in without.probes if probe.conditions] == []


def test_the_held_out_sample_is_unbiased(photos: Path) -> None:
    """Over many draws, the mean of sampled held-out MSI is that of all masks."""
    fine = {"value_step": 0.02, "methods": ["gradcam"], "score": "confidence"}
    exact = run_small(
        config_for(photos, fills="blur", columns=["msi"], checks="none", **fine), None
    )
    wanted = exact.summaries["gradcam"]["msi"].mean
    drawn = [
        run_small(config_for(photos, seed=seed, columns=["msi"], checks="fill", **fine), None)
        for seed in range(8)
    ]
    found = torch.tensor([one.summaries["gradcam"]["msi_held_out"].mean for one in drawn])
    assert found.std() > 1e-4
    assert abs(found.mean() - wanted) < 4.5 * found.std() / 8**0.5


def test_a_twin_of_other_classes_is_refused(photos: Path) -> None:
    (photos.parent / "four.py").write_text(
        MODEL.replace("(24, 3)", "(24, 4)").replace(', classes=["ant", "bee", "cat"]', "")
    )
    twin = f"python:{photos.parent / 'four.py'}:make"
    with pytest.raises(UserError, match="the twin has 4 classes and the model 3"):
        make_job(config_for(photos, twin=twin))


def test_a_folder_without_a_twin_is_named_as_such(photos: Path) -> None:
    for folder in ("nowhere", str(photos)):
        words = f"a twin is a folder with classifier.json, {folder} is none: give the folder that"
        with pytest.raises(UserError, match=words):
            make_job(config_for(photos, twin=folder))
