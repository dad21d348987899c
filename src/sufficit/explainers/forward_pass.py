"""One forward pass, read at one layer, and the gradients that arrive at that layer."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sufficit.classifier import layers
from sufficit.classifier.classifier import Classifier, check_range
from sufficit.errors import UserError
from sufficit.explainers.cams import target_logits


@dataclass(frozen=True)
class Pass:
    """The result of one forward pass, with the graph behind its gradients."""

    classifier: Classifier
    images: Tensor  # [N,C,H,W] as the classifier normalised them
    layer: str
    logits: Tensor  # [N,C] float32
    features: Tensor  # [N,K,h,w] in the layer's own precision
    leaf: Tensor  # the layer's output, where gradients end
    grid: Callable[[Tensor], Tensor]  # a tensor like the leaf -> [N,K,h,w]
    earlier: dict[str, Tensor]  # features of further layers, each [N,K,h,w]
    inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]  # arguments that modules were given

    def stages(self, names: Sequence[str]) -> list[Tensor]:
        """Return the features of these layers: each [N,K,h,w]."""
        return [self.features_of(name) for name in names]

    def features_of(self, name: str) -> Tensor:
        """Return the features of the layer of the pass, or of a further one: [N,K,h,w]."""
        return self.features if name == self.layer else self.earlier[name]

    def gradients(self, scores: Tensor, *, last: bool) -> Tensor:
        """Return gradients of each image's score: [N] -> [N,K,h,w].

        Images do not depend on each other in eval mode, so the gradient of the sum holds each
        image's own. The `last` call frees the graph.
        """
        with torch.autocast(scores.device.type, enabled=False):
            (gradient,) = torch.autograd.grad(
                scores.sum(), self.leaf, retain_graph=not last, allow_unused=True
            )
        if gradient is None:
            wrong = f"the logits do not depend on layer {self.layer!r}"
            raise UserError(f"{wrong}: choose another layer")
        return self.grid(gradient).float()


def look(
    classifier: Classifier,
    images: Tensor,
    layer: str,
    *,
    differentiate: bool = False,
    earlier: Sequence[str] = (),
    inputs: Sequence[str] = (),
) -> Pass:
    """Return one forward pass over images in 0..1: [N,C,H,W]. It records no graph before the layer.

    `earlier` are further layers whose features are kept, `inputs` modules whose arguments are.
    """
    with torch.inference_mode(False), ExitStack() as stack:
        normal = classifier.normalize(images)  # first: a GPU is busy while the rest is prepared
        stack.enter_context(classifier.in_eval_mode())
        layer = layers.resolve(classifier.model, layer)
        # If the model switches gradients off and on itself, they must be on before it does.
        for recording in (torch.no_grad, torch.enable_grad):
            with recording():
                seen = _run(classifier, normal, layer, differentiate, earlier, inputs)
            if not differentiate or seen.logits.requires_grad:
                return seen
    raise UserError(
        f"no gradient goes from the logits to layer {layer!r}: the model detaches what is between,"
        " or runs it under torch.no_grad; choose a later layer"
    )


# Its parameters are those of `look`, which has settled what they may be.
def _run(
    classifier: Classifier,
    inputs: Tensor,
    layer: str,
    differentiate: bool,
    earlier: Sequence[str],
    given_to: Sequence[str],
    *,
    copy: bool = False,
) -> Pass:
    """Run the model once with hooks at its layers; `copy` what they see, or trust it to last."""
    output: Any = None
    leaf = torch.empty(0)
    # torch counts what is written into a tensor: another version means that it was overwritten.
    version = 0
    seen: dict[str, tuple[Any, Tensor, int]] = {}  # an earlier layer's output, its tensor, version
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def cut(_: nn.Module, __: object, returned: Any) -> Any:
        # Gradients reach the leaf even if all weights are frozen, and go no further. The model
        # continues with a copy, so that later layers may overwrite it; without gradients, with the
        # output itself, as long as none of them does: copies are a part of what LAX costs.
        nonlocal output, leaf, version
        tensor = returned[0] if isinstance(returned, tuple | list) and returned else returned
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            came = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(f"a layer must give a tensor of floats, got {came}: choose another")
        output = returned
        leaf = tensor.detach().requires_grad_(differentiate)
        if differentiate:
            torch.set_grad_enabled(True)  # until the end of the pass
        elif not copy and not tensor.is_inference():
            version = tensor._version
            return None
        return layers.with_first(output, leaf.clone())

    def keep(name: str, _: nn.Module, __: object, returned: Any) -> None:
        tensor = layers.first(returned)
        if isinstance(tensor, Tensor):
            inference = tensor.is_inference()  # of a model that runs a part so: it has no version
            tensor = tensor.clone() if copy or inference else tensor
            seen[name] = returned, tensor, 0 if inference else tensor._version

    def keep_arguments(
        name: str, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        arguments[name] = args, options

    def grid(tensor: Tensor) -> Tensor:
        return classifier.as_grid(layers.with_first(output, tensor), inputs, layer)

    with ExitStack() as stack:
        stack.enter_context(layers.hooked(classifier.bare, layer, cut))
        for name in earlier:
            stack.enter_context(layers.hooked(classifier.bare, name, partial(keep, name)))
        for name in given_to:
            module = classifier.bare.get_submodule(name)
            hook = partial(keep_arguments, name)
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        logits = logits_with_graph(classifier, inputs)
    read = seen.keys() | (set() if output is None else {layer})
    for name in (layer, *earlier):
        if name not in read:
            raise UserError(f"layer {name!r} is not used in the forward pass: choose another layer")
    expected = leaf._version if differentiate or copy else version
    watched = [*seen.values(), (output, leaf, expected)]
    if any(not read.is_inference() and read._version != before for _, read, before in watched):
        # A later layer has written over them: once more, with copies.
        return _run(classifier, inputs, layer, differentiate, earlier, given_to, copy=True)
    stages = {
        name: classifier.as_grid(layers.with_first(whole, tensor.detach()), inputs, name)
        for name, (whole, tensor, _) in seen.items()
    }
    return Pass(
        classifier=classifier,
        images=inputs,
        layer=layer,
        logits=logits,
        features=grid(leaf.detach()),
        leaf=leaf,
        grid=grid,
        earlier=stages,
        inputs=arguments,
    )


def target_logits_with_graph(classifier: Classifier, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the targets' logits of normalised inputs: [N]; raise if no gradient reaches them."""
    logits = logits_with_graph(classifier, inputs)
    check_range(targets, logits.shape[1])
    if not logits.requires_grad:
        raise no_gradient()
    return target_logits(logits, targets)


def no_gradient() -> UserError:
    """Return the error for a model whose logits have no gradient at its input."""
    return UserError(
        "no gradient goes from the logits to the image: the model detaches what is between, or runs"
        " under torch.no_grad; use a method without gradients, such as rise"
    )


def logits_with_graph(classifier: Classifier, inputs: Tensor) -> Tensor:
    """Return logits of normalised inputs, in float32; raise if the weights allow no gradients."""
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
