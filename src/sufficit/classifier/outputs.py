"""What a model ends in: logits, or probabilities, which are turned back into logits."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PROBABILITIES = "probabilities"
SIGMOIDS = {torch.sigmoid, Tensor.sigmoid, torch.special.expit}
SUMS_TO_ONE = {torch.float16: 1e-2, torch.bfloat16: 1e-2}  # else 1e-4


class Sigmoids(TorchFunctionMode):
    """Inside, keeps what the last sigmoid gave."""

    last: object = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in SIGMOIDS:
            self.last = result
        return result

    def gave(self, output: Tensor) -> bool:
        """Whether the last sigmoid gave this very tensor."""
        return self.last is output


def kind_of(output: Tensor, *, sigmoid: bool = False) -> str | None:
    """Softmax if each row is non-negative and sums to 1, sigmoid if one gave it: finite [N,C].

    Rows of zeros and a single one may as well be logits of a model made by hand.

    >>> logits = torch.tensor([[2.0, -1.0, 0.5]])
    >>> kind_of(logits), kind_of(logits.softmax(1)), kind_of(logits.sigmoid(), sigmoid=True)
    (None, 'softmax', 'sigmoid')
    """
    values = output.double()
    whole = (values.sum(1) - 1).abs().amax() <= SUMS_TO_ONE.get(output.dtype, 1e-4)
    between = (values > 0) & (values < 1)
    if bool(whole & (values >= 0).all() & between.any()):
        return "softmax"
    return "sigmoid" if sigmoid else None


def to_logits(output: Tensor, kind: str | None) -> Tensor:
    """The logits that a sigmoid had, or a softmax, of which each row then has the mean 0: [N,C].

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
