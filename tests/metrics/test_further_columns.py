"""The columns beyond the paper's: one mask at a time, and as Quantus and captum have them."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from captum.metrics import infidelity as captum_infidelity
from scipy.stats import pearsonr, spearmanr
from torch import Tensor, nn

from small_models import Spy
from sufficit import Classifier, UserError, evaluate
from sufficit.evaluation import batch_of
from sufficit.metrics import COLUMNS, CellMetric, Evaluation, MapMetric, Metric
from sufficit.metrics.artefacts import ARTEFACTS
from sufficit.metrics.columns import HEADINGS, METRICS
from sufficit.metrics.further_columns import CELLS, FURTHER, SUBSETS, complexity, sparseness
from sufficit.perturbation.bands import top
from sufficit.perturbation.image_masks import ImageMask
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.perturbation.sampling import uniforms
from sufficit.probes.cells import CellProbe

SIZE = (16, 16)
FREE = ("srg", "aopc", "sufficient_share", "sparseness", "complexity")


def case(n: int = 4, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    images, maps = torch.rand(n, 3, *SIZE, generator=drawn), torch.rand(n, *SIZE, generator=drawn)
    return images, maps, net()(images).argmax(1)


def net() -> nn.Module:
    """A network whose probabilities depend on where the light is."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE[0] * SIZE[1], 3))


def probability(model: nn.Module, image: Tensor, target: int) -> float:
    with torch.no_grad():
        return model(image[None]).softmax(1)[0, target].item()


def hidden_by(mask: ImageMask, name: str, seed: int = 0) -> np.ndarray:
    """The pixels a mask hides, one at a time: bool [H,W]."""
    cells = mask.cells(seed, name)
    found = np.zeros(SIZE, bool)
    for y in range(SIZE[0]):
        for x in range(SIZE[1]):
            cell = (y * mask.grid // SIZE[0]) * mask.grid + x * mask.grid // SIZE[1]
            found[y, x] = cell in cells
    return found


def by_hand(model: nn.Module, image: Tensor, heatmap: Tensor, target: int, name: str) -> dict:
    """Every further column of one image, one mask and one call at a time."""
    order = sorted(range(heatmap.numel()), key=lambda i: (-heatmap.flatten()[i].item(), i))
    whole = probability(model, image, target)
    ins, dele, first = [], [], None
    shares = [k / 50 for k in range(51)]
    for share in shares:
        count = math.floor(round(share * heatmap.numel(), 6) + 0.5)
        keep = torch.zeros(heatmap.numel())
        keep[order[:count]] = 1
        keep = keep.view(SIZE)
        ins.append(probability(model, image * keep, target))
        dele.append(probability(model, image * (1 - keep), target))
        with torch.no_grad():
            right = model((image * keep)[None]).argmax().item() == target
        first = share if right and first is None else first
    areas = [sum((a + b) / 2 / 50 for a, b in pairwise(c)) for c in (ins, dele)]
    values = sorted(heatmap.double().flatten().tolist())
    n, total = len(values), sum(values)
    pairs = sum(abs(a - b) for a in values for b in values)  # the Gini index, as differences
    falls, sums = {}, {}
    for mask in (*CELLS, *SUBSETS):
        hidden = torch.from_numpy(hidden_by(mask, name))
        falls[mask] = whole - probability(model, image * ~hidden, target)
        sums[mask] = heatmap.double()[hidden].sum().item()
    a, d = np.array([[sums[m], falls[m]] for m in SUBSETS]).T
    scales = np.linspace(-1, 1, 200_001)
    errors = (d**2).mean() - 2 * scales * (a * d).mean() + scales**2 * (a**2).mean()
    return {
        "srg": areas[0] - areas[1],
        "aopc": sum(whole - p for p in dele) / len(dele),
        "sufficient_share": 1.0 if first is None else first,
        "sparseness": pairs / (2 * n * total),
        "complexity": -sum(v / total * math.log(v / total) for v in values if v),
        "single_deletion": spearmanr([sums[m] for m in CELLS], [falls[m] for m in CELLS])[0],
        "faithfulness_correlation": pearsonr(a, d)[0],
        "infidelity": errors.min(),
    }


def test_every_column_equals_one_mask_at_a_time() -> None:
    images, maps, _ = case(3)
    model, targets = net(), torch.tensor([0, 1, 2])
    names = ["a.png", "b/c.png", "d"]
    scores = evaluate(Classifier(model), images, maps, targets, columns="all", names=names)
    assert tuple(scores.columns) == (*COLUMNS, "msi_rank", *FURTHER, *ARTEFACTS)
    for i in range(3):
        wanted = by_hand(model, images[i], maps[i], int(targets[i]), names[i])
        assert wanted.keys() == FURTHER.keys()
        for name, value in wanted.items():
            assert scores[name][i].item() == pytest.approx(value, abs=2e-6), name


def test_every_column_has_words_in_columns_toml() -> None:
    assert {*METRICS} <= {*HEADINGS}


def test_the_eleven_are_the_default_and_what_they_were() -> None:
    default, everything = (
        evaluate(Classifier(net()), *case(), columns=columns) for columns in (None, "all")
    )
    assert tuple(default.columns) == COLUMNS
    assert tuple(evaluate(Classifier(net()), *case(), columns="paper").columns) == COLUMNS
    for name in COLUMNS:
        assert torch.equal(default[name], everything[name])


def test_columns_of_masks_that_are_asked_anyway_cost_nothing() -> None:
    plain, free, image = (
        evaluate(Classifier(net()), *case(), columns=["paper", *more]).calls
        for more in ((), FREE, ("single_deletion", "infidelity", "faithfulness_correlation"))
    )
    assert torch.equal(free, plain)
    assert torch.equal(image, plain + len(CELLS) + len(SUBSETS))


def test_masks_of_the_image_are_asked_once_for_all_methods() -> None:
    images, maps, targets = case()
    spy, columns = Spy(net()), ("single_deletion", "infidelity")
    classifier = Classifier(spy)
    probe = CellProbe(MaskedModel(classifier), {name: METRICS[name] for name in columns})
    found = probe(batch_of(classifier, images, targets), {"a": maps, "b": maps.flip(1)})
    assert sum(spy.sizes) == 4 * (len(CELLS) + len(SUBSETS)) + 4  # and the whole image
    # They count for the first method.
    assert found["a"]["calls@cells"].sum() + 4 == sum(spy.sizes)
    assert "calls@cells" not in found["b"]
    for name, own in (("a", maps), ("b", maps.flip(1))):
        alone = evaluate(Classifier(net()), images, own, targets, columns=columns)
        for column in columns:
            assert torch.equal(found[name][column], alone[column])


def test_image_masks_depend_on_seed_name_and_number_alone() -> None:
    images, maps, targets = case()
    options: Any = {"columns": ["infidelity"], "seed": 1}
    names = list("abcd")
    whole = evaluate(Classifier(net()), images, maps, targets, names=names, **options)
    some = evaluate(
        Classifier(net()),
        images[[2]],
        maps[[2]],
        targets[[2]],
        names=["c"],
        batch_size=3,
        **options,
    )
    assert some.infidelity.item() == pytest.approx(whole.infidelity[2].item(), abs=1e-7)
    other = evaluate(Classifier(net()), images, maps, targets, names=names, **options | {"seed": 2})
    assert not torch.allclose(other.infidelity, whole.infidelity)
    order = uniforms(0, "8 13 7/x", 64).argsort()[:13].tolist()
    assert ImageMask(8, 7, drawn=13).cells(0, "x") == order


def test_a_fill_of_each_image_is_that_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sufficit.perturbation.predict._groups", lambda n, *_: [1] * n)
    images, maps, targets = case()
    fills = torch.rand(4, 3, *SIZE, generator=torch.Generator().manual_seed(9))
    options: Any = {"columns": ["single_deletion"], "names": list("abcd")}
    whole = evaluate(Classifier(net()), images, maps, targets, fill=fills, **options)
    for i in range(4):
        one = [part[i : i + 1] for part in (images, maps, targets)]
        alone = evaluate(Classifier(net()), *one, fill=fills[i], columns=["single_deletion"])
        assert alone.single_deletion.item() == pytest.approx(whole.single_deletion[i].item())


def test_what_has_no_value_is_nan_and_counted() -> None:
    images, _, targets = case()
    maps = torch.zeros(4, *SIZE)
    maps[1] = 0.5
    maps[2, 0, 0] = 1
    scores = evaluate(Classifier(net()), images, maps, targets, columns="all")
    assert scores.sparseness[1:3].tolist() == pytest.approx([0, 1 - 1 / 256])
    assert scores.complexity[1:3].exp().tolist() == pytest.approx([256, 1])
    for name in ("sparseness", "complexity", "single_deletion", "faithfulness_correlation"):
        assert scores[name][0].isnan(), name
    assert scores.nan_counts()["sparseness"] == 2  # images 0 and 3
    assert scores.faithfulness_correlation[1].isnan()  # all subsets have one sum
    assert not scores.infidelity.isnan().any()


class Broken(nn.Module):
    """Answers NaN where the first pixel is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, images: Tensor) -> Tensor:
        dark = images[:, :, 0, 0].sum(1) == 0
        return self.net(images).masked_fill(dark[:, None], torch.nan)


def test_an_answer_of_nan_is_no_value() -> None:
    with pytest.warns(RuntimeWarning, match="the model gave NaN"):
        scores = evaluate(Classifier(Broken()), *case(), columns=[*FURTHER])
    for name in set(FURTHER) - {"sparseness", "complexity"}:
        assert scores[name].isnan().all(), name


def test_no_share_suffices_is_one_and_a_blank_image_may() -> None:
    images, maps, _ = case(1)

    class Says(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.tensor([[1.0, 0.0]]).expand(len(images), 2)

    for target, share in ((0, 0.0), (1, 1.0)):
        found = evaluate(Classifier(Says()), images, maps, torch.tensor([target]), columns="all")
        assert found.sufficient_share.item() == share


def test_linear_columns_are_unbiased_with_few_calls() -> None:
    images, maps, targets = case()
    exact = evaluate(Classifier(net()), images, maps, targets, columns=["srg", "aopc", "msi"])
    repeats = 300
    many = [part.repeat(repeats, *[1] * (part.ndim - 1)) for part in (images, maps, targets)]
    found = evaluate(Classifier(net()), *many, columns=["srg", "aopc", "msi"], calls=10)
    assert found.sampled
    for name in ("srg", "aopc"):
        values = found[name].view(repeats, -1)
        error = values.std(0) / repeats**0.5
        assert (error > 1e-4).any()
        assert ((values.mean(0) - exact[name]).abs() <= 4.5 * error + 1e-9).all()


def test_few_calls_leave_out_what_needs_a_whole_curve_unless_it_is_named() -> None:
    few = evaluate(Classifier(net()), *case(), columns="all", calls=26)
    assert tuple(few.columns) == (
        *COLUMNS,
        "msi_rank",
        *(name for name in FURTHER if name != "sufficient_share"),
        *ARTEFACTS,
    )
    assert (few.calls <= 26 + len(CELLS) + len(SUBSETS)).all()
    with pytest.raises(UserError, match="calls must be 52 or more for these columns"):
        evaluate(Classifier(net()), *case(), columns=["sufficient_share", "srg"], calls=26)
    exact, named = (
        evaluate(Classifier(net()), *case(), columns=["sufficient_share", "srg"], calls=calls)
        for calls in ("exact", 70)
    )
    assert named.sampled
    assert torch.equal(named.sufficient_share, exact.sufficient_share)


def test_a_search_has_all_columns() -> None:
    exact = evaluate(Classifier(net()), *case(), columns="all")
    searched = evaluate(Classifier(net()), *case(), columns="all", alpha_min="search")
    for name in FURTHER:
        assert torch.equal(searched[name], exact[name]), name


def test_unknown_columns_name_the_groups_too() -> None:
    with pytest.raises(UserError, match="Unknown column 'al'. Did you mean 'all'"):
        evaluate(Classifier(net()), *case(), columns="al")


def spread_of(heatmaps: Tensor, truth: Tensor | None) -> Tensor:
    return heatmaps.flatten(1).amax(1) - heatmaps.flatten(1).amin(1)


HALVES = (ImageMask(2, 0), ImageMask(2, 3))
OWN = {
    "spread": MapMetric(True, lambda _: spread_of),
    "fall": CellMetric(True, HALVES, lambda sums, falls: falls.sum(1) + 10 * sums[:, 1]),
    "kept": Metric(True, lambda s: [top(0.5)], lambda p, s: p.of([top(0.5)], "accuracy")[:, 0]),
}


def test_metrics_of_ones_own_have_the_same_means() -> None:
    images, maps, targets = case()
    model = net()
    scores = evaluate(Classifier(model), images, maps, targets, metrics=OWN)
    for i in range(4):
        whole = probability(model, images[i], int(targets[i]))
        falls = []
        for rows in (slice(0, 8), slice(8, 16)):
            dark = images[i].clone()
            dark[:, rows, rows] = 0
            falls.append(whole - probability(model, dark, int(targets[i])))
        kept = images[i] * (maps[i].flatten().argsort(descending=True).argsort() < 128).view(SIZE)
        with torch.no_grad():
            right = model(kept[None]).argmax().item() == targets[i]
        assert scores["spread"][i].item() == pytest.approx((maps[i].max() - maps[i].min()).item())
        fall = sum(falls) + 10 * maps[i, 8:, 8:].double().sum().item()
        assert scores["fall"][i].item() == pytest.approx(fall, abs=1e-5)
        assert scores["kept"][i].item() == float(right)


def test_a_torchmetrics_class_has_the_columns() -> None:
    images, maps, targets = case()
    wanted = evaluate(Classifier(net()), images, maps, targets, columns="all", metrics=OWN)
    metric = Evaluation(Classifier(net()), columns="all", metrics=OWN)
    for rows in (slice(0, 3), slice(3, 4)):
        metric.update(images[rows], maps[rows], targets[rows])
    found = metric.scores()
    for name, values in wanted.columns.items():
        expected = pytest.approx(values.tolist(), abs=1e-6)
        assert found[name].tolist() == expected, name


@pytest.mark.parametrize("given", [(0, 0), (4, 16), (4, -1), (4, 0, 16), (300, 0)])
def test_a_mask_that_no_grid_has_is_refused(given: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="no image mask has"):
        ImageMask(*given)


# The same as captum and Quantus have it, where they do.


def test_infidelity_is_captums_at_the_best_scale() -> None:
    images, maps, targets = case()
    model, masks = net(), [torch.from_numpy(hidden_by(mask, "0")) for mask in SUBSETS]
    drawn = iter(masks)

    def perturb(inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = next(drawn)[None, None].expand_as(inputs)
        # The heatmap has no channels: a third of it on each.
        return hidden.float() / 3, inputs * ~hidden

    wanted = captum_infidelity(
        lambda x: model(x).softmax(1),
        perturb,
        images[:1],
        maps[:1, None].expand(1, 3, *SIZE),
        target=targets[:1],
        n_perturb_samples=len(masks),
        max_examples_per_batch=1,
        normalize=True,
    )
    scores = evaluate(Classifier(model), images[:1], maps[:1], targets[:1], columns=["infidelity"])
    assert scores.infidelity.item() == pytest.approx(wanted.item(), abs=1e-6)


def quantus_metric(name: str, **options: Any) -> Any:
    quantus = pytest.importorskip("quantus")
    quiet = {"disable_warnings": True, "abs": False, "normalise": False}
    return getattr(quantus, name)(**quiet, **options)


quantus_warns = pytest.mark.filterwarnings("ignore")  # of its own, at import


@quantus_warns
def test_sparseness_and_complexity_are_those_of_quantus() -> None:
    _, maps, _ = case()
    given = {"x_batch": maps[:, None].numpy()}
    # It adds 1e-7 to every value, which moves the Gini index of an all-zero map to 0.
    gini = quantus_metric("Sparseness").evaluate_batch(a_batch=maps.double().numpy(), **given)
    assert sparseness(maps).tolist() == pytest.approx(gini.tolist(), abs=1e-6)
    entropy = quantus_metric("Complexity").evaluate_batch(a_batch=maps.double().numpy(), **given)
    assert complexity(maps).tolist() == pytest.approx(entropy.tolist(), abs=1e-6)


@quantus_warns
def test_faithfulness_correlation_is_that_of_quantus(monkeypatch: pytest.MonkeyPatch) -> None:
    quantus = pytest.importorskip("quantus")
    images, maps, _ = case(1)
    images = images[:, :1]  # it draws pixels of single channels
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 3)).eval()
    masks = iter([np.flatnonzero(hidden_by(mask, "0")) for mask in SUBSETS])
    monkeypatch.setattr(np.random, "choice", lambda *_, **__: next(masks))
    metric = quantus_metric(
        "FaithfulnessCorrelation",
        nr_runs=len(SUBSETS),
        subset_size=13 * 4,
        perturb_baseline=0.0,  # its "black" is the lowest value of the image
        return_aggregate=False,
    )
    wanted = metric(
        model=model,
        x_batch=images.numpy(),
        y_batch=np.array([1]),
        a_batch=maps[:, None].numpy(),
        softmax=True,
        device="cpu",
    )
    assert quantus.__version__
    given = (Classifier(model), images, maps, torch.tensor([1]))
    found = evaluate(*given, columns=["faithfulness_correlation"])
    assert found.faithfulness_correlation.item() == pytest.approx(wanted[0], abs=1e-6)


@quantus_warns
def test_aopc_is_the_mean_fall_along_quantus_pixel_flipping() -> None:
    images, maps, _ = case(1)
    images = images[:, :1]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 3)).eval()
    metric = quantus_metric("PixelFlipping", features_in_step=16, perturb_baseline=0.0)
    preds = metric(
        model=model,
        x_batch=images.numpy(),
        y_batch=np.array([2]),
        a_batch=maps[:, None].numpy(),
        softmax=True,
        device="cpu",
    )
    whole = probability(model, images[0], 2)
    wanted = np.mean([0.0, *(whole - np.array(preds[0]))])  # it leaves out the whole image
    given = (Classifier(model), images, maps, torch.tensor([2]))
    found = evaluate(*given, columns=["aopc"], percent_step=1 / 16)
    assert found.aopc.item() == pytest.approx(wanted, abs=1e-6)
