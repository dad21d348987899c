"""The CAMs equal the grad-cam package, scikit-learn and answers known by hand."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.decomposition import KernelPCA
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from small_models import linear, random_images, settled, small, small_model
from sufficit import Classifier, UserError, explain
from sufficit.explainers import CAMS, cams, explain_all

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


def vit() -> nn.Module:
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
    "vit": (vit, 64, "encoder.layers.encoder_layer_2.ln_1"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")  # random weights give some
@pytest.mark.parametrize("name", MODELS)
def test_all_five_equal_grad_cam(name: str) -> None:
    build, side, layer = MODELS[name]
    model, images = build(), random_images(3, side)
    classifier = Classifier(model)
    ours = explain_all(classifier, images, TARGETS)
    assert classifier.layer == layer
    for method in CAMS:
        theirs = by_peer(method, model, layer, images)
        assert theirs.amax() > 0.99, method
        assert (ours[method] - theirs).abs().max() < 1e-4, method


@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")  # random weights give some
def test_a_layer_in_the_middle_equals_grad_cam() -> None:
    model, images = settled("resnet18", 64), random_images(3, 64)
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
    model, images = settled("resnet18", 64), random_images(3, 64)
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
    images = torch.tensor([[[[0.0, 0.2], [0.4, 1.0]], [[0.4, 0.3], [0.4, 0.1]]]])
    # (0, 0.4, 0.8, 0) + (0, 0, 0, 0.1), over 0.8; the gradient -1 at 0.3 counts for nothing
    found = explain(linear(weights), images, torch.tensor([1]), "layercam")
    assert torch.allclose(found, torch.tensor([[[0.0, 0.5], [1.0, 0.125]]]))


def test_gradcam_plus_plus_divides_its_weights() -> None:
    features = torch.tensor([[[[1.0, 2.0]], [[0.0, 1.0]]]])
    gradients = torch.tensor([[[[0.5, -1.0]], [[2.0, 2.0]]]])
    # channel 0: 0.5 * 0.25 / (0.5 + 3 * 0.125) = 1/7; channel 1: twice 2 * 4 / (8 + 1 * 8) = 1
    wanted = torch.tensor([[[1 / 7, 2 / 7 + 1]]])
    assert torch.allclose(cams.gradcam_plus_plus(features, gradients), wanted, atol=1e-5)


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
        assert torch.allclose(cams.gradcam(features, gradients)[n], plain, atol=1e-6)
        assert torch.allclose(cams.layercam(features, gradients)[n], cells, atol=1e-6)


def test_what_writes_over_the_layer_does_not_change_its_features() -> None:
    """Layer 3 is followed by a ReLU in place; grad-cam then reads features that are already cut."""
    classifier, images = small(), random_images()
    targets = torch.tensor([0, 1, 2])
    found = explain(classifier, images, targets, layer="3")
    plain = small_model().eval()
    plain[4] = nn.ReLU(inplace=False)
    assert torch.allclose(found, explain(Classifier(plain, layer="3"), images, targets), atol=1e-6)
    with peer.GradCAM(plain, [plain[3]]) as cam:
        theirs = torch.from_numpy(cam(images, [ClassifierOutputTarget(int(t)) for t in targets]))
    assert (found - theirs).abs().max() < 1e-4


def test_nearest_classes_leave_out_the_target_also_in_a_tie() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 4.0, 0.0], [0.0, 5.0, 4.0, 9.0, 5.5]])
    assert cams.nearest_classes(logits, torch.tensor([2, 1])).tolist() == [[0, 1, 4], [4, 2, 3]]


def test_finer_scores_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]]).requires_grad_()
    targets = torch.tensor([0])
    p = [float(v) for v in logits.detach().softmax(1)[0]]
    wanted = (p[1] * 1 + p[2] * 2 + p[3] * 3) / (p[1] + p[2] + p[3])
    assert cams.contrast(logits, targets).item() == pytest.approx(wanted, rel=1e-5)
    assert cams.contrast(logits, targets, "mean").item() == pytest.approx(2.0)
    (gradient,) = torch.autograd.grad(cams.contrast(logits, targets, "mean").sum(), logits)
    assert torch.allclose(gradient, torch.tensor([[1.0, -0.2, -0.2, -0.2, 0.0]]))


def test_finer_mean_reading_is_gradcam_of_a_contrast() -> None:
    classifier, images = small(), random_images()
    targets = torch.tensor([0, 1, 2])
    found = explain(classifier, images, targets, ("finer-cam", {"reading": "mean"}))
    others = cams.nearest_classes(classifier(images).detach(), targets)
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
    classifier, images = small(classes=classes), random_images(2)
    model = classifier.model
    with peer.FinerCAM(model, [model[4]]) as cam:
        theirs = torch.from_numpy(cam(images))
    assert (explain(classifier, images, method="finer-cam") - theirs).abs().max() < 1e-4


def test_finer_refuses_what_it_does_not_know() -> None:
    classifier, images = small(), random_images(1)
    with pytest.raises(UserError, match="Did you mean 'mean'"):
        explain(classifier, images, method=("finer-cam", {"reading": "meen"}))
    with pytest.raises(UserError, match="1 or more"):
        explain(classifier, images, method=("finer-cam", {"nearest": 0}))


def test_target_logits() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert cams.target_logits(logits, torch.tensor([1, 0])).tolist() == [2.0, 3.0]


def test_kpca_equals_scikit_learn() -> None:
    features = torch.randn(3, 16, 5, 4, generator=torch.Generator().manual_seed(0)) * 3
    found = cams.kpca_cam(features)
    for maps, wanted in zip(found, features, strict=True):
        cells = wanted.flatten(1).T.double()
        kpca = KernelPCA(n_components=1, kernel="sigmoid")
        theirs = kpca.fit_transform((cells - cells.mean(0)).numpy())
        wanted_map = theirs[:, 0] / np.linalg.norm(theirs)
        assert np.allclose(maps.flatten().numpy(), wanted_map, atol=1e-5)


def test_the_component_farthest_entry_is_positive_and_a_run_repeats() -> None:
    features = torch.randn(8, 6, 4, 4, generator=torch.Generator().manual_seed(0))
    maps = cams.kpca_cam(features).flatten(1)
    assert (maps.amax(1) == maps.abs().amax(1)).all()
    assert torch.equal(cams.kpca_cam(features), cams.kpca_cam(features.flip(0)).flip(0))


def test_the_gpu_way_to_eigenvectors_equals_the_solver() -> None:
    kernels = cams.centred_kernels(
        torch.randn(16, 8, 7, 7, generator=torch.Generator().manual_seed(0)) * 2
    )
    solved, raised = cams.by_solver(kernels), cams.by_powers(kernels)
    assert torch.allclose(solved, raised, atol=1e-6)


def test_features_without_spread_give_zeros_by_kpca() -> None:
    assert torch.equal(cams.kpca_cam(torch.full((2, 3, 4, 4), 0.3)), torch.zeros(2, 4, 4))
