"""Attributions of captum and composites of zennit as methods: captum:DeepLift, zennit:EpsilonPlus.

The library gets a copy of the model, so what it does to modules and weights, it does to the copy.
There no module works in place, and one that is called several times per pass is several modules:
captum's hooks keep one call per module.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from inspect import Parameter, isclass, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sufficit.classifier import layers
from sufficit.classifier.classifier import Classifier, check_range
from sufficit.classifier.loading import extra
from sufficit.errors import UserError, unknown
from sufficit.explainers.explainer import LIBRARIES, Explainer, Option
from sufficit.perturbation.predict import usual_batch
from sufficit.seeds import seeded

BASELINES = 10  # noise images, where captum wants several
_GIVEN = {"forward_func", "model", "layer", "inputs", "baselines", "sliding_window_shapes"}
_GIVEN |= {"low", "high"}
_FIXED = ("return_", "show_progress", "verbose", "attr_dim_summation")  # no options of a heatmap
_OF_RELU = ("GuidedBackprop", "Deconvolution", "GuidedGradCam", "DeconvNet", "BetaSmooth")
_NEEDS = {  # what a signature does not say
    "FeaturePermutation": "the other images of a batch",
    "LayerFeaturePermutation": "the other images of a batch",
    "ShapleyValues": "a forward pass for each order of all cells",
}


def library_method(word: str) -> Explainer:
    """Return the method of a word such as captum:DeepLift; raise for one that draws no heatmap."""
    library, _, name = word.partition(":")
    kinds = _kinds(library, word)
    usable = [kind_name for kind_name, kind in kinds.items() if not _needs(kind_name, kind)]
    if name not in kinds:
        raise unknown(f"attribution of {library}", name, usable)
    needs = _needs(name, kinds[name])
    if needs:
        raise UserError(
            f"{word} needs {needs}, more than an image and its logits: use one of"
            f" {', '.join(usable)}"
        )
    takes = _parameters(kinds[name])
    options = {}
    # What can be written as a word is an option: numbers, words, true and false.
    for key, parameter in takes.items():
        default = parameter.default
        about = f"as in {library}"
        if isinstance(default, bool) and not key.startswith(_FIXED):
            options[key] = Option(str(default).lower(), about, choices=("true", "false"))
        elif isinstance(default, int | float | str) and not key.startswith(_FIXED):
            options[key] = Option(default, about, least=1 if isinstance(default, int) else None)
    if takes.keys() & {"feature_mask", "sliding_window_shapes"}:
        cells = 14 if name == "Occlusion" else 7
        options["grid"] = Option(cells, "cells per side, hidden together", least=1)
    reference = f"{library} {version(library)}"
    return Explainer(
        f"{name} of {reference}",
        "model",
        partial(draw, word=word),
        what_for=f"any attribution of {library}",
        reference=reference,
        cost="hw + 1" if "layer_mask" in takes else partial(_passes, name),
        class_agnostic=library == "captum" and "target" not in takes,
        extra=LIBRARIES[library],
        sign="absolute" if "abs" in takes else "positive",
        signed=True,
        options=options,
    )


def draw(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor,
    *,
    word: str,
    layer: str | None,
    seed: int,
    **options: Any,
) -> Tensor:
    """Return the library's attributions, summed over channels: [N,H,W], or [N,h,w] of a layer."""
    library, _, name = word.partition(":")
    kind = _kinds(library, word)[name]
    with torch.no_grad(), classifier.in_eval_mode():
        inputs = classifier.normalize(images[:1])
        check_range(targets.cpu(), classifier.plain_logits_of(inputs).shape[1])
        if "layer" in _parameters(kind):
            options["layer"] = layer or classifier.feature_layer(images)
    # A backward pass keeps what a forward pass frees. Random numbers must not depend on the batch.
    alone = "n_samples" in options or name.endswith("Shap")
    size = 1 if alone else max(1, usual_batch(classifier, images.shape[1:]) // 4)
    attribute = partial(_captum if library == "captum" else _zennit, kind, seed=seed)
    maps = []
    try:
        # A division by the std, passed as a gradient, would scale relevance.
        relevance = library == "zennit" or name.endswith("LRP")
        model = _Logits(classifier, inputs, relevance=relevance)
        hooked = getattr(import_module(kind.__module__), "SUPPORTED_NON_LINEAR", ())  # of DeepLift
        hooked = (nn.ReLU,) if name in _OF_RELU else tuple(hooked)
        if hooked and not any(isinstance(module, hooked) for module in model.modules()):
            raise RuntimeError("it changes gradients at modules such as nn.ReLU, and there is none")
        for part, goals in zip(images.float().split(size), targets.split(size), strict=True):
            with torch.enable_grad(), _on_its_own(seed):
                maps.append(attribute(model, part, goals, **options).detach().float())
    except torch.OutOfMemoryError:
        raise  # fewer images may fit
    except Exception as error:  # the library's own, of any kind: it names no remedy
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{word} does not work with this model and these options ({reason:.300}): use another"
            " method"
        ) from error
    return torch.cat(maps)


def _needs(name: str, kind: Any) -> str:
    """Return what an attribution needs beside an image and its logits; "" for nothing."""
    required = [parameter for parameter in _required(kind) if parameter not in _GIVEN]
    return _NEEDS.get(name, ", ".join(required))


class _Turns(nn.Module):
    """A module that is called several times per pass, as one module for each call."""

    def __init__(self, module: nn.Module, calls: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(copy.deepcopy(module) for _ in range(calls))
        self.turn = 0

    def forward(self, *args: Any, **options: Any) -> Any:
        module = self.each[self.turn % len(self.each)]
        self.turn += 1
        return module(*args, **options)


class _Logits(nn.Module):
    """Logits of a copy of the model, from images or, to bring relevance back, from its inputs."""

    def __init__(self, classifier: Classifier, inputs: Tensor, *, relevance: bool) -> None:
        super().__init__()
        # Rules of relevance change weights while they work; other methods share them.
        shared = () if relevance else (*classifier.bare.parameters(), *classifier.bare.buffers())
        memo = {id(tensor): tensor for tensor in shared}  # deepcopy takes them as copied already
        self.model = copy.deepcopy(classifier.bare, memo).eval()
        self.classifier = classifier.over(self.model)
        self.relevance = relevance
        calls: dict[nn.Module, int] = {}

        def count(module: nn.Module, *_: object) -> None:
            calls[module] = calls.get(module, 0) + 1

        with ExitStack() as stack, torch.no_grad():
            for module in self.model.modules():
                if getattr(module, "inplace", False) is True:
                    module.inplace = False  # type: ignore[assignment]  # torch allows tensors only
                if not [*module.children(), *module.parameters(), *module.buffers()]:
                    stack.callback(module.register_forward_hook(count).remove)
            self.classifier.plain_logits_of(inputs)
        self.turns = {module: _Turns(module, n) for module, n in calls.items() if n > 1}
        for name, module in [*self.model.named_modules(remove_duplicate=False)]:
            if module in self.turns:
                self.model.set_submodule(name, self.turns[module])

    def prepared(self, images: Tensor) -> Tensor:
        """Return what `forward` takes, as a new tensor."""
        return (self.classifier.normalize(images) if self.relevance else images).detach().clone()

    def forward(self, inputs: Tensor) -> Tensor:
        for module in self.turns.values():
            module.turn = 0
        if not self.relevance:
            inputs = self.classifier.normalize(inputs)
        return self.classifier.plain_logits_of(inputs).float()


def _captum(
    kind: Any, model: _Logits, images: Tensor, targets: Tensor, *, seed: int, **options: Any
) -> Tensor:
    """Return captum's attributions, with the arguments that its signature asks for."""
    takes = _parameters(kind)
    inputs = model.prepared(images)
    c, h, w = images.shape[1:]
    grid = options.pop("grid", 1)
    layer = options.pop("layer", None)
    options = {name: {"true": True, "false": False}.get(v, v) for name, v in options.items()}
    place = () if layer is None else (model.model.get_submodule(layer),)
    # Options of the constructor, such as NoiseTunnel's; the others are those of `attribute`.
    own = {name: options.pop(name) for name in signature(kind).parameters if name in options}
    if "target" in takes:
        options["target"] = targets
    if "baselines" in _required(kind):
        generator = torch.Generator(device="cpu").manual_seed(seed)
        noise = torch.rand(BASELINES, c, h, w, generator=generator, device="cpu")
        options["baselines"] = noise.to(images)
    if "internal_batch_size" in takes:
        options["internal_batch_size"] = len(images)
    if "feature_mask" in takes:
        down, right = (torch.arange(side, device=images.device) * grid // side for side in (h, w))
        options["feature_mask"] = (down[:, None] * grid + right).repeat(1, c, 1, 1)
    if "sliding_window_shapes" in takes:
        cell = (max(1, h // grid), max(1, w // grid))
        options["strides"] = (c, *cell)
        # Twice the stride: neighbouring windows overlap by half, as in our own occlusion.
        options["sliding_window_shapes"] = (c, min(2 * cell[0], h), min(2 * cell[1], w))
    if "layer_mask" in takes:  # a cell's channels are one feature
        reader = import_module("captum.attr").LayerActivation(model, *place)
        output = layers.first(reader.attribute(inputs[:1]))
        places = torch.arange(output.numel(), device=inputs.device).view_as(output)
        by_cell = model.classifier.as_grid(places, inputs).flatten(2)  # [1,K,hw]
        cells = torch.zeros_like(places).flatten()  # 0: in no cell, as a class token
        numbers = torch.arange(1, by_cell.shape[2] + 1, device=inputs.device)
        cells[by_cell] = numbers.expand_as(by_cell)
        options["layer_mask"] = cells.view_as(output)
    maps = layers.first(kind(model, *place, **own).attribute(inputs, **options))
    if maps.shape != inputs.shape:  # of a layer
        maps = model.classifier.as_grid(maps, inputs)
    attributions: Tensor = maps.sum(1)
    return attributions


def _zennit(
    kind: Any, model: _Logits, images: Tensor, targets: Tensor, *, seed: int, **options: Any
) -> Tensor:
    """Return the relevance of a composite of zennit, brought back to the normalised images."""
    inputs = model.prepared(images)
    if "low" in _parameters(kind):
        ends = {"low": torch.zeros_like(images), "high": torch.ones_like(images)}
        options |= {name: model.classifier.normalize(end) for name, end in ends.items()}
    with torch.no_grad():
        logits = model(inputs)
    start = F.one_hot(targets, logits.shape[1]).float()
    if kind.__name__.startswith("Epsilon"):  # shares of the logit; the others are like gradients
        start = start * logits
    merging = import_module("zennit.torchvision").ResNetCanonizer()  # batch norms of any model
    gradient = import_module("zennit.attribution").Gradient
    with gradient(model, kind(**options, canonizers=[merging])) as attributor:
        merged, parts = attributor(inputs, start)
    # It pairs layers by the order in which modules are defined, which may not be that of calls.
    if (merged - logits).norm() > 0.05 * logits.norm():
        raise RuntimeError("zennit merges batch norms into other layers than those before them")
    relevance: Tensor = parts.sum(1)
    return relevance


def _kinds(library: str, word: str) -> dict[str, Any]:
    """Return the library's classes by name; raise if it is not installed."""
    with _on_its_own():
        extra(LIBRARIES[library], word)
        if library == "zennit":
            composites = import_module("zennit.composites").COMPOSITES.values()
            return {composite.__name__: composite for composite in composites}
        attr = import_module("captum.attr")
    exported = {name: getattr(attr, name) for name in attr.__all__}
    return {
        name: value
        for name, value in exported.items()
        if isclass(value) and hasattr(value, "attribute")
    }


def _parameters(kind: Any) -> dict[str, Parameter]:
    """Return the parameters of `attribute` and of the constructor."""
    called = signature(kind.attribute).parameters if hasattr(kind, "attribute") else {}
    every = {**called, **signature(kind).parameters}
    return {
        name: parameter
        for name, parameter in every.items()
        if name != "self" and parameter.kind != Parameter.VAR_KEYWORD
    }


def _required(kind: Any) -> list[str]:
    """Return the parameters without a default."""
    parameters = _parameters(kind).items()
    return [name for name, parameter in parameters if parameter.default is Parameter.empty]


def _passes(name: str, **options: Any) -> int:
    """Return forward passes per image, a backward pass counted as two."""
    times: int = options.get("n_samples", options.get("n_steps", 1))
    if "grid" in options:
        cells = (options["grid"] - (name == "Occlusion")) ** 2  # its window is two cells wide
        return times if name in ("Lime", "KernelShap") else int(times * cells + 1)
    twice = "DeepLift" in name or name in ("LayerConductance", "GuidedGradCam")
    return 3 * times * (2 if twice else 1) * (BASELINES if name.endswith("DeepLiftShap") else 1)


@contextmanager
def _on_its_own(seed: int = 0) -> Iterator[None]:
    """Seed torch and numpy inside, and silence warnings: captum warns of every hook."""
    with seeded(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
