"""The demo's adapter is the same wherever it is trained, as far as rounding lets it."""

import inspect
from itertools import count

import pytest
import torch
from torch import Tensor

from sufficit import Classifier, Lax
from sufficit.cli.demo import demo as command
from sufficit.demo import TRAINED_ON, run_demo, train
from sufficit.training.validation import Examination, Report

PICTURES = 32


def judged(monkeypatch: pytest.MonkeyPatch, step: int) -> Lax:
    """The demo's adapter where each epoch is found better (+1) or worse (-1) than the last."""
    worth = count(0, step)
    report = lambda *_: Report(next(worth), 0.0, 0.0, 0.0, 0.0)  # noqa: E731  # a method's stand-in
    monkeypatch.setattr(Examination, "report", report)
    return train(Classifier.load("sufficit:digits"), PICTURES, seed=0)


def weights(lax: Lax) -> Tensor:
    return torch.cat([part.flatten() for part in lax.state_dict().values()])


def test_what_few_pictures_say_of_the_epochs_does_not_choose_the_demos_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rising, falling = judged(monkeypatch, 1), judged(monkeypatch, -1)
    assert torch.equal(weights(rising), weights(falling))
    torch.manual_seed(0)
    untrained = Lax(rising.channels, upsample=rising.upsample)
    assert not torch.equal(weights(rising), weights(untrained))


def test_the_number_of_threads_does_not_change_the_demos_adapter() -> None:
    classifier, found = Classifier.load("sufficit:digits"), {}
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found[threads] = weights(train(classifier, PICTURES, seed=0))
            assert torch.get_num_threads() == threads  # the caller's own again
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[1], found[2])


def test_the_command_trains_on_as_many_pictures_as_the_demo_and_its_picture() -> None:
    assert inspect.signature(command).parameters["train_images"].default == TRAINED_ON
    assert inspect.signature(run_demo).parameters["trained_on"].default == TRAINED_ON
