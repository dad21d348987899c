"""Attention rollout (Abnar and Zuidema 2020) for any transformer that attends with torch.

The attention is read off torch's own functions while the forward pass runs, so it does not matter
how the model calls them: fused, eager, or through nn.MultiheadAttention.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sufficit.errors import UserError

Fold = Callable[[Tensor | None, Tensor], Tensor]


def rolled(so_far: Tensor | None, attention: Tensor) -> Tensor:
    """One block more: attention plus identity, rows summing to 1, times the blocks before.

    >>> rolled(None, torch.tensor([[[0.5, 0.5], [0.2, 0.8]]]))
    tensor([[[0.7500, 0.2500],
             [0.1000, 0.9000]]])
    """
    block = attention + torch.eye(attention.shape[-1], device=attention.device)
    block = block / block.sum(-1, keepdim=True)
    return block if so_far is None else block @ so_far


def class_row(tokens: Tensor, prefix: int, pool: Tensor | None, mean_pooled: bool) -> Tensor:
    """What the prediction drew from each token: [N,T,T] -> [N,T].

    That is the class token's row. A model without class token that averages its patch tokens has
    the mean of their rows, one that pools them by attention has that attention times the rows.
    """
    if pool is not None:
        return (pool @ tokens)[:, 0]
    if mean_pooled or not prefix:
        return tokens[:, prefix:].mean(1)
    return tokens[:, 0]


def mean_pooled(model: nn.Module) -> bool:
    """Whether the model says of itself that it averages its tokens, as timm's and BEiT's do."""
    config = getattr(model, "config", None)
    return getattr(model, "global_pool", "") == "avg" or bool(
        getattr(config, "use_mean_pooling", False)
    )


class AttentionFold(TorchFunctionMode):
    """Folds every attention of a forward pass into one [N,T,T] as it is made; none is kept."""

    def __init__(self, images: int, fold: Fold) -> None:
        super().__init__()
        self.images = images
        self.fold = fold
        self.tokens: Tensor | None = None  # [N,T,T]
        self.pool: Tensor | None = None  # [N,1,T]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function as it is, and take note of the attention in it."""
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":
            return self._multi_head(func, args, options)
        result = func(*args, **options)
        if name == "scaled_dot_product_attention":
            self._note(attention_weights(*args, **options))
        elif name == "softmax" and _over_last(result, args, options):
            self._note(result)
        return result

    def _multi_head(
        self, func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """The weights are made only when asked for: ask, then answer what the caller asked."""
        asked = {**options, "need_weights": True, "average_attn_weights": False}
        output, weights = func(*args, **asked)
        self._note(weights)
        if not options.get("need_weights", True):
            return output, None
        return output, weights.mean(-3) if options.get("average_attn_weights", True) else weights

    def _note(self, weights: Tensor) -> None:
        with torch.no_grad(), torch.autocast(weights.device.type, enabled=False):
            attention = self._over_heads(weights.detach())
            if attention.shape[1] == 1 and self.tokens is not None:
                self.pool = attention
            else:
                self.tokens = self.fold(self.tokens, attention)

    def _over_heads(self, weights: Tensor) -> Tensor:
        """The mean over heads: [N,heads,T,T] or [N*heads,T,T] -> [N,T,T]."""
        if weights.ndim == 3 and weights.shape[0] % self.images == 0:
            weights = weights.view(self.images, -1, *weights.shape[1:])
        *_, queries, keys = weights.shape
        tokens = keys if self.tokens is None else self.tokens.shape[1]
        pooling = queries == 1 and self.tokens is not None
        if weights.shape[0] != self.images or weights.ndim != 4 or keys != tokens:
            raise _unfit(weights)
        if queries != keys and not pooling:
            raise _unfit(weights)
        return weights.float().mean(1)


def attention_weights(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> Tensor:
    """What scaled_dot_product_attention weighs the values by: [N,heads,T,T].

    It is asked itself, with the identity for values, so that masks and scales mean what they mean.
    """
    one_hot = torch.eye(key.shape[-2], dtype=value.dtype, device=value.device)
    values = one_hot.expand(*value.shape[:-1], -1)
    return F.scaled_dot_product_attention(query.detach(), key.detach(), values, *args, **options)


@contextmanager
def torch_attention(model: nn.Module) -> Iterator[None]:
    """Attention by torch inside, where transformers was set to a kernel that cannot be watched."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        for config, kind in before:
            if kind not in ("eager", "sdpa"):
                config._attn_implementation = "eager"
        yield
    finally:
        for config, kind in before:  # the outer ones first: they pass it on to the inner ones
            if config._attn_implementation != kind:
                config._attn_implementation = kind


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration of transformers in the model, the outer ones first."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            found[id(config)] = config
    return list(found.values())


def _over_last(result: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    axis = options.get("dim", args[1] if len(args) > 1 else None)
    return result.ndim in (3, 4) and axis in (-1, result.ndim - 1)


def _unfit(weights: Tensor) -> UserError:
    return UserError(
        "rollout needs attention from every token to every token, [N,heads,T,T] with the same T in "
        f"every block; this model has {list(weights.shape)}, as models with windows or stages do: "
        'use another method, for example "gradcam"'
    )
