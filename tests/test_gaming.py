"""The tool behind docs/gaming.md, on four digits."""

import json
import sys
from pathlib import Path

import gaming
import pytest

from sufficit import Classifier, evaluate, explain
from sufficit.data.digits import synthetic_digits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")
def test_the_table_of_gaming_has_a_row_for_each_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--images", "4", "--calls", "18", "--step", "0.25"]
    training = ["--train-images", "16", "--twin-epochs", "1"]
    words = ["gaming.py", "digits", "--out", str(tmp_path), *sizes, *training]
    monkeypatch.setattr(sys, "argv", words)
    gaming.main()
    found = json.loads((tmp_path / "gaming.json").read_text())
    assert set(found["rows"]) == {*gaming.METHODS, "LAX robust", *gaming.SEARCHES}
    digits = synthetic_digits(4, seed=2)
    model, twin = Classifier.load("sufficit:digits"), Classifier.load(tmp_path / "work" / "twin")
    maps = explain(model, digits.images, digits.labels, "gradcam", progress=False)
    for name, one, fill in (("model_black", model, "black"), ("twin_blur", twin, "blur")):
        scores = evaluate(
            one, digits.images, maps, digits.labels, fill=fill, value_step=0.25, columns=("msi",)
        )
        assert found["rows"]["gradcam"][name] == pytest.approx(scores.mean()["msi"], abs=1e-6)
    table = (tmp_path / "gaming.md").read_text().splitlines()
    assert len(table) == 2 + len(found["rows"])
    assert (tmp_path / "gaming.png").stat().st_size > 10_000
