"""A user's function beside the model: what it may not change, and what it draws at random."""

import random
import sys
from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from small_models import Spy, Traces, cnn, mixed_modes, random_images, small, small_model
from sufficit import Classifier, UserError, explain, explain_all
from sufficit.explainers.explanation import draw_all
from sufficit.explainers.guard import _checksum
from sufficit.seeds import random_state, unmoved

Method = Callable[[Classifier, Tensor, Tensor], Tensor]


def grey(_: Classifier, images: Tensor, __: Tensor) -> Tensor:
    return images.mean(1)


def saliency(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    """As people write it: the model as it is, gradients in every weight."""
    images = images.clone().requires_grad_()
    classifier.model(images).gather(1, targets[:, None]).sum().backward()
    found = images.grad.abs().sum(1)
    return found / found.amax((1, 2), keepdim=True)


def loaded() -> Classifier:
    """A classifier as `Classifier.load` leaves it: in training mode."""
    return Classifier(small_model().train(), layer="4")


def test_a_function_finds_the_model_in_eval_mode_and_shifts_no_statistics() -> None:
    classifier, images, modes = loaded(), random_images(4), []
    beside = explain(loaded(), images, method="gradcam")

    def watched(*given: object) -> Tensor:
        modes.append(classifier.model[1].training)
        return saliency(*given)  # type: ignore[arg-type]

    traces = Traces(classifier.model)
    for size in (4, 1):
        found = explain_all(
            classifier, images, methods={"mine": watched, "gradcam": "gradcam"}, batch_size=size
        )
        torch.testing.assert_close(found["gradcam"], beside, atol=1e-6, rtol=0)
    assert modes == [False] * 5
    assert classifier.model[1].training
    traces.check()
    still = Classifier(small_model().eval(), layer="4")
    assert torch.equal(found["mine"], explain(still, images, method=saliency, batch_size=1))


def test_gradients_of_a_training_run_are_left_alone() -> None:
    model = cnn()
    mixed_modes(model)
    traces = Traces(model)
    found = []

    def mine(*given: object) -> Tensor:
        found.append(saliency(*given))  # type: ignore[arg-type]
        assert model[8].weight.grad is not None
        return found[-1]

    assert torch.equal(explain(Classifier(model), random_images(), method=mine), found[0])
    traces.check()


LEAKS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "forward hook": (
        lambda model: model[4].register_forward_hook(lambda _, __, output: output * 0),
        "hooks of layer '4'",
    ),
    "pre-hook": (
        lambda model: model[4].register_forward_pre_hook(lambda *_: None),
        "hooks of layer '4'",
    ),
    "backward hook": (
        lambda model: model[4].register_full_backward_hook(lambda *_: None),
        "hooks of layer '4'",
    ),
    "hook of all modules": (
        lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
        "hooks of all modules",
    ),
    "hook of a weight": (
        lambda model: model[0].weight.register_hook(lambda gradient: gradient * 2),
        "requires_grad or hooks of 0.weight",
    ),
    "mode": (lambda model: model.train(), "the mode of the model, the mode of layer '0'.* more"),
    "requires_grad": (
        lambda model: model[0].weight.requires_grad_(False),
        "requires_grad or hooks of 0.weight",
    ),
    "attribute": (lambda model: setattr(model[1], "eps", 5.0), "eps of layer '1'"),
    "new attribute": (lambda model: setattr(model, "mine", [1]), "mine of the model"),
    "forward": (lambda model: setattr(model[0], "forward", nn.Identity()), "forward of layer '0'"),
    "layer": (lambda model: setattr(model, "7", nn.Linear(24, 5)), "7 of the model"),
    "other weight": (
        lambda model: setattr(model[7], "weight", nn.Parameter(torch.ones(5, 24))),
        "weight of layer '7'",
    ),
    "dtype": (lambda _: torch.set_default_dtype(torch.float64), "torch's default dtype"),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_what_a_function_leaves_behind_stops_the_run_and_is_undone(kind: str) -> None:
    leak, words = LEAKS[kind]
    classifier, images = small(), random_images()
    before = explain(classifier, images)
    traces = Traces(classifier.model)

    def careless(asked: Classifier, images: Tensor, _: Tensor) -> Tensor:
        leak(asked.model)
        return images.mean(1)

    with pytest.raises(UserError, match=f"^method careless changed the model: {words}"):
        explain(classifier, images, method=careless)
    traces.check()
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(explain(classifier, images), before)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a weight": (lambda model: model[0].weight.data[0, 0, 0, 0].add_(1e-3), "0.weight"),
    "a sign": (lambda model: model[7].bias.data[3].neg_(), "7.bias"),
    "two rows": (
        lambda model: model[3].weight.data.copy_(model[3].weight.data[[1, 0, 2, 3, 4, 5]]),
        "3.weight",
    ),
    "statistics": (lambda model: model[1].running_mean.fill_(0.1), "1.running_mean"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_weights_and_buffers_that_a_function_writes_stop_the_run(kind: str) -> None:
    change, place = CHANGES[kind]

    def careless(asked: Classifier, images: Tensor, _: Tensor) -> Tensor:
        change(asked.model)
        return images.mean(1)

    with pytest.raises(UserError, match=rf"changed the model: the values of {place}\."):
        explain(small(), random_images(), method=careless)


def test_training_the_model_inside_a_function_stops_the_run() -> None:
    def careless(asked: Classifier, images: Tensor, _: Tensor) -> Tensor:
        asked.model.train()
        asked.model(images)
        asked.model.eval()
        return images.mean(1)

    with pytest.raises(UserError, match=r"the values of 1\.running_mean, .*running_var"):
        explain(loaded(), random_images(), method=careless)


def test_settings_of_the_classifier_are_part_of_the_model() -> None:
    def careless(asked: Classifier, images: Tensor, _: Tensor) -> Tensor:
        asked.mean = asked.std = (0.5, 0.5, 0.5)
        asked.layer = "0"
        return images.mean(1)

    classifier = small()
    with pytest.raises(UserError, match=r"classifier\.mean, classifier\.std, classifier\.layer"):
        explain(classifier, random_images(), method=careless)
    assert (classifier.mean, classifier.layer) == (None, "4")


def test_what_a_function_changes_and_undoes_is_its_own_affair() -> None:
    def careful(asked: Classifier, images: Tensor, targets: Tensor) -> Tensor:
        weight = asked.model[0].weight
        before = weight.detach().clone()
        handle = asked.model[7].register_full_backward_hook(lambda *_: None)
        with torch.no_grad():
            weight.mul_(2)
        asked.model.eval()
        asked.model.zero_grad()
        found = saliency(asked, images, targets)
        with torch.no_grad():
            weight.copy_(before)
        handle.remove()
        torch.set_grad_enabled(False)
        return found

    classifier = small()
    traces = Traces(classifier.model)
    assert explain(classifier, random_images(), method=careful).amax() == 1
    traces.check()


def test_what_the_models_own_pass_changes_is_no_functions_fault() -> None:
    class Counting(Spy):
        calls = 0
        seen = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen = super().forward(x)
            return self.seen.clone()

    model = Counting(small_model().eval())
    classifier = Classifier(model, layer="model.4")
    images, targets = random_images(), torch.tensor([0, 1, 2])
    for _ in range(2):
        explain(classifier, images, targets, method=saliency)

    def careless(asked: Classifier, images: Tensor, targets: Tensor) -> Tensor:
        asked.model.model[1].eps = 1
        return saliency(asked, images, targets)

    with pytest.raises(UserError, match=r"changed the model: eps of layer 'model\.1'\."):
        explain(classifier, images, targets, method=careless)


def test_hooks_are_undone_also_when_a_function_raises() -> None:
    def broken(asked: Classifier, *_: Tensor) -> Tensor:
        asked.model[4].register_forward_hook(lambda *_: None)
        asked.model.train()
        raise KeyError("size")

    classifier = small()
    traces = Traces(classifier.model)
    with pytest.raises(UserError, match="method broken on image 0 raised KeyError: 'size'"):
        explain(classifier, random_images(), method=broken)
    traces.check()


# Random numbers


def from_torch(_: Classifier, images: Tensor, __: Tensor) -> Tensor:
    return torch.rand(len(images), *images.shape[2:])


def from_numpy(_: Classifier, images: Tensor, __: Tensor) -> Tensor:
    shape = len(images), *images.shape[2:]
    return torch.from_numpy(np.random.rand(*shape).astype(np.float32))  # noqa: NPY002


def from_python(_: Classifier, images: Tensor, __: Tensor) -> Tensor:
    values = torch.tensor([random.random() for _ in images])
    return values[:, None, None].expand(-1, *images.shape[2:])


def drawn(method: Method, sizes: int, some: list[int], seed: int = 0) -> Tensor:
    names = [f"{number}.png" for number in some]
    with unmoved():
        classifier = small()
    found = draw_all(
        classifier,
        random_images(6)[some],
        torch.zeros(len(some), dtype=torch.long),
        {"mine": method},
        batch_size=sizes,
        seed=seed,
        names=names,
    )
    return found["mine"].maps


@pytest.mark.parametrize("method", [from_torch, from_numpy, from_python])
def test_random_numbers_belong_to_the_image_and_the_seed(method: Method) -> None:
    torch.manual_seed(5)
    state = random_state()
    whole = drawn(method, 6, [0, 1, 2, 3, 4, 5])
    assert random_state() == state
    assert len(whole.flatten(1).unique(dim=0)) == 6
    random.seed(7)
    torch.rand(3)
    assert torch.equal(drawn(method, 2, [0, 1, 2, 3, 4, 5]), whole)
    assert torch.equal(drawn(method, 4, [4, 2]), whole[[4, 2]])
    assert not torch.equal(drawn(method, 6, [0, 1], seed=1), whole[:2])


def test_a_function_that_draws_nothing_keeps_its_batch() -> None:
    sizes: list[int] = []

    def mine(_: Classifier, images: Tensor, __: Tensor) -> Tensor:
        sizes.append(len(images))
        return images.mean(1)

    explain(small(), random_images(6), method=mine, batch_size=4)
    assert sizes == [4, 2]


def test_a_function_that_draws_is_given_a_whole_batch_once() -> None:
    sizes: list[int] = []

    def mine(_: Classifier, images: Tensor, __: Tensor) -> Tensor:
        sizes.append(len(images))
        return torch.rand(len(images), *images.shape[2:])

    explain(small(), random_images(6), method=mine, batch_size=3)
    assert sizes == [3, 1, 1, 1, 1, 1, 1]


def test_one_image_that_draws_makes_its_batch_go_image_by_image() -> None:
    sizes: list[int] = []

    def mine(_: Classifier, images: Tensor, __: Tensor) -> Tensor:
        sizes.append(len(images))
        lots = (images[:, 0, 0, 0] > 0.9).any()
        return torch.rand(len(images), *images.shape[2:]) if lots else images.mean(1)

    images = random_images(4) * 0.5
    images[1, :, 0, 0] = 1
    whole = explain(small(), images, method=mine)
    assert sizes == [4, 1, 1, 1, 1]
    assert torch.equal(whole[[0, 2, 3]], images.mean(1)[[0, 2, 3]])
    assert torch.equal(explain(small(), images, method=mine, batch_size=2), whole)


# Errors


def test_an_error_names_method_image_and_line() -> None:
    def picky(_: Classifier, images: Tensor, __: Tensor) -> Tensor:
        if (images[:, 0, 0, 0] == 0).any():
            raise ValueError("a black corner")
        return images.mean(1)

    images = random_images(4)
    images[2, :, 0, 0] = 0
    given = (small(), images, None, {"mine": picky})
    words = rf"^method mine on image {{}} raised ValueError: a black corner \({__file__}, line"
    with pytest.raises(UserError, match=words.format("2")):
        draw_all(*given)
    with pytest.raises(UserError, match=words.format(r"c\.png")):
        draw_all(*given, names=["a.png", "b.png", "c.png", "d.png"])


def test_an_error_that_no_image_alone_raises_names_the_method() -> None:
    def alone(_: Classifier, images: Tensor, __: Tensor) -> Tensor:
        (image,) = images
        return image.mean(0)[None]

    with pytest.raises(UserError, match="^method alone raised ValueError: too many values"):
        explain(small(), random_images(), method=alone)


@pytest.mark.parametrize("code", [0, "done"])
def test_a_method_that_exits_is_an_error(code: object) -> None:
    def leaves(*_: object) -> Tensor:
        sys.exit(code)  # type: ignore[arg-type]

    with pytest.raises(UserError, match=f"method leaves on image 0 raised SystemExit: {code}"):
        explain(small(), random_images(), method=leaves)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda images: images.mean(1).to("meta"), "got a meta one"),
        (lambda images: images.mean(1).to_sparse(), "got a sparse_coo one"),
    ],
)
def test_maps_without_values_are_refused(made: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(UserError, match=f"^method mine: heatmaps must be a dense tensor.*{words}"):
        explain_all(small(), random_images(), methods={"mine": lambda _, x, __: made(x)})


# Checksums


def test_a_checksum_sees_every_bit_and_its_place() -> None:
    values = random_images(2, 40)
    known = _checksum(values)
    seen = {int(known)}
    for place in (0, 1, 999, values.numel() - 1):
        for bit in (0, 13, 31):
            changed = deepcopy(values)
            flat = changed.view(-1).view(torch.int32)
            flat[place] ^= -(2**31) if bit == 31 else 1 << bit
            seen.add(int(_checksum(changed)))
    seen.add(int(_checksum(values.flip(0))))
    assert len(seen) == 14
    assert int(_checksum(values.to(memory_format=torch.channels_last))) == int(known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_changes_do_not_cancel(dtype: torch.dtype) -> None:
    values = random_images(1).to(dtype).flatten()
    seen = {int(_checksum(values))}
    for one in range(12):
        for other in range(one):
            changed = values.clone()
            changed[[one, other]] *= -1
            seen.add(int(_checksum(changed)))
    assert len(seen) == 1 + 66


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.cfloat]
)
def test_tensors_of_every_kind_have_a_checksum(dtype: torch.dtype) -> None:
    ones, zeros = (torch.full((3, 5), value).to(dtype) for value in (1, 0))
    assert int(_checksum(ones)) != int(_checksum(zeros))
    assert _checksum(ones.to("meta")) is None
    assert _checksum(torch.ones(3).to_sparse()) is None
    assert int(_checksum(torch.zeros(0))) == 0
