"""The cut of a map, against a second writing that asks one mask at a time."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sufficit import Classifier, UserError, compare, explain
from sufficit.data.digits import synthetic_digits
from sufficit.evaluation import batch_of
from sufficit.perturbation.bands import EVERYTHING, all_but_top, ranks, top
from sufficit.perturbation.fills import FILLS
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.regions import Around, Certificate, Said
from sufficit.sources import Control, Maps, MapTensor, Method, SourceBase, cut_at, sources_of
from sufficit.sources.asked import PARTS, REGION, REST, THOUSANDTHS
from sufficit.sources.fitted import UNDECIDED, WHOLE, Fitted, next_parts

SIZES = [Fraction(size, 1000) for size in THOUSANDTHS]
fractions = [size / 1000 for size in THOUSANDTHS]


class Raw(SourceBase):
    """A source that gives these maps as they are, negative values included."""

    def __init__(self, maps):
        self.name, self.drawn = "raw", maps

    def maps(self, model, batch):
        return Maps(self.drawn[list(batch.numbers)], final=False)

    def digest(self):
        return "raw"


def digits(n: int = 6):
    found = synthetic_digits(n, seed=3)
    model = Classifier.load("sufficit:digits")
    return model, batch_of(model, found.images, found.labels)


def plainly(model, image, target, order, fills):
    """The share of one image by the definition, one mask at a time, in fractions."""
    pixels = order.numel()
    place = torch.empty(pixels, dtype=torch.long)
    place[order.flatten().argsort(descending=True, stable=True)] = torch.arange(pixels)

    def right(mask, fill):
        hidden = FILLS[fill](image[None])
        return int(
            model(image[None].where(mask.view(1, 1, *order.shape), hidden)).argmax() == target
        )

    kept, rest = {}, {}
    for number, size in enumerate(SIZES):
        count = int(size * pixels + Fraction(1, 2))
        for fill in fills:
            kept[number, fill] = right(place < count, fill)
            rest[number, fill] = right(place >= count, fill)

    def mean(values, number):
        near = [max(number - 1, 0), number, min(number + 1, len(SIZES) - 1)]
        return Fraction(sum(values[k, fill] for k in near for fill in fills), 3 * len(fills))

    best, share = None, Fraction(1)
    for number, size in enumerate(SIZES):
        if all(kept[number, fill] for fill in fills):
            score = mean(kept, number) - mean(rest, number) / 2 - size
            if best is None or score > best:
                best, share = score, size
    return float(share)


@pytest.mark.parametrize("fills", [("black",), ("black", "blur"), ("mean", "noise", "blur")])
def test_the_size_is_that_of_the_definition_to_the_letter(fills) -> None:
    model, batch = digits()
    orders = torch.randn(6, 8, 8, generator=torch.Generator().manual_seed(1))
    orders[3] = orders[3].round()  # ties
    found = Fitted(Raw(orders), fills=fills, name="raw+fit").maps(model, batch)
    full = torch.nn.functional.interpolate(orders[:, None], size=batch.size, mode="bilinear")[:, 0]
    # A wrong label is fitted by another rule.
    right = model(batch.images).argmax(1) == batch.targets
    assert right.sum() >= 4
    for row in right.nonzero()[:, 0].tolist():
        wanted = plainly(model, batch.images[row], batch.targets[row], full[row], fills)
        assert found.columns["fit_share"][row] == wanted


def test_gradcam_fitted_marks_the_region_and_keeps_the_order_of_all_pixels() -> None:
    model, batch = digits()
    inner = Method("gradcam", "gradcam")
    found = Fitted(inner, name="gradcam+fit").maps(model, batch)
    heatmaps = found.at(batch.size)
    marked = (heatmaps >= 0.5).flatten(1).double().mean(1)
    torch.testing.assert_close(marked, found.columns["fit_share"], atol=1 / 4096, rtol=0)
    raw = torch.nn.functional.interpolate(
        inner.maps(model, batch).maps[:, None], size=batch.size, mode="bilinear"
    )[:, 0]
    assert torch.equal(ranks(heatmaps), ranks(raw))
    assert float(heatmaps.max()) <= 1
    assert float(heatmaps.min()) >= 0


def test_values_of_a_cut_map_are_distinct_on_a_large_image() -> None:
    order = torch.rand(1, 600, 600, generator=torch.Generator().manual_seed(0))
    cut = cut_at(order, torch.tensor([0.9]))
    assert torch.equal(ranks(cut), ranks(order))
    assert int((cut >= 0.5).sum()) == 324_000


def asked_in_rounds(kept, rest):
    """The size that is chosen for each image, and the parts that were asked on the way."""
    enough = torch.zeros(*kept.shape[:2], len(PARTS), dtype=torch.bool)
    enough[..., REGION], enough[..., REST] = kept, rest
    known = torch.zeros_like(enough)
    while True:
        chosen, wanted = next_parts(enough & known, known)
        wanted &= (chosen == UNDECIDED)[:, None, None]
        if not wanted.any():
            return chosen, known
        assert not (wanted & known).any(), "nothing is asked twice"
        known |= wanted


def chosen_by_all(kept, rest):
    """The number of the size of one image by all answers, in fractions; WHOLE if there is none."""
    fills, sizes = kept.shape
    best, number = None, WHOLE
    for k in range(sizes):
        if kept[:, k].all():
            near = [max(k - 1, 0), k, min(k + 1, sizes - 1)]
            sums = [int(one[:, near].sum()) for one in (kept, rest)]
            score = Fraction(2 * sums[0] - sums[1], 6 * fills) - SIZES[k]
            if best is None or score > best:
                best, number = score, k
    return number


bits = st.integers(0, 2**24 - 1).map(lambda n: [bool(n >> k & 1) for k in range(24)])
monotone = st.integers(0, 24).map(lambda n: [k >= n for k in range(24)])


@given(
    st.integers(1, 4).flatmap(lambda f: st.lists(bits | monotone, min_size=2 * f, max_size=2 * f))
)
@settings(max_examples=150, deadline=None)
def test_rounds_of_a_few_parts_choose_what_all_answers_choose(answers) -> None:
    both = torch.tensor(answers).view(2, -1, 24)
    chosen, known = asked_in_rounds(both[:1], both[1:])
    assert int(chosen) == chosen_by_all(both[0], both[1])
    assert known.sum() <= both.numel()


class Dice(torch.nn.Module):
    """Answers that hang on every pixel, and not on the batch: classes and numbers at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = torch.nn.Parameter(torch.tensor(float(seed)))

    def forward(self, images):
        levels = (images * 255).round().long().flatten(1)
        weights = torch.arange(1, levels.shape[1] + 1) * 40_503 + int(self.seed) * 7_919
        sums = (levels * weights).sum(1, keepdim=True)
        return (sums * torch.tensor([31, 57, 91]) % 1009) / 250


@pytest.mark.parametrize("rule", ["classes", "wrong targets", "a score"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_a_fit_of_random_answers_is_that_of_the_exhaustive_rule(rule, seed) -> None:
    model, dice = Classifier(Dice(seed)), torch.Generator().manual_seed(seed)
    images = torch.rand(4, 3, 12, 10, generator=dice)
    orders = torch.randn(4, 12, 10, generator=dice)
    targets = model(images).argmax(1)
    if rule == "wrong targets":
        targets = (targets + 1) % 3
    if rule == "a score":
        model, targets = model.with_score(lambda logits: logits[:, 0]), None
    batch = batch_of(model, images, targets)
    fills, enough = ("black", "blur", "noise"), 0.5
    found = Fitted(Raw(orders), fills=fills, enough=enough, name="raw+fit").maps(model, batch)
    parts = [top(0.0), *map(top, fractions), *map(all_but_top, fractions)]
    said = [MaskedModel(model, fill).ask(batch, orders, parts) for fill in fills]
    for row in range(4):
        by_fill = []
        for one in said:
            values = one.of(parts, "confidence")[row]
            whole = one.of([EVERYTHING], "confidence")[row, 0]
            right = one.of(parts, "accuracy")[row] == 1
            if rule != "classes":
                right = (values >= values[0] + enough * (whole - values[0])) & (whole > values[0])
            by_fill.append(right[1:])
        both = torch.stack(by_fill)
        number = chosen_by_all(both[:, :24], both[:, 24:])
        assert found.columns["fit_share"][row] == [*fractions, 1.0][number]
        assert found.columns["calls@fit"][row] <= 49 * 3


def test_rounds_of_many_images_are_those_of_each_alone() -> None:
    dice = torch.Generator().manual_seed(0)
    kept, rest = (torch.rand(60, 3, 24, generator=dice) < 0.7 for _ in range(2))
    chosen, known = asked_in_rounds(kept, rest)
    for row in range(60):
        alone, asked = asked_in_rounds(kept[row : row + 1], rest[row : row + 1])
        assert chosen[row] == alone[0]
        assert torch.equal(known[row], asked[0])


def test_usual_answers_need_a_third_of_the_passes() -> None:
    # From a size on the region is right, up to a size the rest is: 8 to 20 and 4 to 16.
    dice = torch.Generator().manual_seed(0)
    sizes = torch.arange(24)
    first = torch.randint(8, 20, (50, 3, 1), generator=dice)
    last = torch.randint(4, 16, (50, 3, 1), generator=dice)
    _, known = asked_in_rounds(sizes >= first, sizes <= last)
    assert known.sum((1, 2)).double().mean() < 144 / 3


def test_where_no_size_suffices_the_region_is_the_whole_image() -> None:
    kept, rest = torch.zeros(1, 2, 24, dtype=torch.bool), torch.ones(1, 2, 24, dtype=torch.bool)
    chosen, known = asked_in_rounds(kept, rest)
    assert chosen.tolist() == [WHOLE]
    assert known.sum() == 24, "each size is refuted by one fill"


def test_a_tie_goes_to_the_smaller_size() -> None:
    kept = torch.zeros(1, 1, 24, dtype=torch.bool)
    # .15 alone: kept 1/3 - .15; .25 and .29 together: 2/3 - .25 and 2/3 - .29.
    kept[0, 0, [7, 10, 11]] = True
    rest = torch.zeros_like(kept)
    assert asked_in_rounds(kept, rest)[0].tolist() == [10]


def test_a_wrong_target_is_fitted_by_its_probability() -> None:
    model, batch = digits()
    wrong = (batch.targets + 1) % 10
    odd = batch_of(model, batch.images, wrong)
    found = Fitted(Control("center"), name="center+fit").maps(model, odd)
    confidence = model(batch.images).softmax(1).gather(1, wrong[:, None])[:, 0]
    shares = found.columns["fit_share"]
    for row in range(len(batch)):
        empty = torch.zeros_like(batch.images[row : row + 1])
        blank = model(empty).softmax(1)[0, wrong[row]]
        if confidence[row] <= blank:  # the whole image scores no more than an empty one
            assert shares[row] == 1


def test_a_fit_without_a_fill_is_refused() -> None:
    with pytest.raises(UserError, match="one fill or more"):
        Fitted(MapTensor("maps", torch.rand(1, 4, 4)), fills=())


def test_a_word_cuts_any_source_and_draws_its_map_once() -> None:
    found = {one.name: one for one in sources_of(["gradcam", "gradcam+fit", "random+fit"])}
    assert [*found] == [
        "gradcam",
        "gradcam+fit",
        "random+fit",
        "everything",
        "random",
        "center",
        "center+fit",
    ]
    assert found["gradcam+fit"].source is found["gradcam"]
    roles = {name: one.role for name, one in found.items()}
    assert roles["gradcam+fit"] == "method"
    assert roles["center+fit"] == "control"
    assert [one.name for one in sources_of(["mine=gradcam+fit"], controls=False)] == ["mine"]


@pytest.mark.slow
def test_a_run_scores_the_cut_under_a_fill_it_has_not_asked(tmp_path) -> None:
    model, batch = digits()
    steps = {"value_step": 0.25, "percent_step": 0.25, "unit_size": 4, "progress": False}
    cut = Fitted("gradcam", fills=("black", "blur"))
    methods = {"gradcam+fit": cut, "gradcam": "gradcam"}
    asked = {**steps, "checks": ("fill", "controls", "leak")}
    result = compare(model, batch.images, methods, batch.targets, out=tmp_path / "run", **asked)
    conditions = {one.key: one.fill for one in result.conditions}
    assert conditions["held_out"] == "mean"
    rows = result.rows["gradcam+fit"]
    # Where no part is enough with every fill, the region is the whole image.
    assert ((rows["fit_enough"] == 1) | (rows["fit_share"] == 1)).all()
    assert rows["fit_enough"].sum() >= 4
    # alpha_min marks exactly the region, and alone it is right with black around it.
    assert rows["mask_penalty"].sub(rows["fit_share"]).abs().max() <= 1 / 4096
    assert result.table().at["gradcam+fit", "msi"] > result.table().at["gradcam", "msi"]
    again = compare(model, batch.images, methods, batch.targets, **asked)
    assert again.rows["gradcam+fit"].equals(rows)
    assert "Share of the image in the region" in result.report(tmp_path / "r.html").read_text()


def test_explain_with_a_fit_returns_regions_whose_certificates_the_model_confirms() -> None:
    model, batch = digits()
    regions = explain(model, batch.images, batch.targets, "gradcam", fit=True)
    assert len(regions) == 6
    for row, found in enumerate(regions.certificates):
        mask = regions.heatmaps[row] >= 0.5
        assert abs(float(mask.double().mean()) - found.share) <= 1 / 4096
        assert [one.asked for one in found.fills] == [True, True, True, False]
        for around in found.fills:
            image, fill = batch.images[row : row + 1], FILLS[around.fill]
            parts = {"region": mask, "rest": ~mask, "nothing": mask & False}
            for name, part in parts.items():
                said = model(image.where(part, fill(image))).detach().softmax(1)[0]
                known = getattr(around, name)
                assert known.name == model.classes[int(said.argmax())]
                assert known.is_target == (int(said.argmax()) == int(batch.targets[row]))
                assert known.confidence == pytest.approx(float(said[batch.targets[row]]), abs=1e-4)
        assert [size.share for size in found.sizes] == sorted({size.share for size in found.sizes})
        for size in found.sizes:
            first = ranks(regions.heatmaps[row][None])[0] < int(size.share * 4096 + 0.5)
            for part, answers in ((first, size.region), (~first, size.rest)):
                for fill, known in answers.items():
                    image = batch.images[row : row + 1]
                    seen = image.where(part, FILLS[fill](image))
                    said = model(seen).detach().softmax(1)[0]
                    assert known.name == model.classes[int(said.argmax())]
                    value = float(said[batch.targets[row]])
                    assert known.confidence == pytest.approx(value, abs=1e-4)
        chosen = next(size for size in found.sizes if size.share == found.share)
        assert {*chosen.region} == {"black", "blur", "noise"}
        assert found.enough
        assert all(one.region.is_target for one in found.fills if one.asked)
        assert f"{found.share:.0%} of this image is enough" in found.sentence
    frame = regions.frame()
    assert frame["share"].tolist() == [one.share for one in regions]
    assert frame["mean_region"].tolist() == [one.fills[3].region.name for one in regions]


def said(name: str, target: str = "tabby", confidence: float = 0.9) -> Said:
    return Said(name, name == target, confidence)


@pytest.mark.parametrize(
    ("rest", "unseen", "words"),
    [
        (("sofa", "sofa"), "tabby", "(0.90) and blur around it (0.90); without it, sofa."),
        (("sofa", "tabby"), "tabby", "without it, sofa with black, still tabby with blur."),
        (("tabby", "tabby"), "tabby", "without it, still tabby."),
        (("sofa", "sofa"), "dog", "With mean, which was not asked, it says dog."),
    ],
)
def test_the_sentence_is_true_in_every_case(rest, unseen, words) -> None:
    blank = said("night")
    asked = [
        Around(fill, True, said("tabby"), said(one), blank)
        for fill, one in zip(("black", "blur"), rest, strict=True)
    ]
    fills = (*asked, Around("mean", False, said(unseen), said("sofa"), blank))
    one = Certificate("tabby", 0.23, True, said("tabby"), fills, 100)
    assert one.sentence.startswith("23% of this image is enough: the model says tabby with black")
    assert words in one.sentence


def around(region: Said, rest: Said, *fills: str) -> tuple[Around, ...]:
    return tuple(Around(fill, True, region, rest, said("night", confidence=0.01)) for fill in fills)


def test_where_nothing_suffices_the_sentence_says_so() -> None:
    fills = around(said("tabby"), said("night"), "black", "blur")
    one = Certificate("tabby", 1.0, False, said("tabby"), fills, 98)
    assert one.sentence == (
        "No region of this map is enough for tabby with black and blur: the region is the whole"
        " image."
    )


def test_a_target_that_the_model_does_not_give_is_not_claimed() -> None:
    fills = around(said("sofa", confidence=0.19), said("sofa", confidence=0.02), "black", "blur")
    whole = said("sofa", confidence=0.2)
    one = Certificate("tabby", 0.125, True, whole, fills, 98, needed=0.9)
    assert one.sentence == (
        "The model says sofa of the whole image, not tabby (0.20). 12.5% of this image keeps 90% of"
        " tabby's score above that of an empty image: with black around it (0.19) and blur around"
        " it (0.19); without it, with black in its place (0.02) and blur in its place (0.02)."
    )
    none = Certificate("tabby", 1.0, False, whole, fills, 98, needed=0.9)
    assert none.sentence == (
        "The model says sofa of the whole image, not tabby (0.20). No region of this map keeps 90%"
        " of tabby's score above that of an empty image with black and blur: the region is the"
        " whole image."
    )
    (night,) = around(said("sofa", confidence=0.2), said("night", confidence=0.01), "black")
    blank = (replace(night, nothing=said("tabby", confidence=0.3)),)
    worse = Certificate("tabby", 1.0, False, whole, blank, 98, needed=0.9)
    assert worse.sentence.endswith(
        "The whole image scores no more than an empty one with black: the region is the whole"
        " image."
    )


def test_a_score_of_the_users_has_no_classes_in_its_sentence() -> None:
    model, batch = digits()
    scored = model.with_score(lambda logits: logits.softmax(1).amax(1))
    found = explain(scored, batch.images, None, "gradcam", fit=True, fills=("blur", "mean"))
    for one in found:
        assert one.target == "the score"
        assert one.needed == 0.9
        assert "the model says" not in one.sentence.lower()
    cut = [one for one in found if one.enough]
    assert cut
    assert "keeps 90% of the score above that of an empty image" in cut[0].sentence
    kept = next(one for one in cut[0].fills if one.asked)
    least = kept.nothing.confidence + 0.9 * (1 - kept.nothing.confidence)
    assert kept.region.confidence >= least - 1e-6
