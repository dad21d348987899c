"""The page in Chromium, with a server in a thread."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image
from torch import nn

from browsing import Tab, in_browser, launched, opened, shot
from report_content import HOSTILE
from sufficit import Classifier, View, evaluate, explain
from sufficit.data.digits import synthetic_digits
from sufficit.data.images import read_image
from sufficit.web import Limits, Service, make_app, open_service, serve
from sufficit.web.server import bind, url

pytestmark = [pytest.mark.browser, in_browser]
METHODS = ["gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam"]


class Serving:
    """A server in a thread of its own, for as long as the block runs."""

    def __init__(self, service: Service, **given: Any) -> None:
        self.listening = bind("127.0.0.1", 0)
        self.address = url(self.listening)
        app = make_app(service, Limits(bytes=500_000, pixels=1_000_000), **given)
        self.thread = threading.Thread(
            target=serve, args=(app, self.listening), kwargs={"ready": self.keep}
        )

    def keep(self, server: uvicorn.Server) -> None:
        self.server = server

    def __enter__(self) -> str:
        self.thread.start()
        started = time.monotonic()
        while not getattr(getattr(self, "server", None), "started", False):
            assert time.monotonic() - started < 10
            time.sleep(0.02)
        return self.address

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        self.listening.close()


@pytest.fixture(scope="module")
def home(service: Service) -> Iterator[str]:
    with Serving(service) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


class PageTab(Tab):
    """The page in a tab."""

    def state(self, wanted: str) -> None:
        self.page.wait_for_selector(f"#found[data-state={wanted}]")

    def upload(self, path: Path) -> None:
        self.page.set_input_files("#file", path)
        self.state("done")

    def drawn(self) -> tuple[str, int]:
        """Method and step that the viewer shows, once it is drawn."""
        method, step = self.drawn_words()
        return method, int(step)

    def msi(self) -> dict[str, float]:
        found = {}
        for button in self.page.locator("#maps button").all():
            value = button.locator("b").inner_text().removeprefix("MSI ").replace("\u2212", "-")
            found[button.get_attribute("data-method")] = float(value)
        return found


@pytest.fixture
def tab(browser: Any, home: str) -> Iterator[PageTab]:
    with opened(browser, home, PageTab) as found:
        yield found
    refused = "Failed to load resource"  # what a browser notes of any answer that is no success
    assert [text for text in found.complaints if refused not in text] == []
    assert [url for url in found.requests if not url.startswith((home, "data:", "blob:"))] == []


def truth(service: Service, digit_file: Path, method: str, target: int) -> tuple[Any, torch.Tensor]:
    """Scores and heatmap as the package gives them."""
    images = read_image(digit_file, service.classifier.view)[None]
    goal = torch.tensor([target])
    heatmaps = explain(service.classifier, images, goal, method=method)
    return evaluate(service.classifier, images, heatmaps, goal, value_step=0.05), heatmaps[0]


def test_an_upload_gives_prediction_overlays_and_scores(
    tab: PageTab, service: Service, digit_file: Path
) -> None:
    tab.upload(digit_file)
    assert tab.page.inner_text("#found-title").startswith("Prediction: 5 (")
    assert tab.page.locator("#likeliest li").count() == 5
    values = tab.msi()
    assert list(values) == METHODS
    for method, value in values.items():
        scores, _ = truth(service, digit_file, method, 5)
        assert value == pytest.approx(scores.msi.item(), abs=0.00501), method
        told = tab.page.locator(f'#maps [data-method="{method}"] small').inner_text()
        base, penalty = (float(part.replace("\u2212", "-")) for part in told.split(" \u2212 "))
        assert base == pytest.approx(scores.base_score.item(), abs=0.00501)
        assert penalty == pytest.approx(scores.mask_penalty.item(), abs=0.00501)
    best = tab.page.locator("#maps .top-one").first.get_attribute("data-method")
    assert values[best] == max(values.values())
    assert "curve step 0.05" in tab.page.inner_text("#status")
    colours = "c => new Set(c.getContext('2d').getImageData(0, 0, 64, 64).data).size"
    assert all(c.evaluate(colours) > 20 for c in tab.page.locator("#maps canvas").all())


def test_the_slider_shows_the_masked_images_and_the_predictions(
    tab: PageTab, service: Service, digit_file: Path
) -> None:
    tab.upload(digit_file)
    tab.page.locator('#maps [data-method="kpca-cam"]').click()
    scores, heatmap = truth(service, digit_file, "kpca-cam", 5)
    image = read_image(digit_file, service.classifier.view)
    curves, places, words = scores.curves(), set(), []
    for step in (10, 16, 4):
        tab.page.locator("#alpha").fill(str(step))
        assert tab.drawn() == ("kpca-cam", step)
        alpha = step / 20
        for view, inside in (
            ("kept", heatmap > alpha),
            ("hidden", (heatmap > 0.5) & (heatmap <= alpha)),
            ("rest", heatmap <= alpha),
        ):
            wanted = (image * inside).mul(255).round().byte().permute(1, 2, 0).reshape(-1, 3)
            assert np.array_equal(tab.pixels(view), wanted.numpy()), (step, view)
        for view, name in (("kept", "insertion_pixel"), ("rest", "deletion_pixel")):
            said = tab.page.inner_text(f"#says-{view} .says")
            kept = heatmap > alpha if view == "kept" else heatmap <= alpha
            named = int(service.classifier((image * kept)[None]).argmax())
            assert said.startswith("says 5 (" if named == 5 else f"says {named} (5:")
            words.append(named)
            value = float(re.findall(r"([\d.]+)\s%", said)[0])
            assert value == pytest.approx(100 * curves[name].confidence[0][step].item(), abs=0.11)
        places.add(tab.page.get_attribute("#marker line", "x1"))
        heights = tab.page.locator("#marker circle.kept").get_attribute("cy")
        assert float(heights) > 0
    assert len(places) == 3
    assert 5 in words
    assert {*words} > {5}, "another class is named somewhere"
    tab.page.locator("#to-start").click()
    assert tab.drawn() == ("kpca-cam", 10)


@pytest.mark.slow
def test_changed_settings_take_effect_at_once(
    tab: PageTab, service: Service, digit_file: Path
) -> None:
    tab.upload(digit_file)
    for box in METHODS[1:]:
        mark = " (a)" if box == "kpca-cam" else ""  # class-agnostic
        tab.page.locator(f"label:text-is('{box}{mark}')").click()
    tab.page.fill("#target", "3")
    tab.page.dispatch_event("#target", "change")
    tab.page.wait_for_function("() => document.querySelectorAll('#maps button').length === 1")
    tab.state("done")
    scores, _ = truth(service, digit_file, "gradcam", 3)
    assert tab.msi() == {"gradcam": pytest.approx(scores.msi.item(), abs=0.00501)}
    assert tab.page.inner_text("#likeliest .wanted .name") == "3, explained"
    tab.page.fill("#target", "eleven")
    tab.page.dispatch_event("#target", "change")
    tab.page.wait_for_selector("#problem:not([hidden])")
    assert "Unknown class 'eleven'" in tab.page.inner_text("#problem")
    tab.page.fill("#target", "")
    tab.page.fill("#alpha_min", "0.7")
    tab.page.dispatch_event("#alpha_min", "change")
    tab.page.wait_for_function(
        "() => document.getElementById('to-start').textContent.includes('0.70')"
    )
    assert not tab.page.is_visible("#problem")
    tab.page.locator("label:text-is('gradcam')").click()
    tab.page.wait_for_selector("#problem:not([hidden])")
    assert tab.page.inner_text("#problem") == "Choose at least one method."


def test_bad_files_get_a_message(tab: PageTab, digit_file: Path, tmp_path: Path) -> None:
    files = {
        "notes.png": (b"no image at all", "The file is not an image"),
        "cut.png": (digit_file.read_bytes()[:3000], "corrupt or cut off"),
        "empty.png": (b"", "The file is empty"),
        "large.png": (bytes(600_000), "too large, the limit is 0.5 MB"),
    }
    for name, (content, sentence) in files.items():
        (tmp_path / name).write_bytes(content)
        tab.page.set_input_files("#file", tmp_path / name)
        tab.page.wait_for_function(
            "text => document.getElementById('problem').textContent.includes(text)", arg=sentence
        )
        assert tab.page.is_visible("#problem")
    tab.upload(digit_file)
    assert not tab.page.is_visible("#problem")


def test_images_can_be_dropped_and_pasted(tab: PageTab, digit_file: Path) -> None:
    content = list(digit_file.read_bytes())
    script = """([content, kind]) => {
      const data = new DataTransfer();
      data.items.add(new File([new Uint8Array(content)], "five.png", { type: "image/png" }));
      const options = { bubbles: true, cancelable: true };
      document.body.dispatchEvent(kind === "drop"
        ? new DragEvent("drop", { ...options, dataTransfer: data })
        : new ClipboardEvent("paste", { ...options, clipboardData: data }));
    }"""
    for kind, title in (("drop", "five.png"), ("paste", "The pasted image")):
        tab.page.evaluate(script, [content, kind])
        tab.page.wait_for_function(
            "text => document.getElementById('viewer-title').textContent.startsWith(text)",
            arg=title,
        )
        tab.state("done")
        assert len(tab.msi()) == 5


def test_the_page_works_with_the_keyboard_alone(tab: PageTab) -> None:
    keys, focused = tab.page.keyboard, "document.activeElement.id"
    ring = "getComputedStyle(document.activeElement).outlineStyle"
    reached = []
    for _ in range(30):
        keys.press("Tab")
        reached.append(tab.page.evaluate(focused))
        if reached[-1] == "example":
            break
    assert "file" in reached
    assert tab.page.evaluate(ring) == "solid"
    keys.press("Enter")
    tab.state("done")
    while tab.page.evaluate("document.activeElement.dataset.method") != "layercam":
        keys.press("Tab")
        reached.append(tab.page.evaluate(focused))
        assert len(reached) < 60
    assert {"method-0", "target", "alpha_min", "fill", "score", "value_step"} <= set(reached)
    keys.press("Enter")
    assert tab.drawn() == ("layercam", 10)
    while tab.page.evaluate(focused) != "alpha":
        keys.press("Tab")
    keys.press("ArrowRight")
    assert tab.drawn() == ("layercam", 11)
    spoken = tab.page.get_attribute("#alpha", "aria-valuetext")
    assert spoken.startswith("alpha 0.55: kept says")


def test_everything_has_a_name_for_screen_readers(tab: PageTab, digit_file: Path) -> None:
    tab.upload(digit_file)
    unnamed = tab.page.evaluate(
        """[...document.querySelectorAll("input, select, button, canvas:not([aria-hidden]), img")]
          .filter((e) => !(e.labels?.length || e.ariaLabel || e.getAttribute("aria-labelledby")
            || e.textContent.trim() || e.alt)).map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    assert tab.page.get_attribute("#status", "aria-live") == "polite"
    assert tab.page.get_attribute("#problem", "role") == "alert"
    label = tab.page.locator('#maps [data-method="gradcam"]').get_attribute("aria-label")
    assert re.fullmatch(r"gradcam, MSI .\d\.\d\d, base score .*, mask penalty .*", label)


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (320, "dark")]
)
def test_the_page_fits_wide_and_narrow_screens_in_light_and_dark(
    browser: Any, home: str, digit_file: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 900}
    with opened(browser, home, PageTab, viewport=size, color_scheme=scheme) as tab:
        tab.upload(digit_file)
        tab.drawn()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        shade = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", shade))) < 150) == (scheme == "dark")
        shot(tab, f"page-{scheme}-{width}", tmp_path)
        assert tab.complaints == []


def test_hostile_names_run_nothing(browser: Any, tmp_path: Path, digit_file: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    torch.nn.init.constant_(model[0].weight, 0.1)
    classifier = Classifier(model, "0", classes=[HOSTILE, "good"], view=View(crop=(16, 16)))
    path = tmp_path / ('<img src=x onerror="window.hacked=3">.png'.replace("/", ""))
    path.write_bytes(digit_file.read_bytes())
    service = open_service(classifier, HOSTILE, value_step=0.1)
    with Serving(service) as home, opened(browser, home, PageTab) as tab:
        tab.page.fill("#target", HOSTILE)
        tab.upload(path)
        assert tab.page.evaluate("window.hacked") is None
        assert HOSTILE in tab.page.inner_text("#likeliest")
        assert "onerror" in tab.page.inner_text("#viewer-title")
        assert tab.complaints == []


def test_the_docs_of_the_endpoints_need_no_network(tab: PageTab, home: str) -> None:
    tab.page.goto(f"{home}/docs")
    assert "POST /api/score" in tab.page.inner_text("main")
    tab.page.set_viewport_size({"width": 390, "height": 800})
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390


def saved(tab: PageTab, button: str) -> tuple[str, Path]:
    """The name and the content of what a button downloads."""
    with tab.page.expect_download() as waiting:
        tab.page.locator(button).click()
    return waiting.value.suggested_filename, Path(waiting.value.path())


def test_map_mask_and_numbers_can_be_downloaded(
    tab: PageTab, service: Service, digit_file: Path
) -> None:
    tab.upload(digit_file)
    tab.page.locator('#maps [data-method="kpca-cam"]').click()
    tab.page.locator("#alpha").fill("7")
    assert tab.drawn() == ("kpca-cam", 7)
    scores, heatmap = truth(service, digit_file, "kpca-cam", 5)
    name, path = saved(tab, "#get-map")
    assert name == "five-kpca-cam-map.png"
    with Image.open(path) as found:
        assert found.mode == "L"
        assert np.array_equal(np.asarray(found), (heatmap * 255).round().numpy())
    name, path = saved(tab, "#get-mask")
    assert name == "five-kpca-cam-mask-0.35.png"
    with Image.open(path) as found:
        mask = np.asarray(found.convert("L"))
        assert np.array_equal(mask, (heatmap > 0.35).numpy() * np.uint8(255))
    name, path = saved(tab, "#get-numbers")
    assert name == "five-kpca-cam-numbers.json"
    told = json.loads(path.read_text())
    assert told["scores"]["msi"] == pytest.approx(scores.msi.item())
    given = {"image": "five.png", "method": "kpca-cam", "alpha": 0.35, "model": "sufficit:digits"}
    assert told.items() >= given.items()
    assert told["prediction"][0]["name"] == "5"
    assert not tab.page.is_visible("#get-link"), "a link cannot bring back an upload"


def test_the_region_is_fitted_when_it_is_wanted(
    tab: PageTab, service: Service, digit_file: Path
) -> None:
    tab.upload(digit_file)
    tab.page.locator('#maps [data-method="kpca-cam"]').click()
    images = read_image(digit_file, service.classifier.view)[None]
    target = torch.tensor([5])
    (wanted,) = explain(service.classifier, images, target, method="kpca-cam", fit=True)
    asked = len([one for one in tab.requests if one.endswith("/api/region")])
    assert asked == 0, "only on request"
    tab.page.locator("#by-size").click()
    tab.page.wait_for_selector("#to-fitted:not([hidden])")
    assert tab.drawn() == ("kpca-cam", round(1000 * wanted.share))
    assert tab.page.inner_text("#certificate").replace("\u00a0", "") == wanted.sentence
    assert tab.page.locator("#told tr").count() == 1 + len(wanted.fills)
    pixels = images[0].mul(255).round().byte().permute(1, 2, 0).reshape(-1, 3).numpy()
    for size in (215, 5, 990):
        tab.page.locator("#size").fill(str(size))
        assert tab.drawn() == ("kpca-cam", size)
        cut = explain(service.classifier, images, target, method="kpca-cam", size=size / 1000)
        region = (cut[0] >= 0.5).flatten().numpy()
        assert np.array_equal(tab.pixels("alone"), np.where(region[:, None], pixels, 128)), size


def test_the_model_can_be_asked_about_any_size(
    tab: PageTab, service: Service, digit_file: Path
) -> None:
    tab.upload(digit_file)
    tab.page.locator('#maps [data-method="gradcam"]').click()
    tab.page.locator("#by-size").click()
    tab.page.wait_for_selector("#to-fitted:not([hidden])")
    tab.page.locator("#size").fill("215")
    assert tab.page.inner_text("#untold") == "The model was not asked about this size."
    tab.page.locator("#ask-size").click()
    tab.page.wait_for_selector("#told td")
    assert tab.page.is_hidden("#ask-size")
    assert tab.drawn() == ("gradcam", 215), "the slider stays where it is"
    images = read_image(digit_file, service.classifier.view)[None]
    region = explain(service.classifier, images, method="gradcam", size=0.215) >= 0.5
    probabilities = service.classifier(images * region[:, None]).softmax(1)[0]
    cells = [cell.inner_text() for cell in tab.page.locator("#told tr").nth(1).locator("td").all()]
    assert f"{100 * probabilities[5]:.1f}\u00a0%" in cells[0]
    name, path = saved(tab, "#get-mask")
    assert name == "five-gradcam-mask-size-0.215.png"
    with Image.open(path) as found:
        assert np.array_equal(np.asarray(found.convert("L")) == 255, region[0].numpy())
    _, path = saved(tab, "#get-numbers")
    told = json.loads(path.read_text())["region"]
    assert 215 in [share for share, *_ in told["sizes"]]
    assert "enough" in told["sentence"]


@pytest.mark.slow
def test_another_image_is_cut_by_size_too(
    tab: PageTab, digit_file: Path, encode: Callable[..., bytes], tmp_path: Path
) -> None:
    tab.upload(digit_file)
    tab.page.locator("#by-size").click()
    tab.page.wait_for_selector("#to-fitted:not([hidden])")
    (tmp_path / "other.png").write_bytes(encode(synthetic_digits(1, seed=7).images[0]))
    tab.upload(tmp_path / "other.png")
    tab.page.wait_for_selector("#to-fitted:not([hidden])")
    assert "enough" in tab.page.inner_text("#certificate")
    assert tab.page.inner_text("#viewer-title").startswith("other.png")
    tab.page.fill("#target", "3")
    tab.page.dispatch_event("#target", "change")
    tab.page.wait_for_function(
        "() => document.getElementById('certificate').textContent.includes('not 3')"
    )


def test_the_region_works_with_the_keyboard_on_a_phone(browser: Any, home: str) -> None:
    size = {"width": 400, "height": 800}
    with opened(browser, home, PageTab, viewport=size) as tab:
        keys, focused = tab.page.keyboard, "document.activeElement.id"
        tab.page.focus("#example")
        keys.press("Enter")
        tab.state("done")
        for wanted in ("by-size", "size"):
            while tab.page.evaluate(focused) != wanted:
                keys.press("Tab")
            if wanted == "by-size":
                keys.press("Enter")
                tab.page.wait_for_selector("#to-fitted:not([hidden])")
        method, fitted = tab.drawn()
        keys.press("ArrowRight")
        assert tab.drawn() == (method, fitted + 5)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 400
        assert tab.complaints == []


def test_it_opens_on_the_best_method(tab: PageTab, digit_file: Path) -> None:
    tab.upload(digit_file)
    values = tab.msi()
    best = max(values, key=lambda name: values[name])
    assert best != METHODS[0], "or the test says nothing"
    assert tab.drawn() == (best, 10)
    pressed = tab.page.locator('#maps [aria-pressed="true"]').get_attribute("data-method")
    assert pressed == best
    tab.page.locator('#maps [data-method="finer-cam"]').click()
    tab.page.fill("#alpha_min", "0.6")
    tab.page.dispatch_event("#alpha_min", "change")
    tab.page.wait_for_function(
        "() => document.getElementById('to-start').textContent.includes('0.60')"
    )
    tab.state("done")
    assert tab.drawn()[0] == "finer-cam", "what the user chose stays"


@pytest.mark.slow
def test_a_link_restores_an_example_its_method_and_threshold(
    browser: Any, service: Service, digit: bytes
) -> None:
    examples = [("first.png", digit), ("a second, with & and #.png", digit)]
    with Serving(service, examples=examples) as home:
        with opened(browser, home, PageTab) as tab:
            tab.page.locator("[data-example='1']").click()
            tab.state("done")
            tab.page.locator("label:text-is('layercam')").click()
            tab.page.fill("#target", "3")
            tab.page.dispatch_event("#target", "change")
            tab.page.wait_for_function(
                "() => document.querySelectorAll('#maps button').length === 4"
            )
            tab.state("done")
            tab.page.locator('#maps [data-method="gradcam++"]').click()
            tab.page.locator("#alpha").fill("13")
            assert tab.drawn() == ("gradcam++", 13)
            values = tab.msi()
            tab.page.locator("#get-link").click()
            tab.page.wait_for_function("() => location.hash.length > 1")
            link = tab.page.url
            assert tab.complaints == []
        with opened(browser, link, PageTab) as tab:
            tab.state("done")
            assert tab.drawn() == ("gradcam++", 13)
            assert tab.msi() == values
            assert tab.page.input_value("#target") == "3"
            assert tab.page.inner_text("#viewer-title").startswith(examples[1][0])
        with opened(browser, f"{home}/#example=7&method=gradcam", PageTab) as tab:
            assert "does not have" in tab.page.inner_text("#problem")
            assert tab.complaints == []
        with opened(browser, f"{link}&size=0.4", PageTab) as tab:
            tab.page.wait_for_selector("#to-fitted:not([hidden])")
            assert tab.drawn() == ("gradcam++", 400)
            tab.page.locator("#size").fill("120")
            tab.page.locator("#get-link").click()
            tab.page.wait_for_function("() => location.hash.includes('size=0.12')")
            assert tab.complaints == []


def test_terms_are_explained_one_hover_away(tab: PageTab, digit_file: Path) -> None:
    tab.upload(digit_file)
    shown = "e => getComputedStyle(e, '::after').content"
    for place, sentence in (("#found", "does what the heatmap marks suffice"), ("form", "marked")):
        term = tab.page.locator(f"{place} .tip").first
        assert term.evaluate(shown) == "none"
        term.hover()
        assert sentence in term.evaluate(shown)
        tab.page.mouse.move(1, 1)
        assert term.evaluate(shown) == "none"
        term.focus()
        assert sentence in term.evaluate(shown), "with the keyboard too"
        tab.page.evaluate("document.activeElement.blur()")


def test_class_agnostic_methods_are_marked_one_hover_away(tab: PageTab, digit_file: Path) -> None:
    tab.upload(digit_file)
    said, page = "class-agnostic: the same map for every class", tab.page
    for method, mark in (("kpca-cam", " (a)"), ("gradcam", "")):
        thumb = page.locator(f'#maps [data-method="{method}"]')
        assert thumb.locator("span").inner_text() == method + mark
        assert thumb.get_attribute("title") == method + (f", {said}" if mark else "")
        assert (said in (thumb.get_attribute("aria-label") or "")) == bool(mark)
        label = page.locator(f'.tick:has([value="{method}"]) label')
        assert label.inner_text() == method + mark
        assert (said in (label.get_attribute("title") or "")) == bool(mark)


@pytest.mark.slow
def test_a_bad_upload_greys_the_old_result_and_says_so_at_the_upload(
    tab: PageTab, digit_file: Path, tmp_path: Path
) -> None:
    tab.upload(digit_file)
    for content in (b"", b"no image"):
        (tmp_path / "bad.png").write_bytes(content)
        tab.page.set_input_files("#file", tmp_path / "bad.png")
        tab.page.wait_for_selector("#drop #problem:not([hidden])")
        tab.state("failed")
        assert "the result of five.png" in tab.page.inner_text("#stale")
        opacity = "getComputedStyle(document.getElementById('viewer')).opacity"
        tab.page.wait_for_function(f"() => Number({opacity}) < 0.5")
        place = tab.page.locator("#problem").bounding_box()
        assert 0 <= place["y"] < 900, "it is on the screen"
        tab.upload(digit_file)
        tab.page.wait_for_function(f"() => Number({opacity}) === 1")
        assert not tab.page.is_visible("#stale")


RED = [0, 31, 85, 136, 186, 227, 249, 249, 252]  # of the colours of a heatmap


@pytest.mark.slow
def test_colours_have_no_bands_at_coarse_steps(
    tab: PageTab, service: Service, digit_file: Path
) -> None:
    tab.upload(digit_file)
    tab.page.select_option("#value_step", "0.1")
    tab.page.wait_for_function("() => document.getElementById('alpha').max === '10'")
    tab.state("done")
    _, heatmap = truth(service, digit_file, "kpca-cam", 5)
    grey = read_image(digit_file, service.classifier.view).mul(255).mean(0).numpy()
    weight = 0.7 * (heatmap * 255).round().numpy() / 255
    script = "c => [...c.getContext('2d').getImageData(0, 0, 64, 64).data]"
    seen = tab.page.locator('#maps [data-method="kpca-cam"] canvas').evaluate(script)
    red = np.reshape(seen, (64, 64, 4))[..., 0]
    tint = np.interp(weight / 0.7, np.linspace(0, 1, 9), RED)
    assert np.abs(red - (grey * (1 - weight) + tint * weight)).max() <= 1


def test_long_names_fit_a_phone(browser: Any, tmp_path: Path, digit: bytes) -> None:
    long = "x" * 180
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    classifier = Classifier(model, "0", classes=[long, f"{long}y"], view=View(crop=(16, 16)))
    own = {long: lambda _, images, targets: images.mean(1), "gradcam": "gradcam"}
    service = open_service(classifier, long, own, value_step=0.1)
    path = tmp_path / f"{long}.png"
    path.write_bytes(digit)
    size = {"width": 390, "height": 800}
    with (
        Serving(service, title=f"{long} title", examples=[(long, digit), (long, digit)]) as home,
        opened(browser, home, PageTab, viewport=size) as tab,
    ):
        tab.upload(path)
        assert tab.page.title() == f"{long} title"
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
        shot(tab, "page-long-names", tmp_path)
        assert tab.complaints == []
