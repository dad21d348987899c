"""The report: its numbers, words, size and safety, and how it behaves in a real browser."""

import base64
import csv
import html
import io
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from sufficit import Classifier, evaluate
from sufficit.comparison import compare_values
from sufficit.errors import UserError
from sufficit.heatmaps import normalize, resize
from sufficit.metrics.evaluate import Scores, read
from sufficit.report import Content, Facts, Shown, pick_shown, write_report
from sufficit.report.charts import Frame, loss_bars, scatter
from sufficit.report.numbers import curves_of, slider_grid
from sufficit.report.pictures import encode_fill, encode_heatmaps, encode_images, steps
from sufficit.report.words import cautions, readings
from sufficit.results import summarise

HOSTILE = '</script><script>window.hacked=1</script><!--"\'&<img src=x onerror="window.hacked=2">'


class Quarters(nn.Module):
    """Class k where quarter k of the image is brightest."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        means = nn.functional.adaptive_avg_pool2d(images.mean(1, keepdim=True), 2)
        return 40 * means.flatten(1)


def quarters(n: int, side: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Dim noise with one bright quarter, and which."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.4 * torch.rand(n, 3, side, side, generator=generator)
    targets = torch.arange(n) % 4
    half = side // 2
    for image, target in zip(images, targets.tolist(), strict=True):
        row, column = divmod(target, 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 0.3
    return images, targets


def coarse_maps(n: int, side: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(resize(torch.rand(n, 7, 7, generator=generator), (side, side)))


def make(
    n: int = 8,
    side: int = 16,
    names: list[str] | None = None,
    maps: dict[str, torch.Tensor] | None = None,
    fill: str = "black",
    **options: Any,
) -> Content:
    images, targets = quarters(n, side)
    classifier = Classifier(Quarters())
    if maps is None:
        maps = {"bright": normalize(images.mean(1)), "coarse": coarse_maps(n, side, 1)}
    scores = {
        name: evaluate(classifier, images, found, targets, fill=fill, progress=False, **options)
        for name, found in maps.items()
    }
    rows = pick_shown(scores)
    return Content(
        title="Which quarter is bright?",
        facts=Facts(model="quarters", data="noise", seed=3, n_skipped=2, command="by hand"),
        scores=scores,
        summaries={name: summarise(found) for name, found in scores.items()},
        standing=compare_values({name: found.msi for name, found in scores.items()}),
        names=names or [f"picture-{i}" for i in range(n)],
        shown=Shown(rows, images[rows], {name: found[rows] for name, found in maps.items()}),
        classes=["north-west", "north-east", "south-west", "south-east"],
        fill=fill,
    )


@pytest.fixture(scope="module")
def content() -> Content:
    return make()


@pytest.fixture(scope="module")
def page(content: Content, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", content)


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


def decoded(address: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(address.split(",")[1]))) as picture:
        return np.asarray(picture)


def test_the_table_holds_the_means_of_all_columns(content: Content, page: Path) -> None:
    expected = {
        (method, column): pytest.approx(values.mean().item(), abs=5.01e-4)
        for method, scores in content.scores.items()
        for column, values in scores.columns.items()
    }
    found = {key: float(value.replace("\u2212", "-")) for key, value in cells(page).items()}
    assert found == expected


def test_the_best_and_the_tied_are_marked_and_what_is_beside_is_not_in_the_contest(
    content: Content, tmp_path: Path
) -> None:
    alone = replace(
        content, standing=compare_values({"bright": content.scores["bright"].msi.numpy()})
    )
    text = write_report(tmp_path / "r.html", alone).read_text()
    rows = re.findall(r'<tr class="([a-z]*)">\s*<th scope="row"><i[^>]*></i>([a-z]+)', text)
    assert sorted(rows) == [("best", "bright"), ("outside", "coarse")]
    same = dict.fromkeys(content.scores, content.scores["bright"])
    tied = replace(
        content, scores=same, standing=compare_values({n: s.msi for n, s in same.items()})
    )
    text = write_report(tmp_path / "t.html", tied).read_text()
    assert re.search(r'<tr class="tied">\s*<th scope="row"><i[^>]*></i>coarse', text)


def test_intervals_stand_beside_the_means(content: Content, page: Path) -> None:
    estimate = content.summaries["coarse"]["base_score"]
    wanted = f"{estimate.low:.3f} to {estimate.high:.3f}".replace("-", "\u2212")
    cell = page.read_text().split('data-method="coarse" data-column="base_score"')[1][:120]
    assert wanted in cell


def test_the_numbers_can_be_taken_along(content: Content, page: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(download(page, "methods.csv"))))
    for row in rows:
        estimate = content.summaries[row["method"]][row["column"]]
        assert float(row["mean"]) == estimate.mean
        assert float(row["low"]) == estimate.low
    images = list(csv.DictReader(io.StringIO(download(page, "images.csv"))))
    assert len(images) == 16
    for row in images:
        number = content.names.index(row["image"])
        assert float(row["msi"]) == pytest.approx(
            content.scores[row["method"]].msi[number].item(), abs=5e-5
        )
    everything = json.loads(download(page, "report.json"))
    assert everything["facts"]["n_skipped"] == 2
    assert everything["standing"]["best"] == content.standing.best
    assert everything["methods"]["bright"]["msi"]["mean"] == content.summaries["bright"]["msi"].mean


def test_heatmap_files_give_back_the_masks_at_every_alpha_exactly(
    content: Content, page: Path
) -> None:
    data = data_of(page)
    grid = slider_grid(content)
    for i in range(len(content.shown.rows)):
        for m, method in enumerate(data["methods"]):
            coded = decoded(data["images"][i]["maps"][m])
            heatmap = content.shown.heatmaps[method][i]
            for step, alpha in enumerate(grid):
                above = heatmap > torch.tensor(alpha, dtype=torch.float32)
                assert np.array_equal(coded > step, above.numpy())


def test_curves_in_the_page_are_the_answers_of_the_model(content: Content, page: Path) -> None:
    data = data_of(page)
    assert data["grid"] == [round(i / 100, 4) for i in range(101)]
    for i, row in enumerate(content.shown.rows):
        for m, method in enumerate(data["methods"]):
            curves, found = content.scores[method].curves(), data["images"][i]["curves"][m]
            for name, curve, start in (
                ("kept", curves["insertion_pixel"], 0),
                ("rest", curves["deletion_pixel"], 0),
                ("hidden", curves["hide"], 50),
            ):
                assert found[name][:start] == [None] * start
                assert found[name][start:] == pytest.approx(
                    curve.confidence[row].tolist(), abs=5e-5
                )
                hits = "".join(str(int(hit)) for hit in curve.accuracy[row])
                assert found[f"{name}_hits"] == "?" * start + hits
            penalty = (content.shown.heatmaps[method][i] > 0.5).double().mean().item()
            assert found["share"][50] == pytest.approx(penalty, abs=5e-5)


def test_an_alpha_min_between_two_steps_is_a_step_of_the_slider() -> None:
    content = make(4, alpha_min=0.333)
    grid = slider_grid(content)
    start = grid.index(0.333)
    assert len(grid) == 102
    found = curves_of(content, "coarse", grid)[0]
    row = content.shown.rows[0]
    show = content.scores["coarse"].curves()["show"].confidence[row, 0].item()
    assert found["kept"][start] == pytest.approx(show, abs=5e-5)
    assert None not in found["hidden"][start:]


def test_what_was_not_asked_is_said_to_be_unknown() -> None:
    content = make(4, columns=["msi", "base_score", "mask_penalty"])
    found = curves_of(content, "coarse", slider_grid(content))[0]
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
        standing=compare_values(dict.fromkeys(maps, small.scores["coarse"].msi)),
        shown=Shown(range(n), images, maps),
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
        scores={new: content.scores[old] for new, old in renamed.items()},
        summaries={new: content.summaries[old] for new, old in renamed.items()},
        standing=compare_values({new: content.scores[old].msi for new, old in renamed.items()}),
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


def losses_by_hand(scores: Scores) -> list[float]:
    """What keeps each image's MSI from 1, from the curves and the definition of MSI."""
    curves = scores.curves()
    show, hide = curves["show"].accuracy.numpy(), curves["hide"].accuracy.numpy()
    place = curves["deletion_pixel"].grid.index(scores.alpha_min)
    rest = curves["deletion_pixel"].accuracy.numpy()[:, place]
    width = 1 - scores.alpha_min
    inner = np.trapezoid(show, curves["show"].grid, axis=1) / width
    weaker = np.trapezoid(hide, curves["hide"].grid, axis=1) / width
    parts = [scores.mask_penalty.numpy(), 1 - (show[:, 0] + inner) / 2, rest / 2, weaker / 2]
    return [float(part.mean()) for part in parts]


def test_what_msi_lacks_adds_up(content: Content) -> None:
    for reading in readings(content):
        scores = content.scores[reading.method]
        parts = reading.losses
        found = [parts.size, parts.short, parts.outside, parts.weaker]
        assert found == pytest.approx(losses_by_hand(scores), abs=1e-6)
        assert sum(found) == pytest.approx(1 - scores.msi.mean().item(), abs=1e-6)
        bars = loss_bars(readings(content))[reading.method]
        assert bars[1][1] == pytest.approx(bars[0][2], abs=0.011)


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
        ("a dim quarter", "close to -1", "What it marks does not suffice"),
    ],
)
def test_scores_are_read_as_the_paper_reads_them(case: str, place: str, reason: str) -> None:
    maps = marked(case, torch.arange(8) % 4, 16)
    reading = readings(make(8, 16, maps={"m": maps}))[0]
    assert (reading.place, reading.why[: len(reason)]) == (place, reason)


def test_the_one_pixel_that_decides_is_read_as_the_best_there_is() -> None:
    reading = readings(make_right(8, 16))[0]
    assert reading.place == "close to +1"
    assert reading.why.startswith("A small region suffices: 0% of the image is marked")


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
        scores,
        {"m": summarise(scores["m"])},
        compare_values({"m": scores["m"].msi}),
        [str(i) for i in range(count)],
        Shown(range(count), images[chosen], {"m": maps[chosen]}),
    )


def texts(content: Content) -> str:
    return "\n".join([c.text for c in cautions(content)])


def test_a_reader_is_warned_of_few_images_bad_classifiers_nan_and_leaks(content: Content) -> None:
    assert "8 images are few" in texts(content)
    assert "gives only" not in texts(content)
    assert "NaN" not in texts(content)
    images, targets = quarters(40)
    maps = {"m": normalize(images.mean(1))}
    many = make(40, maps=maps)
    assert texts(many) == ""
    wrong = evaluate(Classifier(Quarters()), images, maps["m"], (targets + 1) % 4, progress=False)
    assert "gives only 0% of the whole images" in texts(replace(many, scores={"m": wrong}))
    holes = many.scores["m"].msi.clone()
    holes[:3] = math.nan
    broken = replace(many.scores["m"], columns={**many.scores["m"].columns, "msi": holes})
    assert "3 of 40 images have no msi" in texts(replace(many, scores={"m": broken}))
    leaking = make(40, maps={"frame": quarter_map(targets, 16)}, leak_donors=4)
    found = [c for c in cautions(leaking) if "leak" in c.text]
    assert found[0].text.startswith("The masks of frame leak")
    assert found[0].details[0].startswith("frame: the masks leak: over images of other classes")


def test_dots_stand_where_the_means_are(content: Content) -> None:
    found = scatter(content)
    for dot in found.dots:
        assert dot.base == content.summaries[dot.name]["base_score"]
    frame = Frame(100, 50, 10, 10, 5, 5, x_low=0, x_high=2, y_low=-1, y_high=1)
    assert (frame.x(1), frame.y(0), frame.y(1)) == (50, 25, 5)
    assert frame.path((0, 1, 2), (0, math.nan, 1)) == "M10 25M90 5"


def test_the_best_worst_and_most_disputed_are_shown(content: Content) -> None:
    def with_msi(*values: float) -> Scores:
        return replace(content.first, columns={"msi": torch.tensor(values)})

    scores = {"a": with_msi(0.1, 0.9, -0.9, 0.5), "b": with_msi(0.1, 0.9, -0.9, -0.5)}
    assert pick_shown(scores, 1) == [1]
    assert pick_shown(scores, 2) == [1, 2]
    assert pick_shown(scores, 3) == [1, 2, 3]
    assert pick_shown(scores, 50) == [0, 1, 2, 3]


def test_steps_count_the_alphas_below() -> None:
    grid = tuple(i / 100 for i in range(101))
    values = torch.rand(50, generator=torch.Generator().manual_seed(0))
    edges = torch.tensor(grid)
    assert steps(values, grid).tolist() == [int((edges < v).sum()) for v in values]


def test_parts_that_do_not_belong_together_are_refused(content: Content, tmp_path: Path) -> None:
    shown = content.shown
    for bad, why in (
        (replace(content, names=["one"]), "names must be one an image"),
        (replace(content, summaries={}), "same methods"),
        (replace(content, shown=replace(shown, rows=[0])), "a row of the scores each"),
        (replace(content, shown=replace(shown, heatmaps={})), "must be of the methods scored"),
        (replace(content, shown=replace(shown, rows=[99] * 8)), "must lie in 0..7"),
    ):
        with pytest.raises(UserError, match=why):
            write_report(tmp_path / "report.html", bad)
    assert not list(tmp_path.iterdir())


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
in_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")


class Tab:
    """A page in a browser, and all that it complained of or asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, path: Path) -> None:
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]")

    def drawn(self) -> tuple[int, int, int]:
        """Image, method and step that the viewer shows, once it is drawn."""
        self.page.wait_for_function(
            "document.getElementById('viewer').dataset.drawn.split(' ')[2]"
            " === document.getElementById('alpha').value"
        )
        image, method, step = self.page.get_attribute("#viewer", "data-drawn").split()
        return int(image), int(method), int(step)

    def pixels(self, view: str) -> np.ndarray:
        script = "view => document.querySelector(`[data-view=${view}] canvas`).toDataURL()"
        return decoded(self.page.evaluate(script, view)).reshape(-1, 4)[:, :3]

    def order(self) -> list[int]:
        script = "[...document.querySelectorAll('#rows > li')].map(row => +row.dataset.image)"
        found: list[int] = self.page.evaluate(script)
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def tab(browser: Any, page: Path) -> Iterator[Tab]:
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, color_scheme="light", reduced_motion="reduce"
    )
    context.set_default_timeout(20_000)
    found = Tab(context.new_page())
    found.open(page)
    yield found
    context.close()
    assert found.complaints == []
    assert [url for url in found.requests if not url.startswith(("data:", "file:"))] == []


def expected_pixels(
    content: Content, image: int, method: str, view: str, alpha: float
) -> np.ndarray:
    heatmap = content.shown.heatmaps[method][image]
    inside = {
        "kept": heatmap > alpha,
        "hidden": (heatmap > 0.5) & (heatmap <= alpha),
        "rest": heatmap <= alpha,
    }[view]
    kept = content.shown.images[image] * inside
    return kept.mul(255).round().to(torch.uint8).permute(1, 2, 0).reshape(-1, 3).numpy()


@in_browser
def test_the_slider_shows_what_the_model_sees(tab: Tab, content: Content) -> None:
    seen = set()
    for step in (50, 70, 20):
        tab.page.locator("#alpha").fill(str(step))
        image, method, _ = tab.drawn()
        name = content.methods[method]
        for view in ("kept", "hidden", "rest"):
            wanted = expected_pixels(content, image, name, view, step / 100)
            assert np.array_equal(tab.pixels(view), wanted), (step, view)
        seen.add(float(tab.page.get_attribute("#marker line", "x1")))
        assert tab.page.inner_text("#alpha-value") == f"α = {step / 100:.2f}"  # noqa: RUF001
    assert len(seen) == 3


@in_browser
def test_the_words_beside_a_mask_are_the_answers_of_the_model(tab: Tab, content: Content) -> None:
    data = curves_of(content, "coarse", slider_grid(content))
    place = content.methods.index("coarse")
    tab.page.locator(f'#image-2 button[data-method="{place}"]').click()
    tab.page.locator("#alpha").fill("30")
    assert tab.drawn() == (2, place, 30)
    target = content.class_name(int(content.first.targets[content.shown.rows[2]]))
    for view in ("kept", "rest"):
        said = tab.page.inner_text(f"#says-{view} .says")
        hit = data[2][f"{view}_hits"][30] == "1"
        assert said.startswith(f"says {target} (" if hit else "says another class")
        value = 100 * data[2][view][30]
        assert float(re.findall(r"([\d.]+)\s%", said)[0]) == pytest.approx(value, abs=0.11)
    assert "below" in tab.page.inner_text("#says-hidden .says")
    share = tab.page.inner_text("#says-kept .share")
    assert float(share.split("\u00a0")[0]) == pytest.approx(100 * data[2]["share"][30], abs=0.051)


@in_browser
def test_keys_move_the_slider_and_choose_a_map(tab: Tab) -> None:
    tab.page.locator("#alpha").focus()
    before = tab.drawn()[2]
    tab.page.keyboard.press("ArrowRight")
    assert tab.drawn()[2] == before + 1
    assert "kept says" in tab.page.get_attribute("#alpha", "aria-valuetext")
    tab.page.locator('#image-1 button[data-method="1"]').focus()
    tab.page.keyboard.press("Enter")
    assert tab.drawn()[:2] == (1, 1)
    assert tab.page.get_attribute('#image-1 button[data-method="1"]', "aria-pressed") == "true"


@in_browser
def test_images_come_in_the_order_asked_for(tab: Tab, content: Content) -> None:
    rows = list(content.shown.rows)
    values = torch.stack([content.scores[method].msi[rows] for method in content.methods])
    values = (values * 1e4).round() / 1e4
    keys = {
        "best": values.mean(0),
        "worst": -values.mean(0),
        "disputed": values.amax(0) - values.amin(0),
        "given": -torch.arange(len(rows)),
    }
    for name, key in keys.items():
        tab.page.locator(f'[data-order="{name}"]').click()
        found = key[tab.order()].double().tolist()
        assert all(a >= b - 1e-9 for a, b in pairwise(found)), name
        assert tab.page.get_attribute(f'[data-order="{name}"]', "aria-pressed") == "true"
        assert tab.drawn()[0] == tab.order()[0]
    tab.page.locator("#judge").select_option("1")
    found = values[1][tab.order()].tolist()
    assert found == sorted(found, reverse=True)


@in_browser
def test_dark_and_light_can_be_chosen(tab: Tab) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = tab.page.evaluate(background)
    tab.page.locator("#theme").click()
    dark = tab.page.evaluate(background)
    assert dark != light
    assert sum(map(int, re.findall(r"\d+", dark))) < 150 < sum(map(int, re.findall(r"\d+", light)))
    for system, kept, wanted in (
        ("light", True, dark),
        ("light", False, light),
        ("dark", False, dark),
    ):
        if not kept:
            tab.page.evaluate("localStorage.clear()")
        tab.page.emulate_media(color_scheme=system)
        tab.page.reload()
        tab.page.wait_for_selector("html[data-ready]")
        assert tab.page.evaluate(background) == wanted


@in_browser
def test_all_columns_and_all_images_are_there_on_demand(tab: Tab) -> None:
    extra = tab.page.locator('td[data-column="fid_plus_pixel"]').first
    assert not extra.is_visible()
    tab.page.locator("label[for=all-columns]").click()
    assert extra.is_visible()
    assert not tab.page.locator("#image-7").is_visible()
    tab.page.locator("#more").click()
    assert tab.page.locator("#image-7").is_visible()


@in_browser
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_sticks_out_of_the_screen(tab: Tab, width: int) -> None:
    tab.page.set_viewport_size({"width": width, "height": 800})
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width


@in_browser
@pytest.mark.parametrize("case", ["one image", "msi alone", "confidence and blur", "only NaN"])
def test_rare_contents_are_shown_too(tab: Tab, tmp_path: Path, case: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "one image": {"n": 1, "maps": {"m": coarse_maps(1, 16, 0)}},
        "msi alone": {"n": 3, "columns": ["msi"]},
        "confidence and blur": {"n": 3, "score": "confidence", "fill": "blur"},
        "only NaN": {"n": 3, "maps": {"m": coarse_maps(3, 16, 0)}},
    }
    content = make(**options[case])
    if case == "only NaN":
        answers = content.first.answers
        nothing = torch.full_like(answers.confidences, math.nan)
        empty = read(replace(answers, hits=nothing, confidences=nothing), content.first.plan)
        content = replace(
            content,
            scores={"m": empty},
            summaries={"m": summarise(empty)},
            standing=compare_values({"m": empty.msi}),
        )
    tab.open(write_report(tmp_path / "rare.html", content))
    assert tab.page.locator(".dot").count() == {"msi alone": 0, "only NaN": 0}.get(
        case, len(content.methods)
    )
    assert tab.drawn()[0] == 0


@in_browser
def test_hostile_names_run_nothing(tab: Tab, tmp_path: Path) -> None:
    names = [f"{HOSTILE}{i}" for i in range(4)]
    content = replace(make(4, names=names), title=HOSTILE, classes=[HOSTILE] * 4)
    tab.open(write_report(tmp_path / "hostile.html", content))
    tab.page.locator('#image-1 button[data-method="1"]').click()
    assert tab.drawn()[0] == 1
    assert tab.page.evaluate("window.hacked") is None
    assert HOSTILE in tab.page.inner_text("#viewer-title")
    assert tab.page.title() == HOSTILE
