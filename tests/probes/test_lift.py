"""The leak of a model of many classes: lifts, paired with Grad-CAM's on the same donors."""

import torch
from torch import nn

from sufficit import Classifier, leak
from sufficit.data.batch import Batch
from sufficit.evaluation import batch_of
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.probes.leak import LeakProbe
from sufficit.probes.probe import CALLS, Donors

CLASSES = 120


def made() -> tuple[Classifier, Batch, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 6, CLASSES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    classifier = Classifier(model)
    images = torch.rand(6, 3, 8, 6, generator=generator)
    targets = torch.tensor([3, 40, 90, 3, 40, 119])
    names = ("mine", "gradcam", "everything")
    maps = {name: torch.rand(6, 8, 6, generator=generator) for name in names}
    return classifier, batch_of(classifier, images, targets), maps


def test_lifts_are_those_of_leak_and_paired_with_gradcams() -> None:
    classifier, batch, maps = made()
    probe = LeakProbe(MaskedModel(classifier), 0.5, donors=8, with_usual=True)
    assert [*probe.headings] == [
        *("leak_lift", "leak_lift_over_gradcam"),
        *("leak_lift_10", "leak_lift_25", "leak_lift_45"),
    ]
    assert probe.ratios == {}
    rows = probe.holding(Donors(batch, maps))(batch, maps)
    assert {*rows} == {"mine", "gradcam"}  # what marks everything has no shape
    for name, columns in rows.items():
        alone = leak(classifier, batch.images, maps[name], batch.targets, donors=8)
        for column, values in alone.columns.items():
            torch.testing.assert_close(columns[column], values)
        assert columns[CALLS + "leak"].max() <= probe.calls
        assert {*columns} - {CALLS + "leak"} == {*probe.headings}
    apart = rows["mine"]["leak_lift"] - rows["gradcam"]["leak_lift"]
    assert torch.equal(rows["mine"]["leak_lift_over_gradcam"], apart)
    assert (rows["gradcam"]["leak_lift_over_gradcam"] == 0).all()


def test_without_gradcam_there_is_nothing_to_compare_with() -> None:
    classifier, batch, maps = made()
    few = {"mine": maps["mine"]}
    probe = LeakProbe(MaskedModel(classifier), 0.5, donors=8)
    rows = probe.holding(Donors(batch, few))(batch, few)
    assert "leak_lift_over_gradcam" not in {*rows["mine"], *probe.headings}
