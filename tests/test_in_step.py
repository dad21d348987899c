"""Jobs that wait for answers take turns, and two halves of some images give what all give."""

from collections.abc import Generator

import pytest
import torch

from sufficit import Classifier, explain, regions
from sufficit.data.batch import Batch
from sufficit.sources.asked import in_step


class Later:
    """An answer that notes when it is waited for."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events
        events.append(f"ask {name}")

    def arrived(self) -> str:
        self.events.append(f"wait {self.name}")
        return self.name.upper()


def job(name: str, rounds: int, events: list[str]) -> Generator[Later, str, list[str]]:
    answers = []
    for number in range(rounds):
        answer = yield Later(f"{name}{number}", events)
        answers.append(answer)
    return answers


def test_a_job_is_asked_before_the_answers_of_another_are_waited_for() -> None:
    events: list[str] = []
    found = in_step([job("a", 2, events), job("b", 1, events), job("c", 0, events)])
    assert found == [["A0", "A1"], ["B0"], []]
    assert events == ["ask a0", "ask b0", "wait a0", "ask a1", "wait b0", "wait a1"]


def test_halves_of_the_images_have_the_regions_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 4, stride=4),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 50),
    ).eval()
    for parameter in model.parameters():
        parameter.data *= 3  # so that parts of an image have other classes
    classifier = Classifier(model, layer="1")
    images = torch.nn.functional.interpolate(torch.rand(7, 3, 5, 5), 32, mode="bilinear")
    whole = explain(classifier, images, fit=True)
    assert len({one.share for one in whole.certificates}) > 1  # they stop in different rounds

    def halves(batch: Batch, *_: object) -> list[Batch]:
        return [batch.rows(range(3)), batch.rows(range(3, 7))]

    monkeypatch.setattr(regions, "_halves", halves)
    parts = explain(classifier, images, fit=True)
    assert torch.equal(parts.heatmaps, whole.heatmaps)
    for one, other in zip(parts.certificates, whole.certificates, strict=True):
        assert one.sentence == other.sentence  # confidences of other batches differ by rounding
        assert (one.share, one.passes) == (other.share, other.passes)
        assert [size.share for size in one.sizes] == [size.share for size in other.sizes]
