"""The viewer cut by size: what it is given, and what it shows in a browser."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from browsing import Tab, in_browser, launched, opened, shot
from report_content import Quarters, decoded, make, quarters
from sufficit import Classifier, Regions, explain
from sufficit.perturbation.heatmaps import normalize
from sufficit.report import Content, write_report
from sufficit.report.viewer_data import CUTS, encode_orders, region_data, size_data
from sufficit.sources.certificate import Around, Certificate, Said, Size

pytestmark = pytest.mark.browser
FITTED = "bright+fit"


def bright(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    return normalize(images.mean(1))


@pytest.fixture(scope="module")
def regions() -> Regions:
    images, targets = quarters(8, 16)
    names = ["north-west", "north-east", "south-west", "south-east"]
    return explain(Classifier(Quarters(), classes=names), images, targets, method=bright, fit=True)


@pytest.fixture(scope="module")
def content(regions: Regions) -> Content:
    images, _ = quarters(8, 16)
    found = make(maps={"bright": normalize(images.mean(1)), FITTED: regions.heatmaps})
    certificates = {FITTED: [regions[row] for row in found.shown.rows]}
    return replace(found, shown=replace(found.shown, certificates=certificates))


def first_pixels(order: Tensor, thousandths: int) -> np.ndarray:
    """The region of a size, sorted pixel by pixel: bool [pixels]."""
    values = order.flatten().tolist()
    ranked = sorted(range(len(values)), key=lambda pixel: (-values[pixel], pixel))
    marked = np.zeros(len(values), bool)
    marked[ranked[: int(thousandths * len(values) / 1000 + 0.5)]] = True
    return marked


def test_every_position_of_the_slider_cuts_an_order_at_the_exact_place() -> None:
    order = torch.rand(1, 13, 17, generator=torch.Generator().manual_seed(0))
    (address,) = encode_orders(order)
    shades = decoded(address).astype(int).flatten()
    for position in range(1, CUTS + 1):
        wanted = first_pixels(order, position * 1000 // CUTS)
        assert np.array_equal(shades > 255 - position, wanted), position


def test_a_large_order_is_averaged_and_ranked_again() -> None:
    order = torch.zeros(1, 300, 200)
    order[:, :150] = 1
    order[:, 3, 7] = -1  # which an average hides
    shades = decoded(encode_orders(order, side=60)[0])
    assert shades.shape == (60, 40)
    assert (shades[:30] > 255 - CUTS // 2).all()
    assert (shades[30:] <= 255 - CUTS // 2).all()


def said(name: str, confidence: float) -> Said:
    return Said(name, name == "cat", confidence)


def test_the_viewer_gets_what_the_certificate_says() -> None:
    black = Around("black", True, said("cat", 0.9), said("dog", 0.12345678), said("sofa", 0.01))
    mean = Around("mean", False, said("dog", 0.3), said("cat", 0.7), said("sofa", 0.02))
    sizes = (
        Size(0.125, {"black": said("dog", 0.25)}, {}),
        Size(0.25, {"black": said("cat", 0.9)}, {"black": said("dog", 0.12345678)}),
    )
    found = Certificate(
        target="cat", share=0.25, enough=True, whole=said("cat", 0.99), fills=(black, mean),
        passes=9, sizes=sizes,
    )  # fmt: skip
    assert region_data(found, "data:") == {
        "order": "data:",
        "share": 250,
        "sentence": found.sentence,
        "fills": ["black", "mean"],
        "sizes": [
            [125, [["dog", 0.25], None], [None, None]],
            [250, [0.9, ["dog", 0.3]], [["dog", 0.1235], 0.7]],
            [1000, [0.99, 0.99], [["sofa", 0.01], ["sofa", 0.02]]],
        ],
    }
    nothing = Size(0.5, {"black": Said("nothing", False, float("nan"))}, {})
    assert size_data(nothing, ["black"]) == [500, [["nothing", None]], [None]]


class RegionTab(Tab):
    """The report in a tab."""

    def choose(self, image: int, method: int) -> None:
        self.page.locator(f'#image-{image} button[data-method="{method}"]').click()

    def size(self) -> int:
        """The size that is drawn, in thousandths."""
        return int(self.drawn_words()[2])

    def told(self) -> list[list[str]]:
        """The table of answers, without its head."""
        rows = self.page.locator("#told tr").all()[1:]
        return [[cell.inner_text() for cell in row.locator("th, td").all()] for row in rows]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def page(content: Content, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", content)


@pytest.fixture
def tab(browser: Any, page: Path) -> Iterator[RegionTab]:
    with opened(browser, page.as_uri(), RegionTab) as found:
        yield found
    assert found.complaints == []
    assert [url for url in found.requests if not url.startswith(("data:", "file:"))] == []


def percent(confidence: float) -> str:
    return "< 0.1\u00a0%" if 0 < confidence < 0.001 else f"{100 * confidence:.1f}\u00a0%"


def in_words(one: Said, target: str) -> str:
    value = percent(round(one.confidence, 4))
    return f"{target} ({value})" if one.is_target else f"{one.name} ({target}: {value})"


@in_browser
def test_a_fitted_map_opens_at_its_size_with_its_certificate(
    tab: RegionTab, content: Content
) -> None:
    method = content.methods.index(FITTED)
    for image in (0, 3):
        certificate = content.shown.certificates[FITTED][image]
        tab.choose(image, method)
        assert tab.size() == round(1000 * certificate.share)
        sentence = tab.page.inner_text("#certificate").replace("\u00a0", "")
        assert sentence == certificate.sentence
        target = certificate.target
        assert tab.told() == [
            [one.fill, in_words(one.region, target), in_words(one.rest, target)]
            for one in certificate.fills
        ]
        assert tab.page.is_hidden("#alpha")


@in_browser
def test_the_slider_shows_the_first_pixels_of_the_order_on_grey(
    tab: RegionTab, content: Content
) -> None:
    method = content.methods.index(FITTED)
    tab.choose(2, method)
    fitted = tab.size()
    order = content.shown.heatmaps[FITTED][2]
    image = content.shown.images[2].mul(255).round().byte().permute(1, 2, 0).reshape(-1, 3).numpy()
    for size in (fitted, 5, 215, 500, 995, 1000):
        tab.page.locator("#size").fill(str(size))
        assert tab.size() == size
        region = first_pixels(order, size)
        assert np.array_equal(tab.pixels("alone"), np.where(region[:, None], image, 128)), size
        assert tab.page.inner_text("#says-outline .share") == f"{size / 10:g}\u00a0% of the pixels"
    tab.page.locator("#size").fill("215")
    assert tab.told() == []
    assert tab.page.inner_text("#untold") == "The model was not asked about this size."
    assert tab.page.is_hidden("#ask-size"), "a report has no model"
    tab.page.locator("#to-fitted").click()
    assert tab.size() == fitted


@in_browser
def test_the_outline_runs_between_the_region_and_the_rest(tab: RegionTab, content: Content) -> None:
    tab.choose(1, content.methods.index(FITTED))
    tab.page.locator("#size").fill("250")
    assert tab.size() == 250
    region = first_pixels(content.shown.heatmaps[FITTED][1], 250).reshape(16, 16)
    side = 448
    script = "() => document.querySelector('[data-view=outline] canvas').toDataURL()"
    drawn = decoded(tab.page.evaluate(script)).reshape(side, side, 4)[..., :3].astype(int)
    is_line = (np.abs(drawn - [53, 224, 207]) < 12).all(-1)
    scale = side // 16
    rows, columns = np.nonzero(region[:, 1:] != region[:, :-1])
    assert len(rows) > 0
    for row, column in zip(rows, columns, strict=True):
        assert is_line[row * scale + scale // 2, (column + 1) * scale], (row, column)
    middles = is_line[scale // 2 :: scale, scale // 2 :: scale]
    assert not middles.any(), "no line runs through a pixel"


@in_browser
def test_any_other_map_is_cut_by_its_values_and_claims_no_answer(
    tab: RegionTab, content: Content
) -> None:
    tab.choose(0, content.methods.index("bright"))
    assert tab.page.is_visible("#alpha")
    tab.page.locator("#by-size").click()
    tab.page.locator("#size").fill("300")
    assert tab.size() == 300
    grid = torch.linspace(0, 1, 101)
    levels = torch.bucketize(content.shown.heatmaps["bright"][0], grid)
    region = first_pixels(levels, 300)
    image = content.shown.images[0].mul(255).round().byte().permute(1, 2, 0).reshape(-1, 3).numpy()
    assert np.array_equal(tab.pixels("alone"), np.where(region[:, None], image, 128))
    assert tab.told() == []
    assert "The model was not asked" in tab.page.inner_text("#untold")
    assert tab.page.inner_text("#certificate") == ""
    tab.choose(0, content.methods.index(FITTED))
    tab.page.locator("#by-threshold").click()
    assert tab.page.is_visible("#alpha")
    tab.choose(3, content.methods.index(FITTED))
    assert tab.page.is_visible("#alpha"), "what the reader chose stays"


@in_browser
def test_the_size_moves_with_the_keyboard(tab: RegionTab, content: Content) -> None:
    tab.choose(0, content.methods.index(FITTED))
    fitted = tab.size()
    for _ in range(5):
        tab.page.keyboard.press("Tab")
        focused = tab.page.evaluate("document.activeElement.id")
        if focused == "size":
            break
    assert focused == "size"
    tab.page.keyboard.press("ArrowLeft")
    assert tab.size() == fitted - 5
    tab.page.keyboard.press("Home")
    assert tab.size() == 5
    spoken = tab.page.get_attribute("#size", "aria-valuetext")
    assert spoken == "0.5\u00a0% of the image. The model was not asked about this size."


@in_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (400, "light"), (320, "dark")])
def test_the_region_fits_wide_and_narrow_screens(
    browser: Any, content: Content, page: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 900}
    with opened(browser, page.as_uri(), RegionTab, viewport=size, color_scheme=scheme) as tab:
        tab.choose(0, content.methods.index(FITTED))
        tab.size()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        shot(tab, f"region-{scheme}-{width}", tmp_path)
        assert tab.complaints == []
