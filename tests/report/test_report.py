"""The report: its numbers, words, size and safety."""

import base64
import csv
import html
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from report_content import (
    HOSTILE,
    Quarters,
    choose,
    coarse_maps,
    curves_shown,
    decoded,
    make,
    quarters,
)
from sufficit import Classifier, evaluate
from sufficit.metrics.metric import curves_of as curves_by_image
from sufficit.perturbation.heatmaps import normalize, resize
from sufficit.report import Content, Facts, MethodScores, Shown, write_report
from sufficit.report.answer import verdict
from sufficit.report.html import render, typeset
from sufficit.report.interpretation import cautions, run_remarks, sentences
from sufficit.report.readings import readings, why
from sufficit.report.tables import results_table
from sufficit.report.viewer_data import (
    encode_fill,
    encode_heatmaps,
    encode_images,
    steps,
)
from sufficit.statistics import compare_values


@pytest.fixture(scope="module")
def content() -> Content:
    return make()


@pytest.fixture(scope="module")
def page(content: Content, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "of a day" / "report.html", content)


def cells(page: Path) -> dict[tuple[str, str], str]:
    """(method, column) -> the mean in the table."""
    found = re.findall(
        r'data-method="([^"]*)" data-column="([^"]*)"><span class="mean[^"]*">([^<]*)<',
        page.read_text(),
    )
    return {(html.unescape(method), column): value for method, column, value in found}


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found
    return json.loads(found[1])


def download(page: Path, name: str) -> str:
    found = re.search(rf'download="{name}" href="data:[^,]*,([^"]*)"', page.read_text())
    assert found
    return base64.b64decode(found[1]).decode()


def test_the_table_holds_the_means_of_all_columns(content: Content, page: Path) -> None:
    expected = {
        (method, column): pytest.approx(values.mean().item(), abs=5.01e-4)
        for method, scores in content.scores.items()
        for column, values in scores.columns.items()
    }
    found = {key: float(value.replace("\u2212", "-")) for key, value in cells(page).items()}
    assert found == expected


def test_the_best_and_those_not_significantly_different_are_marked_and_controls_are_not_ranked(
    content: Content, tmp_path: Path
) -> None:
    values = {name: scores["msi"].numpy() for name, scores in content.scores.items()}
    standing = compare_values(values, controls=["coarse"])
    alone = replace(content, class_agnostic=["bright", "coarse"], standing=standing)
    text = write_report(tmp_path / "r.html", alone).read_text()
    agnostic = '<span class="badge out" title="it draws the same map for every class">'
    assert text.count(f"{agnostic}class-agnostic</span>") == 1, "a control has its own mark"
    head = r'\s*<th scope="row"><span class="name"><i[^>]*></i>'
    rows = re.findall(rf'<tr class="([a-z ]*)">{head}([a-z]+)', text)
    assert sorted(rows) == [("drawn", "bright"), ("other outside", "coarse")]
    assert ">control</span>" in text
    same = dict.fromkeys(content.scores, content.scores["bright"])
    alike = replace(
        content, scores=same, standing=compare_values({n: s["msi"] for n, s in same.items()})
    )
    text = write_report(tmp_path / "t.html", alike).read_text()
    same_as_top = 'title="not significantly different from the top of its group">n.s.</span>'
    assert text.count(same_as_top) == 1
    assert text.count(">top</span>") == 1
    assert ">best</span>" not in text, "it was not compared with controls"


def test_intervals_are_next_to_the_means(content: Content, page: Path) -> None:
    estimate = content.summaries["coarse"]["base_score"]
    wanted = f"{estimate.low:.3f} to {estimate.high:.3f}".replace("-", "\u2212")
    cell = page.read_text().split('data-method="coarse" data-column="base_score"')[1][:120]
    assert wanted in cell


def test_the_numbers_can_be_downloaded(content: Content, page: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(download(page, "methods.csv"))))
    for row in rows:
        estimate = content.summaries[row["method"]][row["column"]]
        assert float(row["mean"]) == estimate.mean
        assert float(row["low"]) == estimate.low
    images = list(csv.DictReader(io.StringIO(download(page, "images.csv"))))
    assert len(images) == 16
    for row in images:
        number = content.shown.names.index(row["image"])
        assert float(row["msi"]) == pytest.approx(
            content.scores[row["method"]]["msi"][number].item(), abs=5e-5
        )
    everything = json.loads(download(page, "report.json"))
    assert everything["facts"]["n_skipped"] == 2
    assert everything["standing"]["best"] == content.standing.best
    assert everything["methods"]["bright"]["msi"]["mean"] == content.summaries["bright"]["msi"].mean


def test_heatmap_files_give_back_the_masks_at_every_alpha_exactly(
    content: Content, page: Path
) -> None:
    data = data_of(page)
    grid = data["grid"]
    for i in range(len(content.shown.rows)):
        for m, method in enumerate(data["methods"]):
            coded = decoded(data["images"][i]["maps"][m])
            heatmap = content.shown.heatmaps[method][i]
            for step, alpha in enumerate(grid):
                above = heatmap > torch.tensor(alpha, dtype=torch.float32)
                assert np.array_equal(coded > step, above.numpy())


def test_curves_in_the_page_are_the_predictions_of_the_model(content: Content, page: Path) -> None:
    data = data_of(page)
    assert data["grid"] == [round(i / 100, 4) for i in range(101)]
    for m, method in enumerate(data["methods"]):
        scores = content.scores[method]
        curves = curves_by_image(scores.shown, scores.schedule)
        for i in range(len(content.shown.rows)):
            found = data["images"][i]["curves"][m]
            for name, curve, start in (
                ("kept", curves["insertion_pixel"], 0),
                ("rest", curves["deletion_pixel"], 0),
                ("hidden", curves["hide"], 50),
            ):
                assert found[name][:start] == [None] * start
                assert found[name][start:] == pytest.approx(curve.confidence[i].tolist(), abs=5e-5)
                hits = "".join(str(int(hit)) for hit in curve.accuracy[i])
                assert found[f"{name}_hits"] == "?" * start + hits
            penalty = (content.shown.heatmaps[method][i] > 0.5).double().mean().item()
            assert found["share"][50] == pytest.approx(penalty, abs=5e-5)


def test_the_page_names_the_class_that_the_model_says_instead(content: Content, page: Path) -> None:
    data, classifier, others = data_of(page), Classifier(Quarters()), 0
    for i, row in enumerate(content.shown.rows):
        image, target = content.shown.images[i], int(content.first.targets[row])
        for m, method in enumerate(data["methods"]):
            heatmap, found = content.shown.heatmaps[method][i], data["images"][i]["curves"][m]
            masks = torch.stack([heatmap > alpha for alpha in data["grid"]])
            for view, kept in (("kept", masks), ("rest", ~masks)):
                named = classifier(image * kept[:, None]).argmax(1).tolist()
                assert found[f"{view}_said"] == [None if k == target else k for k in named]
                others += sum(k != target for k in named)
                assert {content.class_name(k) for k in named if k != target} <= {
                    *data["classes"].values()
                }
    assert others > 100


def test_an_alpha_min_between_two_steps_is_a_step_of_the_slider() -> None:
    content = make(4, alpha_min=0.333)
    grid, curves = curves_shown(content, "coarse")
    start = grid.index(0.333)
    assert len(grid) == 102
    found = curves[0]
    scores = content.scores["coarse"]
    show = curves_by_image(scores.shown, scores.schedule)["show"].confidence[0, 0].item()
    assert found["kept"][start] == pytest.approx(show, abs=5e-5)
    assert None not in found["hidden"][start:]


def test_what_was_not_asked_is_said_to_be_unknown() -> None:
    content = make(4, columns=["msi", "base_score", "mask_penalty"])
    found = curves_shown(content, "coarse")[1][0]
    assert found["kept"][:50] == [None] * 50
    assert None not in found["kept"][50:]
    assert [i for i, value in enumerate(found["rest"]) if value is not None] == [50]


def test_a_page_of_24_images_and_7_methods_is_below_3_megabytes(tmp_path: Path) -> None:
    n, side = 24, 224
    small = make(n, 16)
    generator = torch.Generator().manual_seed(0)
    # Nothing compresses worse than noise.
    images = torch.rand(n, 3, side, side, generator=generator)
    maps = {f"method {k}": torch.rand(n, side, side, generator=generator) for k in range(7)}
    assert sum(map(len, encode_images(images))) < 1_000_000
    content = replace(
        small,
        scores=dict.fromkeys(maps, small.scores["coarse"]),
        summaries=dict.fromkeys(maps, small.summaries["coarse"]),
        standing=compare_values(dict.fromkeys(maps, small.scores["coarse"]["msi"])),
        rows=dict.fromkeys(maps, small.rows["coarse"]),
        shown=Shown(range(n), small.shown.names, images, maps),
    )
    path = write_report(tmp_path / "report.html", content)
    assert path.stat().st_size < 3_000_000
    assert len(data_of(path)["images"]) == 24
    assert max(decoded(data_of(path)["images"][0]["maps"][0]).shape) <= 112


def test_smaller_maps_show_nearly_the_same_masks() -> None:
    heatmap = coarse_maps(1, 224, 5)
    grid = tuple(i / 100 for i in range(101))
    coded = decoded(encode_heatmaps({"m": heatmap}, grid)["m"][0])
    assert coded.shape == (112, 112)
    back = resize(torch.from_numpy(coded.copy()).float()[None], (224, 224))
    assert ((back > 50) == (heatmap > 0.5)).float().mean() > 0.98


def test_hidden_pixels_look_as_the_model_saw_them() -> None:
    images, _ = quarters(3)
    assert encode_fill(images, "black") == ["#000000"]
    means = [
        "#" + "".join(f"{round(255 * value):02x}" for value in image.mean((1, 2)).tolist())
        for image in images
    ]
    assert encode_fill(images, "mean") == means
    assert encode_fill(images, torch.tensor([1.0, 0.5, 0.0])) == ["#ff8000"]
    assert len(encode_fill(images, "noise")) == 1
    blurred = encode_fill(images, "blur")
    assert len(blurred) == 3
    assert abs(decoded(blurred[0]).mean() / 255 - images[0].mean().item()) < 0.02


def test_names_from_files_stay_text(tmp_path: Path) -> None:
    names = [f"{HOSTILE}{i}" for i in range(7)] + ["\udcff.png"]
    content = replace(
        make(8, names=names), title=HOSTILE, classes=[f"{HOSTILE}{i}" for i in "abcd"]
    )
    renamed = {HOSTILE: "bright", "coarse": "coarse"}
    content = replace(
        content,
        rows={new: content.rows[old] for new, old in renamed.items()},
        scores={new: content.scores[old] for new, old in renamed.items()},
        summaries={new: content.summaries[old] for new, old in renamed.items()},
        standing=compare_values({new: content.scores[old]["msi"] for new, old in renamed.items()}),
        shown=replace(
            content.shown,
            heatmaps={new: content.shown.heatmaps[old] for new, old in renamed.items()},
        ),
        facts=replace(content.facts, model=HOSTILE, data=HOSTILE, command=HOSTILE),
    )
    path = write_report(tmp_path / "report.html", content)
    text = path.read_text()
    assert "<script>window" not in text
    assert "<!--" not in text.replace("<!doctype", "")
    assert "<img src=x" not in text
    assert text.count("</script>") == 2
    assert data_of(path)["images"][0]["name"] == names[0]
    assert (HOSTILE, "msi") in cells(path)


def losses_by_hand(scores: MethodScores) -> list[float]:
    """What keeps each image's MSI from 1, from the curves and the definition of MSI."""
    curves = curves_by_image(scores.shown, scores.schedule)
    show, hide = curves["show"].accuracy.numpy(), curves["hide"].accuracy.numpy()
    place = curves["deletion_pixel"].grid.index(scores.alpha_min)
    rest = curves["deletion_pixel"].accuracy.numpy()[:, place]
    width = 1 - scores.alpha_min
    inner = np.trapezoid(show, curves["show"].grid, axis=1) / width
    weaker = np.trapezoid(hide, curves["hide"].grid, axis=1) / width
    parts = [scores["mask_penalty"].numpy(), 1 - (show[:, 0] + inner) / 2, rest / 2, weaker / 2]
    return [float(part.mean()) for part in parts]


@pytest.mark.parametrize("alpha_min", [0.5, 0.333])
def test_the_four_losses_add_up_to_what_msi_lacks(alpha_min: float) -> None:
    content = make(alpha_min=alpha_min, maps={"coarse": coarse_maps(8, 16, 1)}, value_step=0.037)
    for found in readings(content):
        scores = content.scores[found.method]
        losses = [found.losses[name] for name in ("size", "short", "outside", "weaker")]
        assert sum(losses) == pytest.approx(1 - scores["msi"].mean().item(), abs=1e-6)


def test_the_losses_are_those_of_the_definition(content: Content) -> None:
    for found in readings(content):
        losses = [found.losses[name] for name in ("size", "short", "outside", "weaker")]
        assert losses == pytest.approx(losses_by_hand(content.scores[found.method]), abs=1e-6)


def quarter_map(targets: torch.Tensor, side: int, value: float = 1.0) -> torch.Tensor:
    maps = torch.zeros(len(targets), side, side)
    for heatmap, target in zip(maps, targets.tolist(), strict=True):
        row, column = divmod(target, 2)
        heatmap[row * side // 2 :, column * side // 2 :][: side // 2, : side // 2] = value
    return maps


def marked(case: str, targets: torch.Tensor, side: int) -> torch.Tensor:
    right = quarter_map(targets, side)
    if case == "three quarters, the bright one too":
        return 1 - quarter_map((targets + 1) % 4, side)
    if case == "a pixel of the bright quarter":
        return right * (right.flatten(1).cumsum(1).view_as(right) == 1)
    return quarter_map((targets + 1) % 4, side)


@pytest.mark.parametrize(
    ("case", "place", "reason"),
    [
        ("three quarters, the bright one too", "near 0", "The mask is too large: it marks 75%"),
        ("a pixel of the bright quarter", "between 0 and +1", "Other regions suffice too"),
        ("a dim quarter", "close to -1", "A poor mask: what it marks does not suffice"),
    ],
)
def test_scores_are_read_as_the_paper_reads_them(case: str, place: str, reason: str) -> None:
    maps = marked(case, torch.arange(8) % 4, 16)
    (found,) = readings(make(8, 16, maps={"m": maps}))
    assert (found.place, found.why[: len(reason)]) == (place, reason)


def test_a_mask_whose_peak_alone_falls_short_is_not_said_to_fall_short_itself() -> None:
    losses = {"size": 0.2, "short": 1.0, "outside": 0.05, "weaker": 0.0}
    whole = why(-0.5, losses, kept=0.95, inner=0.4, accuracy=True)
    assert "with all that is marked the model is right on 95% of the images" in whole
    assert "from there, the model is right on 40% of the images on average" in whole
    scores = {"kept": 0.3, "inner": 0.2, "accuracy": True}
    assert why(-0.5, losses, **scores) == (
        "What it marks does not suffice: with that alone the model is right on 30% of the images."
    )
    assert why(0.1, losses, **scores) == (
        "It is near 0 because what it marks does not suffice: with that alone the model is right on"
        " 30% of the images. The size of the mask (20% of the image) and evidence elsewhere"
        " (without what it marks the model is right on 10% of the images) matter less."
    )
    assert why(0.5, losses, **scores).startswith(
        "It stays below +1 mostly because what it marks does"
    )
    assert why(-0.8, losses, **scores).startswith(
        "A poor mask: what it marks does not suffice: with"
    )


def test_the_one_pixel_that_decides_is_read_as_the_best_there_is() -> None:
    found = readings(make_right(8, 16))[0]
    assert found.place == "close to +1"
    assert found.why.startswith("A small region suffices: 0% of the image is marked")


def make_right(n: int, side: int) -> Content:
    """Black images with one bright pixel that decides, marked and nothing else."""
    images = torch.zeros(n, 3, side, side)
    targets = torch.arange(n) % 4
    maps = torch.zeros(n, side, side)
    for i, target in enumerate(targets.tolist()):
        y, x = 2 + 8 * (target // 2), 2 + 8 * (target % 2)
        images[i, :, y, x] = 1
        maps[i, y, x] = 1
    chosen = targets > 0  # of nothing the model says class 0
    scores = {
        "m": evaluate(
            Classifier(Quarters()), images[chosen], maps[chosen], targets[chosen], progress=False
        )
    }
    count = int(chosen.sum())
    return Content(
        "t",
        Facts("m", "d", 0),
        {"m": MethodScores.of(scores["m"], range(count))},
        {"m": scores["m"].summary()},
        compare_values({"m": scores["m"].msi}),
        Shown(range(count), [str(i) for i in range(count)], images[chosen], {"m": maps[chosen]}),
    )


def texts(content: Content) -> str:
    return "\n".join([c.text for c in cautions(content)])


def test_a_reader_is_warned_of_few_images_bad_classifiers_nan_and_leaks(content: Content) -> None:
    assert "Only 8 images" in texts(content)
    known = texts(replace(content, remarks=["Know this."])).splitlines()
    assert known == [
        "Only 8 images: small differences do not show. Score 50 or more.",
        "Know this.",
    ]
    images, targets = quarters(60)
    maps = {"m": normalize(images.mean(1))}
    many = make(60, maps=maps)
    assert texts(many) == ""
    wrong = evaluate(Classifier(Quarters()), images, maps["m"], (targets + 1) % 4, progress=False)
    bad = replace(many, scores={"m": MethodScores.of(wrong)})
    assert "target class on only 0% of the whole images" in texts(bad)
    holes = replace(many.summaries["m"]["msi"], n=56, n_nan=4)
    broken = {"m": {**many.summaries["m"], "msi": holes}}
    assert "m has no MSI in 4 of 60 images" in texts(replace(many, summaries=broken))
    leaking = make(60, maps={"frame": quarter_map(targets, 16)}, leak_donors=4)
    found = [c for c in cautions(leaking) if c.text.startswith("Leakage")]
    assert found[0].text == "Leakage: the masks of frame reveal the class by their shape."
    assert found[0].details[0].startswith("frame: the masks leak: over images of other classes")


def test_the_title_of_one_image_is_in_the_singular(
    content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Content, "n", 1)
    assert results_table(content).title == "Means over 1 image, alpha_min 0.5"


def test_the_terminal_says_what_the_report_says(content: Content) -> None:
    content = replace(content, facts=replace(content.facts, targets="label"))
    said = list(sentences(content))
    assert said[0] == "Targets: the labels. The model classifies 100.0% of whole images correctly."
    assert said[1:] == ["MSI is near +1 when a small region suffices and nothing else does."]
    page = render(content)
    assert all(typeset(text) in page for text in said)
    assert all(typeset(line) in page for line in verdict(content).lines)
    table = results_table(content)
    assert table.title == "Means over 8 images, alpha_min 0.5"
    assert [column.header.strip() for column in table.columns] == [
        *("method", "ins. % ↑", "del. % ↓", "base ↑", "penalty ↓", "MSI ↑", "95 % interval"),
    ]


def test_methods_that_are_not_above_a_control_are_named(content: Content, tmp_path: Path) -> None:
    values = {m: s["msi"] for m, s in content.scores.items()}
    beaten = replace(content, standing=compare_values(values, controls=["bright"]))
    mean = content.summaries["bright"]["msi"].mean
    sentence = f"Significantly worse than bright ({mean:.3f}, n = 8): coarse."
    assert sentence in sentences(beaten)
    page = write_report(tmp_path / "report.html", beaten).read_text()
    assert page.count("Significantly worse than bright") == 1
    good = replace(content, standing=compare_values(values, controls=["coarse"]))
    listed = f"the controls coarse ({content.summaries['coarse']['msi'].mean:.3f})"
    assert f"All methods are significantly better than {listed}." in sentences(good)


def test_a_searched_alpha_min_is_compared_with_each_methods_own() -> None:
    content = make(4, alpha_min="search", value_step=0.25, alphas=[0.25, 0.5])
    own = {m: max(s.alphas, key=s.alphas.get) for m, s in content.scores.items()}
    listed = ", ".join(f"{m} {own[m]:g}" for m in content.methods)
    assert any(f"best for it alone ({listed})" in sentence for sentence in sentences(content))
    assert results_table(content).title.endswith("(best for the mean of the methods)")


def test_the_run_remarks_on_zeros_and_random_weights() -> None:
    assert run_remarks(9, {"a": 0}) == []
    assert run_remarks(9, {"a": 3, "b": 0}, random_weights=True) == [
        "The model has random weights: its scores mean nothing.",
        "All-zero heatmaps, which mark nothing, of 9 images: a 3.",
    ]


def test_charts_have_every_line_and_point_and_the_colours_of_the_page(
    content: Content, page: Path
) -> None:
    text = page.read_text()
    for chart in ("sizes", "insertion_percent", "deletion_percent"):
        figure = text.split(f'<figure id="chart-{chart}">')[1].split("</figure>")[0]
        named = re.findall(r'<g class="named"><title>([^<]*)</title>', figure)
        assert sorted(named) == sorted(content.scores)
        assert "var(--m0)" in figure
        assert not re.search(r"#[0-9a-f]{6}[^0-9a-f]", figure)
    assert text.count("<title>complement</title>") == len(content.scores)
    assert 'id="chart-alpha"' not in text
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def test_a_page_has_the_same_bytes_each_time(content: Content, page: Path, tmp_path: Path) -> None:
    assert write_report(tmp_path / "again.html", content).read_bytes() == page.read_bytes()


def test_the_best_worst_and_most_disputed_are_shown() -> None:
    msi = {"a": [0.1, 0.9, -0.9, 0.5], "b": [0.1, 0.9, -0.9, -0.5]}
    found = choose(msi, most=4)
    assert found == {1: "best", 2: "worst", 3: "most disputed", 0: "drawn by seed"}
    assert sorted(choose(msi, most=50)) == [0, 1, 2, 3]
    assert len(choose(msi, most=2)) == 2


def test_steps_count_the_alphas_below() -> None:
    grid = tuple(i / 100 for i in range(101))
    values = torch.rand(50, generator=torch.Generator().manual_seed(0))
    edges = torch.tensor(grid)
    assert steps(values, grid).tolist() == [int((edges < v).sum()) for v in values]
