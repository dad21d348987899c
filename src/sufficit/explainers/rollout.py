"""Attention rollout (Abnar and Zuidema 2020) for any transformer that attends with torch.

A torch function mode reads the attention during the forward pass, so it does not matter how the
model computes it: fused, eager, or through nn.MultiheadAttention.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sufficit.errors import UserError

Fold = Callable[[Tensor | None, Tensor], Tensor]


def rolled(so_far: Tensor | None, attention: Tensor) -> Tensor:
    """One more block: attention plus identity, rows that sum to 1, times the blocks before.

    >>> rolled(None, torch.tensor([[[0.5, 0.5], [0.2, 0.8]]]))
    tensor([[[0.7500, 0.2500],
             [0.1000, 0.9000]]])
    """
    block = attention + torch.eye(attention.shape[-1], device=attention.device)
    block = block / block.sum(-1, keepdim=True)
    return block if so_far is None else block @ so_far


def class_row(tokens: Tensor, prefix: int, pool: Tensor | None, mean_pooled: bool) -> Tensor:
    """How much the prediction attends to each token: [N,T,T] -> [N,T]."""
    if pool is not None:  # the model pools its tokens by attention
        return (pool @ tokens)[:, 0]
    if mean_pooled or not prefix:  # it averages its patch tokens
        return tokens[:, prefix:].mean(1)
    return tokens[:, 0]  # it reads its class token


class AttentionFold(TorchFunctionMode):
    """Folds the attention of every block into one [N,T,T] during a forward pass."""

    def __init__(self, images: int, fold: Fold) -> None:
        super().__init__()
        self.images, self.fold = images, fold
        self.tokens: Tensor | None = None  # [N,T,T]
        self.pool: Tensor | None = None  # [N,1,T]

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the function unchanged, and fold the attention in it."""
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":  # ask for the weights, return what was asked for
            asked = {**options, "need_weights": True, "average_attn_weights": False}
            output, weights = func(*args, **asked)
            self._add(weights)
            if not options.get("need_weights", True):
                return output, None
            averaged = options.get("average_attn_weights", True)
            return output, weights.mean(-3) if averaged else weights
        result = func(*args, **options)
        if name == "scaled_dot_product_attention":
            self._add(attention_weights(*args, **options))
        elif name == "softmax" and result.ndim in (3, 4):
            axis = options.get("dim", args[1] if len(args) > 1 else None)
            if axis in (-1, result.ndim - 1):
                self._add(result)
        return result

    @torch.no_grad()
    def _add(self, weights: Tensor) -> None:
        """Fold the mean over heads: [N,heads,T,T] or [N*heads,T,T] -> [N,T,T]."""
        with torch.autocast(weights.device.type, enabled=False):
            tokens = None if self.tokens is None else self.tokens.shape[1]
            weights = whole_attention(weights, self.images, tokens, "rollout")
            attention = weights.detach().float().mean(1)
            if weights.shape[2] == 1 and tokens is not None:
                self.pool = attention
            else:
                self.tokens = self.fold(self.tokens, attention)


def no_attention(method: str) -> UserError:
    """The error for a model without attention that can be read."""
    return UserError(
        f"{method} needs a transformer that attends with torch's own functions, and this model"
        ' called none: use another method, for example "gradcam"'
    )


def whole_attention(weights: Tensor, images: int, tokens: int | None, method: str) -> Tensor:
    """Attention as [N,heads,T,T], or [N,heads,1,T] of a pool; raise unless it is over all tokens.

    `tokens` is the T of the blocks before, None in the first.
    """
    if weights.ndim == 3 and weights.shape[0] % images == 0:
        weights = weights.view(images, -1, *weights.shape[1:])
    *_, queries, keys = weights.shape
    pooling = queries == 1 and tokens is not None
    whole = weights.ndim == 4 and weights.shape[0] == images and tokens in (None, keys)
    if not whole or (queries != keys and not pooling):
        raise UserError(
            f"{method} needs attention from every token to every token, [N,heads,T,T] with the same"
            f" T in every block; this model has {list(weights.shape)}, as models with windows or"
            ' stages do: use another method, for example "gradcam"'
        )
    return weights


def attention_weights(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> Tensor:
    """The weights that scaled_dot_product_attention gives the values: [N,heads,T,T]."""
    # With the identity as values, the function returns its weights, masks and scales included.
    one_hot = torch.eye(key.shape[-2], dtype=value.dtype, device=value.device)
    values = one_hot.expand(*value.shape[:-1], -1)
    return F.scaled_dot_product_attention(query.detach(), key.detach(), values, *args, **options)


@contextmanager
def torch_attention(model: nn.Module) -> Iterator[None]:
    """Inside, models of transformers attend with torch, not with a kernel of their own."""
    found = [getattr(module, "config", None) for module in model.modules()]
    configs: dict[int, Any] = {id(config): config for config in found}  # the outer modules' first
    before = [
        (config, getattr(config, "_attn_implementation", None)) for config in configs.values()
    ]
    try:
        for config, kind in before:
            if kind not in (None, "eager", "sdpa"):
                config._attn_implementation = "eager"
        yield
    finally:
        for config, kind in before:  # the outer ones first: they set the inner ones
            if kind is not None and config._attn_implementation != kind:
                config._attn_implementation = kind
