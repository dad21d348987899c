"""A step of training, recorded once as a CUDA graph and replayed.

A step of LAX is a thousand small operations. With small images Python takes five times as long to
start them as a GPU to run them; a graph starts all of them at once.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from sufficit.errors import warn_user
from sufficit.explainers.step import Batch

MOST = 8  # graphs of a training: each holds the memory of a step
Found = TypeVar("Found")
Work = Callable[[Callable[..., Tensor], Batch, Tensor], dict[str, Tensor]]
"""An adapter, a batch, the finished share of training -> "loss", with its gradient, and more."""


class SlowTrainingWarning(UserWarning):
    """Training runs, but more slowly than it could."""


class RecordedStep:
    """The numbers and gradients of a step, for batches of one form.

    The random numbers are those of `generator`, as they would be without a graph.
    """

    def __init__(self, work: Work, lax: nn.Module, batch: Batch, generator: Generator) -> None:
        self.weights = dict(lax.named_parameters())
        self.batch = batch.each(torch.clone)
        self.done = torch.zeros((), device=generator.device)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(generator)
        with _recording(self.graph, generator.device):
            # The weights themselves belong to another stream, which must not wait for this one.
            leaves = {name: one.detach().requires_grad_() for name, one in self.weights.items()}

            def drawn(*given: Any, **more: Any) -> Tensor:
                found: Tensor = functional_call(lax, leaves, given, more)
                return found

            numbers = work(drawn, self.batch, self.done)
            options: Any = {"allow_unused": True}
            self.gradients = torch.autograd.grad(numbers["loss"], [*leaves.values()], **options)
        self.numbers = {name: value.detach() for name, value in numbers.items()}

    def __call__(self, batch: Batch, done: float) -> dict[str, Tensor]:
        """The numbers of a batch; its gradients are in the weights' `grad`."""
        for place, given in zip(self.batch.tensors, batch.tensors, strict=True):
            place.copy_(given, non_blocking=True)
        self.done.fill_(done)
        self.graph.replay()
        for weight, gradient in zip(self.weights.values(), self.gradients, strict=True):
            weight.grad = gradient
        return {name: value.clone() for name, value in self.numbers.items()}


class Recorder:
    """Records the steps of a training: one graph per form of a batch and `kind`.

    The first step of a form runs as written, which prepares what can't be made while recording.
    The second does too and shows whether anything in it waits for the GPU, which a graph can't.
    All images must be of one `size` [C,H,W]: a graph reads what a model keeps for a size, and
    another size may replace that.
    """

    def __init__(self, lax: nn.Module, generator: Generator, size: Sequence[int]) -> None:
        self.lax, self.generator, self.size = lax, generator, tuple(size)
        self.usable = generator.device.type == "cuda" and torch.version.cuda is not None
        self._steps: dict[object, RecordedStep] = {}
        self._written: Counter[object] = Counter()  # steps of a form that have run so

    def step(
        self,
        work: Work,
        written: Callable[[Batch, float], dict[str, Tensor]],
        batch: Batch,
        done: float,
        kind: object,
    ) -> dict[str, Tensor]:
        """The numbers of a step with the gradients in `grad`; `written` is the step as written."""
        if self.usable and tuple(batch.images.shape[1:]) != self.size:
            self._stop("images of several sizes")
        if not self.usable:
            return written(batch, done)
        forms = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in batch.tensors]
        form = (kind, batch.layers, *forms)
        if form in self._steps:
            return self._steps[form](batch, done)
        known = self._written[form] if len(self._steps) < MOST else 0
        state = self.generator.get_state()
        try:
            if known < 2:
                with _never_waiting() if known else nullcontext():
                    found = written(batch, done)
                self._written[form] += 1
                return found
            step: Any = RecordedStep(work, self.lax, batch, self.generator)
            self._steps[form] = step
        except RuntimeError as error:
            short = isinstance(error, torch.OutOfMemoryError) and self._steps
            if not known and not short:
                raise  # it has nothing to do with recording
            self._recover()
            self._stop(str(error).split("\n")[0])
            step = written
        self.generator.set_state(state)
        return step(batch, done)  # type: ignore[no-any-return]  # numbers

    def with_memory(self, call: Callable[[], Found]) -> Found:
        """What a call gives; if memory runs out, once more without the graphs, which hold some."""
        try:
            return call()
        except torch.OutOfMemoryError as error:
            if not self._steps:
                raise
            self._stop(str(error).split("\n")[0])
        return call()

    def free(self) -> None:
        """Give the memory of all graphs back, with the gradients of the weights."""
        self._steps.clear()
        for weight in self.lax.parameters():
            weight.grad = None

    def _stop(self, reason: str) -> None:
        self.usable = False
        self.free()
        warn_user(
            f"a training step can't be recorded as a CUDA graph ({reason}): each runs as written,"
            " which is slower",
            SlowTrainingWarning,
        )

    def _recover(self) -> None:
        """Free the generators of a recording that failed: the end of any other does that."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is empty
            with _recording(graph, self.generator.device):
                pass


def _recording(graph: torch.cuda.CUDAGraph, device: torch.device) -> torch.cuda.graph:
    """Inside, this thread records what it does on the device; others, as of a loader, go on."""
    return torch.cuda.graph(graph, stream=_stream(device), capture_error_mode="thread_local")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to record on; torch's own is of the device that was the first to record."""
    return torch.cuda.Stream(device)


@contextmanager
def _never_waiting() -> Iterator[None]:
    """Inside, what waits for a GPU raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
