"""What a method is: one line about it, what it needs to see, and the function that draws."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Need = Literal["gradients", "features", "attention", "images"]
Score = Callable[[Tensor, Tensor], Tensor]
"""What is differentiated: (logits [N,C], targets [N]) -> [N]."""


def target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """The logit of each image's target: [N,C], [N] -> [N]."""
    return logits.gather(1, targets[:, None])[:, 0]


@dataclass(frozen=True)
class Explainer:
    """A method; `needs` says what `draw` is given.

    - gradients: draw(features [N,K,h,w], gradients of `score` [N,K,h,w]) -> maps [N,h,w]
    - features: draw(features [N,K,h,w]) -> maps [N,h,w]
    - attention: draw(map so far or None, a block's attention), both [N,T,T] -> map so far [N,T,T]
    - images: draw(images [N,C,H,W], seed) -> heatmaps [N,H,W], final

    Methods that share a score share one backward pass. A method may name the `layer` it reads;
    one that is `final` draws values in 0..1 that are brought to size and nothing else. `check`
    raises where the method does not fit the classifier; it is called while the first batch is
    under way, so that a GPU need not wait for it.
    """

    description: str
    needs: Need
    draw: Callable[..., Tensor]
    score: Score = target_logits
    layer: str | None = None
    final: bool = False
    check: Callable[[], None] = lambda: None
