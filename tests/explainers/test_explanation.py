"""`explain`: what methods share, what is refused, and what is left behind."""

import gc
import os
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reference import small_net
from small_models import (
    Linear,
    SmallMemory,
    Traces,
    linear,
    random_images,
    small,
    small_model,
)
from sufficit import Classifier, UserError, explain
from sufficit.errors import EmptyHeatmapWarning
from sufficit.explainers import CAMS, EXPLAINERS, Explainer, explain_all
from sufficit.explainers.cams import gradcam

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # grad-cam's own imports are not ours to mend


def test_a_map_is_stretched_before_and_after_it_is_resized() -> None:
    weights = torch.ones(2, 1, 4, 4)
    weights[0] = 0
    model = nn.Sequential(nn.AvgPool2d(4), Linear(weights))
    image = random_images(1, 16, 1)
    image[:, :, 4:8, 4:8] = 1  # no resized pixel reaches a peak inside the map
    small_map = F.avg_pool2d(image, 4)
    small_map = (small_map - small_map.min()) / (small_map.max() - small_map.min())
    grown = F.interpolate(small_map, (16, 16), mode="bilinear", align_corners=False)[:, 0]
    assert grown.max() < 0.9
    wanted = (grown - grown.min()) / (grown.max() - grown.min())
    found = explain(Classifier(model, layer="0"), image, torch.tensor([1]))
    assert torch.allclose(found, wanted, atol=1e-6)


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
def test_methods_share_one_forward_pass_and_one_backward_pass_per_score(
    methods: tuple[str, ...], backwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier, forwards = small(), []
    classifier.model.register_forward_hook(lambda *_: forwards.append(1))
    with watched_backwards(monkeypatch) as calls:
        shared = explain_all(classifier, random_images(), methods=methods)
    assert (len(forwards), len(calls)) == (1, backwards)
    for name in methods:
        assert torch.equal(shared[name], explain(classifier, random_images(), method=name))


def test_controls_do_not_call_the_model() -> None:
    classifier, forwards = small(), []
    classifier.model.register_forward_hook(lambda *_: forwards.append(1))
    explain_all(classifier, random_images(), methods=["random", "center"])
    assert not forwards


def test_nothing_is_recorded_before_the_layer() -> None:
    classifier, modes = small(), []
    for place in (3, 5):
        classifier.model[place].register_forward_hook(
            lambda *_: modes.append(torch.is_grad_enabled())
        )
    explain(classifier, random_images())
    assert modes == [False, True]


def test_without_targets_the_own_prediction_is_explained() -> None:
    classifier, images = small(), random_images(6)
    own = classifier(images).argmax(1)
    for name, maps in explain_all(classifier, images).items():
        assert torch.equal(maps, explain(classifier, images, own, name))


def test_callers_under_no_grad_and_inference_mode_get_the_right_answer() -> None:
    classifier, images = small(), random_images()
    wanted = explain_all(classifier, images)
    with torch.no_grad():
        quiet = explain_all(classifier, images)
    with torch.inference_mode():
        inference = explain_all(classifier, images * 1)
        assert torch.is_inference_mode_enabled()
    for name in CAMS:
        assert torch.equal(quiet[name], wanted[name])
        assert torch.equal(inference[name], wanted[name])
        assert not inference[name].is_inference()


def test_a_model_made_under_inference_mode_is_refused_only_for_gradients() -> None:
    with torch.inference_mode():
        classifier = small()
    with pytest.raises(UserError, match=r"0\.weight was made under torch\.inference_mode"):
        explain(classifier, random_images())
    assert torch.equal(
        explain(classifier, random_images(), method="kpca-cam"),
        explain(small(), random_images(), method="kpca-cam"),
    )


def test_bf16_models_come_close_to_float32_and_give_float32() -> None:
    images = random_images()
    wanted = explain_all(small(), images)
    found = explain_all(small().to(dtype=torch.bfloat16), images)
    for name in CAMS:
        assert found[name].dtype == torch.float32
        assert (found[name] - wanted[name]).abs().mean() < 0.03, name


def test_autocast_reaches_the_model_and_not_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, images, seen = small(), random_images(), []
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
    images = random_images(5, 4, 1)
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
    images = random_images()

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


def test_nothing_is_left_behind() -> None:
    model = small_model().train()
    model[1].eval()
    model[3].weight.requires_grad_(False)
    traces = Traces(model)
    explain_all(Classifier(model), random_images())
    traces.check()


@pytest.mark.parametrize("place", [0, 4, 7])
def test_nothing_is_left_behind_when_the_model_raises(place: int) -> None:
    model = small_model().train()
    classifier = Classifier(model, layer="4")

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    model[place].register_forward_hook(fail)
    traces = Traces(model)
    with pytest.raises(RuntimeError, match="in the middle"):
        explain_all(classifier, random_images())
    traces.check()


def test_nothing_is_left_behind_when_the_method_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise RuntimeError("in the formula")

    monkeypatch.setitem(EXPLAINERS, "mine", Explainer("fails", "gradients", fail))
    model = small_model().train()
    traces = Traces(model)
    with pytest.raises(RuntimeError, match="in the formula"):
        explain(Classifier(model, layer="4"), random_images(), method="mine")
    traces.check()


def test_grads_of_a_training_run_are_left_alone() -> None:
    classifier = small()
    classifier.model(random_images()).sum().backward()
    traces = Traces(classifier.model)
    explain_all(classifier, random_images())
    traces.check()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("wrap", [compiled, compiled_in_place, nn.DataParallel])
def test_wrapped_models_give_what_bare_ones_give(wrap: Callable[[nn.Module], nn.Module]) -> None:
    images = random_images()
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
def test_a_layer_may_have_the_name_it_has_in_the_wrapper(
    wrap: Callable[[nn.Module], nn.Module], layer: str
) -> None:
    model, images = wrap(small_model().eval()), random_images()
    wanted = explain(small(), images)
    for name in (layer, "4"):
        found = explain(Classifier(model, layer=name), images)
        assert torch.allclose(found.cpu(), wanted, atol=1e-5)
        found = explain(Classifier(model), images, layer=name)
        assert torch.allclose(found.cpu(), wanted, atol=1e-5)


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
    found = explain(Classifier(model, layer="5"), random_images())
    assert torch.equal(found, explain(small(), random_images()))


def test_a_frozen_backbone_under_its_own_no_grad_is_seen_through() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = small_model()

        def forward(self, images: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.whole[:5](images)
            return self.whole[5:](features)

    found = explain(Classifier(Frozen().eval(), layer="whole.4"), random_images())
    assert torch.equal(found, explain(small(), random_images()))


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
        explain(Classifier(Aside(False), layer="aside"), random_images())
    with pytest.raises(UserError, match=r"no gradient|do not depend"):
        explain(Classifier(Aside(True), layer="whole.3"), random_images())
    unused = Aside(False)
    unused.idle = nn.Conv2d(3, 2, 3)
    with pytest.raises(UserError, match="'idle' is not used"):
        explain(Classifier(unused, layer="idle"), random_images())


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    with pytest.raises(UserError, match="Did you mean 'gradcam'"):
        explain(small(), random_images(), method="gradcm")
    with pytest.raises(UserError, match="Unknown layer"):
        explain(small(), random_images(), layer="layer9")
    with pytest.raises(UserError, match="no method given"):
        explain_all(small(), random_images(), methods=[])
    with pytest.raises(UserError, match="a name or a function, got list: use explain_all"):
        explain(small(), random_images(), method=["gradcam", "layercam"])  # type: ignore[arg-type]


@pytest.mark.parametrize("room", [1, 3])
def test_out_of_memory_halves_the_batch_and_retries(room: int) -> None:
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
        explain(classifier, random_images() * 255)
    with pytest.raises(UserError, match=r"images must be \[N,C,H,W\]"):
        explain(classifier, random_images()[0])
    with pytest.raises(UserError, match="the model has 5 classes, got 5"):
        explain(classifier, random_images(), torch.tensor([0, 1, 5]))
    with pytest.raises(UserError, match=r"targets must be \[N\] = \[3\]"):
        explain(classifier, random_images(), torch.tensor([0]))
    with pytest.raises(UserError, match="batch_size must be 1 or more"):
        explain(classifier, random_images(), batch_size=0)


def test_a_function_is_a_method() -> None:
    classifier, images, given = small(), random_images(4), []

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
def test_the_result_of_a_function_is_checked(wrong: Callable[..., Tensor], says: str) -> None:
    with pytest.raises(UserError, match=says):
        explain(small(), random_images(), method=wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_what_the_cpu_gives() -> None:
    images, targets = random_images(), torch.tensor([0, 1, 2])
    wanted = explain_all(small(), images, targets, [*CAMS, "random", "center"])
    classifier = small().to("cuda")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = explain_all(classifier, images, targets, list(wanted))
        for name, maps in found.items():
            assert maps.device.type == "cuda"
            assert torch.allclose(maps.cpu(), wanted[name], atol=1e-4), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [1, 3])
def test_images_on_a_gpu_are_checked(size: int) -> None:
    images, targets = random_images(), torch.tensor([0, 1, 2])
    wanted = explain(small(), images, targets, "gradcam")
    classifier = small().to("cuda")
    for factor in (1, 300):
        shown = images.cuda() * factor
        if factor == 1:
            found = explain(classifier, shown, targets, "gradcam", batch_size=size)
            assert torch.allclose(found.cpu(), wanted, atol=1e-4)
        else:
            with pytest.raises(UserError, match=r"0\.\.1"):
                explain(classifier, shown, targets, "gradcam", batch_size=size)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some lazy modules warn when they are looked at
        return sum(type(thing) is Tensor for thing in gc.get_objects())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_a_thousand_calls_do_not_grow_memory() -> None:
    classifier, images = small(), random_images(4)
    for _ in range(50):
        explain_all(classifier, images)
    count, size = tensors(), resident()
    for _ in range(1000):
        explain_all(classifier, images)
    assert tensors() <= count
    assert resident() - size < 16 * 2**20


def test_methods_that_draw_maps_of_several_sizes_go_together() -> None:
    words = ("integrated-gradients:steps=3", "occlusion:grid=4", "scorecam", "lrp", "gradcam")
    classifier, images = small(), random_images(2)
    together = explain_all(classifier, images, torch.tensor([0, 1]), methods=words)
    for word in words:
        alone = explain(classifier, images, torch.tensor([0, 1]), word)
        assert torch.allclose(together[word], alone, atol=1e-5), word
