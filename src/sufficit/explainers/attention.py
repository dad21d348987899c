"""The attention of any transformer that attends with torch, and maps of it.

A torch function mode replaces functions while the model runs, so it does not matter which modules
call them, or whether attention is fused, eager, or inside nn.MultiheadAttention. Nothing is changed
on the model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.explainers.forward_pass import target_logits_with_graph


def rollout(
    classifier: Classifier, images: Tensor, _: Tensor | None, *, layer: str | None, **__: Any
) -> Tensor:
    """Return the product of all blocks' attention (Abnar and Zuidema 2020): [N,h,w]."""
    fold = AttentionFold(len(images), "rollout", rolled)
    layer = layer or classifier.feature_layer(images)
    with torch.no_grad(), torch_attention(classifier.bare), ReadAttention(fold):
        (features,), _logits = classifier.stages(images, (layer,))
    cells = fold.cells(classifier, images)
    if cells.shape[1:] != features.shape[2:]:
        raise UserError(
            f"the attention is over {cells.shape[1]} x {cells.shape[2]} cells, the layer has"
            f" {list(features.shape[2:])}: give the layer of a block that attends to all cells"
        )
    return cells


def rolled(so_far: Tensor | None, attention: Tensor) -> Tensor:
    """Return one more block: attention plus identity, rows that sum to 1, times the blocks before.

    >>> rolled(None, torch.tensor([[[0.5, 0.5], [0.2, 0.8]]]))
    tensor([[[0.7500, 0.2500],
             [0.1000, 0.9000]]])
    """
    block = attention + torch.eye(attention.shape[-1], device=attention.device)
    block = block / block.sum(-1, keepdim=True)
    return block if so_far is None else block @ so_far


def generic_attribution(
    classifier: Classifier, images: Tensor, targets: Tensor, **_: Any
) -> Tensor:
    """Return attention times its gradient, positive part, rolled over the blocks: [N,h,w].

    Chefer et al. 2021, equations 5 and 6: R = R + mean over heads of (gradient * A)^+ R.
    """

    def added(so_far: Tensor | None, block: Tensor) -> Tensor:
        if so_far is None:
            so_far = torch.eye(block.shape[1], device=block.device).expand_as(block)
        return so_far + block @ so_far

    mode = WrittenAttention()
    fold = AttentionFold(len(images), "generic-attribution", added)
    with torch.enable_grad(), classifier.in_eval_mode():
        inputs = classifier.normalize(images).requires_grad_()
        goal = target_sum(classifier, inputs, targets, mode)
        if not mode.weights:
            raise no_attention("generic-attribution")
        gradients = torch.autograd.grad(goal, mode.weights, allow_unused=True)
    for weights, gradient in zip(mode.weights, gradients, strict=True):
        if gradient is not None:  # None: the prediction does not depend on this block's weights
            fold.add((weights.detach().float() * gradient.float()).clamp(min=0))
    return fold.cells(classifier, images)


def target_sum(
    classifier: Classifier, inputs: Tensor, targets: Tensor, mode: TorchFunctionMode
) -> Tensor:
    """Return the sum of the targets' logits of a pass inside the mode."""
    with torch_attention(classifier.bare), mode:
        return target_logits_with_graph(classifier, inputs, targets).sum()


class AttentionFold:
    """Folds the attention of block after block into one map [N,T,T]."""

    def __init__(
        self, images: int, method: str, fold: Callable[[Tensor | None, Tensor], Tensor]
    ) -> None:
        self.images = images
        self.method = method
        self.fold = fold
        self.tokens: Tensor | None = None  # [N,T,T]
        self.pool: Tensor | None = None  # [N,1,T] of a model that pools its tokens by attention

    @torch.no_grad()
    def add(self, weights: Tensor) -> None:
        """Fold the mean over heads: [N,heads,T,T] or [N*heads,T,T] -> [N,T,T]."""
        tokens = None if self.tokens is None else self.tokens.shape[1]
        if weights.ndim == 3 and weights.shape[0] % self.images == 0:
            weights = weights.view(self.images, -1, *weights.shape[1:])
        *_, queries, keys = weights.shape
        # A last block with a single query pools the tokens, as in SigLIP.
        pooling = queries == 1 and tokens is not None
        whole = weights.ndim == 4 and weights.shape[0] == self.images and tokens in (None, keys)
        if not whole or (queries != keys and not pooling):
            raise UserError(
                f"{self.method} needs attention from every token to every token, [N,heads,T,T] with"
                f" the same T in every block; this model has {list(weights.shape)}, as models with"
                ' windows or stages do: use another method, for example "gradcam"'
            )
        with torch.autocast(weights.device.type, enabled=False):
            block = weights.float().mean(1)
            if pooling:
                self.pool = block
            else:
                self.tokens = self.fold(self.tokens, block)

    def cells(self, classifier: Classifier, images: Tensor) -> Tensor:
        """Return how much the prediction takes from each cell: [N,h,w]."""
        if self.tokens is None:
            raise no_attention(self.method)
        return cells_of(classifier, images, self.tokens, self.pool)


def cells_of(classifier: Classifier, images: Tensor, tokens: Tensor, pool: Tensor | None) -> Tensor:
    """Return how much the prediction takes from each cell: [N,T,T] -> [N,h,w]."""
    h, w = classifier.as_grid(tokens[:, 0, :, None], images).shape[2:]
    prefix = tokens.shape[1] - h * w
    # The settings of timm and of BEiT that say a model averages its tokens.
    config = getattr(classifier.bare, "config", None)
    averages = getattr(classifier.bare, "global_pool", "") == "avg"
    averages = averages or bool(getattr(config, "use_mean_pooling", False))
    if pool is not None:  # it pools them by attention
        row = (pool @ tokens)[:, 0]
    elif averages or not prefix:
        row = tokens[:, prefix:].mean(1)
    else:  # it reads its class token
        row = tokens[:, 0]
    return classifier.as_grid(row[:, :, None], images)[:, 0]


def no_attention(method: str) -> UserError:
    """Return the error for a model without attention that can be read."""
    return UserError(
        f"{method} needs a transformer that attends with torch's own functions, and this model"
        ' called none: use another method, for example "gradcam"'
    )


class WrittenAttention(TorchFunctionMode):
    """Computes attention step by step, and keeps the weights of every block in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []  # each [N,heads,T,T]

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the function, or its written-out form."""
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self.attention(*args, **options)[0]
        if name == "multi_head_attention_forward":
            return self.multi_head(func, *args, **options)
        # Eager attention calls softmax over the keys, on scores of [N,heads,T,T] or [N*heads,T,T].
        if name == "softmax":
            result = func(*args, **options)
            axis = options.get("dim", args[1] if len(args) > 1 else None)
            if result.ndim in (3, 4) and axis in (-1, result.ndim - 1):
                self.keep(result)
            return result
        return self.other(name, func, args, options)

    def keep(self, weights: Tensor) -> None:
        """Keep the weights of a block."""
        if weights.requires_grad:
            self.weights.append(weights)

    def other(self, name: str, func: Callable[..., Any], args: Any, options: Any) -> Any:
        """Any function but attention."""
        return func(*args, **options)

    def product(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the matrix product of two activations."""
        return one @ other

    # The parameters are torch's own, of the functions that these methods replace.
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return what scaled_dot_product_attention returns, [N,heads,T,K], and its weights."""
        if enable_gqa:
            key, value = (
                t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value)
            )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = self.product(query * scale, key.mT)
        if is_causal:
            attn_mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1)
        self.keep(weights)
        return self.product(weights, value), weights

    def multi_head(
        self,
        func: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        *rest: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what nn.MultiheadAttention computes for [T,N,E], without masks, extra tokens."""
        # nn.MultiheadAttention gives some of them by position, the others by name.
        names = ("bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight")
        others = dict(zip((*names, "out_proj_bias"), rest, strict=False)) | options
        unusual = ("bias_k", "bias_v", "add_zero_attn", "attn_mask", "key_padding_mask")
        if in_proj_weight is None or any(others.get(name) not in (None, False) for name in unusual):
            raise UserError(
                "this method reads nn.MultiheadAttention without masks, extra tokens and separate"
                ' projections, and the model has some: use another method, for example "gradcam"'
            )
        weights = in_proj_weight.chunk(3)
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        projected = [
            self.other("linear", F.linear, (tensor, weight, bias), {})
            for tensor, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]
        # [T,N,E] -> [N,heads,T,E/heads]
        heads = [p.unflatten(2, (num_heads, -1)).permute(1, 2, 0, 3) for p in projected]
        mixed, shown = self.attention(*heads)
        joined = mixed.permute(2, 0, 1, 3).flatten(2)
        projection = (joined, others["out_proj_weight"], others["out_proj_bias"])
        return self.other("linear", F.linear, projection, {}), _asked_for(shown, others)


class ReadAttention(WrittenAttention):
    """Shows a fold the attention of every block; nn.MultiheadAttention is run as it is."""

    def __init__(self, fold: AttentionFold) -> None:
        super().__init__()
        self.fold = fold

    def keep(self, weights: Tensor) -> None:
        """Fold the weights of a block, of which no other copy stays."""
        self.fold.add(weights)

    def multi_head(self, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what nn.MultiheadAttention computes; it is asked for the weights of each head."""
        output, weights = func(
            *args, **options | {"need_weights": True, "average_attn_weights": False}
        )
        self.keep(weights)
        return output, _asked_for(weights, options)


def _asked_for(weights: Tensor, options: Mapping[str, Any]) -> Tensor | None:
    """Return what the caller of nn.MultiheadAttention wants of the weights [N,heads,T,T]."""
    if not options.get("need_weights", True):
        return None
    return weights.mean(-3) if options.get("average_attn_weights", True) else weights


@contextmanager
def torch_attention(model: nn.Module) -> Iterator[None]:
    """Have models of transformers attend with torch inside, not with a kernel of their own.

    A function mode sees torch's functions only, not what a kernel such as flash-attention does.
    """
    held = [getattr(module, "config", None) for module in model.modules()]
    configs: dict[int, Any] = {id(config): config for config in held}  # the outer modules' first
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
