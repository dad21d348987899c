"""A compiled copy of a classifier: the same predictions, the model untouched, a fallback."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sufficit import Classifier, evaluate
from sufficit.classifier import acceleration
from sufficit.classifier.acceleration import SlowModelWarning, accelerated, is_compiled, pays
from sufficit.perturbation import predict


def net() -> nn.Module:
    """Two convolutions with batch norms that have seen data."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2),
        nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.5, 0.5)
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 2)
    return model.eval()


@pytest.fixture
def graph_only(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """torch.compile that traces and runs the graph without making code; the shapes it traced."""
    shapes: list[tuple[int, ...]] = []
    whole = torch.compile

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        shapes.extend(tuple(one.shape) for one in inputs if one.shape[2:] == (12, 10))
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda model, **more: whole(model, backend=backend, **more)
    )
    torch._dynamo.reset()
    return shapes


def test_batch_norms_are_folded_and_the_model_stays_as_it_was(
    graph_only: list[tuple[int, ...]],
) -> None:
    model = net().train()
    before = copy.deepcopy(model.state_dict())
    classifier = Classifier(model, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    fast = accelerated(classifier, (4, 3, 12, 10))
    images = torch.rand(4, 3, 12, 10, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(fast(images), classifier(images), rtol=1e-5, atol=1e-6)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fast.bare.modules())
    assert is_compiled(fast)
    assert fast.memory_format == torch.channels_last
    assert model.training
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    shared = {one.data_ptr() for one in model.state_dict().values()}
    assert not shared & {one.data_ptr() for one in fast.bare.state_dict().values()}


def test_scores_are_those_of_the_model_in_two_batch_sizes(
    graph_only: list[tuple[int, ...]],
) -> None:
    classifier = Classifier(net(), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    random = torch.Generator().manual_seed(1)
    images, maps = (
        torch.rand(3, 3, 12, 10, generator=random),
        torch.rand(3, 12, 10, generator=random),
    )
    fast = accelerated(classifier, (64, 3, 12, 10))
    found = evaluate(fast, images, maps, batch_size=64).frame()
    wanted = evaluate(classifier, images, maps, batch_size=64).frame()
    for column in wanted.columns:
        assert found[column].to_numpy() == pytest.approx(wanted[column].to_numpy(), abs=1e-5)
    assert {shape[0] for shape in graph_only} == {64, 16}
    assert len(graph_only) == 2  # nothing is compiled twice


@pytest.mark.slow
def test_the_real_compiler_gives_the_same_logits() -> None:
    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowModelWarning)  # where there is no C++ compiler
        fast = accelerated(classifier, (2, 3, 2, 2))
    images = torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(fast(images), classifier(images), rtol=1e-5, atol=1e-6)


class Moody(nn.Module):
    """A forward pass that depends on the numbers, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body(images)
        return logits if float(logits.detach().sum()) > 0 else 2 * logits


def test_a_model_that_cannot_be_traced_is_used_without_folding(
    graph_only: list[tuple[int, ...]],
) -> None:
    classifier = Classifier(Moody())
    fast, images = accelerated(classifier, (2, 3, 12, 10)), torch.rand(2, 3, 12, 10)
    assert any(isinstance(module, nn.BatchNorm2d) for module in fast.bare.modules())
    torch.testing.assert_close(fast(images), classifier(images), rtol=1e-5, atol=1e-6)


def test_a_model_that_cannot_be_compiled_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler\nfor this")

    monkeypatch.setattr(torch, "compile", broken)
    classifier = Classifier(net())
    with pytest.warns(
        SlowModelWarning, match=r"cannot be compiled \(RuntimeError: no compiler for"
    ):
        assert accelerated(classifier, (2, 3, 12, 10)) is classifier


def test_folding_that_changes_the_logits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, graph_only: list[tuple[int, ...]]
) -> None:
    from torch.fx.experimental import optimization

    monkeypatch.setattr(optimization, "fuse", lambda model: nn.Sequential(model, nn.Softmax(1)))
    classifier = Classifier(net())
    fast, images = accelerated(classifier, (2, 3, 12, 10)), torch.rand(2, 3, 12, 10)
    torch.testing.assert_close(fast(images), classifier(images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("calls", "wanted", "answer"),
    [(10**9, "auto", False), (10**9, "off", False), (1, "on", True)],
)
def test_a_cpu_compiles_only_where_asked(calls: int, wanted: str, answer: bool) -> None:
    assert pays(Classifier(net()), "cpu", calls, wanted) is answer


def test_a_gpu_compiles_for_long_runs() -> None:
    many = acceleration.PAYS_FROM
    found = [pays(Classifier(net()), "cuda:0", calls, "auto") for calls in (many - 1, many)]
    assert found == [False, True]
    assert not pays(Classifier(nn.Conv2d(3, 4, 8)), "cuda:0", many, "auto")  # no batch norm


def test_the_usual_batch_is_a_power_of_two_that_fits() -> None:
    assert predict.usual_batch(Classifier(net()), (3, 224, 224)) == 4
    assert predict.usual_batch(Classifier(net()), (1, 28, 28)) == 512
