"""The registry of methods, and the controls."""

import importlib
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from small_models import Spy, random_images, settled, small, small_model, transformers_vit
from sufficit import Classifier, UserError, explain, normalize
from sufficit.explainers import EXPLAINERS, Explainer, Option, cams, explainer_named, methods_for

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # grad-cam's own imports are not ours to mend
    import pytorch_grad_cam as peer
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget


AT_MOST = ("scorecam", "region-search", "refine")  # the cost depends on the model, or is a limit
QUICK = {  # words that take less time
    "rise": "rise:masks=30",
    "kernel-shap": "kernel-shap:grid=3:samples=20",
    "occlusion": "occlusion:grid=4",
    "extremal-perturbation": "extremal-perturbation:steps=5",
    "expected-gradients": "expected-gradients:samples=4",
}


def test_random_depends_on_the_seed_alone() -> None:
    classifier, images = small(), random_images(4)
    first = explain(classifier, images, method="random", seed=3)
    assert torch.equal(explain(classifier, images, method="random", seed=3, batch_size=1), first)
    assert torch.equal(explain(classifier, images[:2], method="random", seed=3), first[:2])
    assert not torch.equal(explain(classifier, images, method="random", seed=4), first)
    assert abs(first.mean() - 0.5) < 0.05
    state_before = torch.get_rng_state()
    explain(classifier, images, method="random")
    assert torch.equal(torch.get_rng_state(), state_before)


def test_center_is_a_gaussian_in_the_middle() -> None:
    found = explain(small(), random_images(2, 8), method="center")
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[0].flip(0))
    assert torch.allclose(found[0], found[0].T)
    assert found[0, 3, 3] == 1
    assert found[0, 0, 0] == 0
    assert (found[0, 3, :4].diff() > 0).all()


def test_a_new_method_is_one_function_and_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def bright(classifier, images, targets, *, layer, seed, power=1) -> Tensor:
        return images.mean(1) ** power - 0.3

    options = {"power": Option(2, "of the brightness", least=1)}
    entry = Explainer("brightness", "model", bright, options=options, signed=True)
    monkeypatch.setitem(EXPLAINERS, "bright", entry)
    images = random_images(2)
    for word, power, absolute in (("bright", 2, False), ("bright:3:sign=absolute", 3, True)):
        raw = images.mean(1) ** power - 0.3
        raw = raw.abs() if absolute else raw.clamp(min=0)
        assert torch.allclose(explain(small(), images, method=word), normalize(raw), atol=1e-6)
    given = {"power": 3, "sign": "absolute"}
    assert torch.equal(
        explain(small(), images, method=("bright", given)),
        explain(small(), images, method="bright:3:sign=absolute"),
    )


@pytest.mark.parametrize("name", ["HiResCAM", "EigenCAM"])
def test_other_cams_equal_those_of_grad_cam(name: str) -> None:
    targets = torch.tensor([1, 7, 3])
    model, images = settled("resnet18", 64), random_images(3, 64)
    with getattr(peer, name)(model, [model.layer4]) as cam:
        theirs = torch.from_numpy(cam(images, [ClassifierOutputTarget(int(t)) for t in targets]))
        if name == "EigenCAM":  # its sign is free: turn theirs where it is the other way
            raw = torch.from_numpy(
                cam.get_cam_image(None, None, None, _layer4(model, images), 0, 0)
            )
            flip = raw.abs().amax((1, 2)) > raw.amax((1, 2))
            assert not flip.all()
            theirs, targets, images = theirs[~flip], targets[~flip], images[~flip]
    found = explain(Classifier(model), images, targets, name.lower())
    assert (found - theirs).abs().max() < 1e-4


def _layer4(model: nn.Module, images: Tensor) -> np.ndarray:
    return Classifier(model).features(images)[0].detach().numpy()


def test_every_method_says_what_it_is() -> None:
    for name, entry in EXPLAINERS.items():
        assert 10 < len(entry.description) < 100, name
        assert 10 < len(entry.what_for) < 100, name
        ours = ("region-search", "refine", "everything", "random", "center")
        assert bool(entry.reference) == (name not in ours), name
        assert "\n" not in entry.description + entry.what_for
        assert isinstance(entry.passes, int | str)
        for option in entry.takes.values():
            assert 5 < len(option.about) < 100, name


def test_the_page_about_methods_is_current() -> None:
    page = importlib.import_module("methods")
    text = page.PAGE.read_text()
    assert text == page.page(text), "run python tools/methods.py"
    for name in EXPLAINERS:
        assert f"\n| `{name}` | " in text


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("finer-cam:nearst=5", "Unknown option of finer-cam 'nearst'. Did you mean 'nearest'"),
        ("finer-cam:nearest=many", "nearest of finer-cam must be a whole number, got 'many'"),
        ("finer-cam:nearest=0", "nearest of finer-cam must be 1 or more, got 0"),
        ("finer-cam:nearest=2.5", "nearest of finer-cam must be a whole number, got '2.5'"),
        ("finer-cam:reading=maen", "Unknown reading of finer-cam 'maen'. Did you mean 'mean'"),
        ("finer-cam:nearest=2:nearest=3", "gives nearest twice"),
        ("gradcam:steps=3", "gradcam takes no options, got 'steps': write gradcam alone"),
        ("gradcam:20", "gradcam takes no options, got '20'"),
        ("finercam:nearest=2", "Unknown method 'finercam'. Did you mean 'finer-cam'"),
        ("needy", "needy needs its adapter: write needy:ADAPTER"),
    ],
)
def test_a_wrong_option_is_refused(
    word: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"adapter": Option(None, "a folder")}
    monkeypatch.setitem(EXPLAINERS, "needy", Explainer("x", "model", torch.add, options=options))
    with pytest.raises(UserError, match=message):
        explainer_named(word)
    with pytest.raises(UserError, match=message):
        explain(small(), random_images(1), method=word)


@pytest.mark.parametrize("value", [2.5, True, None, "x", float("nan"), 10**400, [3]])
def test_wrong_values_in_python_are_refused(value: object) -> None:
    with pytest.raises(UserError, match="nearest of finer-cam must be"):
        explain(small(), random_images(1), method=("finer-cam", {"nearest": value}))


def test_options_change_finer_cam_as_its_score_does() -> None:
    classifier, images = small(), random_images(2)
    for reading, nearest in (("mean", 2), ("weighted", 1)):
        word = f"finer-cam:reading={reading}:nearest={nearest}"
        score = partial(cams.contrast, reading=reading, nearest=nearest)
        wanted = explain(classifier, images, method=replace(EXPLAINERS["gradcam"], score=score))
        assert torch.equal(explain(classifier, images, method=word), wanted)
    assert not torch.equal(wanted, explain(classifier, images, method="finer-cam"))


def test_a_missing_extra_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = Explainer("x", "model", torch.add, extra="no-such-extra")
    monkeypatch.setitem(EXPLAINERS, "rare", entry)
    wrong = r"the method rare needs the extra no-such-extra: pip install '\.\[no-such-extra\]'"
    with pytest.raises(UserError, match=wrong):
        explain(small(), random_images(1), method="rare")
    with pytest.raises(UserError, match=wrong):
        methods_for(["rare"], small())


@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")  # random weights give some
def test_methods_that_ignore_the_class_say_so() -> None:
    agnostic = [name for name, method in EXPLAINERS.items() if method.class_agnostic]
    assert agnostic == ["kpca-cam", "eigencam", "rollout", "everything", "random", "center"]
    classifier, images = small(), random_images(4)
    for name in (
        one for one, entry in EXPLAINERS.items() if entry.nets == "any" and one != "refine"
    ):
        word = QUICK.get(name, name)
        one, other = (explain(classifier, images, torch.full((4,), k), word) for k in (0, 3))
        assert torch.equal(one, other) == (name in agnostic), name


@pytest.mark.parametrize("name", [n for n, e in EXPLAINERS.items() if n not in AT_MOST])
def test_a_method_costs_what_it_says(name: str) -> None:
    """Forward passes are counted, with two more for each whose graph is kept."""
    word = QUICK.get(name, name)
    fits = EXPLAINERS[name].nets != "transformer"
    spy = Spy(small_model().eval() if fits else transformers_vit(5).eval())
    layer = "model.4" if fits else "model.vit.layernorm"
    images = random_images(2, 16 if fits else 32)
    explain(Classifier(spy, layer=layer), images, torch.tensor([1, 2]), word)
    entry = explainer_named(word)
    weight = 3 if entry.needs == "gradients" or True in spy.grad_enabled else 1
    assert weight * sum(spy.sizes) / 2 == entry.passes
