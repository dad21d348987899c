"""Twins on the command line: trained on a folder, resumed, loaded as a classifier."""

import json
from pathlib import Path

import pandas
import pytest
import torch

from digit_images import write_digits
from small_runs import StopError
from sufficit import Classifier
from sufficit.data.images import read_image
from sufficit.training.folder_images import TrainingImages
from sufficit.training.twin_training import TwinValidation

MODEL = ["--model", "sufficit:digits"]
QUICK = ["--epochs", "1", "--batch-size", "8", "--lr", "1e-3"]


def test_a_twin_that_stops_early_says_so(sufficit, tmp_path: Path, monkeypatch) -> None:
    scores = {"whole_accuracy": 1.0, "masked_accuracy": 0.5, "validation_loss": 0.7}
    monkeypatch.setattr(TwinValidation, "score", lambda *_: dict(scores))
    digits, out = write_digits(tmp_path / "digits", 16), tmp_path / "twin"
    words = ["train-twin", *MODEL, "--data", digits, *QUICK[2:], "--epochs", "7"]
    run = sufficit(*words, "--out", out, "--patience", "1")
    assert run.code == 0, run.err
    assert (
        "for 2 epochs; selected epoch 2. Stopped after 2 of 7 epochs, because epoch 1 was the best"
        " by the loss on held-out images, and 1 more epoch (2 steps) brought nothing better;"
        " --patience 0 trains to the end." in run.words
    )
    assert "for 7 epochs; selected epoch 7. Written" in sufficit(*words, "--out", f"{out}2").words


def test_a_twin_is_trained_on_a_folder_resumed_and_loaded(sufficit, tmp_path: Path) -> None:
    digits, out = write_digits(tmp_path / "digits", 16), tmp_path / "twin"
    (digits / "3").mkdir(exist_ok=True)
    (digits / "3" / "broken.png").write_bytes(b"not a picture")
    words = ["train-twin", *MODEL, "--data", digits, "--out", out, *QUICK]
    run = sufficit(*words)
    assert run.code == 0, run.err
    assert "broken.png" in run.err
    record = json.loads((out / "run.json").read_text())
    assert record["n_trained_on"] + record["n_validated_on"] == 16
    assert list(record["skipped"]) == ["3/broken.png"]
    assert len(pandas.read_csv(out / "history.csv")) == 1
    assert "Next: sufficit compare --model sufficit:digits" in run.words
    # The accuracies are those of the held-out images.
    names = record["validation_images"]
    images = torch.stack([read_image(digits / name, None) for name in names])
    labels = torch.tensor([int(name.split("/")[0]) for name in names])
    for name, folder in (("original", "sufficit:digits"), ("twin", out)):
        right = (Classifier.load(folder)(images).argmax(1) == labels).float().mean()
        assert abs(record[name]["whole_accuracy"] - float(right)) < 1e-6
        assert f"{float(right):.1%}" in run.words
    weights = (out / "classifier.safetensors").read_bytes()
    assert sufficit(*words).code == 0  # nothing is left to do
    assert (out / "classifier.safetensors").read_bytes() == weights
    other = sufficit(*words[:-1], "1e-2")
    assert other.code == 2
    assert "Cannot resume" in other.err


def test_a_twin_killed_before_its_first_checkpoint_is_not_taken_for_finished(
    sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = write_digits(tmp_path / "digits", 16)
    words = ["train-twin", *MODEL, "--data", digits, *QUICK, "--epochs", "2", "--out"]
    assert sufficit(*words, tmp_path / "whole").code == 0

    def killed(*_: object) -> None:
        raise StopError

    with monkeypatch.context() as patched:
        patched.setattr("sufficit.training.trainer.torch.save", killed)
        with pytest.raises(StopError):
            sufficit(*words, tmp_path / "twin")
    assert (tmp_path / "twin" / "classifier.safetensors").exists()  # that of the first epoch
    run = sufficit(*words, tmp_path / "twin")
    assert run.code == 0, run.err
    wanted = (tmp_path / "whole" / "classifier.safetensors").read_bytes()
    assert (tmp_path / "twin" / "classifier.safetensors").read_bytes() == wanted


def test_a_twin_that_is_trained_again_and_stopped_is_not_finished(
    sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits, out = write_digits(tmp_path / "digits", 16), tmp_path / "twin"
    words = ["train-twin", *MODEL, "--data", digits, *QUICK, "--out", out]
    assert sufficit(*words).code == 0
    assert sufficit("status", out).words == "training: 1 of 1 epochs done Finished."

    def killed(*_: object) -> None:
        raise StopError

    monkeypatch.setattr(TwinValidation, "score", killed)
    with pytest.raises(StopError):
        sufficit(*words, "--overwrite")
    assert "Finished" not in sufficit("status", out).words


def test_a_model_that_cannot_be_saved_is_refused(sufficit, tmp_path: Path) -> None:
    digits = write_digits(tmp_path / "digits", 16)
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 10))\n"
    )
    model = f"python:{tmp_path / 'mine.py'}:net"
    words = ["--model", model, "--data", digits, "--out", tmp_path / "twin"]
    run = sufficit("train-twin", *words, "--size", "64")
    assert run.code == 2
    assert "the architecture has no name to save" in run.words or "no name to save" in run.err
    assert not (tmp_path / "twin").exists()


def test_ctrl_c_says_what_is_kept_of_a_twin(
    sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = write_digits(tmp_path / "digits", 16)
    words = ["train-twin", *MODEL, "--data", digits, "--out", tmp_path / "twin", *QUICK]
    real = TrainingImages.__iter__

    def stopped(self):
        yield next(real(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingImages, "__iter__", stopped)
    run = sufficit(*words)
    assert run.code == 130
    assert "Interrupted: no epoch is finished yet. Run the same command again" in run.err
