"""Models that end in a softmax or a sigmoid give the numbers of the model without it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from own_model import MODEL
from small_models import random_images, small_model, small_vit
from small_runs import FLAGS, config_for, run_small, write_photos
from sufficit import Classifier, Recipe, UserError, compare, evaluate, explain
from sufficit.classifier.acceleration import accelerated
from sufficit.classifier.fingerprint import fingerprint, same
from sufficit.classifier.outputs import OutputWarning, to_logits

STEPS = {"value_step": 0.25, "percent_step": 0.25}


class Functional(nn.Module):
    """A model that ends in a function, which no list of modules shows."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        return logits.softmax(1) if self.kind == "softmax" else torch.sigmoid(logits)


def confident(scale: float = 20.0) -> nn.Module:
    """A small model whose probabilities lie near 0 and 1."""
    model = small_model()
    with torch.no_grad():
        model[-1].weight.mul_(scale)
    return model.eval()


ENDS = {
    "softmax module": lambda model: nn.Sequential(*model, nn.Softmax(dim=1)),
    "sigmoid module": lambda model: nn.Sequential(*model, nn.Sigmoid()),
    "softmax function": lambda model: Functional(model, "softmax"),
    "sigmoid function": lambda model: Functional(model, "sigmoid"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("score", ["accuracy", "confidence"])
def test_columns_are_those_of_the_model_without_its_end(end: str, score: str) -> None:
    images, maps = random_images(3), random_images(3, channels=1, seed=2)[:, 0]
    wanted = evaluate(Classifier(confident()), images, maps, score=score, **STEPS)
    ended = Classifier(ENDS[end](confident()), output="probabilities")
    found = evaluate(ended, images, maps, score=score, **STEPS)
    assert wanted.fid_plus_percent.max() > 0.01
    assert torch.equal(found.targets, wanted.targets)
    for name, values in wanted.columns.items():
        torch.testing.assert_close(found[name], values, atol=2e-6, rtol=0, msg=name)


@pytest.mark.parametrize("end", ["softmax module", "softmax function"])
def test_probabilities_taken_for_logits_are_warned_of_once(end: str) -> None:
    images, maps = random_images(3), random_images(3, channels=1, seed=2)[:, 0]
    classifier = Classifier(ENDS[end](confident()))
    with pytest.warns(OutputWarning, match=f'a {end[:7]}:.*output="probabilities"'):
        wrong = evaluate(classifier, images, maps, **STEPS)
    evaluate(classifier, images, maps, **STEPS)  # a second warning would be an error
    right = evaluate(Classifier(confident()), images, maps, **STEPS)
    assert (wrong.fid_plus_percent - right.fid_plus_percent).abs().max() > 0.01


def test_logits_are_given_back_as_they_are() -> None:
    """A model of logits in 0..1, of one-hot rows, and rows that sum to 1 but are negative."""
    rows = torch.tensor([[0.2, 0.3, 0.9], [0.0, 1.0, 0.0], [1.5, -0.5, 0.0]])
    for row in rows:

        class Fixed(nn.Module):
            def forward(self, x: Tensor, row: Tensor = row) -> Tensor:
                return row.expand(len(x), -1)

        assert torch.equal(Classifier(Fixed())(random_images(2)), row.expand(2, -1))


def test_to_logits_by_hand() -> None:
    half = to_logits(torch.tensor([[0.5, 0.25, 0.25]]), "softmax")
    log2 = torch.log(torch.tensor(2.0))
    torch.testing.assert_close(half, torch.tensor([[2.0, -1.0, -1.0]]) / 3 * log2)
    odds = to_logits(torch.tensor([[0.5, 0.75]]), "sigmoid")
    torch.testing.assert_close(odds, torch.tensor([[0.0, 3.0]]).clamp(min=1).log())
    for kind in ("softmax", "sigmoid"):
        ends = to_logits(torch.tensor([[1.0, 0.0]]), kind)
        assert ends.isfinite().all()
        assert ends[0, 0] - ends[0, 1] > 30


def test_values_that_are_no_probabilities_are_refused() -> None:
    with pytest.raises(UserError, match=r'no probabilities: use output="logits"'):
        Classifier(confident(), output="probabilities")(random_images(2))
    with pytest.raises(UserError, match="Unknown output 'probs'. Did you mean 'probabilities'"):
        Classifier(confident(), output="probs")


def test_nan_in_the_first_image_does_not_decide() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found = x.flatten(1)[:, :3].softmax(1)
            return found.masked_fill(x[:, :1, 0, 0] == 0, torch.nan)

    black, images = torch.zeros(1, 3, 4, 4), random_images(2, 4) * 0.9 + 0.1
    classifier = Classifier(Broken(), output="probabilities")
    assert classifier(black).isnan().all()
    assert classifier.ends_in is None
    torch.testing.assert_close(classifier(images).softmax(1), images.flatten(1)[:, :3].softmax(1))
    assert classifier.ends_in == "softmax"


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_gradcam_is_that_of_the_logits(kind: str) -> None:
    """Of a sigmoid to rounding; of a softmax, of the logits less their mean, also where p is 1."""

    class Centred(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            logits = self.model(x)
            return logits - logits.mean(1, keepdim=True) if kind == "softmax" else logits

    images = random_images(3)
    plain = Classifier(Centred(confident(10)), layer="model.4")
    ended = Classifier(Functional(confident(10), kind), layer="model.4", output="probabilities")
    wanted, found = (explain(one, images, method="gradcam") for one in (plain, ended))
    assert wanted.max() == 1
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0)


def test_tokens_that_are_dropped_end_in_the_same_logits() -> None:
    torch.manual_seed(0)
    model = small_vit().eval()
    images, maps = random_images(2, 32), random_images(2, 32, 1, seed=2)[:, 0]
    wanted = evaluate(Classifier(model), images, maps, fill="drop", **STEPS)
    model.heads.append(nn.Softmax(dim=1))
    ended = Classifier(model, output="probabilities")
    found = evaluate(ended, images, maps, fill="drop", **STEPS)
    for name, values in wanted.columns.items():
        torch.testing.assert_close(found[name], values, atol=2e-6, rtol=0, msg=name)


def test_copies_files_and_fingerprints_keep_the_output(tmp_path: Path) -> None:
    recipe = Recipe("torchvision:resnet18", {"num_classes": 3})
    classifier = Classifier.load("torchvision:resnet18", weights=None, num_classes=3)
    before = fingerprint(classifier)
    classifier.output = "probabilities"
    assert not same(before, fingerprint(classifier))
    assert classifier.recipe == recipe
    classifier.save(tmp_path / "saved")
    assert Classifier.load(tmp_path / "saved").output == "probabilities"
    description = tmp_path / "saved" / "classifier.json"
    saved = json.loads(description.read_text())
    description.write_text(json.dumps(saved | {"output": "odds"}))
    with pytest.raises(UserError, match="Unknown output 'odds'"):
        Classifier.load(tmp_path / "saved")


def test_a_compiled_copy_keeps_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    model = ENDS["softmax module"](confident())
    copy = accelerated(Classifier(model, output="probabilities"), (2, 3, 16, 16))
    images = random_images(2)
    torch.testing.assert_close(copy(images).softmax(1), model(images))
    assert copy.model is not model


ENDED = """

def ended():
    made = make()
    made.model.append(nn.Softmax(1))
    return made
"""


@pytest.mark.filterwarnings("ignore::sufficit.classifier.outputs.OutputWarning")
def test_a_run_says_so_in_its_record_and_remarks(tmp_path: Path) -> None:
    photos = write_photos(tmp_path, 6, model=MODEL + ENDED)
    ended = config_for(photos, model=f"python:{tmp_path / 'model.py'}:ended")
    wrong = run_small(ended, tmp_path / "wrong")
    assert wrong.record.output == "logits"
    assert "ends in a softmax" in wrong.record.output_remark
    assert wrong.record.output_remark in wrong.remarks()
    right = run_small(replace(ended, output="probabilities"), tmp_path / "right")
    plain = run_small(config_for(photos), tmp_path / "plain")
    assert (right.record.output, right.record.output_remark) == ("probabilities", "")
    assert right.config.output == "probabilities"
    found, wanted, off = (
        run.rows["center"]["fid_plus_percent"].to_numpy() for run in (right, plain, wrong)
    )
    assert abs(off - wanted).max() > 0.01
    assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.filterwarnings("default::sufficit.classifier.outputs.OutputWarning")
@pytest.mark.usefixtures("undrawn")
def test_the_command_line_takes_it(tmp_path: Path, sufficit) -> None:
    photos = write_photos(tmp_path, 6, model=MODEL + ENDED)
    model = f"python:{tmp_path / 'model.py'}:ended"
    given = ("--model", model, "--data", str(photos), "--methods", "random", *FLAGS)
    given += ("--checks", "fill")
    run = sufficit("compare", *given, "--out", str(tmp_path / "a"))
    assert run.code == 0, run.err
    assert 'set output = "probabilities" in a RUN.toml and pass --config' in run.err
    (tmp_path / "own.toml").write_text('output = "probabilities"')
    own = ("--config", str(tmp_path / "own.toml"))
    run = sufficit("compare", *given, *own, "--out", str(tmp_path / "b"))
    assert run.code == 0, run.err
    assert "probabilities" not in run.err


def test_an_output_for_a_classifier_that_has_another_is_refused() -> None:
    with pytest.raises(UserError, match=r'set it there, as in Classifier\(..., output="prob'):
        compare(Classifier(confident()), random_images(2), ["random"], output="probabilities")


def test_a_saturated_first_image_does_not_make_a_softmax_a_sigmoid() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Softmax(1))
    classifier = Classifier(model, layer="0", output="probabilities")
    classifier(torch.tensor([200.0, -200.0]).reshape(1, 1, 1, 2))
    again = classifier(torch.tensor([2.0, 0.0]).reshape(1, 1, 1, 2))
    assert again.softmax(1)[0, 0] == pytest.approx(torch.tensor([2.0, 0.0]).softmax(0)[0].item())
