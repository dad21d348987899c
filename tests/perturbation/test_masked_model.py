"""A masked model keeps the same promises, whatever hides the pixels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from small_models import Spy, Traces, cnn, mixed_modes, rand, small_vit
from sufficit import Classifier, UserError
from sufficit.data.batch import Batch
from sufficit.evaluation import batch_of
from sufficit.perturbation.bands import EVERYTHING, Band, at_least, hide, rest, show, top
from sufficit.perturbation.fills import blur, grey_noise, impute, noise
from sufficit.perturbation.masked_model import MaskedModel, finite, whole_images
from sufficit.perturbation.predict import predict_whole
from sufficit.perturbation.predictions import NO_CLASS, Predictions
from sufficit.perturbation.sampling import make_sampling
from sufficit.progress import counted

N, SIDE, PATCH = 5, 32, 8
TARGETS = torch.tensor([0, 3, 1, 2, 3])
BANDS = (show(0.5), rest(0.5), hide(0.2, 0.7), top(0.25), at_least(0.9), EVERYTHING, show(2.0))


def images_of() -> Tensor:
    return rand(N, 3, SIDE, SIDE, seed=3)


def heatmaps_of(seed: int = 5) -> Tensor:
    """Heatmaps of whole patches, so that leaving out tokens hides the very same pixels."""
    cells = rand(N, SIDE // PATCH, SIDE // PATCH, seed=seed)
    return cells.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)


def loud_cnn() -> Classifier:
    """A network whose logits differ from image to image."""
    model = cnn()
    with torch.no_grad():
        model[8].weight.mul_(40)
    return Classifier(model)


def loud_vit() -> Classifier:
    torch.manual_seed(0)
    model = small_vit(SIDE).eval()
    with torch.no_grad():
        model.heads[0].weight.normal_(std=2.0)
    return Classifier(model)


def loud_probabilities() -> Classifier:
    model = nn.Sequential(loud_cnn().model, nn.Softmax(1))
    return Classifier(model, output="probabilities")


def first_logit(logits: Tensor) -> Tensor:
    return 1 + logits[:, 0].square()


@dataclass(frozen=True, eq=False)
class Case:
    """A fill, the model that is asked, and the same by hand for one image and one mask."""

    fill: str | Tensor
    by_hand: Callable[[Tensor, Tensor, int], Tensor] | None = None
    model: Callable[[], Classifier] = loud_cnn
    own_score: bool = False

    def asked(self) -> MaskedModel:
        classifier = self.model()
        return MaskedModel(
            classifier.with_score(first_logit) if self.own_score else classifier, self.fill
        )


def over(filling: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Fill by a picture: image [1,C,H,W], mask [1,H,W] -> masked image."""
    return lambda image, kept, row: torch.where(kept[:, None], image, filling(image, row))


PICTURE, PICTURES = rand(1, 3, SIDE, SIDE, seed=8), rand(N, 3, SIDE, SIDE, seed=9)
CASES = {
    "black": Case("black", over(lambda image, _: torch.zeros_like(image))),
    "mean": Case("mean", over(lambda image, _: image.mean((2, 3), keepdim=True).expand_as(image))),
    "blur": Case("blur", over(lambda image, _: blur(image))),
    "noise": Case("noise", over(lambda image, _: noise(image).expand_as(image))),
    "road": Case("road", lambda image, kept, _: impute(image, kept, grey_noise(image))),
    "picture": Case(PICTURE, over(lambda _, __: PICTURE)),
    "a picture each": Case(PICTURES, over(lambda _, row: PICTURES[[row]])),
    "drop": Case("drop", model=loud_vit),
    "black, transformer": Case("black", model=loud_vit),
    "probabilities": Case(
        "black", over(lambda image, _: torch.zeros_like(image)), model=loud_probabilities
    ),
    "own score": Case("black", own_score=True),
}
every_case = pytest.mark.parametrize("name", CASES)


@cache
def batch_for(name: str) -> tuple[MaskedModel, Batch]:
    asked = CASES[name].asked()
    names = [f"{row}.png" for row in range(N)]
    targets = None if asked.model.score is not None else TARGETS
    return asked, batch_of(asked.model, images_of(), targets, names=names)


def ask(name: str, some: list[int] | None = None, maps: Tensor | None = None) -> Predictions:
    """What a case answers for some images; nothing of them is known before."""
    asked, batch = batch_for(name)
    rows = list(range(N)) if some is None else some
    found = heatmaps_of() if maps is None else maps
    part = batch.rows(rows)
    whole = predict_whole(asked.model, part.images, part.targets)
    part = replace(part, known={("whole", asked.model): whole})
    return asked.over(rows).ask(
        part, found[rows] if maps is None else found, BANDS, sizes=[show(0.5)]
    )


def same(one: Predictions, other: Predictions) -> None:
    assert torch.equal(one.named, other.named)
    torch.testing.assert_close(
        one.confidences, other.confidences, atol=1e-5, rtol=0, equal_nan=True
    )
    assert torch.equal(one.shares, other.shares)
    assert torch.equal(one.calls, other.calls)


def kept_by(band: Band, heatmaps: Tensor) -> Tensor:
    """The pixels of a band, by the definition: [N,H,W]."""
    if band.axis == "value":
        return (heatmaps > band.low) & (heatmaps <= band.high)
    order = heatmaps.flatten(1).argsort(dim=1, descending=True, stable=True)
    ranks = order.argsort(dim=1).view_as(heatmaps)
    pixels = heatmaps[0].numel()
    return (ranks >= band.low * pixels) & (ranks < band.high * pixels)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.by_hand])
def test_answers_are_those_of_images_masked_by_hand(name: str) -> None:
    case, found = CASES[name], ask(name)
    assert case.by_hand is not None
    classifier = case.model()
    for place, band in enumerate(BANDS):
        masks = kept_by(band, heatmaps_of())
        for row in range(N):
            image = images_of()[[row]]
            masked = case.by_hand(image, masks[[row]], row)
            with torch.no_grad():
                logits = classifier(masked)[0]
            wanted = logits.softmax(0)[TARGETS[row]]
            assert found.confidences[row, 1 + place] == pytest.approx(float(wanted), abs=2e-3)
            margin = logits.topk(2).values.diff().abs()
            if margin > 0.05:  # road is solved to a tolerance
                assert found.named[row, 1 + place] == logits.argmax()


@every_case
def test_the_whole_image_comes_first_and_is_what_the_model_says_of_it(name: str) -> None:
    asked, batch = batch_for(name)
    found = ask(name)
    whole = whole_images(asked.model, batch)
    assert found.bands == (EVERYTHING, *BANDS)
    for place in (0, 1 + BANDS.index(EVERYTHING)):
        assert torch.equal(found.named[:, place], whole.named[:, 0])
        assert torch.equal(found.confidences[:, place], whole.confidences[:, 0])
    if asked.model.score is not None:
        assert (found.confidences[:, 0] == 1).all(), "the share of the whole image's number"


@every_case
def test_an_image_alone_is_answered_as_in_a_batch(name: str) -> None:
    whole = ask(name)
    for row in (3, 0):
        same(ask(name, [row]), whole.rows([row]))
    order = [4, 2, 0, 1, 3]
    same(ask(name, order), whole.rows(order))


@every_case
def test_sources_one_after_the_other_are_answered_as_each_alone(name: str) -> None:
    one, other = heatmaps_of(5), heatmaps_of(6)
    together = ask(name, maps=torch.cat([one, other]))
    same(together.rows(range(N)), ask(name, maps=one))
    same(together.rows(range(N, 2 * N)), ask(name, maps=other))


@every_case
@pytest.mark.parametrize("size", [1, 7])
def test_the_batch_size_changes_no_answer(name: str, size: int) -> None:
    asked, batch = batch_for(name)
    smaller = replace(asked, batch_size=size)
    found = smaller.ask(batch, heatmaps_of(), BANDS, sizes=[show(0.5)])
    same(found, ask(name))


@every_case
def test_calls_are_the_masked_images_that_pass_the_model(name: str) -> None:
    passes: list[int] = []
    with counted(passes.append):
        found = ask(name)
    assert found.calls.sum() == sum(passes)
    assert (found.calls <= len({*BANDS} - {EVERYTHING})).all()
    assert found.calls.min() > 0


@every_case
def test_any_image_through_any_mask_is_answered_as_through_its_band(name: str) -> None:
    asked, batch = batch_for(name)
    masks = kept_by(show(0.5), heatmaps_of())
    rows = torch.arange(N)
    found = asked.views(batch.images, masks, (rows, rows), targets=batch.targets)
    banded = ask(name)
    place = 1 + BANDS.index(show(0.5))
    assert torch.equal(found.named, banded.named[:, place].long())
    torch.testing.assert_close(found.confidences, banded.confidences[:, place], atol=1e-5, rtol=0)
    images, through = torch.tensor([4, 0, 4]), torch.tensor([1, 1, 0])
    mixed = asked.views(
        batch.images,
        masks,
        (images, through),
        targets=batch.targets[images],
    )
    one = asked.over([4]).views(
        batch.images[[4]],
        masks[[1]],
        (torch.tensor([0]), torch.tensor([0])),
        targets=batch.targets[[4]],
    )
    assert mixed.named[0] == one.named[0]
    torch.testing.assert_close(mixed.confidences[0], one.confidences[0], equal_nan=True)


@every_case
def test_drawn_bands_are_answered_as_if_all_were_asked(name: str) -> None:
    asked, batch = batch_for(name)
    bands = [show(alpha / 20) for alpha in range(1, 20)]
    drawing = make_sampling(bands, dict.fromkeys(bands, 1.0), set(), 6)
    exact = asked.ask(batch, heatmaps_of(), bands)
    found = asked.ask(batch, heatmaps_of(), bands, drawing=drawing, seed=3)
    assert found.drawn is not None
    assert found.drawn.shape == (N, 1 + 6)
    assert (found.drawn[:, 0] == 0).all(), "the whole image"
    assert torch.equal(found.named, exact.named.gather(1, found.drawn.long()))
    torch.testing.assert_close(
        found.confidences, exact.confidences.gather(1, found.drawn.long()), atol=1e-5, rtol=0
    )
    alone = asked.over([2]).ask(batch.rows([2]), heatmaps_of()[[2]], bands, drawing=drawing, seed=3)
    assert torch.equal(alone.drawn[0], found.drawn[2]), "by seed and name"
    other = asked.ask(batch, heatmaps_of(), bands, drawing=drawing, seed=4)
    assert not torch.equal(other.drawn, found.drawn)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].model is loud_cnn])
def test_the_model_is_left_as_it_was(name: str) -> None:
    case = CASES[name]
    model = case.model().model
    mixed_modes(model)
    classifier = Classifier(model)
    asked = MaskedModel(
        classifier.with_score(first_logit) if case.own_score else classifier, case.fill
    )
    traces = Traces(model)
    batch = batch_of(asked.model, images_of(), None if case.own_score else TARGETS)
    asked.ask(batch, heatmaps_of(), BANDS)
    rows = torch.arange(N)
    asked.views(batch.images, kept_by(show(0.5), heatmaps_of()), (rows, rows))
    traces.check()


class Picky(nn.Module):
    """Gives NaN for one image wherever it is masked; its whole has the highest mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = loud_cnn().model

    def forward(self, images: Tensor) -> Tensor:
        corner = (images[:, 0, 0, 0] - 0.123).abs() < 1e-6
        masked = (images[:, :, 1:] < 0.001).all(1).any(2).any(1)
        broken = (corner & masked)[:, None]
        return self.inner(images).masked_fill(broken, torch.nan)


def test_nan_stays_in_its_row_and_in_its_band() -> None:
    images = images_of() * 0.9 + 0.05
    images[1, :, 0, 0] = 0.123
    classifier = Classifier(Picky().eval())
    batch = batch_of(classifier, images, TARGETS)
    assert finite(whole_images(classifier, batch)) == [True] * N
    maps = heatmaps_of()
    maps[1, 0, 0] = 0.6  # kept by some bands
    found = MaskedModel(classifier).ask(batch, maps, BANDS)
    plain = MaskedModel(loud_cnn()).ask(batch.for_another_model(), maps, BANDS)
    kept = torch.stack([kept_by(band, maps)[1, 0, 0] for band in (EVERYTHING, *BANDS)])
    whole = torch.tensor([band == EVERYTHING for band in (EVERYTHING, *BANDS)])
    broken = torch.zeros(N, 1 + len(BANDS), dtype=torch.bool)
    broken[1] = kept & ~whole
    assert broken.any()
    assert torch.equal(found.named == NO_CLASS, broken)
    assert torch.equal(found.confidences.isnan(), broken)
    assert torch.equal(found.named[~broken], plain.named[~broken])


def test_equal_masks_are_sent_once_and_whole_images_once_per_model() -> None:
    spy = Spy(loud_cnn().model)
    classifier = Classifier(spy)
    batch = batch_of(classifier, images_of(), TARGETS)
    flat = (heatmaps_of() > 0.5).float()
    spy.sizes.clear()
    bands = [show(alpha / 10) for alpha in range(10)]
    for fill in ("black", "mean"):
        found = MaskedModel(classifier, fill).ask(batch, flat, [*bands, EVERYTHING])
        assert found.calls.tolist() == [1] * N
    assert sum(spy.sizes) == 2 * N


def test_a_faster_copy_answers_for_masks_and_the_model_for_whole_images() -> None:
    spy, copy = Spy(loud_cnn().model), Spy(loud_cnn().model)

    class Copied:
        def of(self, shape: tuple[int, ...], size: int) -> Classifier:
            assert shape == (3, SIDE, SIDE)
            return Classifier(copy)

    classifier = Classifier(spy)
    batch = batch_of(classifier, images_of(), TARGETS)
    asked = MaskedModel(classifier, faster=Copied())  # type: ignore[arg-type]
    found = asked.ask(batch, heatmaps_of(), BANDS)
    assert (sum(spy.sizes), sum(copy.sizes)) == (N, int(found.calls.sum()))
    same(found, MaskedModel(loud_cnn()).ask(batch.for_another_model(), heatmaps_of(), BANDS))


def test_a_score_of_ones_own_is_the_share_of_the_whole_images_number() -> None:
    _, batch = batch_for("own score")
    found = ask("own score")
    plain = loud_cnn()
    masks = kept_by(show(0.5), heatmaps_of())
    with torch.no_grad():
        whole = first_logit(plain(batch.images))
        part = first_logit(plain(batch.images * masks[:, None]))
    place = 1 + BANDS.index(show(0.5))
    shares = (part / whole).clamp(0, 1)
    assert len(shares.unique()) > 2
    torch.testing.assert_close(found.confidences[:, place], shares, atol=1e-4, rtol=1e-4)


def test_a_class_that_the_model_does_not_have_is_refused() -> None:
    classifier = loud_cnn()
    with pytest.raises(UserError, match=r"must lie in 0\.\.3, the model has 4 classes"):
        batch_of(classifier, images_of(), TARGETS + 4)
