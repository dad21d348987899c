import warnings
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import sufficit.perturbation.bands
import sufficit.perturbation.predict
from reference import COLUMNS, heatmaps_like, one_at_a_time, reference_columns, small_net
from small_models import SmallMemory, Spy
from small_probes import ask, probe_for
from sufficit import Classifier, UserError, evaluate, leak
from sufficit.perturbation.bands import EVERYTHING, rest, show
from sufficit.perturbation.fills import FILLS, blur
from sufficit.perturbation.predict import predict, predict_views

SIZE = (8, 6)
COARSE = {"value_step": 0.05, "percent_step": 0.1}


def data(n: int = 5, seed: int = 2) -> tuple[Tensor, Tensor]:
    images = torch.rand(n, 3, *SIZE, generator=torch.Generator().manual_seed(seed))
    return images, heatmaps_like("random", n, SIZE, seed)


def assert_same(scores, wanted, tolerance: float = 1e-6) -> None:
    for name in COLUMNS:
        torch.testing.assert_close(
            torch.as_tensor(scores[name], dtype=torch.float64),
            torch.as_tensor(wanted[name], dtype=torch.float64),
            rtol=0,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


# Memory


@pytest.mark.parametrize("batch_size", [None, 64, 5])
@pytest.mark.parametrize("room", [1, 3])
def test_out_of_memory_halves_the_batch_and_retries(room, batch_size):
    images, heatmaps = data()
    wanted = evaluate(Classifier(small_net(seed=2)), images, heatmaps, **COARSE)
    model = SmallMemory(small_net(seed=2), room)
    with pytest.warns(RuntimeWarning, match="memory"):
        scores = evaluate(Classifier(model), images, heatmaps, batch_size=batch_size, **COARSE)
    assert_same(scores, wanted)
    assert scores.targets.tolist() == wanted.targets.tolist()
    # Failed calls answer nothing and are no calls; every image that came back is.
    assert scores.calls.tolist() == wanted.calls.tolist()
    assert sum(model.sizes) == wanted.calls.sum().item()
    assert max(model.sizes) <= room
    # Halving from any size that fits an integer takes few tries, and a lesson learned is kept.
    assert 1 <= model.failures <= 32


def test_what_fits_into_memory_is_learned_once_for_a_model_and_a_size():
    images, heatmaps = data()
    model = SmallMemory(small_net(seed=2), 3)
    with pytest.warns(RuntimeWarning, match="memory"):
        evaluate(Classifier(model), images, heatmaps, **COARSE)
    model.failures = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(Classifier(model), images, heatmaps, batch_size=64, **COARSE)
    assert model.failures == 0
    assert max(model.sizes) <= 3


def test_out_of_memory_for_the_targets_own_pass_is_survived_too():
    images, heatmaps = data(12)
    model = SmallMemory(small_net(seed=2), 4)
    with pytest.warns(RuntimeWarning, match="memory"):
        scores = evaluate(Classifier(model), images, heatmaps, columns=["mask_penalty"])
    wanted = small_net(seed=2)(images).argmax(1)
    assert scores.targets.tolist() == wanted.tolist()


@pytest.mark.parametrize("batch_size", [None, 8, 1])
def test_out_of_memory_for_a_single_image_is_an_error_that_says_so(batch_size):
    images, heatmaps = data(2)
    model = SmallMemory(small_net(seed=2), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(UserError, match="memory"):
            evaluate(Classifier(model), images, heatmaps, batch_size=batch_size, **COARSE)


def test_other_errors_of_the_model_come_through_as_they_are():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        evaluate(Classifier(Broken()), *data(2), **COARSE)
    assert not isinstance(raised.value, UserError)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 100])
def test_no_call_has_more_images_than_the_batch_size(batch_size):
    model = Spy(small_net(seed=2))
    scores = evaluate(Classifier(model), *data(), batch_size=batch_size, **COARSE)
    assert max(model.sizes) == batch_size
    assert sum(model.sizes) == scores.calls.sum().item()


@pytest.mark.parametrize("last", [False, True])
def test_where_new_sizes_are_slow_the_model_sees_few_and_says_the_same(monkeypatch, last):
    images, heatmaps = data(6)
    targets = torch.tensor([0, 1, 2, 0, 1, 2])
    asked = {"batch_size": 32, "leak_donors": 2, **COARSE}
    model = Spy(small_net(seed=2))
    if last:
        model.to(memory_format=torch.channels_last)
    plain = evaluate(Classifier(model), images, heatmaps, targets, **asked)
    free = set(model.sizes)
    model.sizes.clear()
    monkeypatch.setattr(sufficit.perturbation.predict, "_FEW_SIZES", ("cpu",))
    scores = evaluate(Classifier(model), images, heatmaps, targets, **asked)
    assert any(size % 4 for size in free)  # so there was something to fill up
    assert all(size % 4 == 0 and size <= 32 for size in model.sizes)
    assert all(kept for _, kept in model.inputs) or not last
    assert torch.equal(scores.calls, plain.calls)
    assert torch.equal(scores.answers.named, plain.answers.named)
    assert_same(scores, plain.columns)


@pytest.mark.filterwarnings("ignore:out of memory")
def test_a_batch_that_was_filled_up_is_halved_from_what_was_sent(monkeypatch):
    monkeypatch.setattr(sufficit.perturbation.predict, "_FEW_SIZES", ("cpu",))
    wanted = evaluate(Classifier(small_net(seed=2)), *data(), **COARSE)
    model = SmallMemory(small_net(seed=2), 5)
    scores = evaluate(Classifier(model), *data(), batch_size=64, **COARSE)
    assert_same(scores, wanted.columns)
    assert max(model.sizes) >= 2


@pytest.mark.parametrize("most", [0, 2**32])
def test_masks_of_the_leak_may_lie_anywhere(monkeypatch, most):
    images, heatmaps = data(6)
    targets = torch.tensor([0, 1, 2, 0, 1, 2])
    wanted = leak(Classifier(small_net(seed=2)), images, heatmaps, targets)
    monkeypatch.setattr(sufficit.perturbation.bands, "_MASK_ELEMENTS", most)
    monkeypatch.setattr(sufficit.perturbation.bands, "_STEP_ELEMENTS", 100)
    found = leak(Classifier(small_net(seed=2)), images, heatmaps, targets)
    assert found.mean() == wanted.mean()


@pytest.mark.filterwarnings("ignore:out of memory")
@pytest.mark.parametrize("fill", ["black", "blur", "noise"])
def test_views_are_any_images_through_any_masks(fill):
    images, heatmaps = data(6)
    masks, model = heatmaps[:4] > 0.5, SmallMemory(small_net(seed=2), 3)
    views = (torch.tensor([5, 0, 0, 3, 5]), torch.tensor([1, 3, 0, 1, 2]))
    targets = torch.tensor([0, 1, 2, 1, 0])
    found = predict_views(Classifier(model), images, masks, views, targets=targets, fill=fill)
    for i, (image, mask) in enumerate(zip(*(v.tolist() for v in views), strict=True)):
        whole = images[image : image + 1]
        shown = torch.where(masks[mask], whole, FILLS[fill](whole))
        with torch.no_grad():
            logits = small_net(seed=2)(shown)[0]
        assert found.named[i] == logits.argmax()
        assert abs(found.confidences[i] - logits.softmax(0)[targets[i]]) < 1e-6
    bare = predict_views(Classifier(model), images, masks, views, fill=fill)
    assert torch.equal(bare.named, found.named)
    assert bare.confidences.isnan().all()


# Whole images


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_whole_image_is_asked_only_where_it_is_needed(batch_size):
    images, heatmaps = data(6)
    heatmaps[1], heatmaps[4] = 0.9, 0.8  # their masks hide nothing
    targets = torch.arange(6) % 3
    asked, size = (show(0.3), rest(0.3)), {"batch_size": batch_size}
    classifier = Classifier(small_net(seed=2))
    wanted = predict(classifier, images, heatmaps, targets, (EVERYTHING, *asked), **size)
    spy = Spy(small_net(seed=2))
    found = predict(Classifier(spy), images, heatmaps, targets, asked, **size)
    assert sum(spy.sizes) == 12
    assert found.calls.sum() == 10  # those of masks; the probe counts whole images
    assert torch.equal(found.named, wanted.named[:, 1:])
    assert torch.equal(found.confidences, wanted.confidences[:, 1:])
    # Without targets the model's own predictions are needed, for every image.
    spy.sizes.clear()
    own = predict(Classifier(spy), images, heatmaps, None, asked, **size)
    assert sum(spy.sizes) == 6 + 10
    assert own.targets.tolist() == small_net(seed=2)(images).argmax(1).tolist()
    with pytest.raises(UserError, match="the model has 3 classes, got 5"):
        predict(classifier, images, heatmaps, torch.arange(6), asked, **size)


# Groups


@pytest.mark.parametrize("elements", [1, 200, 1000])
@pytest.mark.parametrize("fill", ["black", "mean", "blur", "noise", "own"])
@pytest.mark.parametrize("with_targets", [True, False])
def test_images_in_several_groups_score_as_in_one(monkeypatch, elements, fill, with_targets):
    images, heatmaps = data(11)
    own = torch.rand(11, 3, *SIZE, generator=torch.Generator().manual_seed(7))
    options = {"fill": own if fill == "own" else fill, "score": "confidence", **COARSE}
    targets = torch.arange(11) % 3 if with_targets else None
    classifier = Classifier(small_net(seed=2))
    together = evaluate(classifier, images, heatmaps, targets, **options)
    monkeypatch.setattr(sufficit.perturbation.predict, "_GROUP_ELEMENTS", {"cpu": elements})
    apart = evaluate(classifier, images, heatmaps, targets, **options)
    assert_same(apart, together)
    assert apart.targets.tolist() == together.targets.tolist()
    assert apart.calls.tolist() == together.calls.tolist()


def test_small_groups_make_smaller_calls(monkeypatch):
    # Otherwise the test above would compare one group with one group.
    sizes = {}
    for elements in (1, 10**9):
        monkeypatch.setattr(sufficit.perturbation.predict, "_GROUP_ELEMENTS", {"cpu": elements})
        model = Spy(small_net(seed=2))
        evaluate(Classifier(model), *data(11), batch_size=1000, **COARSE)
        sizes[elements] = len(model.sizes)
    assert sizes[1] > sizes[10**9]


@pytest.mark.parametrize("elements", [1, 600, 1000, 10**9])  # 600 and 1000 straddle the methods
@pytest.mark.parametrize("fill", ["blur", "own"])
@pytest.mark.parametrize("with_targets", [True, False])
def test_heatmaps_of_several_methods_at_once_are_asked_as_one_by_one(
    monkeypatch, elements, fill, with_targets
):
    images, _ = data(5)
    methods = [data(5, seed=seed)[1] for seed in (3, 4, 5)]
    own = torch.rand(5, 3, *SIZE, generator=torch.Generator().manual_seed(7))
    targets = torch.arange(5) % 3 if with_targets else None
    asked = own if fill == "own" else fill
    probe = probe_for(Classifier(small_net(seed=2)), score="confidence", fill=asked, **COARSE)
    apart = [ask(probe, images, maps, targets) for maps in methods]
    monkeypatch.setattr(sufficit.perturbation.predict, "_GROUP_ELEMENTS", {"cpu": elements})
    together = ask(probe, images, torch.cat(methods), targets)
    for k, one in enumerate(apart):
        found = together.rows(slice(5 * k, 5 * k + 5))
        assert torch.equal(found.named, one.named)
        assert torch.allclose(found.confidences, one.confidences, atol=1e-6)
        assert torch.equal(found.shares, one.shares)
        assert found.targets.tolist() == one.targets.tolist()
        assert found.calls.tolist() == one.calls.tolist()


# Dtypes and memory formats


def half_net(seed: int = 2) -> nn.Module:
    return small_net(seed=seed).to(torch.bfloat16)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("fill", ["black", "blur"])
def test_masks_are_those_made_by_hand_in_the_models_dtype(dtype, last, normalised, fill):
    model = small_net(seed=2).to(dtype)
    if last:
        model = model.to(memory_format=torch.channels_last)
    mean, std = ((0.4, 0.5, 0.3), (0.2, 0.3, 0.25)) if normalised else (None, None)
    images, heatmaps = data(3)
    fills = blur(images) if fill == "blur" else torch.zeros_like(images)

    class InDtype(nn.Module):
        def forward(self, x):
            typed = x.to(dtype)
            return model(typed.contiguous(memory_format=torch.channels_last) if last else typed)

    logits_of = one_at_a_time(InDtype(), mean, std)
    for score in ("accuracy", "confidence"):
        spy = Spy(model)
        scores = evaluate(
            Classifier(spy, mean=mean, std=std),
            images,
            heatmaps,
            fill=fill,
            score=score,
            batch_size=1,  # the same sums in the same order, so that bf16 rounds the same way
            **COARSE,
        )
        rows = [
            reference_columns(
                logits_of, images[i], heatmaps[i], fill=fills[i], score=score, **COARSE
            )
            for i in range(3)
        ]
        assert_same(scores, {name: [row[name] for row in rows] for name in COLUMNS})
        assert {seen for seen, _ in spy.inputs} == {dtype}
        assert all(values.dtype == torch.float64 for values in scores.columns.values())


@pytest.mark.parametrize("batch_size", [None, 7])
def test_a_channels_last_model_gets_channels_last_inputs_and_scores_the_same(batch_size):
    images, heatmaps = data()
    wanted = evaluate(Classifier(small_net(seed=2)), images, heatmaps, **COARSE)
    model = Spy(small_net(seed=2)).to(memory_format=torch.channels_last)
    scores = evaluate(Classifier(model), images, heatmaps, batch_size=batch_size, **COARSE)
    assert_same(scores, wanted)
    assert all(last for _, last in model.inputs)
    plain = Spy(small_net(seed=2))
    evaluate(Classifier(plain), images, heatmaps, batch_size=batch_size, **COARSE)
    assert not any(last for _, last in plain.inputs)


def test_bf16_scores_are_near_those_in_float32():
    images, heatmaps = data()
    options = {"score": "confidence", **COARSE}
    wanted = evaluate(Classifier(small_net(seed=2)), images, heatmaps, **options)
    scores = evaluate(Classifier(half_net()), images, heatmaps, wanted.targets, **options)
    assert_same(scores, wanted, tolerance=0.03)
    assert not torch.equal(scores.insertion_percent, wanted.insertion_percent)


def test_double_images_score_as_floats_do():
    images, heatmaps = data()
    classifier = Classifier(small_net(seed=2))
    wanted = evaluate(classifier, images, heatmaps, **COARSE)
    assert_same(evaluate(classifier, images.double(), heatmaps, **COARSE), wanted)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_torch_changes_nothing(default):
    images, heatmaps = data()
    heatmaps = (heatmaps * 10).round() / 10  # many at alpha_min itself
    options = {"score": "confidence", **COARSE}
    classifier = Classifier(small_net(seed=2))
    wanted = evaluate(classifier, images, heatmaps, **options)
    torch.set_default_dtype(default)
    try:
        scores = evaluate(classifier, images, heatmaps, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(scores, wanted)


# What is left on the model


class InPlace(nn.Module):
    """Normalises what it gets where it lies, as some models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.sub_(0.5).mul_(2))


@pytest.mark.parametrize("with_targets", [True, False])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_model_that_works_in_place_spoils_neither_scores_nor_images(with_targets, batch_size):
    images, heatmaps = data()
    net = small_net(seed=2)
    classifier = Classifier(net, mean=(0.5,) * 3, std=(0.5,) * 3)
    wanted = evaluate(classifier, images, heatmaps, **COARSE)
    given = images.clone()
    targets = wanted.targets if with_targets else None
    options = {"batch_size": batch_size, **COARSE}
    scores = evaluate(Classifier(InPlace(net)), given, heatmaps, targets, **options)
    assert torch.equal(given, images)
    assert_same(scores, wanted)


HOOKS = [name for name in vars(nn.Linear(1, 1)) if name.endswith(("_hooks", "_hooks_with_kwargs"))]


def test_the_hook_tables_are_found():
    assert {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks"} <= {
        *HOOKS
    }


def used_net() -> nn.Module:
    """A net with all that could be disturbed: modes, frozen weights, gradients, buffers, a hook."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(6 * 8 * 6, 3)),
    )
    model(torch.rand(4, 3, *SIZE)).sum().backward()
    model.train()
    model[2].eval()
    model[3][0].eval()
    model[0].bias.requires_grad_(False)
    model[3][2].weight.grad = None
    model[0].register_forward_hook(keep_output)
    return model


def keep_output(module, inputs, output):
    return output


def snapshot(model: nn.Module) -> dict:
    modules = dict(model.named_modules())
    return {
        "training": {name: module.training for name, module in modules.items()},
        "hooks": {
            (name, table): list(getattr(module, table).items())
            for name, module in modules.items()
            for table in HOOKS
        },
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "identities": {name: id(p) for name, p in model.named_parameters()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "grad_enabled": torch.is_grad_enabled(),
        "random": torch.get_rng_state().tolist(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "default_dtype": torch.get_default_dtype(),
    }


def tensors(model: nn.Module) -> dict[str, Tensor | None]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {
        f"{name}.grad": None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return state | grads


def assert_untouched(model: nn.Module, before: dict, values: dict[str, Tensor | None]) -> None:
    after = snapshot(model)
    for name, value in before.items():
        assert after[name] == value, name
    now = tensors(model)
    assert now.keys() == values.keys()
    for name, value in values.items():
        found = now[name]
        assert (found is None) == (value is None), name
        assert value is None or torch.equal(found, value), name


@pytest.mark.parametrize("fill", ["black", "mean", "blur", "noise"])
@pytest.mark.parametrize("alpha_min", [0.5, "search"])
def test_nothing_is_left_on_the_model(fill, alpha_min):
    model = used_net()
    before, values = snapshot(model), tensors(model)
    evaluate(Classifier(model), *data(), fill=fill, alpha_min=alpha_min, **COARSE)
    assert_untouched(model, before, values)


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_nothing_is_left_on_the_model_when_it_raises_in_the_middle(error):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = used_net()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 3:
                raise error("in the middle")
            return self.net(x)

    model = Fails()
    before, values = snapshot(model), tensors(model)
    wanted = UserError if error is torch.OutOfMemoryError else error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(wanted):
            evaluate(Classifier(model), *data(), batch_size=4, **COARSE)
    assert model.calls > 3
    assert_untouched(model, before, values)


def test_the_model_is_asked_in_eval_mode_and_without_gradients():
    model = used_net()
    wanted = evaluate(Classifier(deepcopy(model).eval()), *data(), **COARSE)
    spy = Spy(model)
    spy.train()
    # Dropout and batch statistics would give other numbers, and other ones each time.
    assert_same(evaluate(Classifier(spy), *data(), **COARSE), wanted)
    assert spy.grad_enabled == {False}


def test_gradients_switched_off_outside_stay_off():
    with torch.no_grad():
        evaluate(Classifier(small_net(seed=2)), *data(2), **COARSE)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("views", "sizes"),
    [
        (100, [32, 32, 32, 8]),
        (56, [32, 8, 8, 8]),  # 24 left: three small batches
        (60, [32, 32]),  # 28 left: a large one, filled up
        (5, [8]),
    ],
)
def test_a_compiled_copy_gets_two_sizes_and_little_that_is_filled_up(
    monkeypatch: pytest.MonkeyPatch, views: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(sufficit.perturbation.predict, "is_compiled", lambda _: True)
    model = Spy(small_net(seed=2))
    images = torch.rand(1, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    masks = torch.rand(views, *SIZE, generator=torch.Generator().manual_seed(1)) > 0.5
    seen = torch.zeros(views, dtype=torch.long), torch.arange(views)
    found = predict_views(Classifier(model), images, masks, seen, batch_size=32)
    assert model.sizes == sizes
    monkeypatch.undo()
    plain = predict_views(Classifier(small_net(seed=2)), images, masks, seen, batch_size=32)
    assert torch.equal(found.named, plain.named)
