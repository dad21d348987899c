"""One forward pass, read at one layer, and the gradients that arrive at that layer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sufficit.classifier import layers
from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.explainers.rollout import (
    AttentionFold,
    Fold,
    class_row,
    mean_pooled,
    torch_attention,
)


@dataclass(frozen=True)
class Pass:
    """The result of one forward pass, with the graph behind its gradients."""

    layer: str
    logits: Tensor  # [N,C] float32
    features: Tensor  # [N,K,h,w] in the layer's own precision
    leaf: Tensor  # the layer's output, where gradients end
    grid: Callable[[Tensor], Tensor]  # a tensor like the leaf -> [N,K,h,w]
    tokens: Tensor | None  # [N,h,w] how much the prediction attends to each cell

    def gradients(self, scores: Tensor, *, last: bool) -> Tensor:
        """Gradients of each image's score with respect to the features: [N] -> [N,K,h,w].

        The `last` call frees the graph.
        """
        with torch.autocast(scores.device.type, enabled=False):
            (found,) = torch.autograd.grad(
                scores.sum(), self.leaf, retain_graph=not last, allow_unused=True
            )
        if found is None:
            raise UserError(
                f"the logits do not depend on layer {self.layer!r}: choose another layer"
            )
        return self.grid(found).float()


class _Leaf:
    """A hook that replaces a layer's output by a leaf of the graph.

    Gradients reach it even if all weights are frozen, and go no further. The model continues with
    a copy, so that later layers may overwrite it.
    """

    def __init__(self, differentiate: bool) -> None:
        self.differentiate = differentiate
        self.output: Any = None
        self.tensor = torch.empty(0)

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            came = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(
                f"a layer must give a tensor of floats, got {came}: choose another layer"
            )
        self.output = output
        self.tensor = tensor.detach().requires_grad_(self.differentiate)
        if self.differentiate:
            torch.set_grad_enabled(True)  # until the end of the pass
        return self.like(self.tensor.clone())

    def like(self, tensor: Tensor) -> Any:
        """The tensor in the form of the layer's output: alone, or first of a tuple or list."""
        if isinstance(self.output, Tensor):
            return tensor
        if hasattr(self.output, "_replace"):
            return self.output._replace(**{self.output._fields[0]: tensor})
        return type(self.output)([tensor, *self.output[1:]])


def look(
    classifier: Classifier,
    images: Tensor,
    layer: str | None = None,
    *,
    differentiate: bool = True,
    fold: Fold | None = None,
) -> Pass:
    """One forward pass over images in 0..1: [N,C,H,W].

    No graph is recorded before the layer; after it, only if `differentiate`.
    """
    with torch.inference_mode(False), classifier.in_eval_mode():
        inputs = classifier.normalize(images)
        inputs = inputs.clone() if inputs.is_inference() else inputs
        name = layers.resolve(classifier.model, layer) if layer else None
        name = name or classifier.feature_layer(inputs)
        seen = _run(classifier, inputs, name, differentiate, fold, torch.no_grad())
        if differentiate and not seen.logits.requires_grad:
            # The model switches gradients off and on itself: they must be on before it does.
            seen = _run(classifier, inputs, name, differentiate, fold, torch.enable_grad())
        if differentiate and not seen.logits.requires_grad:
            raise UserError(
                f"no gradient goes from the logits to layer {name!r}: the model detaches what is "
                "between, or runs it under torch.no_grad; choose a later layer"
            )
    return seen


def _run(
    classifier: Classifier,
    inputs: Tensor,
    layer: str,
    differentiate: bool,
    fold: Fold | None,
    recording: AbstractContextManager[object],
) -> Pass:
    leaf = _Leaf(differentiate)
    attention = AttentionFold(len(inputs), fold) if fold else None
    with ExitStack() as stack:
        stack.enter_context(recording)
        stack.enter_context(layers.hooked(classifier.bare, layer, leaf))
        if attention:
            stack.enter_context(torch_attention(classifier.bare))
            stack.enter_context(attention)
        logits = _logits(classifier, inputs)
    if leaf.output is None:
        raise UserError(f"layer {layer!r} is not used in the forward pass: choose another layer")

    def grid(tensor: Tensor) -> Tensor:
        return classifier.as_grid(leaf.like(tensor), inputs)

    features = grid(leaf.tensor.detach())
    cells = _cells(classifier, inputs, features, attention) if attention else None
    return Pass(layer, logits, features, leaf.tensor, grid, cells)


def _cells(
    classifier: Classifier, inputs: Tensor, features: Tensor, attention: AttentionFold
) -> Tensor:
    """How much the prediction attends to each cell: [N,h,w]."""
    tokens = attention.tokens
    if tokens is None:
        raise UserError(
            "rollout needs a transformer that attends with torch's own functions, and this model "
            'called none: use another method, for example "gradcam"'
        )
    h, w = classifier.as_grid(tokens[:, 0, :, None], inputs).shape[2:]
    if (h, w) != features.shape[2:]:
        raise UserError(
            f"the attention is over {h} x {w} cells, the layer has {list(features.shape[2:])}: "
            "give the layer of a block that attends over all cells"
        )
    pooled = mean_pooled(classifier.bare)
    row = class_row(tokens, tokens.shape[1] - h * w, attention.pool, pooled)
    return classifier.as_grid(row[:, :, None], inputs)[:, 0]


def _logits(classifier: Classifier, inputs: Tensor) -> Tensor:
    try:
        return classifier.plain_logits_of(inputs).float()
    except RuntimeError as error:
        tensors = [*classifier.bare.named_parameters(), *classifier.bare.named_buffers()]
        made = next((name for name, tensor in tensors if tensor.is_inference()), None)
        if made is None:
            raise
        raise UserError(
            f"{made} was made under torch.inference_mode, so no gradient goes through it: build and"
            " load the model outside (torch.no_grad does no harm)"
        ) from error
