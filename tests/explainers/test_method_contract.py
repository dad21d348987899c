"""Every method of the registry keeps the same promises, whatever it draws."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from small_models import SmallMemory, Traces, cnn, random_images, small_vit
from sufficit import Classifier, UserError, explain
from sufficit.explainers import EXPLAINERS

# Options that make a method cheap enough to be drawn many times.
QUICK = {
    "integrated-gradients": "integrated-gradients:steps=6",
    "expected-gradients": "expected-gradients:samples=6",
    "smoothgrad": "smoothgrad:samples=6",
    "occlusion": "occlusion:grid=4",
    "rise": "rise:masks=40",
    "kernel-shap": "kernel-shap:grid=3:samples=60",
    "extremal-perturbation": "extremal-perturbation:steps=3",
    "region-search": "region-search:calls=120",
}
CONTROLS = ("everything", "random", "center")
RANDOM = ("expected-gradients", "smoothgrad", "rise", "kernel-shap", "random")
# Images share the masks, which go to the model without a graph, or the model is only watched.
WITHOUT_GRAPH = (
    *("occlusion", "rise", "kernel-shap", "scorecam", "region-search"),
    *("kpca-cam", "eigencam", "rollout"),
)
TARGETS = torch.tensor([0, 1, 3])
pytestmark = pytest.mark.filterwarnings("ignore:heatmaps with no positive part")
every_method = pytest.mark.parametrize("name", EXPLAINERS)
every_drawn = pytest.mark.parametrize("name", [n for n in EXPLAINERS if n not in CONTROLS])


def is_of_transformers(name: str) -> bool:
    return EXPLAINERS[name].nets == "transformer"


def model_for(name: str) -> nn.Module:
    if not is_of_transformers(name):
        return cnn()
    torch.manual_seed(0)
    model = small_vit().eval()
    nn.init.normal_(model.heads[-1].weight, std=0.5)  # torchvision starts it at zero
    return model


def images_for(name: str) -> Tensor:
    return random_images(3, 32 if is_of_transformers(name) else 16)


def drawn(name: str, model: nn.Module, images: Tensor, targets: Tensor, **options: int) -> Tensor:
    return explain(Classifier(model), images, targets, QUICK.get(name, name), **options)


def half_trained(model: nn.Module) -> nn.Module:
    """The model in train mode, a part of it in eval mode, weights frozen and with gradients."""
    model.train()
    [*model.modules()][2].eval()
    first, *_, last = model.parameters()
    first.requires_grad_(False)
    last.grad = torch.ones_like(last)
    return model


@every_method
def test_heatmaps_are_float32_in_0_to_1_without_gradients(name: str) -> None:
    images = images_for(name).requires_grad_()
    before = images.detach().clone()
    found = drawn(name, model_for(name), images, TARGETS)
    assert found.shape == (3, *images.shape[2:])
    assert found.dtype == torch.float32
    assert found.amin() >= 0
    assert 0 < found.amax() <= 1
    assert not found.requires_grad
    assert images.grad is None
    assert torch.equal(images.detach(), before)


@every_drawn
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_batch_changes_no_heatmap(name: str, batch_size: int) -> None:
    model, images = model_for(name), images_for(name)
    whole = drawn(name, model, images, TARGETS)
    parts = drawn(name, model, images, TARGETS, batch_size=batch_size)
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=0)
    alone = drawn(name, model, images[2:], TARGETS[2:])
    torch.testing.assert_close(alone[0], whole[2], atol=1e-4, rtol=0)


@every_drawn
def test_memory_that_runs_out_changes_no_heatmap(name: str) -> None:
    images = images_for(name)
    wanted = drawn(name, model_for(name), images, TARGETS)
    tight = SmallMemory(model_for(name), room=1)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        found = drawn(name, tight, images, TARGETS)
    assert tight.failures > 0
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@every_method
def test_a_half_trained_model_gives_the_same_and_is_left_as_it_was(name: str) -> None:
    images = images_for(name)
    wanted = drawn(name, model_for(name), images, TARGETS)
    model = half_trained(model_for(name))
    traces = Traces(model)
    found = drawn(name, model, images, TARGETS)
    traces.check()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@every_drawn
def test_an_error_leaves_the_model_as_it_was(name: str) -> None:
    model = half_trained(model_for(name))
    traces = Traces(model)
    if name != "rollout":  # which explains no class
        with pytest.raises(UserError, match="targets must lie in"):
            drawn(name, model, images_for(name), TARGETS + 1000)
    traces.check()

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    handle = [*model.modules()][-2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        drawn(name, model, images_for(name), TARGETS)
    handle.remove()
    traces.check()
    assert torch.overrides._len_torch_function_stack() == 0


def under_no_grad(draw: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return draw()


def under_inference_mode(draw: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():
        return draw()


@every_method
@pytest.mark.parametrize("mode", [under_no_grad, under_inference_mode])
def test_the_callers_mode_and_frozen_weights_change_nothing(
    name: str, mode: Callable[[Callable[[], Tensor]], Tensor]
) -> None:
    images = images_for(name)
    wanted = drawn(name, model_for(name), images, TARGETS)
    model = model_for(name).requires_grad_(False)
    found = mode(lambda: drawn(name, model, images.clone(), TARGETS))
    # torch's attention takes another way where no weight needs a gradient.
    torch.testing.assert_close(found, wanted, atol=1e-5 * is_of_transformers(name), rtol=0)
    assert not any(weight.requires_grad for weight in model.parameters())


@every_method
def test_the_seed_decides_what_is_random(name: str) -> None:
    model, images = model_for(name), images_for(name)
    one, again, other = (drawn(name, model, images, TARGETS, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one, again)
    assert torch.allclose(one, other) != (name in RANDOM)


@pytest.mark.parametrize("name", WITHOUT_GRAPH)
def test_methods_without_gradients_record_no_graph(name: str) -> None:
    spy = SmallMemory(model_for(name), room=10**6)
    drawn(name, spy, images_for(name), TARGETS)
    assert spy.grad_enabled == {False}
