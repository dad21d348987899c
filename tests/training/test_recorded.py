"""Recorded steps: when they are used and, on a GPU, that they are the steps as written."""

import warnings
from dataclasses import dataclass, field

import pytest
import torch
from torch import Generator, Tensor, nn

from small_models import cnn
from sufficit import Classifier, train_lax
from sufficit.explainers.step import Batch
from sufficit.training import recorded
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
    found = Recorder(nn.Linear(1, 1), Generator())
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
