"""Wrong arguments of the library: the error names what was expected, what came and the remedy."""

import math
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reference import heatmaps_like, small_net
from sufficit import Classifier, UserError, evaluate, explain, normalize, resize
from sufficit.classifier.loading import device_named
from sufficit.metrics import MSI

SIZE = (8, 6)


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return Classifier(small_net(size=SIZE, seed=2))


@pytest.fixture
def images() -> Tensor:
    return torch.rand(3, 3, *SIZE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def heatmaps() -> Tensor:
    return heatmaps_like("random", 3, SIZE)


def says(*words: str):
    """A UserError whose message has all these words, in this order."""
    return pytest.raises(UserError, match=r"(?s)" + ".*".join(words))


def test_the_error_is_a_value_error():
    assert issubclass(UserError, ValueError)


# Heatmaps


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((3, 1, 8, 6), r"heatmaps\[:, 0\]"),
        ((3, 3, 8, 6), "channel"),
        ((3, 4, 3), r"sufficit\.resize"),
        ((3, 6, 8), r"sufficit\.resize"),
        ((2, 8, 6), "one heatmap for each image"),
        ((8, 6), "image"),
        ((144,), "image"),
        ((3, 48), "image"),
        ((0, 8, 6), "image"),
        ((1, 3, 1, 8, 6), "image"),
    ],
)
def test_heatmaps_of_another_shape_are_refused_with_both_shapes(classifier, images, shape, advice):
    came = ", ".join(map(str, shape))
    with says(r"\[N,H,W\] = \[3, 8, 6\]", rf"got \[{came}\]", advice):
        evaluate(classifier, images, torch.zeros(shape))


def test_one_heatmap_without_a_batch_axis_is_told_to_get_one(classifier, images):
    with says(r"\[1, 8, 6\]", r"got \[8, 6\]", r"heatmaps\[None\]"):
        evaluate(classifier, images[:1], torch.zeros(8, 6))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_images_that_are_not_finite_are_told_how_to_leave_them_out(
    classifier, images, heatmaps, value
):
    spoiled = images.clone()
    spoiled[2, 1, 4, 4] = value
    for call in (
        lambda some: evaluate(classifier, some, heatmaps[: len(some)]),
        lambda some: explain(classifier, some),
    ):
        with pytest.raises(UserError, match="images must lie in 0..1, got .*: keep only") as caught:
            call(spoiled)
        remedy = str(caught.value).rpartition("keep only ")[2]
        kept = eval(remedy, {"images": spoiled})
        assert torch.equal(kept, torch.cat([images[:2], images[3:]]))
        call(kept)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_heatmaps_that_are_not_finite_name_the_image(classifier, images, heatmaps, value):
    heatmaps[2, 4, 4] = value
    with says("finite", "image 2$"):
        evaluate(classifier, images, heatmaps)
    heatmaps[0, 0, 0] = value
    with says("finite", "images 0, 2$"):
        evaluate(classifier, images, heatmaps)


@pytest.mark.parametrize(
    ("value", "shown"), [(1.5, r"\.\.1\.5"), (-0.25, r"-0\.25\.\."), (255, "255")]
)
def test_heatmaps_outside_0_to_1_name_the_image_and_offer_normalize(
    classifier, images, heatmaps, value, shown
):
    heatmaps[1, 3, 3] = value
    with says(r"0\.\.1", shown, "image 1", r"sufficit\.normalize"):
        evaluate(classifier, images, heatmaps)
    evaluate(classifier, images, normalize(heatmaps), columns=["msi"])


def test_a_value_a_hair_above_1_is_shown_as_what_it_is(classifier, images, heatmaps):
    heatmaps[1, 3, 3] = 1 + 2**-20
    with pytest.raises(UserError) as raised:
        evaluate(classifier, images, heatmaps)
    assert "..1 in" not in str(raised.value)


@pytest.mark.parametrize("size", [(20, 30), (13, 17), (224, 224)])
def test_what_resize_makes_of_good_heatmaps_is_good(size):
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    for heatmaps in (torch.ones(1, 4, 4), heatmaps_like("saturated", 1, (7, 7))):
        grown = resize(heatmaps, size)
        scores = evaluate(
            Classifier(model), torch.rand(1, 3, *size), grown, columns=["mask_penalty"]
        )
        share = (grown >= 0.5).double().mean().item()
        assert scores.mask_penalty.item() == pytest.approx(share)


def test_heatmaps_that_are_no_float_tensor_are_refused(classifier, images):
    with says("float", "int64"):
        evaluate(classifier, images, torch.zeros(3, *SIZE, dtype=torch.long))
    with says("float", "bool"):
        evaluate(classifier, images, torch.zeros(3, *SIZE, dtype=torch.bool))
    with says("torch.Tensor", "ndarray"):
        evaluate(classifier, images, torch.zeros(3, *SIZE).numpy())


# Images


@pytest.mark.parametrize("shape", [(3, 8, 6), (8, 6), (0, 3, 8, 6), (1, 3, 3, 8, 6), (3, 0, 8, 6)])
def test_images_of_another_number_of_axes_are_refused(classifier, heatmaps, shape):
    came = ", ".join(map(str, shape))
    with says(r"\[N,C,H,W\]", rf"got \[{came}\]"):
        evaluate(classifier, torch.zeros(shape), heatmaps)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_images_of_whole_numbers_are_refused(classifier, images, heatmaps, dtype):
    with says("float", str(dtype).replace(".", r"\."), "255"):
        evaluate(classifier, (images * 255).to(dtype), heatmaps)


@pytest.mark.parametrize("value", [1.01, -0.01, 255.0])
def test_images_outside_0_to_1_are_told_to_come_before_normalisation(
    classifier, images, heatmaps, value
):
    images[1, 0, 0, 0] = value
    with says(r"0\.\.1", "got", "normalises them"):
        evaluate(classifier, images, heatmaps)


def test_images_of_bytes_as_floats_are_told_to_be_divided(classifier, images, heatmaps):
    with says(r"0\.\.1", "divide by 255"):
        evaluate(classifier, images * 255, heatmaps)


def test_images_that_are_no_tensor_are_refused(classifier, images, heatmaps):
    with says("tensor", "ndarray"):
        evaluate(classifier, images.numpy(), heatmaps)


def test_images_of_other_channels_than_mean_and_std_are_refused(heatmaps):
    classifier = Classifier(small_net(1, SIZE), mean=(0.5,), std=(0.2,))
    with says("3 channels", "1"):
        evaluate(classifier, torch.rand(3, 3, *SIZE), heatmaps)


# Targets


@pytest.mark.parametrize("value", [3, 99])
def test_a_target_beyond_the_classes_says_how_many_there_are(classifier, images, heatmaps, value):
    with says("targets", r"0\.\.2", "3 classes", f"got {value}"):
        evaluate(classifier, images, heatmaps, torch.tensor([0, value, 1]))


def test_a_negative_target_is_refused(classifier, images, heatmaps):
    with says("targets", "0 or more", "-1"):
        evaluate(classifier, images, heatmaps, torch.tensor([0, -1, 1]))


@pytest.mark.parametrize("shape", [(2,), (3, 1), (3, 3), (), (4,)])
def test_targets_of_another_shape_are_refused(classifier, images, heatmaps, shape):
    came = ", ".join(map(str, shape))
    with says("targets", r"\[N\] = \[3\]", rf"got \[{came}\]"):
        evaluate(classifier, images, heatmaps, torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_targets_that_are_no_whole_numbers_are_refused(classifier, images, heatmaps, dtype):
    with says("targets", str(dtype).replace(".", r"\."), "long"):
        evaluate(classifier, images, heatmaps, torch.zeros(3, dtype=dtype))


# Names


@pytest.mark.parametrize(
    ("options", "kind", "wrong", "near"),
    [
        ({"columns": ["mis"]}, "column", "mis", "msi"),
        ({"columns": ["insertion_pixels"]}, "column", "insertion_pixels", "insertion_pixel"),
        ({"fill": "blak"}, "fill", "blak", "black"),
        ({"fill": "noize"}, "fill", "noize", "noise"),
        ({"score": "acuracy"}, "score", "acuracy", "accuracy"),
        ({"score": "Confidence"}, "score", "Confidence", "confidence"),
    ],
)
def test_an_unknown_name_gets_the_nearest_known_one(
    classifier, images, heatmaps, options, kind, wrong, near
):
    with says(f"Unknown {kind} '{wrong}'", f"Did you mean '{near}'", "Known"):
        evaluate(classifier, images, heatmaps, **options)


def test_a_column_asked_of_scores_that_do_not_have_it_is_refused(classifier, images, heatmaps):
    scores = evaluate(classifier, images, heatmaps, columns=["msi", "mask_penalty"])
    with says("Unknown column 'mask_penality'", "Did you mean 'mask_penalty'"):
        scores["mask_penality"]
    with pytest.raises(AttributeError, match="Did you mean 'mask_penalty'"):
        scores.mask_penality  # noqa: B018  # the attribute is the point
    assert not hasattr(scores, "insertion_pixel")


def test_an_unknown_layer_gets_the_nearest_known_one():
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, 4, 3))
    model.add_module("layer4", nn.Conv2d(4, 4, 3))
    with says("Unknown layer 'layer5'", "Did you mean 'layer4'", "stem"):
        Classifier(model, layer="layer5")


@pytest.mark.parametrize(
    ("source", "near"),
    [
        ("torchvision:resnet81", "resnet18"),
        ("torchvision:resnet_18", "resnet18"),
        ("timm:resnet81", "resnet18"),
        ("torchvison:resnet18", "torchvision:"),
        ("resnet18", None),
    ],
)
def test_an_unknown_model_gets_the_nearest_known_one(source, near):
    words = (
        [r"Unknown .*model", f"Did you mean '{near}"] if near else ["Unknown model", "torchvision:"]
    )
    with says(*words):
        Classifier.load(source, weights=None)


def test_a_path_that_is_no_folder_says_what_a_saved_classifier_is(tmp_path):
    with says("classifier.json"):
        Classifier.load(tmp_path / "nothing")
    with says("classifier.json"):
        Classifier.load(tmp_path)


@pytest.mark.parametrize("package", ["timm", "transformers"])
def test_a_missing_extra_says_what_to_install(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)  # import then raises ImportError
    with says(rf"pip install '.*\[{package}\]'"):
        Classifier.load(f"{package}:resnet18", weights=None)


# Numbers


@pytest.mark.parametrize("name", ["value_step", "percent_step"])
@pytest.mark.parametrize("step", [0, -0.1, 1.5, math.nan, math.inf])
def test_a_step_outside_0_to_1_is_refused(classifier, images, heatmaps, name, step):
    with says("step", r"0\.\.1", f"got {step}"):
        evaluate(classifier, images, heatmaps, **{name: step})


@pytest.mark.parametrize("alpha_min", [-0.01, 1.01, math.nan, math.inf, 50])
def test_an_alpha_min_outside_0_to_1_is_refused(classifier, images, heatmaps, alpha_min):
    with says("alpha_min", r"0\.\.1", f"got {alpha_min}"):
        evaluate(classifier, images, heatmaps, alpha_min=alpha_min)


def test_an_alpha_min_that_is_no_number_is_refused(classifier, images, heatmaps):
    with says("alpha_min", "search", "'serch'"):
        evaluate(classifier, images, heatmaps, alpha_min="serch")


@pytest.mark.parametrize("alpha_min", [None, [0.4, 0.5]])
def test_an_alpha_min_of_another_type_is_refused(classifier, images, heatmaps, alpha_min):
    with says("alpha_min", "number", "search"):
        evaluate(classifier, images, heatmaps, alpha_min=alpha_min)


@pytest.mark.parametrize("alpha_min", [np.float32(0.25), np.float64(0.25), torch.tensor(0.25)])
def test_a_number_of_numpy_or_torch_is_a_number(classifier, images, heatmaps, alpha_min):
    wanted = evaluate(classifier, images, heatmaps, alpha_min=0.25, columns=["msi"])
    scores = evaluate(classifier, images, heatmaps, alpha_min=alpha_min, columns=["msi"])
    assert scores.alpha_min == 0.25
    assert torch.equal(scores.msi, wanted.msi)


def test_a_search_over_nothing_or_outside_0_to_1_is_refused(classifier, images, heatmaps):
    with says("alpha_min", r"0\.\.1"):
        evaluate(classifier, images, heatmaps, alpha_min="search", alphas=())
    with says("alpha_min", r"0\.\.1", r"1\.5"):
        evaluate(classifier, images, heatmaps, alpha_min="search", alphas=(0.5, 1.5))


def test_a_search_without_msi_among_the_columns_is_refused(classifier, images, heatmaps):
    with says("search", "msi"):
        evaluate(classifier, images, heatmaps, alpha_min="search", columns=["insertion_pixel"])


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_of_no_images_is_refused(classifier, images, heatmaps, batch_size):
    with says("batch_size", f"got {batch_size}"):
        evaluate(classifier, images, heatmaps, batch_size=batch_size)


def test_metric_classes_refuse_bad_options_when_they_are_made(classifier):
    with says("alpha_min", r"0\.\.1"):
        MSI(classifier, alpha_min=2)
    with says("step"):
        MSI(classifier, value_step=0)
    with says("Unknown score"):
        MSI(classifier, score="acuracy")


def test_metric_classes_refuse_an_unknown_fill_when_they_are_made(classifier):
    with says("Unknown fill", "Did you mean 'black'"):
        MSI(classifier, fill="blak")


# Fills


@pytest.mark.parametrize(
    "shape", [(2,), (4,), (8, 6), (3, 6, 8), (2, 3, 8, 6), (3, 2, 8, 6), (1, 8)]
)
def test_a_fill_of_another_shape_is_refused_with_both_shapes(classifier, images, heatmaps, shape):
    came = ", ".join(map(str, shape))
    with says("fill", r"\[C,H,W\]", r"\[3, 3, 8, 6\]", rf"got \[{came}\]"):
        evaluate(classifier, images, heatmaps, fill=torch.zeros(shape))


def test_a_fill_outside_0_to_1_or_not_finite_is_refused(classifier, images, heatmaps):
    with says("fill", r"0\.\.1", "before normalisation"):
        evaluate(classifier, images, heatmaps, fill=torch.tensor([0.0, -2.1, 0.0]))
    with says("fill", "finite"):
        evaluate(classifier, images, heatmaps, fill=torch.tensor([0.0, math.nan, 0.0]))


def test_a_fill_that_is_neither_name_nor_tensor_is_refused(classifier, images, heatmaps):
    with says("fill", "black", "float"):
        evaluate(classifier, images, heatmaps, fill=0.5)


# Models


class Gives(nn.Module):
    """A model that answers whatever it is told."""

    def __init__(self, output) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> object:
        return self.output(x)


@pytest.mark.parametrize(
    ("output", "came"),
    [
        (lambda x: x.mean((1, 2, 3)), r"\[3\]"),
        (lambda x: x.mean((2, 3))[:, :1], r"\[3, 1\]"),
        (lambda x: x, r"\[3, 3, 8, 6\]"),
        (lambda x: None, "NoneType"),
        (lambda x: "cat", "str"),
        (lambda x: {"boxes": x}, r"\[3, 3, 8, 6\]"),
        (lambda x: [], "list"),
    ],
    ids=["numbers", "one class", "pictures", "nothing", "words", "boxes", "an empty list"],
)
def test_a_model_that_gives_no_logits_is_refused(images, heatmaps, output, came):
    with says("logits", r"\[N,C\]", rf"got {came}"):
        evaluate(Classifier(Gives(output)), images, heatmaps)


@pytest.mark.parametrize(
    "wrapped",
    [lambda y: {"logits": y}, lambda y: (y, None), lambda y: [y], lambda y: {"anything": y}],
    ids=["named", "a tuple", "a list", "a dict"],
)
def test_logits_in_a_wrapper_are_found(classifier, images, heatmaps, wrapped):
    model = small_net(size=SIZE, seed=2)
    other = Classifier(Gives(lambda x: wrapped(model(x))))
    wanted = evaluate(classifier, images, heatmaps, columns=["msi"])
    found = evaluate(other, images, heatmaps, columns=["msi"])
    assert torch.equal(found.msi, wanted.msi)


@pytest.mark.parametrize("answered", [lambda y: y[:1], lambda y: y.repeat(2, 1)])
def test_a_model_that_answers_for_another_number_of_images_is_refused(images, heatmaps, answered):
    model = Gives(lambda x: answered(x.mean((2, 3))))
    with says("logits", r"\[N,C\]"):
        evaluate(Classifier(model), images, heatmaps, torch.tensor([0, 1, 2]))


def test_what_is_no_module_is_no_classifier():
    with says("nn.Module", "function"):
        Classifier(lambda x: x)


@pytest.mark.parametrize(
    ("mean", "std", "words"),
    [
        ((0.5,), None, "both be given"),
        (None, (0.5,), "both be given"),
        ((0.5, 0.5), (0.2,), "one number per channel"),
        ((0.5,), (0.0,), "above 0"),
        ((), (), "one number per channel"),
    ],
)
def test_mean_and_std_that_do_not_go_together_are_refused(mean, std, words):
    with says(words):
        Classifier(small_net(), mean=mean, std=std)


def test_likely_slips_are_answered_in_words(classifier, images, heatmaps):
    from sufficit import explain, explain_all, normalize, resize

    with says("wrap the model first", "Classifier"):
        evaluate(classifier.model, images, heatmaps)
    with says("wrap the model first"):
        explain(classifier.model, images)
    with says("must be a Classifier", "str"):
        evaluate("resnet18", images, heatmaps)
    with says(r"\[N,C,H,W\]", "ndarray", "from_numpy"):
        evaluate(classifier, images.numpy(), heatmaps)
    with says("batch axis", r"images\[None\]"):
        classifier(images[0])
    channels_last = torch.rand(2, 12, 10, 3)
    with says("permute"):
        evaluate(classifier, channels_last, torch.rand(2, 12, 10))
    with says("targets must be class numbers"):
        evaluate(classifier, images, heatmaps, ["cat"] * len(images))
    with says("targets must be class numbers"):
        explain(classifier, images, ["cat"] * len(images))
    with says("one number per channel"):
        Classifier(classifier.model, mean=0.5, std=0.5)
    with says("batch_size"):
        evaluate(classifier, images, heatmaps, batch_size=1.5)
    for change in (normalize, lambda maps: resize(maps, (4, 4))):
        with says(r"\[N,h,w\]"):
            change(heatmaps[0])
    named = explain_all(classifier, images, methods="center")
    assert list(named) == ["center"]


def test_all_columns_ask_for_as_many_bands_as_the_docs_say():
    scores = evaluate(
        Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 40 * 40, 2))),
        torch.rand(1, 3, 40, 40),
        torch.rand(1, 40, 40),
    )
    assert len(scores.answers.bands) == 354
    assert scores.calls.item() <= 349


@pytest.mark.parametrize("name", ["value_step", "percent_step"])
@pytest.mark.parametrize("step", ["x", [1], None, 1j, 0, -1.0, math.nan])
def test_a_step_that_is_no_number_in_range_is_refused(
    classifier: Classifier, name: str, step: object
) -> None:
    images, maps = torch.rand(1, 3, *SIZE), torch.rand(1, *SIZE)
    with pytest.raises(UserError, match="a step must lie in 0..1"):
        evaluate(classifier, images, maps, **{name: step})  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_images_of_other_channels_than_the_models_are_refused(channels: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images, maps = torch.rand(1, channels, *SIZE), torch.rand(1, *SIZE)
    with pytest.raises(UserError, match=rf"must have 3 channels for this model, got {channels}"):
        evaluate(Classifier(model), images, maps)


@pytest.mark.parametrize(("wanted", "came"), [(3, 1), (1, 3), (3, 4)])
def test_the_remedy_for_other_channels_works(wanted: int, came: int) -> None:
    model = nn.Sequential(nn.Conv2d(wanted, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images = torch.rand(1, came, *SIZE)
    with pytest.raises(UserError, match="convert them to") as caught:
        Classifier(model)(images)
    remedy = str(caught.value).rpartition("convert them to ")[2]
    assert Classifier(model)(eval(remedy, {"images": images})).shape == (1, 2)


def test_a_view_a_layer_and_metrics_of_another_type_are_refused(
    classifier: Classifier, images: Tensor, heatmaps: Tensor
) -> None:
    with says(r"view must be a View, got 224: as in View\(crop=\(224, 224\)\)"):
        Classifier(classifier.model, view=224)  # type: ignore[arg-type]  # on purpose
    for layer in (classifier.model, b"conv", 3, ["conv"], []):
        came = type(layer).__name__
        wanted = rf"layer must be a name in model.named_modules\(\), got {came}: give its name"
        with says(wanted):
            Classifier(classifier.model, layer)  # type: ignore[arg-type]  # on purpose
        for method in ("gradcam", "rise"):
            with says(wanted):
                explain(classifier, images, method=method, layer=layer)  # type: ignore[arg-type]
    with says("metrics must be a dict", r"got \['msi'\]: give columns= for"):
        evaluate(classifier, images, heatmaps, metrics=["msi"])  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["photos", [torch.rand(3, *SIZE)]])
def test_images_that_are_no_tensor_are_refused_with_a_way_to_read_them(
    classifier: Classifier, given: object
) -> None:
    with says("images must be a tensor", "torch.stack what sufficit.data.images.read_image"):
        explain(classifier, given)  # type: ignore[arg-type]  # on purpose


def test_a_model_of_two_inputs_is_refused_in_words() -> None:
    class Pair(nn.Module):
        def forward(self, images: Tensor, others: Tensor) -> Tensor:
            return (images + others).mean((2, 3))

    wanted = r"take a tensor of images alone, got .*'others': wrap it in a module"
    with pytest.raises(UserError, match=wanted):
        explain(Classifier(Pair()), torch.rand(1, 3, *SIZE), method="rise:masks=2")


def test_a_device_that_computes_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="Unknown device 'meta'"):
        device_named("meta")
