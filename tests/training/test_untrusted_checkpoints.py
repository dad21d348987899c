"""Untrusted checkpoints: one clear error."""

from pathlib import Path

import pytest
import torch
from sufficit.training.runs import State, open_run

from sufficit import Classifier, UserError, train_lax
from sufficit.training import classifiers

STATE = vars(State(epoch=1, best={}, best_worth=0.0, history=[{"epoch": 1, "worth": 0.0}]))


@pytest.mark.parametrize(
    "content",
    [
        {"settings": {}, "state": STATE | {"epoch": 5}},
        {"settings": {}, "state": STATE | {"epoch": "x"}},
        {"settings": {}, "state": STATE | {"best": None}},
        {"settings": {}, "state": STATE | {"more": 1}},
        {"settings": {}, "state": STATE | {"history": 3}},
        {"settings": [1], "state": STATE},
        {"state": STATE},
        [],
    ],
)
def test_a_checkpoint_that_tells_nonsense_is_one_line(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "checkpoint.pt")
    with pytest.raises(UserError, match=r"checkpoint\.pt can't be read"):
        open_run(tmp_path, {}, overwrite=False)


def test_a_checkpoint_that_tells_sense_is_read(tmp_path: Path) -> None:
    torch.save({"settings": {}, "state": STATE}, tmp_path / "checkpoint.pt")
    found = open_run(tmp_path, {}, overwrite=False)
    assert found is not None
    assert found["state"] == STATE


def test_a_checkpoint_of_another_adapter_is_one_line(tmp_path: Path) -> None:
    classifier = Classifier.load("sufficit:digits")
    batches = [(torch.rand(4, 3, 64, 64), torch.tensor([0, 1, 2, 3]))]
    asked = {"out": tmp_path, "epochs": 1, "validation_images": 4, "progress": False}
    train_lax(classifier, batches, **asked)
    whole = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    first = next(iter(whole["lax"]))
    for changes in (
        {"lax": {**whole["lax"], first: torch.zeros(1)}},
        {"lax": 3},
        {"optimizer": {}},
        {"state": whole["state"] | {"best": {first: torch.zeros(1)}}},
    ):
        torch.save(whole | changes, tmp_path / "checkpoint.pt")
        with pytest.raises(UserError, match=r"checkpoint\.pt in .* does not fit"):
            train_lax(classifier, batches, **asked)
    torch.save(whole, tmp_path / "checkpoint.pt")
    assert len(train_lax(classifier, batches, **asked).trained["history"]) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": 3},
        {"state": {"epoch": 9, "history": []}},
        {"state": 3},
        {"model": {}},
        {"optimizer": {}},
    ],
)
def test_a_checkpoint_of_another_classifier_is_one_line(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    model, path = torch.nn.Linear(2, 2), tmp_path / "checkpoint.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = {
        "settings": {"a": 1},
        "state": {"epoch": 1, "history": [{}]},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(whole, path)
    assert classifiers._resume(path, {"a": 1}, model, optimizer).epoch == 1
    torch.save(whole | changes, path)
    with pytest.raises(UserError, match=r"checkpoint\.pt (can't be read|does not fit)"):
        classifiers._resume(path, {"a": 1}, model, optimizer)
