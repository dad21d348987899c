"""The certificates of the images that a run shows."""

import json
import re
from pathlib import Path

import pytest
import torch

from sufficit import Classifier, Fitted, compare, explain
from sufficit.data.digits import synthetic_digits
from sufficit.runs.results import RunResults


def test_a_run_keeps_the_certificates_of_what_it_shows(tmp_path: Path) -> None:
    digits, classifier = synthetic_digits(4, seed=6), Classifier.load("sufficit:digits")
    methods = {"gradcam": "gradcam", "cut": Fitted("layercam", fills=("black",), enough=0.8)}
    targets = digits.labels.clone()
    targets[0] = (targets[0] + 1) % 10  # which the model does not give
    made = compare(
        classifier, digits.images, methods, targets,
        columns=["msi"], checks=("none",), calls=26, out=tmp_path / "run",
    )  # fmt: skip
    results = RunResults.read(tmp_path / "run")
    assert results.shown is not None
    assert list(results.shown.certificates) == ["cut"]
    rows = list(results.shown.rows)
    wanted = explain(
        classifier, digits.images[rows], targets[rows], "layercam",
        fit=True, fills=("black",), enough=0.8,
    )  # fmt: skip
    found = results.shown.certificates["cut"]
    for one, certificate in zip(found, wanted.certificates, strict=True):
        assert one.sentence == certificate.sentence
        assert one.share == certificate.share
        assert one.passes == certificate.passes
        assert [size.share for size in one.sizes] == [size.share for size in certificate.sizes]
        for ours, theirs in zip(one.fills, certificate.fills, strict=True):
            assert (ours.fill, ours.asked, ours.region.name) == (
                theirs.fill, theirs.asked, theirs.region.name,
            )  # fmt: skip
            assert ours.rest.confidence == pytest.approx(theirs.rest.confidence, abs=1e-5)
    shown = results.shown.heatmaps["cut"] >= 0.5
    assert torch.equal(shown, wanted.heatmaps.cpu() >= 0.5)
    text = made.report(tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    place = str(data["methods"].index("cut"))
    for image, certificate in zip(data["images"], found, strict=True):
        assert list(image["regions"]) == [place]
        assert image["regions"][place]["sentence"] == certificate.sentence
