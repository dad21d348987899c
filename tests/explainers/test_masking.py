"""Occlusion, RISE, Kernel SHAP and Score-CAM against peers, second writings and known answers."""

import warnings
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from small_models import cnn, linear, rand, random_images
from sufficit import Classifier, UserError, explain, normalize
from sufficit.explainers import explainer_named
from sufficit.explainers.masking import coalitions, kernel_shap, occlusion, rise, rise_masks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the peers' own imports are not ours to mend
    import pytorch_grad_cam as peer
    from captum import attr
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

PLAIN = {"layer": None, "seed": 0, "fill": "black"}
QUICK = ("occlusion:grid=4:window=2", "rise:masks=40", "kernel-shap:grid=3:samples=60", "scorecam")


@pytest.fixture
def classifier() -> Classifier:
    return Classifier(lively(cnn()), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))


def lively(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for weights in model.parameters():
        weights.data += 0.5 * torch.randn(weights.shape, generator=generator)
    return model.eval()


def test_occlusion_equals_captums(classifier: Classifier) -> None:
    images, targets = random_images(2, 16), torch.tensor([1, 3])
    theirs = attr.Occlusion(lambda x: classifier(x).softmax(1)).attribute(
        images, sliding_window_shapes=(3, 8, 8), strides=(3, 4, 4), target=targets, baselines=0
    )
    found = occlusion(classifier, images, targets, **PLAIN, grid=4, window=2)
    assert torch.allclose(found, theirs[:, 0].float(), atol=1e-5)
    assert found.abs().max() > 1e-3


def test_occlusion_with_squares_that_do_not_overlap_is_known_by_hand() -> None:
    weights = torch.zeros(2, 3, 8, 8)
    weights[1, :, :4, :4] = 0.1  # class 1 lives in the upper left quarter
    images, targets = torch.ones(1, 3, 8, 8), torch.tensor([1])
    found = occlusion(linear(weights), images, targets, **PLAIN, grid=2, window=1)
    gap = torch.tensor(3 * 16 * 0.1)
    assert torch.allclose(found[0, :4, :4], gap.sigmoid() - 0.5, atol=1e-5)
    assert found[0, 4:].abs().max() < 1e-6
    assert found[0, :, 4:].abs().max() < 1e-6
    for grid, window in ((9, 1), (2, 3)):
        with pytest.raises(UserError, match="occlusion needs window <= grid <= the image's side"):
            occlusion(linear(weights), images, targets, **PLAIN, grid=grid, window=window)


def test_rise_equals_a_slow_one(classifier: Classifier) -> None:
    """Mask by mask and image by image; masks by torch's own resize of each grid."""
    images, targets = rand(2, 3, 12, 17), torch.tensor([0, 2])
    cells, share, count = 3, 0.4, 7
    generator = torch.Generator().manual_seed(5)
    grids = (torch.rand(count, cells, cells, generator=generator) < share).float()
    downs = torch.randint(4, (count,), generator=generator)
    rights = torch.randint(6, (count,), generator=generator)
    slow = torch.zeros(2, 12, 17)
    for i in range(2):
        for k in range(count):
            large = nn.functional.interpolate(grids[k][None, None], (16, 24), mode="bilinear")
            mask = large[0, 0, downs[k] : downs[k] + 12, rights[k] : rights[k] + 17]
            confidence = classifier(images[i : i + 1] * mask).softmax(1)[0, targets[i]].item()
            slow[i] += confidence * mask / (count * share)
    options = {"layer": None, "seed": 5, "fill": "black", "masks": count}
    found = rise(classifier, images, targets, **options, cells=cells, share=share)
    assert torch.allclose(found, slow, atol=1e-5)


def test_rise_masks_are_the_same_in_chunks_and_show_the_share(monkeypatch) -> None:
    whole = torch.cat([*rise_masks((32, 32), 200, 4, 0.3, 1)])
    monkeypatch.setattr("sufficit.explainers.masking._CHUNK_ELEMENTS", 20_000)
    parts = [*rise_masks((32, 32), 200, 4, 0.3, 1)]
    assert len(parts) > 5
    assert torch.equal(torch.cat(parts), whole)
    assert abs(whole.mean() - 0.3) < 0.03
    assert whole.shape == (200, 32, 32)


def brute_force_shapley(classifier: Classifier, image: Tensor, target: int, grid: int) -> Tensor:
    """The mean over all orders in which the cells appear, by the definition."""
    side = image.shape[-1] // grid

    def value(shown: frozenset[int]) -> float:
        mask = torch.zeros(grid, grid)
        for player in shown:
            mask[player // grid, player % grid] = 1
        masked = image * mask.repeat_interleave(side, 0).repeat_interleave(side, 1)
        return classifier(masked[None])[0, target].item()

    values, orders = torch.zeros(grid * grid), list(permutations(range(grid * grid)))
    for order in orders:
        shown: frozenset[int] = frozenset()
        for player in order:
            values[player] += value(shown | {player}) - value(shown)
            shown |= {player}
    return values.view(grid, grid) / len(orders)


def test_kernel_shap_of_few_cells_is_exact(classifier: Classifier) -> None:
    images, targets = random_images(2, 8), torch.tensor([1, 2])
    found = kernel_shap(classifier, images, targets, **PLAIN, grid=2, samples=14)
    for i in range(2):
        wanted = brute_force_shapley(classifier, images[i], int(targets[i]), 2)
        assert torch.allclose(found[i], wanted, atol=1e-4)


def test_kernel_shap_of_many_cells_comes_close_and_adds_up(classifier: Classifier) -> None:
    images, targets = random_images(1, 12), torch.tensor([1])
    exact = kernel_shap(classifier, images, targets, **PLAIN, grid=3, samples=510)
    drawn = kernel_shap(classifier, images, targets, **PLAIN, grid=3, samples=400)
    assert (drawn - exact).abs().max() < 0.15 * exact.abs().max()
    assert not torch.equal(drawn, exact)
    gap = classifier(images)[0, 1] - classifier(torch.zeros_like(images))[0, 1]
    for found in (exact, drawn):
        assert torch.allclose(found.sum(), gap, atol=1e-4)


def test_kernel_shap_of_a_linear_model_is_known_by_hand() -> None:
    weights = rand(2, 3, 8, 8) - 0.5
    images, targets = random_images(1, 8), torch.tensor([1])
    wanted = (weights[1] * images[0]).sum(0).view(4, 2, 4, 2).sum((1, 3))
    found = kernel_shap(linear(weights), images, targets, **PLAIN, grid=4, samples=300)
    assert torch.allclose(found[0], wanted, atol=1e-4)


def test_coalitions_come_with_their_complements_and_sizes_by_the_kernel() -> None:
    shown, weights = coalitions(14, 4000, 0)
    assert torch.equal(shown[:2000] + shown[2000:], torch.ones(2000, 14))
    sizes = shown.sum(1)
    assert sizes.min() >= 1
    assert sizes.max() <= 13
    mass = torch.tensor([1 / (k * (14 - k)) for k in range(1, 14)])
    found = torch.bincount(sizes.long(), minlength=14)[1:] / len(shown)
    assert torch.allclose(found, mass / mass.sum(), atol=0.02)
    assert weights.unique().tolist() == [1]


def test_scorecam_equals_that_of_grad_cam(monkeypatch: pytest.MonkeyPatch) -> None:
    # grad-cam enlarges with aligned corners, which nothing here does.
    size = lambda size: nn.Upsample(size=size, mode="bilinear")  # noqa: E731  # a class's stand-in
    monkeypatch.setattr(torch.nn, "UpsamplingBilinear2d", size)
    model, images, targets = lively(cnn()), random_images(2, 16), torch.tensor([1, 3])
    with peer.ScoreCAM(model, [model[4]]) as cam:
        theirs = torch.from_numpy(cam(images, [ClassifierOutputTarget(int(t)) for t in targets]))
    found = explain(Classifier(model, layer="4"), images, targets, "scorecam")
    assert (found - theirs).abs().max() < 1e-4


def test_scorecam_of_few_channels_is_that_of_a_model_with_these_channels_alone() -> None:
    # A model that reads three channels of the image; two of them have the higher means.
    features = nn.Conv2d(3, 3, 1, bias=False)
    features.weight.data.copy_(torch.eye(3)[:, :, None, None])
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    model = nn.Sequential(features, *head).eval()
    images = random_images(2, 8) * torch.tensor([1.0, 0.1, 0.8])[:, None, None]
    targets = torch.tensor([0, 1])
    found = explain(Classifier(model, layer="0"), images, targets, "scorecam:channels=2")
    raw = []
    for image, target in zip(images, targets, strict=True):
        asked = [(one - one.min()) / (one.max() - one.min() + 1e-8) for one in image]
        logits = torch.stack([model((image * asked[k])[None])[0, target] for k in (0, 2)])
        weights = logits.softmax(0)
        raw.append(weights[0] * image[0] + weights[1] * image[2])
    assert torch.allclose(found, normalize(torch.stack(raw)), atol=1e-4)
    every = explain(Classifier(model, layer="0"), images, targets, "scorecam:channels=3")
    assert torch.allclose(every, explain(Classifier(model, layer="0"), images, targets, "scorecam"))
    assert explainer_named("scorecam:channels=2").passes == 3
