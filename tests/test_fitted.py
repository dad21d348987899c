"""The cut of a map, against a second writing that asks one mask at a time."""

from fractions import Fraction

import pytest
import torch

from sufficit import Classifier, UserError, compare, explain
from sufficit.data.digits import synthetic_digits
from sufficit.evaluation import batch_of
from sufficit.perturbation.bands import ranks
from sufficit.perturbation.fills import FILLS
from sufficit.regions import Around, Certificate, Said
from sufficit.sources import Control, Maps, MapTensor, Method, SourceBase, cut_at, sources_of
from sufficit.sources.fitted import THOUSANDTHS, Fitted, choose

SIZES = [Fraction(size, 1000) for size in THOUSANDTHS]


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


def test_where_no_size_suffices_the_region_is_the_whole_image() -> None:
    kept, rest = torch.zeros(2, 1, 24, dtype=torch.bool), torch.ones(2, 1, 24, dtype=torch.bool)
    shares, found = choose(kept, rest)
    assert shares.tolist() == [1.0]
    assert found.tolist() == [False]


def test_a_tie_goes_to_the_smaller_size() -> None:
    kept = torch.zeros(1, 1, 24, dtype=torch.bool)
    # .15 alone: kept 1/3 - .15; .25 and .29 together: 2/3 - .25 and 2/3 - .29.
    kept[0, 0, [7, 10, 11]] = True
    rest = torch.zeros_like(kept)
    assert choose(kept, rest)[0].tolist() == [0.25]


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
        (("sofa", "tabby"), "tabby", "without it, sofa and still tabby."),
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


def test_where_nothing_suffices_the_sentence_says_so() -> None:
    one = Certificate("tabby", 1.0, False, said("tabby"), (), 98)
    assert one.sentence == "No part of this image is enough for tabby: the region is all of it."
