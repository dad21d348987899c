"""Heatmap sources by word: names, adapters, Python functions, files, and NAME=SOURCE."""

from pathlib import Path

import pytest
import torch

from small_models import random_images, small
from sufficit import Classifier, Lax, UserError, explain, explain_all, sanity_check
from sufficit.explainers.explanation import draw_all
from sufficit.explainers.words import (
    methods_from,
    source_from,
    sources_from,
)

OWN = """
import torch
SIDE = 3

def brightness(classifier, images, targets):
    assert 0 <= images.min() <= images.max() <= 1 and images.device == classifier.device
    return images.mean(1)

def too_bright(classifier, images, targets):
    return images.mean(1) + 1

def broken(classifier, images, targets):
    return images.mean(1) / {}["size"]

def short(images, targets):
    return images.mean(1)

def hungry(classifier, images, targets):
    if len(images) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return images.mean(1)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own_methods.py").write_text(OWN)
    return f"python:{tmp_path}/own_methods.py"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    Lax(6, widths=(3,)).save_pretrained(tmp_path / "birds-lax")
    return tmp_path / "birds-lax"


def test_a_word_is_a_name_an_adapter_a_function_or_a_file(own: str, adapter: Path) -> None:
    found = sources_from(f" gradcam ,{adapter}, {own}:brightness,, runs/old.maps.npz")
    assert list(found) == ["gradcam", "birds-lax", "brightness", "old.maps"]
    assert found["gradcam"] == "gradcam"
    assert isinstance(found["birds-lax"], Lax)
    assert found["old.maps"] == Path("runs/old.maps.npz")
    assert sources_from(["center", "old.safetensors"]) == {
        "center": "center",
        "old": Path("old.safetensors"),
    }
    assert sources_from("") == {}
    assert source_from("sufficit:digits")[0] == "lax"


def test_a_name_before_an_equals_sign_is_the_sources_name(own: str, adapter: Path) -> None:
    words = [f"mine={own}:brightness", f"one={adapter}", f"two={adapter}", "cam=gradcam"]
    found = sources_from([*words, "gradcam", "old=maps.npz"])
    assert list(found) == ["mine", "one", "two", "cam", "gradcam", "old"]
    assert found["cam"] == found["gradcam"] == "gradcam"


def test_a_word_with_options_has_a_name_of_its_own() -> None:
    found = sources_from("finer-cam:nearest=2, mine=finer-cam:5, finer-cam")
    assert found == {
        "finer-cam-nearest=2": "finer-cam:nearest=2",
        "mine": "finer-cam:5",
        "finer-cam": "finer-cam",
    }


def test_an_equals_sign_in_a_path_is_part_of_the_path(tmp_path: Path, monkeypatch) -> None:
    Lax(6, widths=(3,)).save_pretrained(tmp_path / "lr=0.1")
    assert source_from(str(tmp_path / "lr=0.1"))[0] == "lr=0.1"
    monkeypatch.chdir(tmp_path)
    assert source_from("lr=0.1")[0] == "lr=0.1"
    assert source_from("mine=lr=0.1")[0] == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("finer-cam:near=3", r"Unknown option of finer-cam 'near'. Did you mean 'nearest'"),
        ("a=finer-cam:nearest=0", "nearest of finer-cam must be 1 or more"),
        ("grad-cam", r"Unknown method 'grad-cam'. Did you mean 'gradcam'\?"),
        ("nowhere/adapter", "no LAX adapter or heatmap file at nowhere/adapter"),
        ("nowhere", r"Unknown method .* the folder of a LAX adapter"),
        ("lax", r"give the folder of its adapter, --methods PATH\. Make one with sufficit train"),
        ("sufficit:birds", r"Unknown adapter 'sufficit:birds'. Did you mean 'sufficit:digits'"),
        ("gradcam, gradcam", "the method gradcam is given twice: leave one out"),
        ("arr.npy", r"heatmaps must be a \.npz or \.safetensors file, got arr\.npy: save one"),
        ("heatmaps=THIS", r"a \.npz or \.safetensors file, got test_source_words\.py: save one"),
        ("a.npz,b/a.npz", r"two methods are called a \(a.npz, b/a.npz\): write NAME=b/a.npz"),
        ("x=gradcam,x=layercam", r"\(x=gradcam, x=layercam\): write NAME=layercam to give"),
        ("center=gradcam", r"'center' is the name of another method: write NAME=gradcam"),
        ("maps/gradcam.npz", r"'gradcam' is the name of another method"),
        ("=gradcam", r"'' can't be the name of a file or folder"),
        ("..=gradcam", r"'\.\.' can't be the name of a file or folder"),
        ("+fit", r"names no source"),
        ("mine=", r"mine= names no source: write NAME=SOURCE"),
        ("OWN", r"own_methods.py names no function|no function"),
        ("OWN:absent", r"own_methods.py has no function 'absent'"),
        ("OWN:SIDE", r"'SIDE' in .*own_methods.py must be a function, got int"),
        ("python:nowhere.py:draw", r"no Python file at nowhere.py"),
        ("python:brightness", r"python:brightness names no function: write python:FILE.py:FUNC"),
    ],
)
def test_a_word_that_names_nothing_is_refused(own: str, words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sources_from(words.replace("OWN", own).replace("THIS", __file__))


def test_commands_that_draw_take_no_heatmap_file() -> None:
    with pytest.raises(UserError, match=r"maps\.npz holds finished heatmaps.*sufficit evaluate"):
        methods_from("gradcam,maps.npz")
    assert methods_from("gradcam,center") == {"gradcam": "gradcam", "center": "center"}


def test_a_function_draws_for_explain_and_for_the_sanity_check(own: str) -> None:
    methods = methods_from(f"{own}:brightness,layercam")
    classifier, images = small(), random_images(4)
    found = explain_all(classifier, images, methods=methods)
    assert torch.equal(found["brightness"], images.mean(1))
    assert torch.equal(explain(classifier, images, method=methods["brightness"]), images.mean(1))
    report = sanity_check(classifier, images, methods=methods, steps=1, progress=False)
    fallen = [row for row in report.cascade if row.method == "brightness"]
    assert [row.rank_correlation.mean() for row in fallen] == pytest.approx([1.0])


def test_what_a_function_does_wrong_is_one_line(own: str) -> None:
    for function, message in (
        (
            "too_bright",
            r"^method too_bright: heatmaps must lie in 0\.\.1.*: call sufficit\.normalize"
            r"\(heatmaps\)$",
        ),
        (
            "short",
            r"takes \(classifier, images, targets\), short takes \(images, targets\)"
            r" \(.*own_methods.py, line 15\): change its arguments$",
        ),
        (
            "broken",
            r"^method broken on image 0 raised KeyError: 'size' \(.*own_methods.py, line 13\)",
        ),
    ):
        method = methods_from(f"{own}:{function}")[function]
        with pytest.raises(UserError, match=message):
            explain(small(), random_images(), method=method)


def test_a_wrong_heatmap_is_named_by_its_image_also_in_a_later_batch() -> None:
    def dark_last(_: Classifier, images: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
        return images.mean(1) / images.amax((1, 2, 3))[:, None, None]

    images = random_images(3)
    images[2] = 0
    given = (small(), images, None, {"mine": dark_last})
    with pytest.raises(UserError, match="method mine: .* or leave out image 2$"):
        draw_all(*given, batch_size=2)
    with pytest.raises(UserError, match=r"method mine: .* or leave out image c\.png$"):
        draw_all(*given, batch_size=2, names=["a.png", "b.png", "c.png"])


def test_a_function_that_runs_out_of_memory_gets_smaller_batches(own: str) -> None:
    method = methods_from(f"{own}:hungry")["hungry"]
    with pytest.warns(RuntimeWarning, match="memory"):
        found = explain(small(), random_images(), method=method)
    assert torch.equal(found, random_images().mean(1))
