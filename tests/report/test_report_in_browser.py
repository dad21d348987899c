"""The report in a real browser."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from browsing import Tab, in_browser, launched, opened, shot
from report_content import HOSTILE, coarse_maps, curves_shown, make
from sufficit.metrics.columns import COLUMNS, METRICS, heading_of
from sufficit.metrics.scores import Scores
from sufficit.perturbation.predictions import NO_CLASS
from sufficit.report import Content, MethodScores, write_report
from sufficit.statistics import compare_values

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def content() -> Content:
    return make()


@pytest.fixture(scope="module")
def page(content: Content, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", content)


class ReportTab(Tab):
    """The report in a tab."""

    def drawn(self) -> tuple[int, int, int]:
        """Image, method and step that the viewer shows, once it is drawn."""
        image, method, step = self.drawn_words()
        return int(image), int(method), int(step)

    def order(self) -> list[int]:
        script = "[...document.querySelectorAll('#rows > li')].map(row => +row.dataset.image)"
        found: list[int] = self.page.evaluate(script)
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture
def tab(browser: Any, page: Path) -> Iterator[ReportTab]:
    with opened(browser, page.as_uri(), ReportTab) as found:
        yield found
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
def test_the_slider_shows_what_the_model_sees(tab: ReportTab, content: Content) -> None:
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
def test_the_words_under_a_mask_are_the_predictions_of_the_model(
    tab: ReportTab, content: Content
) -> None:
    _, data = curves_shown(content, "coarse")
    place = content.methods.index("coarse")
    tab.page.locator(f'#image-2 button[data-method="{place}"]').click()
    target = content.class_name(int(content.first.targets[content.shown.rows[2]]))
    wrong = next(k for k, name in enumerate(data[2]["kept_said"]) if name is not None)
    for step, view in product((wrong, 30), ("kept", "rest")):
        tab.page.locator("#alpha").fill(str(step))
        assert tab.drawn() == (2, place, step)
        said, name = tab.page.inner_text(f"#says-{view} .says"), data[2][f"{view}_said"][step]
        word = target if name is None else content.class_name(name)
        assert said.startswith(f"says {word} (" if name is None else f"says {word} ({target}:")
        value = 100 * data[2][view][step]
        assert float(re.findall(r"([\d.]+)\s%", said)[0]) == pytest.approx(value, abs=0.11)
    assert "below" in tab.page.inner_text("#says-hidden .says")
    share = tab.page.inner_text("#says-kept .share")
    assert float(share.split("\u00a0")[0]) == pytest.approx(100 * data[2]["share"][30], abs=0.051)


@in_browser
def test_keys_move_the_slider_and_choose_a_map(tab: ReportTab) -> None:
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
def test_images_come_in_the_order_asked_for(tab: ReportTab, content: Content) -> None:
    rows = list(content.shown.rows)
    values = torch.stack([content.scores[method]["msi"][rows] for method in content.methods])
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
def test_dark_and_light_can_be_chosen(tab: ReportTab) -> None:
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
def test_all_columns_and_all_images_are_there_on_demand(tab: ReportTab) -> None:
    extra = tab.page.locator('td[data-column="fid_plus_pixel"]').first
    assert not extra.is_visible()
    tab.page.locator("label[for=all-columns]").click()
    assert extra.is_visible()
    assert not tab.page.locator("#image-7").is_visible()
    tab.page.locator("#more").click()
    assert tab.page.locator("#image-7").is_visible()


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_sticks_out_of_the_screen(
    browser: Any, page: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 800}
    with opened(browser, page.as_uri(), ReportTab, viewport=size, color_scheme=scheme) as tab:
        tab.drawn()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        shot(tab, f"report-{scheme}-{width}", tmp_path)
        assert tab.complaints == []


@in_browser
def test_badges_do_not_push_columns_off_a_desktop(tab: ReportTab, tmp_path: Path) -> None:
    maps = {f"{name} on average": coarse_maps(8, 16, seed) for seed, name in enumerate("ab")}
    content = replace(make(maps=maps), class_agnostic=[*maps])
    tab.open(write_report(tmp_path / "wide.html", content).as_uri())
    badges = tab.page.locator("tbody .badge").all_inner_texts()
    assert sorted(badges) == ["class-agnostic", "class-agnostic", "n.s.", "top"]
    tab.page.set_viewport_size({"width": 980, "height": 800})
    needs = "document.querySelector('.scroll').scrollWidth"
    there = "document.querySelector('.scroll').clientWidth"
    assert tab.page.evaluate(needs) <= tab.page.evaluate(there)
    one_line = "e => e.getClientRects().length"
    assert all(name.evaluate(one_line) == 1 for name in tab.page.locator("tbody .name").all())


@in_browser
@pytest.mark.parametrize("case", ["one image", "msi alone", "confidence and blur", "only NaN"])
def test_rare_contents_are_shown_too(tab: ReportTab, tmp_path: Path, case: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "one image": {"n": 1, "maps": {"m": coarse_maps(1, 16, 0)}},
        "msi alone": {"n": 3, "columns": ["msi"]},
        "confidence and blur": {"n": 3, "score": "confidence", "fill": "blur"},
        "only NaN": {"n": 3, "maps": {"m": coarse_maps(3, 16, 0)}},
    }
    content = make(**options[case])
    if case == "only NaN":
        content = without_answers(content)
    tab.open(write_report(tmp_path / "rare.html", content).as_uri())
    assert tab.page.locator("#chart-sizes .named").count() == {"msi alone": 0, "only NaN": 0}.get(
        case, len(content.methods)
    )
    assert tab.drawn()[0] == 0


def without_answers(content: Content) -> Content:
    """As if the model had answered NaN to everything."""
    shown, schedule = content.first.shown, content.first.schedule  # of all images, in their order
    nothing = torch.full_like(shown.confidences, math.nan)
    nobody = torch.full_like(shown.named, NO_CLASS)
    answers = replace(shown, named=nobody, confidences=nothing)
    columns = {name: METRICS[name].formula(answers, schedule) for name in COLUMNS}
    headings = {name: heading_of(name) for name in COLUMNS}
    empty = Scores(answers, columns, headings, schedule, answers.calls)
    assert empty.msi.isnan().all()
    return replace(
        content,
        scores={"m": MethodScores.of(empty, range(content.n))},
        summaries={"m": empty.summary()},
        standing=compare_values({"m": empty.msi}),
    )


@in_browser
def test_hostile_names_run_nothing(tab: ReportTab, tmp_path: Path) -> None:
    names = [f"{HOSTILE}{i}" for i in range(4)]
    content = replace(make(4, names=names), title=HOSTILE, classes=[HOSTILE] * 4)
    tab.open(write_report(tmp_path / "hostile.html", content).as_uri())
    tab.page.locator('#image-1 button[data-method="1"]').click()
    assert tab.drawn()[0] == 1
    assert tab.page.evaluate("window.hacked") is None
    assert HOSTILE in tab.page.inner_text("#viewer-title")
    assert tab.page.title() == HOSTILE
