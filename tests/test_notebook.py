"""What a notebook shows: tables of scores, runs and classifiers, figures and bars."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from small_models import random_images, small
from small_runs import STEPS
from sufficit import Classifier, UserError, View, compare, evaluate, overlay
from sufficit.progress import bar, in_notebook

LABELS = torch.tensor([0, 1, 2, 0])


def maps(n: int = 4) -> torch.Tensor:
    return random_images(n, channels=1, seed=3)[:, 0]


@pytest.fixture(scope="module")
def comparison():
    images = random_images(4)
    sources = {"<mine>": maps(), "center": "center"}
    return compare(small(), images, sources, LABELS, donors=2, progress=False, **STEPS)


def test_scores_are_a_table_of_their_means() -> None:
    scores = evaluate(small(), random_images(4), maps(), LABELS, **STEPS)
    shown = scores._repr_html_()
    assert "4 images, alpha_min 0.5" in shown
    assert shown.count("<tr>") == 1 + len(scores.columns)
    for name, mean in scores.mean().items():
        assert f">{name}</td>" in shown
        assert f">{mean:.3f}</td>" in shown


def test_a_comparison_is_the_table_of_the_terminal(comparison) -> None:
    shown = comparison._repr_html_()
    assert "&lt;mine&gt;" in shown
    assert "<mine>" not in shown
    for name in comparison.methods:
        assert f"{comparison.summaries[name]['msi'].mean:.3f}" in shown
    assert "<p>" in shown  # what it means


def test_a_classifier_shows_what_it_is() -> None:
    plain = small()._repr_html_()
    assert "Sequential" in plain
    assert "logits" in plain
    named = Classifier(
        small().model, mean=(0.5,) * 3, std=(0.2,) * 3, classes=["<a>", *"bcde"],
        view=View((16, 12)), output="probabilities",
    )._repr_html_()  # fmt: skip
    for word in ("&lt;a&gt;, b, c", "16 x 12 pixels", "(0.5, 0.5, 0.5)", "probabilities"):
        assert word in named


def pixels(figure: Figure) -> np.ndarray:
    assert isinstance(figure, Figure)
    return np.asarray(Image.open(io.BytesIO(figure._repr_png_())).convert("RGB"))


def test_figures_are_pictures_without_pyplot(comparison) -> None:
    before = "matplotlib.pyplot" in sys.modules
    for show in ("sheet", "curves", "alpha", "sizes"):
        assert pixels(comparison.plot(show)).std() > 10
    assert len(comparison.plot("sheet", ["center"], images=["2"]).axes) == 2 * 2
    scores = evaluate(small(), random_images(4), maps(), LABELS, **STEPS)
    figure = scores.plot("mine")
    assert figure.get_suptitle() == "mine: mean over 4 images"
    drawn = figure.axes[0].lines[0].get_ydata()
    assert drawn == pytest.approx(scores.mean_curves()["insertion_pixel"].values.numpy())
    assert pixels(figure).std() > 10
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_wrong_figures_are_refused(comparison) -> None:
    with pytest.raises(UserError, match="Unknown figure 'sheets'. Did you mean 'sheet'"):
        comparison.plot("sheets")
    with pytest.raises(UserError, match="Unknown method in this run 'lax'"):
        comparison.plot("curves", ["lax"])


def test_an_overlay_marks_where_the_heatmap_is_high() -> None:
    image, heatmap = torch.full((3, 8, 12), 0.5), torch.zeros(2, 3)
    heatmap[0, 0] = 1
    figure = overlay(image, heatmap, "a title")
    assert figure.axes[0].get_title() == "a title"
    shown = np.asarray(figure.axes[0].images[0].get_array())
    assert shown.shape == (8, 12, 3)
    assert shown[-1, -1] == pytest.approx([0.5] * 3, abs=1e-6)  # grey where nothing is marked
    assert shown[0, 0, 0] > shown[0, 0, 2] + 0.1  # inferno's end is yellow: red above blue
    assert pixels(figure).std() > 10


@pytest.mark.parametrize(
    ("image", "heatmap", "words"),
    [
        (torch.rand(2, 3, 4, 4), torch.rand(4, 4), r"one image \[C,H,W\].*take images\[0\]"),
        (torch.rand(3, 4, 4), torch.rand(2, 4, 4), r"one heatmap \[H,W\].*take heatmaps\[0\]"),
        (torch.rand(3, 4, 4) * 255, torch.rand(4, 4), "images must lie in 0..1"),
        (torch.rand(3, 4, 4), 3 * torch.ones(4, 4), "call sufficit.normalize"),
    ],
)
def test_wrong_overlays_are_refused(image, heatmap, words: str) -> None:
    with pytest.raises(UserError, match=words):
        overlay(image, heatmap)


class ZMQInteractiveShell:
    """Named as the shell of a notebook."""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were the kernel of a notebook without widgets."""

    class IPython:
        get_ipython = staticmethod(ZMQInteractiveShell)

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    monkeypatch.setattr("sufficit.progress.find_spec", lambda name: None)


def test_in_a_notebook_a_bar_appears_when_it_takes_long(notebook, capsys, monkeypatch) -> None:
    assert in_notebook()
    monkeypatch.setattr("sufficit.progress.DELAY", 1e-9)
    with bar("long") as tick:
        tick(1, 2)
    assert "long:  50%" in capsys.readouterr().err


def test_the_file_of_a_run_is_shown_as_well(comparison, tmp_path: Path) -> None:
    from sufficit import RunResults

    again = compare(
        small(), random_images(4), {"a": maps()}, LABELS, out=tmp_path / "run", checks="none",
        progress=False, **STEPS,
    )  # fmt: skip
    assert RunResults.read(tmp_path / "run")._repr_html_() == again._repr_html_()
