"""A step of training, recorded once as a CUDA graph and replayed.

A step of LAX is a thousand small operations. With small images Python takes five times as long to
start them as a GPU to run them; a graph starts all of them at once.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from sufficit.explainers.step import Batch

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
        with torch.cuda.graph(self.graph):
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
    """

    def __init__(self, lax: nn.Module, generator: Generator) -> None:
        self.lax, self.generator = lax, generator
        self.usable = generator.device.type == "cuda" and torch.version.cuda is not None
        self._steps: dict[object, RecordedStep | int] = {}  # or how many have run as written

    def step(
        self,
        work: Work,
        written: Callable[[Batch, float], dict[str, Tensor]],
        batch: Batch,
        done: float,
        kind: object,
    ) -> dict[str, Tensor]:
        """The numbers of a step with the gradients in `grad`; `written` is the step as written."""
        if not self.usable:
            return written(batch, done)
        forms = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in batch.tensors]
        form = (kind, batch.layers, *forms)
        known = self._steps.get(form, 0)
        if isinstance(known, RecordedStep):
            return known(batch, done)
        if known == 0:
            self._steps[form] = 1
            return written(batch, done)
        state = self.generator.get_state()
        try:
            if known == 1:
                with _never_waiting():
                    found = written(batch, done)
                self._steps[form] = 2
                return found
            known = self._steps[form] = RecordedStep(work, self.lax, batch, self.generator)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self.usable = False
            self._recover()
            reason = str(error).split("\n")[0]
            warnings.warn(
                f"a training step can't be recorded as a CUDA graph ({reason}): each runs as"
                " written, which is slower",
                SlowTrainingWarning,
                stacklevel=2,
            )
        self.generator.set_state(state)
        return known(batch, done) if isinstance(known, RecordedStep) else written(batch, done)

    def _recover(self) -> None:
        """Free the generators of a recording that failed: the end of any other does that."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with suppress(RuntimeError), warnings.catch_warnings(), torch.cuda.graph(graph):
            warnings.simplefilter("ignore")  # it is empty


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
