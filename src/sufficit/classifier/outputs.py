"""What a model gives: logits, a score, or probabilities, which are turned back into logits."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sufficit.classifier.layers import first
from sufficit.errors import UserError

PROBABILITIES = "probabilities"
SUMS_TO_ONE = {torch.float16: 1e-2, torch.bfloat16: 1e-2}  # else 1e-4


class OutputWarning(UserWarning):
    """The model gives probabilities, and they are taken for logits."""


def output_of(model: nn.Module, inputs: Tensor, classes: Sequence[str] | None) -> Tensor:
    """Return what a model gives for each class: [N,C].

    That is the tensor it returns, its .logits, or the first tensor of a tuple.
    """
    try:
        output = model(inputs)
    except RuntimeError as error:
        # torch's own words: the first convolution says what the model wants.
        counts = re.search(r"to have (\d+) channels, but got (\d+) channels", str(error))
        if counts is None or int(counts[2]) != inputs.shape[1]:
            raise
        wanted = int(counts[1])
        came = inputs.shape[1]
        if wanted == 1:
            way = "images.mean(1, keepdim=True)"
        elif came == 1:
            way = f"images.expand(-1, {wanted}, -1, -1)"
        elif came > wanted:
            way = f"images[:, :{wanted}]"
        else:
            way = f"images of {wanted} channels"
        raise UserError(
            f"images must have {wanted} channels for this model, got {came}: convert them to {way}"
        ) from error
    except TypeError as error:
        if not str(error).startswith(f"{type(model).__qualname__}.forward() missing"):
            raise
        raise UserError(
            f"the model must take a tensor of images alone, got {error}: wrap it in a module that"
            " gives it the rest"
        ) from error
    if isinstance(output, dict):
        output = output.get("logits", next(iter(output.values()), None))
    output = first(getattr(output, "logits", output))
    n = inputs.shape[0]  # unlike a length, it may be unknown while a model is exported
    tensor = isinstance(output, Tensor)
    if not tensor or output.ndim != 2 or output.shape[0] != n or output.shape[1] < 2:
        shape = list(output.shape) if tensor else type(output).__name__
        raise UserError(
            f"the model must give logits [N,C] = [{n},C] of two classes or more, got {shape}: "
            "wrap it in a module that returns them"
        )
    if classes is not None and len(classes) != output.shape[1]:
        raise UserError(
            f"the model gives {output.shape[1]} classes and {len(classes)} have names:"
            " give Classifier(classes=...) a name for each, in the model's order, or None"
        )
    return output  # type: ignore[no-any-return]  # a Tensor by now


def as_logit(values: Any, n: int) -> Tensor:
    """Return the numbers of a score as logits of one class: [N] -> [N,1]."""
    if not isinstance(values, Tensor) or values.shape != (n,) or values.is_complex():
        came = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise UserError(
            f"a score must return one number per image, [N] = [{n}], got {came}: reduce the"
            " model's output to that"
        )
    return values[:, None].float()


def kind_of(output: Tensor, *, probabilities: bool = False) -> str | None:
    """Return softmax if each row is non-negative and sums to 1, of finite [N,C].

    Rows of zeros and a single one may as well be logits of a model made by hand, unless they are
    known to be `probabilities`: those are of a softmax that is sure, or else of a sigmoid.

    >>> logits = torch.tensor([[2.0, -1.0, 0.5]])
    >>> kind_of(logits), kind_of(logits.softmax(1)), kind_of(logits.sigmoid(), probabilities=True)
    (None, 'softmax', 'sigmoid')
    """
    # Doubles, so that a thousand classes add no rounding of their own.
    values = output.double()
    whole = (values.sum(1) - 1).abs().amax() <= SUMS_TO_ONE.get(output.dtype, 1e-4)
    between = bool(((values > 0) & (values < 1)).any())
    if bool(whole & (values >= 0).all()) and (between or probabilities):
        return "softmax"
    return "sigmoid" if probabilities else None


def to_logits(output: Tensor, kind: str | None) -> Tensor:
    """Return the logits behind a sigmoid, or behind a softmax, then with the mean 0 per row: [N,C].

    >>> to_logits(torch.tensor([[3.0, 1.0, -1.0]]).softmax(1), "softmax").round(decimals=4)
    tensor([[ 2.,  0., -2.]])
    """
    values = output.float()
    least = torch.finfo(values.dtype).tiny
    if kind == "sigmoid":
        most = 1 - torch.finfo(values.dtype).eps / 2
        return values.clamp(least, most).logit()
    # The mean, not the sum of probabilities, so that the gradient does not vanish where one is 1.
    logs = values.clamp(min=least).log()
    return logs - logs.mean(1, keepdim=True)
