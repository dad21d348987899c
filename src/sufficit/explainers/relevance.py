"""Relevance brought back from the logit: LRP and AttnLRP.

Each rule is written as a gradient, so that input times gradient is the relevance. A torch function
mode replaces functions by their rules while the model runs; nothing is changed on the model.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_weights

from sufficit.classifier.classifier import Classifier
from sufficit.explainers.attention import WrittenAttention, no_attention, target_sum

Layer = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A linear layer or convolution of inputs, weights and a bias."""


def attnlrp(
    classifier: Classifier, images: Tensor, targets: Tensor, *, gamma: float, **_: Any
) -> Tensor:
    """Return relevance of the target's logit, brought back by AttnLRP's rules: [N,H,W], signed.

    Achtibat et al. 2024.
    """
    mode = RelevanceRules({"linear": gamma, "conv2d": gamma})
    maps = _relevance(classifier, images, targets, mode)
    if not mode.weights:
        raise no_attention("attnlrp")
    return maps


def lrp(
    classifier: Classifier, images: Tensor, targets: Tensor, *, gamma: float, **_: Any
) -> Tensor:
    """Return relevance of the target's logit by the rules epsilon, gamma and box: [N,H,W], signed.

    Montavon et al. 2019: epsilon in linear layers, gamma in convolutions, which include the batch
    norm that follows, and in the first one the box rule for pixels in 0..1.
    """
    low = classifier.normalize(torch.zeros_like(images))
    high = classifier.normalize(torch.ones_like(images))
    return _relevance(classifier, images, targets, RelevanceRules({"conv2d": gamma}, (low, high)))


def _relevance(
    classifier: Classifier, images: Tensor, targets: Tensor, mode: "RelevanceRules"
) -> Tensor:
    """Return input times gradient inside the mode, summed over the channels: [N,H,W]."""
    with torch.enable_grad(), classifier.in_eval_mode():
        inputs = classifier.normalize(images).detach().requires_grad_()
        mode.image = inputs.detach()
        goal = target_sum(classifier, inputs, targets, mode)
        leaves = (inputs, *(mode.ends or ()))
        gradients = torch.autograd.grad(goal, leaves, allow_unused=True)
    # With the box rule a pixel's relevance has three parts: its own and those of the two ends.
    parts = [
        (leaf.detach().float() * gradient.float()).sum(1)
        for leaf, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None
    ]
    return torch.stack(parts).sum(0)


class RelevanceRules(WrittenAttention):
    """Rules of LRP as gradients: values are the model's, gradients carry the relevance.

    `gammas` are by function, linear or conv2d; without one it has the epsilon rule. With `ends`,
    the lowest and highest possible inputs, a convolution of the image has the box rule.
    """

    def __init__(
        self, gammas: Mapping[str, float], ends: tuple[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.gammas = gammas
        self.image = torch.empty(0)
        self.ends = ends and (ends[0].requires_grad_(), ends[1].requires_grad_())
        self.last: tuple[Any, ...] = (None,)  # a convolution: output, layer, x, weight, bias

    def product(self, one: Tensor, other: Tensor) -> Tensor:
        """Return each factor gets half of the relevance (equation 13)."""
        return _halved(one @ other)

    def other(self, name: str, func: Callable[..., Any], args: Any, options: Any) -> Any:
        """Return the rule for a function, or the function itself where its gradient is the rule."""
        if not args or not _live(args[0]):
            return func(*args, **options)
        if name in RULES:
            return RULES[name](func, *args, **options)
        # A linear layer with gamma has its rule also where its weights are activations.
        if len(args) > 1 and _live(args[1]) and not (name == "linear" and self.gammas.get(name)):
            return _of_two(func, *args, name=name, **options)
        if name in ("linear", "conv2d"):
            others = dict(zip(_LAYER, args, strict=False)) | options  # its stride, padding, ...
            x, weight, bias = (others.pop(key, None) for key in _LAYER)
            layer = lambda x, weight, bias: func(x, weight, bias, *args[3:], **others)  # noqa: E731
            result = self.weighted(name, layer, x, weight, bias)
            if name == "conv2d":
                self.last = (result, layer, x, weight, bias)
            return result
        # The convolution before it is computed again with the norm merged into its weights.
        if func is F.batch_norm and args[0] is self.last[0] and args[1] is not None:
            _, layer, x, weight, bias = self.last
            scale, shift, eps = (options[key] for key in ("weight", "bias", "eps"))
            merged = fuse_conv_bn_weights(weight, bias, args[1], args[2], eps, scale, shift)
            return self.weighted("conv2d", layer, x, *merged)
        return func(*args, **options)

    def weighted(
        self, name: str, layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return what a linear layer or convolution gives, with the box, gamma or epsilon rule."""
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
    """Return whether a value is an activation: it depends on the image."""
    return isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)


def _halved(value: Tensor) -> Tensor:
    """Return the value, with half of the gradient."""
    return value / 2 + value.detach() / 2


def _of_two(
    func: Callable[..., Any], one: Any, other: Tensor, *args: Any, name: str, **options: Any
) -> Any:
    """Return a function of two activations.

    Factors share the relevance; a gate or a divisor gets none, as if it were a constant.
    """
    if name in _GATES and one.numel() < other.numel():  # a gate for each channel of a map
        return func(one.detach(), other, *args, **options)
    if name in _QUOTIENTS or (name in _GATES and one.numel() > other.numel()):
        return func(one, other.detach(), *args, **options)
    result = func(one, other, *args, **options)
    return _halved(result) if name in _PRODUCTS else result


def _identity(func: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return a function of each element: the relevance goes through unchanged (equation 9)."""
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
    """Return the norm as a linear function: its divisor is a constant (equation 11)."""
    axes = tuple(range(-len(normalized_shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    deviation = (centred.square().mean(axes, keepdim=True) + eps).sqrt().detach()
    scaled = centred / deviation
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


_ELEMENTWISE = (  # F.normalize is one too, as its divisor counts as a constant
    *("gelu", "silu", "relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu"),
    *("elu", "mish", "tanh", "sigmoid", "softplus", "logit", "normalize"),
)
RULES: Mapping[str, Callable[..., Tensor]] = {
    **dict.fromkeys(_ELEMENTWISE, _identity),
    "layer_norm": _layer_norm,
}


def _gamma(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: float) -> Tensor:
    """Return what a linear layer gives; contributions of its sign count 1 + gamma times as much."""
    plus = weight.clamp(min=0)
    minus = weight.clamp(max=0)
    high = x.clamp(min=0)
    low = x.clamp(max=0)

    def bound(low: float | None, high: float | None) -> Tensor | None:
        return None if bias is None else bias.clamp(low, high)

    value = layer(x, weight, bias)
    shown = value.detach()
    up = layer(high, plus, bound(0, None)) + layer(low, minus, None)  # what is above zero
    down = layer(high, minus, bound(None, 0)) + layer(low, plus, None)
    raised = value + gamma * torch.where(shown > 0, up, down)
    # The value is the layer's own; the gradient is that of the raised contributions.
    safe = raised.detach()
    return raised * (shown / safe.masked_fill(safe == 0, 1))


def _box(
    layer: Layer, ends: tuple[Tensor, Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return a convolution of pixels between two ends: contributions are counted from the ends."""
    low, high = ends
    value = layer(x, weight, bias).detach()
    above = layer(low, weight.clamp(min=0), None)
    below = layer(high, weight.clamp(max=0), None)
    spread = layer(x, weight, None) - above - below
    safe = spread.detach().clamp(min=1e-6)  # it is no less than zero
    return value + (spread - spread.detach()) * (value / safe)
