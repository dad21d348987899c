"""Relevance brought back from the logit: LRP, AttnLRP, and generic attribution.

A torch function mode replaces functions while the model runs, so it does not matter which modules
call them, or whether attention is fused, eager, or inside nn.MultiheadAttention. Nothing is changed
on the model. Each rule is written as a gradient, so that input times gradient is the relevance.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.explainers.forward_pass import cells_of, target_logits_with_graph
from sufficit.explainers.rollout import no_attention, torch_attention, whole_attention

Layer = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A linear layer or convolution of inputs, weights and a bias."""


def generic_attribution(
    classifier: Classifier, images: Tensor, targets: Tensor, **_: Any
) -> Tensor:
    """Attention times its gradient, positive part, rolled over the blocks: [N,h,w].

    Chefer et al. 2021, equations 5 and 6: R = R + mean over heads of (gradient * A)^+ R.
    """
    mode = WrittenAttention()
    with torch.enable_grad(), classifier.in_eval_mode():
        inputs = classifier.normalize(images).requires_grad_()
        goal = _target(classifier, inputs, targets, mode)
        if not mode.weights:
            raise no_attention("generic-attribution")
        gradients = torch.autograd.grad(goal, mode.weights, allow_unused=True)
    relevance, pool = None, None
    for weights, gradient in zip(mode.weights, gradients, strict=True):
        if gradient is None:
            continue  # the prediction does not depend on it
        size = None if relevance is None else relevance.shape[1]
        positive = (weights.detach().float() * gradient.float()).clamp(min=0)
        block = whole_attention(positive, len(images), size, "generic-attribution").mean(1)
        if block.shape[1] == 1 and size not in (None, 1):
            pool = block
            continue
        if relevance is None:
            relevance = torch.eye(block.shape[1], device=block.device).expand_as(block)
        relevance = relevance + block @ relevance
    assert relevance is not None
    return cells_of(classifier, inputs, relevance, pool)


def attnlrp(
    classifier: Classifier, images: Tensor, targets: Tensor, *, gamma: float, **_: Any
) -> Tensor:
    """Relevance of the target's logit, brought back by AttnLRP's rules: [N,H,W], signed.

    Achtibat et al. 2024.
    """
    mode = RelevanceRules({"linear": gamma, "conv2d": gamma})
    found = _relevance(classifier, images, targets, mode)
    if not mode.weights:
        raise no_attention("attnlrp")
    return found


def lrp(
    classifier: Classifier, images: Tensor, targets: Tensor, *, gamma: float, **_: Any
) -> Tensor:
    """Relevance of the target's logit by the rules epsilon, gamma and box: [N,H,W], signed.

    Montavon et al. 2019: epsilon in linear layers, gamma in convolutions, which include the batch
    norm that follows, and in the first one the box rule for pixels in 0..1.
    """
    low = classifier.normalize(torch.zeros_like(images))
    high = classifier.normalize(torch.ones_like(images))
    return _relevance(classifier, images, targets, RelevanceRules({"conv2d": gamma}, (low, high)))


def _relevance(
    classifier: Classifier, images: Tensor, targets: Tensor, mode: "RelevanceRules"
) -> Tensor:
    """Input times gradient inside the mode, summed over the channels: [N,H,W]."""
    with torch.enable_grad(), classifier.in_eval_mode():
        inputs = classifier.normalize(images).detach().requires_grad_()
        goal = _target(classifier, inputs, targets, mode)
        leaves = (inputs, *(mode.ends or ()))
        gradients = torch.autograd.grad(goal, leaves, allow_unused=True)
    found = [
        (leaf.detach().float() * gradient.float()).sum(1)
        for leaf, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None
    ]
    return torch.stack(found).sum(0)


def _target(
    classifier: Classifier, inputs: Tensor, targets: Tensor, mode: TorchFunctionMode
) -> Tensor:
    """The sum of the targets' logits of a pass inside the mode."""
    if isinstance(mode, RelevanceRules):
        mode.image = inputs.detach()
    with torch_attention(classifier.bare), mode:
        logits = target_logits_with_graph(classifier, inputs, targets)
    return logits.sum()


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
            return self.attention(*args, **options)
        if name == "multi_head_attention_forward":
            return self.multi_head(*args, **options)
        if name == "softmax":
            result = func(*args, **options)
            axis = options.get("dim", args[1] if len(args) > 1 else None)
            if result.ndim in (3, 4) and axis in (-1, result.ndim - 1) and result.requires_grad:
                self.weights.append(result)
            return result
        return self.other(name, func, args, options)

    def other(self, name: str, func: Callable[..., Any], args: Any, options: Any) -> Any:
        """Any function but attention."""
        return func(*args, **options)

    def product(self, one: Tensor, other: Tensor) -> Tensor:
        """The matrix product of two activations."""
        return one @ other

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
    ) -> Tensor:
        """What scaled_dot_product_attention returns: [N,heads,T,K]."""
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
        self.weights.append(weights)
        return self.product(weights, value)

    def multi_head(
        self,
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
        """What nn.MultiheadAttention computes, for [T,N,E]; without masks and extra tokens."""
        names = ("bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight")
        given = dict(zip((*names, "out_proj_bias"), rest, strict=False)) | options
        unusual = ("bias_k", "bias_v", "add_zero_attn", "attn_mask", "key_padding_mask")
        if in_proj_weight is None or any(given.get(name) not in (None, False) for name in unusual):
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
        mixed = self.attention(*heads).permute(2, 0, 1, 3).flatten(2)
        out = (mixed, given["out_proj_weight"], given["out_proj_bias"])
        shown = self.weights[-1].mean(1) if given.get("average_attn_weights", True) else None
        shown = self.weights[-1] if shown is None else shown
        needed = shown if given.get("need_weights", True) else None
        return self.other("linear", F.linear, out, {}), needed


class RelevanceRules(WrittenAttention):
    """Rules of LRP as gradients: values are the model's, gradients carry the relevance.

    `gammas` are by function, linear or conv2d; without one it has the epsilon rule. With `ends`,
    the lowest and highest possible inputs, a convolution of the image has the box rule.
    """

    def __init__(
        self, gammas: Mapping[str, float], ends: tuple[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.gammas, self.image = gammas, torch.empty(0)
        self.ends = ends and (ends[0].requires_grad_(), ends[1].requires_grad_())
        self.last: tuple[Any, ...] = (None,)  # a convolution: output, layer, x, weight, bias

    def product(self, one: Tensor, other: Tensor) -> Tensor:
        """Each factor gets half of the relevance (equation 13)."""
        return _halved(one @ other)

    def other(self, name: str, func: Callable[..., Any], args: Any, options: Any) -> Any:
        """The rule for a function, or the function itself where its gradient is the rule."""
        if not args or not _live(args[0]):
            return func(*args, **options)
        if name in RULES:
            return RULES[name](func, *args, **options)
        if len(args) > 1 and _live(args[1]) and not (name == "linear" and self.gammas.get(name)):
            return _of_two(func, *args, name=name, **options)
        if name in ("linear", "conv2d"):
            given = dict(zip(_LAYER, args, strict=False)) | options
            x, weight, bias = (given.pop(key, None) for key in _LAYER)
            layer = lambda x, weight, bias: func(x, weight, bias, *args[3:], **given)  # noqa: E731
            result = self.weighted(name, layer, x, weight, bias)
            self.last = (result, layer, x, weight, bias) if name == "conv2d" else self.last
            return result
        if name == "batch_norm" and args[0] is self.last[0] and args[1] is not None:
            _, layer, x, weight, bias = self.last
            return self.weighted("conv2d", layer, x, *_merged(weight, bias, *args[1:]))
        return func(*args, **options)

    def weighted(
        self, name: str, layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """A linear layer or convolution with its rule: box for the image, gamma, or epsilon."""
        ends = self.ends if name == "conv2d" and x.shape == self.image.shape else None
        if ends and torch.equal(x.detach(), self.image):
            return _box(layer, ends, x, weight, bias)
        gamma = self.gammas.get(name)
        return _gamma(layer, x, weight, bias, gamma) if gamma else layer(x, weight, bias)


_LAYER = ("input", "weight", "bias")  # what a linear layer or convolution is called with first
_GATES = ("mul", "__mul__", "multiply", "mul_", "__imul__")
_PRODUCTS = ("matmul", "bmm", "mul", "__mul__", "__matmul__", "multiply", "einsum")
_QUOTIENTS = ("div", "__truediv__", "true_divide", "divide")


def _live(value: object) -> bool:
    """Whether a value is an activation: it depends on the image."""
    return isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)


def _halved(value: Tensor) -> Tensor:
    """The value, with half of the gradient."""
    return value / 2 + value.detach() / 2


def _of_two(
    func: Callable[..., Any], one: Any, other: Tensor, *args: Any, name: str, **options: Any
) -> Any:
    """A function of two activations: factors share the relevance, a gate or divisor gets none."""
    if name in _GATES and one.numel() < other.numel():  # a gate for each channel of a map
        return func(one.detach(), other, *args, **options)
    if name in _QUOTIENTS or (name in _GATES and one.numel() > other.numel()):
        return func(one, other.detach(), *args, **options)
    found = func(one, other, *args, **options)
    return _halved(found) if name in _PRODUCTS else found


def _merged(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Weights and bias of a convolution with the batch norm after it."""
    factor = (variance + eps).rsqrt() * (1 if scale is None else scale)
    moved = ((0 if bias is None else bias) - mean) * factor
    return weight * factor[:, None, None, None], moved if shift is None else moved + shift


def _identity(func: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
    """A function of each element: the relevance goes through unchanged (equation 9)."""
    with torch.no_grad():
        zero = x == 0
        ratio = func(x.detach().clone(), *args, **options) / x.masked_fill(zero, 1)
        ratio = ratio.masked_fill(zero, 0)
        rest = func(x.detach().clone(), *args, **options) - x * ratio  # of functions with f(0) != 0
    return x * ratio + rest


def _layer_norm(
    func: Callable[..., Tensor],
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The norm as a linear function: its divisor is a constant (equation 11)."""
    axes = tuple(range(-len(normalized_shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    deviation = (centred.square().mean(axes, keepdim=True) + eps).sqrt().detach()
    scaled = centred / deviation
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


def _unit(
    func: Callable[..., Tensor],
    x: Tensor,
    p: float = 2.0,
    dim: int = 1,
    eps: float = 1e-12,
    out: None = None,
) -> Tensor:
    """F.normalize, its divisor a constant."""
    length: Tensor = x.detach().norm(p, dim, keepdim=True).clamp_min(eps)
    return x / length


_ELEMENTWISE = (
    *("gelu", "silu", "relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu"),
    *("elu", "mish", "tanh", "sigmoid", "softplus", "logit"),
)
RULES: Mapping[str, Callable[..., Tensor]] = {
    **dict.fromkeys(_ELEMENTWISE, _identity),
    "layer_norm": _layer_norm,
    "normalize": _unit,
}


def _gamma(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: float) -> Tensor:
    """A linear layer whose contributions of the output's sign count 1 + gamma times as much."""
    plus, minus = weight.clamp(min=0), weight.clamp(max=0)
    high, low = x.clamp(min=0), x.clamp(max=0)

    def bound(low: float | None, high: float | None) -> Tensor | None:
        return None if bias is None else bias.clamp(low, high)

    value = layer(x, weight, bias)
    shown = value.detach()
    up = layer(high, plus, bound(0, None)) + layer(low, minus, None)  # what is above zero
    down = layer(high, minus, bound(None, 0)) + layer(low, plus, None)
    raised = value + gamma * torch.where(shown > 0, up, down)
    safe = raised.detach()
    return raised * (shown / safe.masked_fill(safe == 0, 1))


def _box(
    layer: Layer, ends: tuple[Tensor, Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """A convolution of pixels between two ends: contributions are counted from the ends."""
    low, high = ends
    value = layer(x, weight, bias).detach()
    above, below = layer(low, weight.clamp(min=0), None), layer(high, weight.clamp(max=0), None)
    spread = layer(x, weight, None) - above - below
    safe = spread.detach().clamp(min=1e-6)  # it is no less than zero
    return value + (spread - spread.detach()) * (value / safe)
