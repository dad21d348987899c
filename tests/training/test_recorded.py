"""Recorded steps: when they are used and, on a GPU, that they are the steps as written."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from small_models import cnn
from sufficit import Classifier, train_lax
from sufficit.explainers.step import Batch
from sufficit.training import lax_training, recorded
from sufficit.training.processes import fabric_for
from sufficit.training.recorded import Recorder, SlowTrainingWarning

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@dataclass
class Replayed:
    """In place of a graph: notes what it was recorded for and what it replays."""

    work: object
    lax: nn.Module
    batch: Batch
    generator: Generator
    seen: list[float] = field(default_factory=list)

    def __call__(self, batch: Batch, done: float) -> dict[str, Tensor]:
        self.seen.append(done)
        return {"loss": torch.tensor(-done)}


def batch_of(n: int) -> Batch:
    return Batch(torch.rand(n, 3, 4, 4), torch.zeros(n).long(), (), torch.zeros(n, 2).long())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """One that believes it has a GPU."""
    found = Recorder(nn.Linear(1, 1), Generator(), (3, 4, 4))
    assert not found.usable  # on a CPU
    found.usable = True
    monkeypatch.setattr(recorded, "RecordedStep", Replayed)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    return found


def test_a_form_is_recorded_at_its_third_step_and_each_form_for_itself(recorder: Recorder) -> None:
    written: list[tuple[int, float]] = []

    def plain(batch: Batch, done: float) -> dict[str, Tensor]:
        written.append((len(batch.images), done))
        return {"loss": torch.tensor(done)}

    losses = []
    for number, n in enumerate((4, 4, 2, 4, 4, 2, 2)):
        found = recorder.step(lambda *_: {}, plain, batch_of(n), float(number), "model")
        losses.append(found["loss"].item())
    assert written == [(4, 0), (4, 1), (2, 2), (2, 5)]
    assert losses == [0, 1, 2, -3, -4, 5, -6]
    recorder.step(lambda *_: {}, plain, batch_of(4), 7.0, "twin")  # another judge, another graph
    assert written[-1] == (4, 7)


def test_a_step_that_waits_for_the_gpu_is_never_recorded(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "_recover", lambda _: None)
    drawn, asked = [], []

    def waits(batch: Batch, done: float) -> dict[str, Tensor]:
        asked.append(done)
        drawn.append(torch.rand(1, generator=recorder.generator).item())
        if len(asked) == 2:
            raise RuntimeError("called a synchronizing CUDA operation\nand more")
        return {"loss": torch.tensor(done)}

    given = (lambda *_: {}, waits, batch_of(4))
    recorder.step(*given, 0.0, None)
    with pytest.warns(SlowTrainingWarning, match=r"\(called a synchronizing CUDA operation\)"):
        assert recorder.step(*given, 1.0, None)["loss"] == 1
    assert asked == [0, 1, 1]
    assert drawn[2] == drawn[1] != drawn[0]  # the second try draws what the first one drew
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            recorder.step(*given, 2.0, None)
    assert asked[3:] == [2, 2, 2]


def as_written(batch: Batch, done: float) -> dict[str, Tensor]:
    return {"loss": torch.tensor(done)}


def test_no_more_than_eight_forms_are_recorded(recorder: Recorder) -> None:
    for _ in range(3):
        for n in range(1, 13):
            recorder.step(lambda *_: {}, as_written, batch_of(n), 1.0, None)
    losses = [
        recorder.step(lambda *_: {}, as_written, batch_of(n), 1.0, None)["loss"].item()
        for n in range(1, 13)
    ]
    assert losses == [-1.0] * 8 + [1.0] * 4


def test_images_of_another_size_end_the_recording(recorder: Recorder) -> None:
    for _ in range(3):
        recorder.step(lambda *_: {}, as_written, batch_of(4), 1.0, None)
    large = batch_of(4)._replace(images=torch.rand(4, 3, 8, 8))
    with pytest.warns(SlowTrainingWarning, match="several sizes"):
        recorder.step(lambda *_: {}, as_written, large, 1.0, None)
    # A model may keep something for the last size that it saw, which the graph would read.
    assert recorder.step(lambda *_: {}, as_written, batch_of(4), 1.0, None)["loss"] == 1


def test_a_step_that_fails_half_way_leaves_no_gradient(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "_recover", lambda _: None)
    weight, asked = recorder.lax.weight, []

    def waits(batch: Batch, done: float) -> dict[str, Tensor]:
        asked.append(done)
        (3 * weight).sum().backward()
        if len(asked) == 2:
            raise RuntimeError("waits, in the gradient of an earlier layer")
        return {"loss": torch.tensor(done)}

    for done in (0.0, 1.0):
        weight.grad = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowTrainingWarning)
            recorder.step(lambda *_: {}, waits, batch_of(4), done, None)
    assert asked == [0, 1, 1]
    assert weight.grad.item() == 3


def test_graphs_give_their_memory_to_what_lacks_it(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "_recover", lambda _: None)

    def full(batch: Batch, done: float) -> dict[str, Tensor]:
        if recorder._steps:
            raise torch.OutOfMemoryError("out of memory")
        return as_written(batch, done)

    def recorded_again() -> None:
        recorder.usable = True
        for _ in range(3):
            recorder.step(lambda *_: {}, as_written, batch_of(4), 1.0, None)

    recorded_again()
    with pytest.warns(SlowTrainingWarning, match="out of memory"):
        assert recorder.step(lambda *_: {}, full, batch_of(2), 1.0, None)["loss"] == 1
    recorded_again()
    with pytest.warns(SlowTrainingWarning, match="out of memory"):
        assert recorder.with_memory(lambda: full(batch_of(4), 2.0))["loss"] == 2


def test_errors_of_a_first_step_are_its_own(recorder: Recorder) -> None:
    def wrong(batch: Batch, done: float) -> dict[str, Tensor]:
        raise RuntimeError("shapes do not fit")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="shapes do not fit"):
            recorder.step(lambda *_: {}, wrong, batch_of(4), 1.0, None)


class Rewritten:
    """In place of a graph: the step on leaves of its own, each time anew."""

    alive: ClassVar[weakref.WeakSet["Rewritten"]] = weakref.WeakSet()
    calls = 0

    def __init__(self, work: object, lax: nn.Module, batch: Batch, generator: Generator) -> None:
        self.work, self.lax = work, lax
        self.alive.add(self)

    def __call__(self, batch: Batch, done: float) -> dict[str, Tensor]:
        Rewritten.calls += 1
        weights = dict(self.lax.named_parameters())
        leaves = {name: one.detach().requires_grad_() for name, one in weights.items()}

        def drawn(*given: object) -> Tensor:
            return functional_call(self.lax, leaves, given)

        numbers = self.work(drawn, batch, torch.tensor(done))
        numbers["loss"].backward()
        for name, weight in weights.items():
            weight.grad = leaves[name].grad
        return {name: value.detach() for name, value in numbers.items()}


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch) -> type[Rewritten]:
    """Trainings believe they have a GPU."""

    class Usable(Recorder):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            self.usable = True

    monkeypatch.setattr(lax_training, "Recorder", Usable)
    monkeypatch.setattr(recorded, "RecordedStep", Rewritten)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(Rewritten, "calls", 0)
    return Rewritten


def on_cpu(**options: object) -> dict[str, Tensor]:
    torch.manual_seed(0)
    classifier = Classifier(cnn().eval())
    given = {"epochs": 2, "validation_images": 16, "progress": False} | options
    return train_lax(classifier, loader(), **given).state_dict()


def test_steps_that_are_replayed_train_the_same_and_are_gone_afterwards(
    pretending: type[Rewritten], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.disable()  # a graph must not hold its memory until Python looks for cycles
    try:
        found = on_cpu()
        assert not pretending.alive
    finally:
        gc.enable()
    assert pretending.calls == 2 * 8 - 2
    monkeypatch.undo()
    wanted = on_cpu()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


def test_a_net_of_ones_own_is_never_recorded(pretending: type[Rewritten]) -> None:
    class Sometimes(nn.Conv2d):
        """Does another thing each time, in Python."""

        calls = 0

        def forward(self, features: Tensor) -> Tensor:
            Sometimes.calls += self.training
            return super().forward(features) * (1 + Sometimes.calls % 2)

    on_cpu(net=Sometimes(9, 1, 1), recipe="paper")
    assert Sometimes.calls >= 2 * 8
    assert pretending.calls == 0


def test_recording_leaves_other_threads_alone_and_is_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a loader that pins memory in a thread would end, and a second GPU's graph be empty."""
    seen = []

    class Graph:
        def register_generator_state(self, _: Generator) -> None: ...
        def replay(self) -> None: ...

    @contextmanager
    def graph(_: Graph, **options: object) -> Iterator[None]:
        seen.append(options)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream of", device))
    recorded._stream.cache_clear()
    lax = nn.Linear(2, 1, bias=False)
    batch = Batch(torch.ones(3, 2), torch.zeros(3), (), torch.zeros(3))

    def work(draw: object, batch: Batch, done: Tensor) -> dict[str, Tensor]:
        return {"loss": draw(batch.images).sum()}

    step = recorded.RecordedStep(work, lax, batch, Generator())
    monkeypatch.undo()
    recorded._stream.cache_clear()
    step(batch, 0.5)
    assert lax.weight.grad.tolist() == [[3, 3]]
    cpu = torch.device("cpu")
    assert seen == [{"stream": ("stream of", cpu), "capture_error_mode": "thread_local"}]


def loader() -> list[tuple[Tensor, Tensor]]:
    generator = Generator().manual_seed(0)
    images, labels = torch.rand(32, 3, 16, 16, generator=generator), torch.arange(32) % 4
    return [(images.roll(k, 0), labels.roll(k)) for k in range(8)]


class Waiting(nn.Module):
    """Looks at its input, which makes Python wait for the GPU."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images if images.sum().item() < 1e9 else 2 * images)


@pytest.fixture
def on_gpu() -> Classifier:
    torch.manual_seed(0)
    return Classifier(cnn().eval()).to("cuda")


def trained(classifier: Classifier, **options: object) -> dict[str, Tensor]:
    fabric = fabric_for(torch.device("cuda"), precision="bf16")
    lax = train_lax(
        classifier,
        loader(),
        epochs=2,
        fabric=fabric,
        validation_images=16,
        progress=False,
        **options,
    )
    return {name: one.float().cpu() for name, one in lax.state_dict().items()}


@GPU
@pytest.mark.parametrize("options", [{}, {"answers": 2}, {"class_free": True}])
def test_recorded_training_is_the_training_as_written(
    on_gpu: Classifier, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowTrainingWarning)
        found = trained(on_gpu, deterministic=True, **options)
    monkeypatch.setattr(
        Recorder, "step", lambda _, __, written, batch, done, ___: written(batch, done)
    )
    wanted = trained(on_gpu, deterministic=True, **options)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=0.02, rtol=0.02)


@GPU
def test_a_model_that_waits_trains_as_written(on_gpu: Classifier) -> None:
    waiting = Classifier(Waiting(on_gpu.bare).eval()).to("cuda")
    with pytest.warns(SlowTrainingWarning, match="as written"):
        trained(waiting)
    torch.rand(2, device="cuda")  # the generator of torch is free
