"""A probe, a source or a column of the user's is one class and one entry, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor

from extensions import TOP_QUARTER, Edges, Mirrored, OtherHead, Redrawn
from small_runs import STEPS, assert_same_rows, config_for, interrupted
from sufficit import Classifier, UserError, compare, explain
from sufficit.data.images import list_images, read_image
from sufficit.runs.config import Workers
from sufficit.runs.forecast import forecast
from sufficit.runs.job import Job, make_job
from sufficit.runs.results import RunResults

METHODS = ("gradcam", "edges", "everything", "random", "center")
HEAD = "4"  # the last layer of the small runs' model


@pytest.fixture
def classifier(photos: Path) -> Classifier:
    return Classifier.load(f"python:{photos.parent / 'model.py'}:make")


def extended(classifier: Classifier, photos: Path, out: Path | None, **changed: Any) -> RunResults:
    """A run with three probes, a source and a column of the user's."""
    usual: dict[str, Any] = {
        "methods": {"gradcam": "gradcam", "edges": Edges()},
        "probes": [
            Mirrored(classifier, frozenset({0, 1, 4, 5, 9})),
            Redrawn(classifier, ("gradcam",)),
            OtherHead(classifier, HEAD, "gradcam"),
        ],
        "metrics": {"top_quarter": TOP_QUARTER},
        "checks": "controls",
        "unit_size": 3,
        "progress": False,
        **STEPS,
    }
    return compare(classifier, photos, out=out, **{**usual, **changed})


def images_of(photos: Path) -> tuple[Tensor, Tensor]:
    listed = list_images(photos)
    images = torch.stack([read_image(photos / image.name, None) for image in listed])
    labels = torch.tensor([("ant", "bee", "cat").index(image.name[:3]) for image in listed])
    return images, labels


def by_hand(classifier: Classifier, photos: Path) -> dict[tuple[str, str], np.ndarray]:
    """What each of the user's columns must be, without a run."""
    images, labels = images_of(photos)
    maps = explain(classifier, images, labels, "gradcam")
    rows = torch.arange(len(images))

    def probability(seen: Tensor) -> Tensor:
        with torch.no_grad():
            return classifier(seen).double().softmax(1)[rows, labels]

    seen = images * (maps >= 0.5)[:, None]
    change = (probability(seen) - probability(seen.flip(3))).abs().numpy()
    change[[2, 3, 6, 7, 8, 10]] = np.nan  # not in the sample
    mirrored = explain(classifier, images.flip(3), labels, "gradcam").flip(2)
    ranks = [pandas.Series(one.flatten().numpy()).rank() for one in maps]
    others = [pandas.Series(one.flatten().numpy()).rank() for one in mirrored]
    same = [one.corr(other) for one, other in zip(ranks, others, strict=True)]
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(maps.flatten(1)).scatter_(1, order[:, : order.shape[1] // 4], 1)
    quarter = probability(images * kept.view_as(maps)[:, None])
    grey = images.mean(1)
    edges = normalize_peak((grey - grey.roll(1, 2)).abs())
    return {
        ("gradcam", "mirror_change"): change,
        ("gradcam", "mirror_map"): np.array(same),
        ("gradcam", "top_quarter"): quarter.numpy(),
        ("edges", "edge_share"): (edges > 0.5).double().mean((1, 2)).numpy(),
    }


def normalize_peak(maps: Tensor) -> Tensor:
    return maps / maps.amax((1, 2), keepdim=True)


def test_rows_and_means_are_those_computed_by_hand(
    classifier: Classifier, photos: Path, tmp_path: Path
) -> None:
    results = extended(classifier, photos, tmp_path / "out")
    table = results.table()
    for (source, column), wanted in by_hand(classifier, photos).items():
        found = results.rows[source][column].to_numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        assert table.loc[source, column] == pytest.approx(np.nanmean(wanted), abs=1e-5)
        estimate = results.summaries[source][column]
        assert (estimate.n, estimate.n_nan) == (np.isfinite(wanted).sum(), 0)
        assert estimate.low <= estimate.mean <= estimate.high
    assert results.rows["gradcam"]["other_head"].mean() < 0.5
    assert "mirror_map" not in results.rows["edges"]
    assert np.isnan(table.loc["random", "edge_share"])


def test_the_record_names_every_column(
    classifier: Classifier, photos: Path, tmp_path: Path
) -> None:
    extended(classifier, photos, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    heading = record["columns"]["mirror_change"]
    assert (heading["short"], heading["limits"]) == ("mirror", [0.0, 1.0])
    assert heading["higher_is_better"] is False
    assert {"mirror_map", "other_head", "edge_share", "top_quarter"} <= {*record["columns"]}
    assert record["sources"]["edges"]["kind"] == "function"
    assert {*record["methods"]} == {*METHODS}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["gradcam"]["mirror_change"]["n"] == 5
    assert summary["gradcam"]["mirror_change"]["low"] >= 0
    again = RunResults.read(tmp_path / "out")
    assert again.headings["mirror_change"].limits == (0, 1)
    printed = json.loads(json.dumps(again.as_json(), allow_nan=False))
    assert printed["columns"]["edges"]["edge_share"]["mean"] > 0


def test_report_and_figures_of_the_finished_run_show_them(
    classifier: Classifier, photos: Path, tmp_path: Path, sufficit: Any
) -> None:
    out = tmp_path / "out"
    results = extended(classifier, photos, out)
    told = sufficit("report", out)
    assert told.code == 0, told.err
    page = (out / "report.html").read_text()
    for words in (
        "Change when mirrored",
        "How far the target",
        "Rank correlation with the mirrored map",
        "Share of edges",
        "top_quarter",
    ):
        assert words in page, words
    for source, column in (("gradcam", "mirror_change"), ("edges", "edge_share")):
        assert f"{results.summaries[source][column].mean:.3f}" in page, column
    sheet = ["--images", "2", "--columns", "msi,mirror_change,top_quarter", "--out"]
    told = sufficit("figure", out, *sheet, tmp_path / "sheet.svg")
    assert told.code == 0, told.err
    wanted = results.rows["gradcam"]["mirror_change"].iloc[0]
    figure = results.plot("sheet", images=["2"], columns=["mirror_change"])
    texts = [text.get_text() for axes in figure.axes for text in [*axes.texts, axes.xaxis.label]]
    texts += [axes.get_title() for axes in figure.axes]
    assert any(f"{wanted:.2f}" in text for text in texts), texts
    missing = sufficit("figure", out, "--columns", "mirror_chance", "--out", tmp_path / "no.svg")
    assert "Did you mean 'mirror_change'" in missing.err


def test_a_notebook_shows_them(classifier: Classifier, photos: Path) -> None:
    shown = extended(classifier, photos, None)._repr_html_()
    assert "Change when mirrored" in shown or "mirror" in shown


def jobs(classifier: Classifier, photos: Path) -> tuple[Job, Job]:
    """The same run without and with a probe."""
    config = config_for(photos, checks="controls", methods=["gradcam"])
    made = make_job(config, classifier=classifier)
    return made, make_job(config, classifier=classifier, probes=[Mirrored(classifier)])


def test_the_forecast_counts_its_calls(classifier: Classifier, photos: Path) -> None:
    without, having = jobs(classifier, photos)
    assert having.calls - without.calls == 2 * 11 * 4
    found = [forecast(job) for job in (without, having)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].calls - found[0].calls == 2 * 11 * 4
    few = replace(having, extra=(Mirrored(classifier, frozenset({3, 4})),))
    few.__dict__.pop("probes", None)
    assert few.calls - without.calls == 2 * 2 * 4


def test_progress_moves_to_its_end(classifier: Classifier, photos: Path, tmp_path: Path) -> None:
    ticks: list[tuple[float, float]] = []
    extended(classifier, photos, None, progress=lambda done, total: ticks.append((done, total)))
    done = [share for share, _ in ticks]
    assert done == sorted(done)
    assert ticks[-1] == (55, 55)


def test_an_interrupted_run_resumes_to_the_same_rows(
    classifier: Classifier, photos: Path, tmp_path: Path
) -> None:
    whole = extended(classifier, photos, tmp_path / "whole")
    interrupted(lambda: extended(classifier, photos, tmp_path / "out"), after=2)
    again = extended(classifier, photos, tmp_path / "out")
    assert_same_rows(tmp_path / "whole", tmp_path / "out", METHODS)
    assert again.record.columns == whole.record.columns


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("probe", "`probes` was"),
        ("source", "`methods` was"),
        ("column", "`metrics` was"),
    ],
)
def test_other_ones_of_the_same_name_do_not_resume_it(
    classifier: Classifier, photos: Path, tmp_path: Path, changed: str, words: str
) -> None:
    interrupted(lambda: extended(classifier, photos, tmp_path / "out"))
    other: dict[str, Any] = {
        "probe": {"probes": [Mirrored(classifier, alpha_min=0.3)]},
        "source": {"methods": {"gradcam": "gradcam", "edges": Edges(2.0)}},
        "column": {
            "metrics": {
                "top_quarter": replace(TOP_QUARTER, formula=lambda a, s: a.targets.double())
            }
        },
    }[changed]
    with pytest.raises(UserError, match=f"Cannot resume .*{words}"):
        extended(classifier, photos, tmp_path / "out", **other)


def test_the_size_of_units_changes_no_row(
    classifier: Classifier, photos: Path, tmp_path: Path
) -> None:
    one = extended(classifier, photos, tmp_path / "one", unit_size=1)
    other = extended(classifier, photos, tmp_path / "other", unit_size=11)
    for method in METHODS:
        pandas.testing.assert_frame_equal(one.rows[method], other.rows[method], atol=1e-6, rtol=0)


def test_two_columns_of_one_name_are_refused(classifier: Classifier, photos: Path) -> None:
    for probes in ([Mirrored(classifier), Mirrored(classifier)], [Named(classifier, "msi")]):
        with pytest.raises(UserError, match="two columns would be called"):
            extended(classifier, photos, None, probes=probes)


class Named(Mirrored):
    """A probe whose column has a given name."""

    def __init__(self, model: Classifier, column: str) -> None:
        super().__init__(model)
        self.headings = {column: Mirrored.headings["mirror_change"]}  # type: ignore[misc]


def test_a_probe_that_changes_the_model_stops_the_run_and_is_named(
    classifier: Classifier, photos: Path
) -> None:
    class Careless(Mirrored):
        def __call__(self, *given: Any) -> Any:
            self.model.model[0].bias.data.add_(1e-3)
            return super().__call__(*given)

    with pytest.raises(UserError, match=r"^probe mirror changed the model: the values of 0\.bias"):
        extended(classifier, photos, None, probes=[Careless(classifier)])


def test_an_error_of_a_probe_names_it_and_the_image(classifier: Classifier, photos: Path) -> None:
    class Broken(Mirrored):
        def __call__(self, batch: Any, maps: Any) -> Any:
            if 4 in batch.numbers:
                raise KeyError("size")
            return super().__call__(batch, maps)

    with pytest.raises(UserError, match=r"^probe mirror on image bee/01\.png raised KeyError"):
        extended(classifier, photos, None, probes=[Broken(classifier)])


def lots(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    """A method that draws random numbers."""
    return torch.rand(len(images), *images.shape[2:])


@pytest.mark.slow
@pytest.mark.processes
def test_rays_workers_find_the_same(classifier: Classifier, photos: Path, tmp_path: Path) -> None:
    methods = {"gradcam": "gradcam", "edges": Edges(), "lots": lots}
    extended(classifier, photos, tmp_path / "one", methods=methods)
    extended(classifier, photos, tmp_path / "many", methods=methods, workers=Workers(count=2))
    assert_same_rows(tmp_path / "one", tmp_path / "many", (*METHODS, "lots"))
