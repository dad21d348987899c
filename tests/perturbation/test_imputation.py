"""The fill `road` against a sparse solver, and wherever fills are used."""

import numpy as np
import pytest
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.linalg import spsolve
from torch import Tensor

from reference import small_net
from sufficit import Classifier, evaluate
from sufficit.perturbation.bands import EVERYTHING, inside, rest, show
from sufficit.perturbation.fills import NOISE, fill_for, grey_noise, impute, masked
from sufficit.perturbation.predict import predict, predict_views

WEIGHTS = {  # of Rong et al. 2022
    (a, b): 1 / 6 if 0 in (a, b) else 1 / 12
    for a in (-1, 0, 1)
    for b in (-1, 0, 1)
    if (a, b) != (0, 0)
}


def solved(image: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The paper's system, pixel by pixel, and scipy's direct solver: [C,H,W], [H,W] -> [C,H,W]."""
    hidden = [tuple(place) for place in np.argwhere(~known)]
    number = {place: i for i, place in enumerate(hidden)}
    cells = []  # weight, row and column
    right = np.zeros((len(hidden), len(image)))
    for i, (y, x) in enumerate(hidden):
        total = 0.0
        for (down, across), weight in WEIGHTS.items():
            place = (y + down, x + across)
            if not (0 <= place[0] < known.shape[0] and 0 <= place[1] < known.shape[1]):
                continue
            total += weight
            if known[place]:
                right[i] += weight * image[:, place[0], place[1]]
            else:
                cells.append((-weight, i, number[place]))
        cells.append((total, i, i))
    found = image.astype(np.float64)
    if hidden:
        values, rows, columns = zip(*cells, strict=True)
        matrix = coo_matrix((values, (rows, columns))).tocsc()
        places = np.array(hidden)
        found[:, places[:, 0], places[:, 1]] = spsolve(matrix, right).reshape(-1, len(image)).T
    return found


def some_images(n: int, size: tuple[int, int], channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    coarse = torch.rand(n, channels, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")
    return (smooth + 0.1 * torch.rand(n, channels, *size, generator=generator)).clamp(0, 1)


def some_masks(size: tuple[int, int]) -> Tensor:
    """A corner, a stripe, scattered pixels, all but a hole, all but one pixel hidden."""
    h, w = size
    masks = torch.zeros(5, h, w, dtype=torch.bool)
    masks[0, : h // 3, : w // 2] = True
    masks[1, :, w // 2] = True
    masks[2] = torch.rand(h, w, generator=torch.Generator().manual_seed(5)) > 0.8
    masks[3] = True
    masks[3, h // 4 : -h // 4, w // 4 : -w // 4] = False
    masks[4, h // 2, 1] = True
    return masks


@pytest.mark.parametrize("size", [(28, 28), (19, 33), (6, 5), (64, 48)])
@pytest.mark.parametrize("channels", [1, 3])
def test_hidden_pixels_solve_the_papers_system(size: tuple[int, int], channels: int) -> None:
    masks, images = some_masks(size), some_images(5, size, channels)
    grey = torch.full((1, channels, *size), 0.5)  # no noise
    found = impute(images, masks, grey).double().numpy()
    for image, mask, one in zip(images.double().numpy(), masks.numpy(), found, strict=True):
        assert np.abs(one - solved(image, mask)).max() < 1e-3
        assert np.array_equal(one[:, mask], image[:, mask])


def test_a_plane_is_imputed_exactly_by_hand() -> None:
    """A ramp is the mean of its neighbours everywhere: what is hidden inside comes back."""
    ramp = torch.linspace(0, 1, 16).expand(1, 1, 16, 16).clone()
    mask = torch.ones(1, 16, 16, dtype=torch.bool)
    mask[:, 3:12, 4:13] = False
    spoiled = ramp.masked_fill(~mask[:, None], 9.0)
    grey = torch.full((1, 1, 16, 16), 0.5)
    torch.testing.assert_close(impute(spoiled, mask, grey), ramp, rtol=0, atol=5e-4)


def test_a_mask_that_keeps_nothing_is_grey_and_one_that_keeps_all_is_the_image() -> None:
    images = some_images(2, (12, 10))
    masks = torch.stack([torch.zeros(12, 10), torch.ones(12, 10)]).bool()
    grey = grey_noise(images)
    found = impute(images, masks, grey)
    torch.testing.assert_close(found[0], grey[0], rtol=0, atol=1e-6)
    assert torch.equal(found[1], images[1])
    assert grey.std() == pytest.approx(NOISE, rel=0.2)
    assert torch.equal(grey, grey_noise(images[:1]))  # the same in every batch


def test_the_noise_is_added_to_imputed_pixels_only() -> None:
    images, masks = some_images(5, (24, 24)), some_masks((24, 24))
    plain = impute(images, masks, torch.full((1, 3, 24, 24), 0.5))
    noisy = impute(images, masks, grey_noise(images))
    wanted = (grey_noise(images) - 0.5).expand_as(images) * ~masks[:, None]
    torch.testing.assert_close(noisy - plain, wanted, rtol=0, atol=1e-6)


def test_a_result_does_not_depend_on_the_batch_or_on_normalisation() -> None:
    images, masks, grey = some_images(5, (24, 20)), some_masks((24, 20)), None
    grey = grey_noise(images)
    together = impute(images, masks, grey)
    for k in range(5):
        alone = impute(images[k : k + 1], masks[k : k + 1], grey)
        torch.testing.assert_close(alone[0], together[k], rtol=0, atol=1e-5)
    shifted = impute(4 * images - 2, masks, 4 * grey - 2)
    torch.testing.assert_close(shifted, 4 * together - 2, rtol=0, atol=1e-3)


def slow_logits(classifier: Classifier, image: Tensor, mask: Tensor) -> Tensor:
    """What the model says of an image imputed by the sparse solver: [C,H,W], [H,W] -> [classes]."""
    filled = torch.full_like(image, 0.5).double().numpy()
    if mask.any():
        filled = solved(image.double().numpy(), mask.numpy())
    noise = (fill_for(image[None], "road")[0] - 0.5) * ~mask
    return classifier((torch.from_numpy(filled).float() + noise)[None])[0]


@pytest.fixture
def classifier() -> Classifier:
    return Classifier(small_net(size=(16, 16), seed=2), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))


def test_predict_and_views_ask_what_the_sparse_solver_fills(classifier: Classifier) -> None:
    images = some_images(3, (16, 16))
    maps = some_images(3, (16, 16), 1)[:, 0]
    bands = [EVERYTHING, show(0.6), rest(0.6), show(2.0)]
    targets = torch.tensor([0, 1, 2])
    found = predict(classifier, images, maps, targets, bands, fill="road", batch_size=3)
    masks = inside(maps, show(0.6))
    every = torch.arange(3)
    seen = predict_views(classifier, images, masks, (every, every), targets=targets, fill="road")
    for i in range(3):
        for k, band in enumerate(bands):
            mask = inside(maps[i], band) if band.axis == "value" else torch.ones(16, 16).bool()
            wanted = slow_logits(classifier, images[i], mask).softmax(0)[targets[i]]
            assert found.confidences[i, k].item() == pytest.approx(wanted.item(), abs=1e-4)
        assert seen.confidences[i].item() == pytest.approx(found.confidences[i, 1].item(), abs=1e-5)


def test_evaluate_sampled_and_with_leak_takes_road(classifier: Classifier) -> None:
    images, maps = some_images(4, (16, 16)), some_images(4, (16, 16), 1)[:, 0]
    targets, steps = torch.tensor([0, 1, 2, 0]), {"value_step": 0.25, "percent_step": 0.25}
    given = (classifier, images, maps, targets)
    options = {"fill": "road", "score": "confidence", **steps}
    exact = evaluate(*given, **options, leak_donors=2)
    assert exact.leak.isfinite().all()
    again = evaluate(*given, fill="black", held_out_fill="road", score="confidence", **steps)
    torch.testing.assert_close(again.msi_held_out, exact.msi, rtol=0, atol=1e-5)
    assert (again.msi - exact.msi).abs().max() > 0.001  # the fill matters
    some = evaluate(*given, **options, calls=20)
    assert some.sampled


def test_pictures_show_what_the_model_saw() -> None:
    images, masks = some_images(5, (20, 20)), some_masks((20, 20))
    assert torch.equal(masked(images, masks, "road"), impute(images, masks, grey_noise(images)))
    black = masked(images, masks, "black")
    assert torch.equal(black, images * masks[:, None])


def test_half_precision_is_solved_in_float32() -> None:
    images, masks = some_images(5, (24, 24)), some_masks((24, 24))
    grey = grey_noise(images)
    found = impute(images.bfloat16(), masks, grey.bfloat16())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), impute(images, masks, grey), rtol=0, atol=0.01)
