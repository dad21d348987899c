"""Every CAM against the grad-cam package, against answers known by hand, and where others break."""

import gc
import os
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import KernelPCA
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from reference import SmallMemory, small_net
from sufficit import Classifier, UserError
from sufficit.errors import EmptyHeatmapWarning
from sufficit.explainers import (
    CAMS,
    EXPLAINERS,
    Explainer,
    explain,
    explain_all,
    finer_cam,
    target_logits,
)
from sufficit.explainers.cams import gradcam, gradcam_plus_plus, layercam
from sufficit.explainers.finer import mean_contrast, nearest_classes, weighted_contrast
from sufficit.explainers.kpca import by_powers, by_solver, centred_kernels, kpca_cam
from sufficit.perturbation.heatmaps import _as_channels, _bounded, resize

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # grad-cam's own imports are not ours to mend
    import pytorch_grad_cam as peer
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

PEERS = {
    "gradcam": peer.GradCAM,
    "gradcam++": peer.GradCAMPlusPlus,
    "layercam": peer.LayerCAM,
    "kpca-cam": peer.KPCA_CAM,
}
TARGETS = torch.tensor([1, 7, 3])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make small models slow where other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Linear(nn.Module):
    """Features are the image's channels, logits are linear in them: gradients are the weights."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.features = nn.Identity()
        self.weights = nn.Parameter(weights)  # [C,K,h,w]

    def forward(self, images: Tensor) -> Tensor:
        return torch.einsum("nkhw,ckhw->nc", self.features(images), self.weights)


def linear(weights: Tensor) -> Classifier:
    return Classifier(Linear(weights), layer="features")


def small_model(channels: int = 3, classes: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 6, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, classes),
    )


def small(channels: int = 3, classes: int = 5) -> Classifier:
    return Classifier(small_model(channels, classes).eval(), layer="4")


def pictures(n: int = 3, side: int = 16, channels: int = 3) -> Tensor:
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(1))


def settled(name: str, side: int) -> nn.Module:
    """A model with random weights, and batch statistics that keep its features of a usual size."""
    torch.manual_seed(0)
    model = models.get_model(name, weights=None, num_classes=20)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(pictures(4, side))
    return model.eval()


def small_vit() -> nn.Module:
    torch.manual_seed(0)
    model = models.VisionTransformer(
        image_size=64,
        patch_size=8,
        num_layers=3,
        num_heads=3,
        hidden_dim=48,
        mlp_dim=96,
        num_classes=10,
    )
    nn.init.normal_(model.heads.head.weight, std=0.3)  # torchvision starts it at zero
    return model.eval()


def token_grid(output: Tensor) -> Tensor:
    return output[:, 1:].transpose(1, 2).reshape(len(output), -1, 8, 8)


def by_peer(name: str, model: nn.Module, layer: str, images: Tensor) -> Tensor:
    layers = [model.get_submodule(layer)]
    reshape = token_grid if isinstance(model, models.VisionTransformer) else None
    if name == "finer-cam":  # its target is one number for the whole batch
        with peer.FinerCAM(model, layers, reshape) as cam:
            pairs = zip(images, TARGETS, strict=True)
            maps = [cam(image[None], target_idx=int(target)) for image, target in pairs]
        return torch.from_numpy(np.concatenate(maps))
    with PEERS[name](model, layers, reshape) as cam:
        return torch.from_numpy(cam(images, [ClassifierOutputTarget(int(t)) for t in TARGETS]))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "resnet18": (lambda: settled("resnet18", 96), 96, "layer4"),
    "resnet50": (lambda: settled("resnet50", 96), 96, "layer4"),
    "mobilenet_v2": (lambda: settled("mobilenet_v2", 96), 96, "features"),
    "vit": (small_vit, 64, "encoder.layers.encoder_layer_2.ln_1"),
}


@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")  # random weights give some
@pytest.mark.parametrize("name", MODELS)
def test_all_five_equal_grad_cam(name: str) -> None:
    build, side, layer = MODELS[name]
    model, images = build(), pictures(3, side)
    classifier = Classifier(model)
    ours = explain_all(classifier, images, TARGETS)
    assert classifier.layer == layer
    for method in CAMS:
        theirs = by_peer(method, model, layer, images)
        assert theirs.amax() > 0.99, method
        assert (ours[method] - theirs).abs().max() < 1e-4, method


@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")  # random weights give some
def test_a_layer_in_the_middle_equals_grad_cam() -> None:
    model, images = settled("resnet18", 64), pictures(3, 64)
    classifier = Classifier(model)
    ours = explain_all(classifier, images, TARGETS, layer="layer3")
    # One image at a time, as the peer is asked: at this layer of random weights a map can jump by
    # 0.025 when the input changes by 1e-7, and batches of one and of three round differently.
    ours["finer-cam"] = torch.cat(
        [
            explain(classifier, image[None], target[None], "finer-cam", layer="layer3")
            for image, target in zip(images, TARGETS, strict=True)
        ]
    )
    for method in CAMS:
        theirs = by_peer(method, model, "layer3", images)
        assert (ours[method] - theirs).abs().max().item() < 1e-4, method


def test_own_prediction_equals_grad_cams_own_prediction() -> None:
    model, images = settled("resnet18", 64), pictures(3, 64)
    with peer.FinerCAM(model, [model.layer4]) as cam:
        theirs = torch.from_numpy(cam(images))
    assert (explain(Classifier(model), images, method="finer-cam") - theirs).abs().max() < 1e-4


def test_gradcam_by_hand() -> None:
    # class 1: gradients of channel 0 average 1, of channel 1 average -0.5
    weights = torch.zeros(2, 2, 2, 2)
    weights[1] = torch.tensor([[[0.0, 2.0], [2.0, 0.0]], [[-1.0, -1.0], [0.0, 0.0]]])
    images = torch.tensor([[[[0.0, 0.2], [0.4, 1.0]], [[0.4, 0.0], [0.4, 0.4]]]])
    # 1 * channel 0 - 0.5 * channel 1 = (-0.2, 0.2, 0.2, 0.8); positive part, over 0.8
    found = explain(linear(weights), images, torch.tensor([1]), "gradcam")
    assert torch.allclose(found, torch.tensor([[[0.0, 0.25], [0.25, 1.0]]]))


def test_layercam_by_hand() -> None:
    weights = torch.zeros(2, 2, 2, 2)
    weights[1] = torch.tensor([[[0.0, 2.0], [2.0, 0.0]], [[-1.0, -1.0], [0.0, 1.0]]])
    images = torch.tensor([[[[0.0, 0.2], [0.4, 1.0]], [[0.4, 0.0], [0.4, 0.1]]]])
    # (0, 0.4, 0.8, 0) + (0, 0, 0, 0.1), over 0.8
    found = explain(linear(weights), images, torch.tensor([1]), "layercam")
    assert torch.allclose(found, torch.tensor([[[0.0, 0.5], [1.0, 0.125]]]))


def test_gradcam_plus_plus_divides_its_weights() -> None:
    features = torch.tensor([[[[1.0, 2.0]], [[0.0, 1.0]]]])
    gradients = torch.tensor([[[[0.5, -1.0]], [[2.0, 2.0]]]])
    # channel 0: 0.5 * 0.25 / (0.5 + 3 * 0.125) = 1/7; channel 1: twice 2 * 4 / (8 + 1 * 8) = 1
    wanted = torch.tensor([[[1 / 7, 2 / 7 + 1]]])
    assert torch.allclose(gradcam_plus_plus(features, gradients), wanted, atol=1e-5)


def test_cams_equal_plain_loops() -> None:
    torch.manual_seed(0)
    features, gradients = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 4)
    for n in range(2):
        plain, cells = torch.zeros(3, 4), torch.zeros(3, 4)
        for k in range(5):
            plain += features[n, k] * gradients[n, k].mean()
            for y in range(3):
                for x in range(4):
                    cells[y, x] += max(gradients[n, k, y, x], 0) * features[n, k, y, x]
        assert torch.allclose(gradcam(features, gradients)[n], plain, atol=1e-6)
        assert torch.allclose(layercam(features, gradients)[n], cells, atol=1e-6)


def test_a_map_is_stretched_before_and_after_it_grows() -> None:
    weights = torch.ones(2, 1, 8, 8)
    weights[0] = 0
    model = nn.Sequential(nn.AvgPool2d(4), Linear(weights[:, :, :2, :2]))
    image = pictures(1, 8, 1)
    small_map = F.avg_pool2d(image, 4)
    small_map = (small_map - small_map.min()) / (small_map.max() - small_map.min())
    grown = F.interpolate(small_map, (8, 8), mode="bilinear", align_corners=False)[:, 0]
    wanted = (grown - grown.min()) / (grown.max() - grown.min())
    found = explain(Classifier(model, layer="0"), image, torch.tensor([1]))
    assert torch.allclose(found, wanted, atol=1e-6)


def test_kpca_equals_scikit_learn() -> None:
    features = torch.randn(3, 16, 5, 4, generator=torch.Generator().manual_seed(0)) * 3
    found = kpca_cam(features)
    for maps, wanted in zip(found, features, strict=True):
        cells = wanted.flatten(1).T.double()
        kpca = KernelPCA(n_components=1, kernel="sigmoid")
        theirs = kpca.fit_transform((cells - cells.mean(0)).numpy())
        wanted_map = theirs[:, 0] / np.linalg.norm(theirs)
        assert np.allclose(maps.flatten().numpy(), wanted_map, atol=1e-5)


def test_the_component_farthest_entry_is_positive_and_a_run_repeats() -> None:
    features = torch.randn(8, 6, 4, 4, generator=torch.Generator().manual_seed(0))
    maps = kpca_cam(features).flatten(1)
    assert (maps.amax(1) == maps.abs().amax(1)).all()
    assert torch.equal(kpca_cam(features), kpca_cam(features.flip(0)).flip(0))


def test_the_gpu_way_to_eigenvectors_equals_the_solver() -> None:
    kernels = centred_kernels(
        torch.randn(16, 8, 7, 7, generator=torch.Generator().manual_seed(0)) * 2
    )
    solved, raised = by_solver(kernels), by_powers(kernels)
    assert torch.allclose(solved, raised, atol=1e-6)


def test_features_without_spread_give_zeros_by_kpca() -> None:
    assert torch.equal(kpca_cam(torch.full((2, 3, 4, 4), 0.3)), torch.zeros(2, 4, 4))


def test_nearest_classes_leave_out_the_target_also_in_a_tie() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 4.0, 0.0], [0.0, 5.0, 4.0, 9.0, 5.5]])
    assert nearest_classes(logits, torch.tensor([2, 1])).tolist() == [[0, 1, 4], [4, 2, 3]]


def test_finer_scores_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]]).requires_grad_()
    targets = torch.tensor([0])
    p = [float(v) for v in logits.detach().softmax(1)[0]]
    wanted = (p[1] * 1 + p[2] * 2 + p[3] * 3) / (p[1] + p[2] + p[3])
    assert weighted_contrast(logits, targets).item() == pytest.approx(wanted, rel=1e-5)
    assert mean_contrast(logits, targets).item() == pytest.approx(2.0)
    (gradient,) = torch.autograd.grad(mean_contrast(logits, targets).sum(), logits)
    assert torch.allclose(gradient, torch.tensor([[1.0, -0.2, -0.2, -0.2, 0.0]]))


def test_finer_mean_reading_is_gradcam_of_a_contrast() -> None:
    classifier, images = small(), pictures()
    targets = torch.tensor([0, 1, 2])
    found = explain(classifier, images, targets, finer_cam("mean"))
    others = nearest_classes(classifier(images).detach(), targets)
    maps = []
    for image, target, near in zip(images, targets, others, strict=True):
        features = classifier.model[:5](image[None]).detach().requires_grad_()
        logits = classifier.model[5:](features)[0]
        score = logits[target] - 0.6 * logits[near].mean()
        (gradient,) = torch.autograd.grad(score, features)
        maps.append(F.relu((features * gradient.mean((2, 3), keepdim=True)).sum(1)).detach())
    small_maps = torch.cat(maps)
    small_maps = small_maps / small_maps.amax((1, 2), keepdim=True)  # each has a zero
    grown = F.interpolate(small_maps[:, None], (16, 16), mode="bilinear")[:, 0]
    low, high = grown.amin((1, 2), keepdim=True), grown.amax((1, 2), keepdim=True)
    assert torch.allclose(found, (grown - low) / (high - low), atol=1e-5)
    assert not torch.allclose(found, explain(classifier, images, targets, "finer-cam"), atol=1e-2)


@pytest.mark.parametrize("classes", [2, 3])
def test_finer_takes_the_classes_there_are(classes: int) -> None:
    classifier, images = small(classes=classes), pictures(2)
    model = classifier.model
    with peer.FinerCAM(model, [model[4]]) as cam:
        theirs = torch.from_numpy(cam(images))
    assert (explain(classifier, images, method="finer-cam") - theirs).abs().max() < 1e-4


def test_finer_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UserError, match="Did you mean 'mean'"):
        finer_cam("meen")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="1 or more"):
        finer_cam(nearest=0)


@contextmanager
def watched_backwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    calls: list[int] = []
    real = torch.autograd.grad

    def counting(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counting)
    yield calls
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("methods", "backwards"),
    [
        (("gradcam", "gradcam++", "layercam"), 1),
        (CAMS, 2),
        (("finer-cam",), 1),
        (("kpca-cam",), 0),
    ],
)
def test_methods_share_one_forward_and_one_backward_a_score(
    methods: tuple[str, ...], backwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier, forwards = small(), []
    classifier.model.register_forward_hook(lambda *_: forwards.append(1))
    with watched_backwards(monkeypatch) as calls:
        shared = explain_all(classifier, pictures(), methods=methods)
    assert (len(forwards), len(calls)) == (1, backwards)
    for name in methods:
        assert torch.equal(shared[name], explain(classifier, pictures(), method=name))


def test_controls_ask_the_model_nothing() -> None:
    classifier, forwards = small(), []
    classifier.model.register_forward_hook(lambda *_: forwards.append(1))
    explain_all(classifier, pictures(), methods=["random", "center"])
    assert not forwards


def test_nothing_is_recorded_before_the_layer() -> None:
    classifier, modes = small(), []
    for place in (3, 5):
        classifier.model[place].register_forward_hook(
            lambda *_: modes.append(torch.is_grad_enabled())
        )
    explain(classifier, pictures())
    assert modes == [False, True]


@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")  # random weights give some
@pytest.mark.parametrize("method", CAMS)
def test_batches_of_any_size_give_the_same(method: str) -> None:
    classifier, images = small(), pictures(5)
    targets = torch.tensor([0, 1, 2, 3, 4])
    whole = explain(classifier, images, targets, method)
    assert torch.allclose(
        explain(classifier, images, targets, method, batch_size=2), whole, atol=1e-5
    )
    for i in range(5):
        one = explain(classifier, images[i : i + 1], targets[i : i + 1], method)
        assert torch.allclose(one[0], whole[i], atol=1e-5)


def test_without_targets_the_own_prediction_is_explained() -> None:
    classifier, images = small(), pictures(6)
    own = classifier(images).argmax(1)
    for name, maps in explain_all(classifier, images).items():
        assert torch.equal(maps, explain(classifier, images, own, name))


@pytest.mark.parametrize("method", EXPLAINERS.keys() - {"rollout"})
def test_heatmaps_are_float32_in_0_1_without_gradients(method: str) -> None:
    images = pictures(2).requires_grad_()
    found = explain(small(), images, method=method)
    assert found.shape == (2, 16, 16)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert found.amin() >= 0
    assert found.amax() <= 1
    assert images.grad is None


@pytest.mark.parametrize("method", CAMS)
def test_frozen_models_give_what_free_ones_give(method: str) -> None:
    images = pictures()
    free = explain(small(), images, method=method)
    classifier = small()
    classifier.model.requires_grad_(False)
    assert torch.equal(explain(classifier, images, method=method), free)
    assert not any(p.requires_grad for p in classifier.model.parameters())


def test_callers_under_no_grad_and_inference_mode_get_the_right_answer() -> None:
    classifier, images = small(), pictures()
    wanted = explain_all(classifier, images)
    with torch.no_grad():
        quiet = explain_all(classifier, images)
    with torch.inference_mode():
        inference = explain_all(classifier, images * 1)
        assert torch.is_inference_mode_enabled()
    for name in CAMS:
        assert torch.equal(quiet[name], wanted[name])
        assert torch.equal(inference[name], wanted[name])


def test_a_model_made_under_inference_mode_is_refused_only_for_gradients() -> None:
    with torch.inference_mode():
        classifier = small()
    with pytest.raises(UserError, match=r"0\.weight was made under torch\.inference_mode"):
        explain(classifier, pictures())
    assert torch.equal(
        explain(classifier, pictures(), method="kpca-cam"),
        explain(small(), pictures(), method="kpca-cam"),
    )


def test_bf16_models_come_close_to_float32_and_give_float32() -> None:
    images = pictures()
    wanted = explain_all(small(), images)
    found = explain_all(small().to(dtype=torch.bfloat16), images)
    for name in CAMS:
        assert found[name].dtype == torch.float32
        assert (found[name] - wanted[name]).abs().mean() < 0.03, name


def test_autocast_reaches_the_model_and_not_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, images, seen = small(), pictures(), []
    wanted = explain_all(classifier, images)

    def spy(features: Tensor, gradients: Tensor) -> Tensor:
        seen.extend([features.dtype, gradients.dtype, (features[:, 0] @ gradients[:, 0]).dtype])
        return gradcam(features, gradients)

    monkeypatch.setitem(EXPLAINERS, "gradcam", Explainer("spied on", "gradients", spy))
    classifier.model[3].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = explain_all(classifier, images)
    assert seen == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    for name in CAMS:
        assert (found[name] - wanted[name]).abs().mean() < 0.03, name


def test_grey_scale_and_oblong_images() -> None:
    images = torch.rand(2, 1, 12, 20, generator=torch.Generator().manual_seed(0))
    for name, maps in explain_all(small(channels=1), images).items():
        assert maps.shape == (2, 12, 20), name
        assert maps.amax() > 0.99


def test_maps_with_no_positive_part_are_zeros_with_one_warning_that_counts_them() -> None:
    weights = torch.stack([torch.ones(1, 4, 4), -torch.ones(1, 4, 4)])
    images = pictures(5, 4, 1)
    targets = torch.tensor([0, 1, 0, 1, 1])
    with pytest.warns(EmptyHeatmapWarning) as caught:
        found = explain_all(linear(weights), images, targets, ["gradcam", "layercam"], batch_size=2)
    assert len(caught) == 1
    assert "of 5 images: gradcam 3, layercam 3" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert torch.equal(found["gradcam"][1], torch.zeros(4, 4))
    assert found["gradcam"][0].amax() == 1


def test_a_map_whose_spread_is_rounding_has_none() -> None:
    images = torch.full((1, 1, 4, 4), 0.5)
    images[0, 0, 0, 0] += 1e-7
    with pytest.warns(EmptyHeatmapWarning, match="gradcam 1"):
        found = explain(linear(torch.ones(2, 1, 4, 4)), images)
    assert torch.equal(found, torch.zeros(1, 4, 4))


def test_nan_is_refused_and_counted() -> None:
    classifier = small()
    images = pictures()

    def spoil(_: nn.Module, __: object, output: Tensor) -> Tensor:
        spoiled = output.clone()
        spoiled[1] = torch.nan
        return spoiled

    classifier.model[4].register_forward_hook(spoil)
    for method in CAMS:
        with pytest.raises(
            UserError, match="NaN or infinite values for 1 of 3 images, the first is 1"
        ):
            explain(classifier, images, method=method)


def state(model: nn.Module) -> list[object]:
    """What a call must leave as it was."""
    found: list[object] = [torch.is_grad_enabled()]
    for module in model.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        found.append((module.training, [len(h) for h in hooks], sorted(vars(module))))
    found += [(p.requires_grad, p.grad, p._version) for p in model.parameters()]
    return found + [buffer._version for buffer in model.buffers()]


def test_nothing_is_left_behind() -> None:
    model = small_model().train()
    model[1].eval()
    model[3].weight.requires_grad_(False)
    before = state(model)
    explain_all(Classifier(model), pictures())
    assert state(model) == before


@pytest.mark.parametrize("place", [0, 4, 7])
def test_nothing_is_left_behind_when_the_model_raises(place: int) -> None:
    model = small_model().train()
    classifier = Classifier(model, layer="4")

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    model[place].register_forward_hook(fail)
    before = state(model)
    with pytest.raises(RuntimeError, match="in the middle"):
        explain_all(classifier, pictures())
    assert state(model) == before


def test_nothing_is_left_behind_when_the_method_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise RuntimeError("in the formula")

    monkeypatch.setitem(EXPLAINERS, "mine", Explainer("fails", "gradients", fail))
    model = small_model().train()
    before = state(model)
    with pytest.raises(RuntimeError, match="in the formula"):
        explain(Classifier(model, layer="4"), pictures(), method="mine")
    assert state(model) == before


def test_grads_of_a_training_run_are_left_alone() -> None:
    classifier = small()
    classifier.model(pictures()).sum().backward()
    before = [p.grad.clone() for p in classifier.model.parameters()]
    explain_all(classifier, pictures())
    for gradient, parameter in zip(before, classifier.model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)


def test_train_mode_gives_what_eval_mode_gives() -> None:
    classifier = small()
    wanted = explain(classifier, pictures())
    classifier.model.train()
    assert torch.equal(explain(classifier, pictures()), wanted)
    assert classifier.model.training


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("wrap", [compiled, compiled_in_place, nn.DataParallel])
def test_wrapped_models_give_what_bare_ones_give(wrap: Callable[[nn.Module], nn.Module]) -> None:
    images = pictures()
    wanted = explain_all(small(), images)
    model = wrap(small_model().eval())
    with torch.no_grad():
        model(images)  # compiled before any hook is there
    classifier = Classifier(model)
    found = explain_all(classifier, images)
    assert classifier.layer == "4"
    for name in CAMS:
        assert torch.allclose(found[name].cpu(), wanted[name], atol=1e-5), name
    features, logits = classifier.features(images)
    assert features.shape == (3, 6, 8, 8)
    assert torch.allclose(logits.cpu(), small()(images), atol=1e-5)


@pytest.mark.parametrize(
    ("wrap", "layer"), [(compiled, "_orig_mod.4"), (nn.DataParallel, "module.4")]
)
def test_a_layer_may_be_named_as_the_wrapper_spells_it(
    wrap: Callable[[nn.Module], nn.Module], layer: str
) -> None:
    model, images = wrap(small_model().eval()), pictures()
    wanted = explain(small(), images)
    for name in (layer, "4"):
        found = explain(Classifier(model, layer=name), images)
        assert torch.allclose(found.cpu(), wanted, atol=1e-5)
        found = explain(Classifier(model), images, layer=name)
        assert torch.allclose(found.cpu(), wanted, atol=1e-5)


def test_what_writes_over_the_layer_does_not_change_its_features() -> None:
    """Layer 3 is followed by a ReLU in place; grad-cam then reads features that are already cut."""
    classifier, images = small(), pictures()
    targets = torch.tensor([0, 1, 2])
    found = explain(classifier, images, targets, layer="3")
    plain = small_model().eval()
    plain[4] = nn.ReLU(inplace=False)
    assert torch.allclose(found, explain(Classifier(plain, layer="3"), images, targets), atol=1e-6)
    with peer.GradCAM(plain, [plain[3]]) as cam:
        theirs = torch.from_numpy(cam(images, [ClassifierOutputTarget(int(t)) for t in targets]))
    assert (found - theirs).abs().max() < 1e-4


Pair = namedtuple("Pair", ["maps", "rest"])


@pytest.mark.parametrize("form", [lambda *two: two, lambda *two: list(two), Pair])
def test_a_layer_may_give_its_features_first_of_several(form: Callable[..., object]) -> None:
    class Several(nn.Module):
        def forward(self, maps: Tensor) -> object:
            return form(maps, maps.mean())

    class First(nn.Module):
        def forward(self, several: object) -> Tensor:
            return getattr(several, "maps", None) if isinstance(several, Pair) else several[0]

    whole = small_model().eval()
    model = nn.Sequential(*whole[:5], Several(), First(), *whole[5:])
    found = explain(Classifier(model, layer="5"), pictures())
    assert torch.equal(found, explain(small(), pictures()))


def test_a_frozen_backbone_under_its_own_no_grad_is_seen_through() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = small_model()

        def forward(self, images: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.whole[:5](images)
            return self.whole[5:](features)

    found = explain(Classifier(Frozen().eval(), layer="whole.4"), pictures())
    assert torch.equal(found, explain(small(), pictures()))


def test_layers_without_a_way_to_the_logits_are_named() -> None:
    class Aside(nn.Module):
        def __init__(self, detach: bool) -> None:
            super().__init__()
            self.aside, self.whole, self.detach = nn.Conv2d(3, 2, 3), small_model(), detach

        def forward(self, images: Tensor) -> Tensor:
            self.aside(images)
            features = self.whole[:5](images)
            return self.whole[5:](features.detach() if self.detach else features)

    with pytest.raises(UserError, match="do not depend on layer 'aside'"):
        explain(Classifier(Aside(False), layer="aside"), pictures())
    with pytest.raises(UserError, match=r"no gradient|do not depend"):
        explain(Classifier(Aside(True), layer="whole.3"), pictures())
    unused = Aside(False)
    unused.idle = nn.Conv2d(3, 2, 3)
    with pytest.raises(UserError, match="'idle' is not used"):
        explain(Classifier(unused, layer="idle"), pictures())


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'gradcam'"):
        explain(small(), pictures(), method="gradcm")
    with pytest.raises(UserError, match="Unknown layer"):
        explain(small(), pictures(), layer="layer9")
    with pytest.raises(UserError, match="at least one method"):
        explain_all(small(), pictures(), methods=[])
    with pytest.raises(UserError, match="a name or a function, got int"):
        explain(small(), pictures(), method=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("room", [1, 3])
def test_out_of_memory_halves_the_batch_and_goes_on(room: int) -> None:
    images = torch.rand(10, 3, 8, 6, generator=torch.Generator().manual_seed(2))
    wanted = explain(Classifier(small_net(seed=2)), images)
    model = SmallMemory(small_net(seed=2), room)
    with pytest.warns(RuntimeWarning, match="out of memory: retrying with batch size"):
        found = explain(Classifier(model), images)
    torch.testing.assert_close(found, wanted)
    assert max(model.sizes) <= room
    assert model.failures == {1: 3, 3: 2}[room]  # 10, 5 and 2 at a time
    no_room = Classifier(SmallMemory(small_net(seed=2), 0))
    with pytest.raises(UserError, match="out of memory at batch size 1"):
        explain(no_room, images[:1])


def test_wrong_images_and_targets_are_refused() -> None:
    classifier = small()
    with pytest.raises(UserError, match=r"images must lie in 0\.\.1, got"):
        explain(classifier, pictures() * 255)
    with pytest.raises(UserError, match=r"images must be \[N,C,H,W\]"):
        explain(classifier, pictures()[0])
    with pytest.raises(UserError, match="the model has 5 classes, got 5"):
        explain(classifier, pictures(), torch.tensor([0, 1, 5]))
    with pytest.raises(UserError, match=r"targets must be \[N\] = \[3\]"):
        explain(classifier, pictures(), torch.tensor([0]))
    with pytest.raises(UserError, match="batch_size must be 1 or more"):
        explain(classifier, pictures(), batch_size=0)


def test_random_is_the_seeds_alone() -> None:
    classifier, images = small(), pictures(4)
    first = explain(classifier, images, method="random", seed=3)
    assert torch.equal(explain(classifier, images, method="random", seed=3, batch_size=1), first)
    assert torch.equal(explain(classifier, images[:2], method="random", seed=3), first[:2])
    assert not torch.equal(explain(classifier, images, method="random", seed=4), first)
    assert abs(first.mean() - 0.5) < 0.05
    state_before = torch.get_rng_state()
    explain(classifier, images, method="random")
    assert torch.equal(torch.get_rng_state(), state_before)


def test_center_is_a_hill() -> None:
    found = explain(small(), pictures(2, 8), method="center")
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[0].flip(0))
    assert torch.allclose(found[0], found[0].T)
    assert found[0, 3, 3] == 1
    assert found[0, 0, 0] == 0
    assert (found[0, 3, :4].diff() > 0).all()


def test_a_method_of_ones_own() -> None:
    classifier, images, given = small(), pictures(4), []

    def brightness(asked: Classifier, batch: Tensor, targets: Tensor) -> Tensor:
        given.append((asked is classifier, len(batch), targets.tolist()))
        return batch.mean(1)

    found = explain(classifier, images, method=brightness, batch_size=3)
    assert torch.equal(found, images.mean(1))
    own = classifier(images).argmax(1).tolist()
    assert given == [(True, 3, own[:3]), (True, 1, own[3:])]
    both = explain_all(classifier, images, methods={"mine": brightness, "theirs": "gradcam"})
    assert list(both) == ["mine", "theirs"]
    assert torch.equal(both["mine"], found)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda *a: a[1], "drop|reduce the channel"),
        (lambda *a: a[1].mean(1) * 2, "must lie in 0..1"),
        (lambda *a: a[1].mean(1) / 0 * 0, "finite"),
        (lambda *_: None, "must be a torch.Tensor"),
    ],
)
def test_the_result_of_a_method_of_ones_own_is_checked(
    wrong: Callable[..., Tensor], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        explain(small(), pictures(), method=wrong)


def test_a_new_method_is_one_function_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def hires(features: Tensor, gradients: Tensor) -> Tensor:
        return (features * gradients).sum(1)

    monkeypatch.setitem(EXPLAINERS, "hirescam", Explainer("cell by cell", "gradients", hires))
    model, images = settled("resnet18", 64), pictures(3, 64)
    with peer.HiResCAM(model, [model.layer4]) as cam:
        theirs = cam(images, [ClassifierOutputTarget(int(t)) for t in TARGETS])
    found = explain(Classifier(model), images, TARGETS, "hirescam")
    assert (found - torch.from_numpy(theirs)).abs().max() < 1e-4


def test_every_method_has_a_line_about_it() -> None:
    assert list(EXPLAINERS) == [*CAMS, "rollout", "random", "center"]
    for entry in EXPLAINERS.values():
        assert 10 < len(entry.description) < 100
        assert "\n" not in entry.description


def test_target_logits() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert target_logits(logits, torch.tensor([1, 0])).tolist() == [2.0, 3.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_what_the_cpu_gives() -> None:
    images, targets = pictures(), torch.tensor([0, 1, 2])
    wanted = explain_all(small(), images, targets, [*CAMS, "random", "center"])
    classifier = small().to("cuda")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = explain_all(classifier, images, targets, list(wanted))
        for name, maps in found.items():
            assert maps.device.type == "cuda"
            assert torch.allclose(maps.cpu(), wanted[name], atol=1e-4), name


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some lazy modules warn when they are looked at
        return sum(type(thing) is Tensor for thing in gc.get_objects())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_a_thousand_calls_do_not_grow_memory() -> None:
    classifier, images = small(), pictures(4)
    for _ in range(50):
        explain_all(classifier, images)
    count, size = tensors(), resident()
    for _ in range(1000):
        explain_all(classifier, images)
    assert tensors() <= count
    assert resident() - size < 16 * 2**20


@pytest.mark.parametrize(
    ("small", "large"), [((4, 4), (16, 16)), ((7, 5), (31, 44)), ((9, 8), (4, 5))]
)
def test_maps_grow_alike_as_images_and_as_channels(small, large) -> None:
    maps = torch.rand(6, *small, generator=torch.Generator().manual_seed(0))
    one = torch.nn.functional.interpolate(maps[:, None], size=large, mode="bilinear")[:, 0]
    found = _bounded(_as_channels(maps, large), maps)  # the way of a GPU
    torch.testing.assert_close(found, one, rtol=0, atol=1e-6)
    assert found.is_contiguous()
    torch.testing.assert_close(resize(maps, large), one, rtol=0, atol=1e-6)
