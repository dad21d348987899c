"""`explain`: images in, heatmaps out. Several methods share their forward and backward passes."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier import classifier as checks
from sufficit.classifier.classifier import Classifier
from sufficit.classifier.layers import eval_mode
from sufficit.classifier.loading import extra
from sufficit.classifier.source_code import check_arguments
from sufficit.errors import EmptyHeatmapWarning, NotFiniteError, UserError
from sufficit.explainers.explainer import Explainer
from sufficit.explainers.forward_pass import Pass, look
from sufficit.explainers.lax import Lax
from sufficit.explainers.registry import CAMS, EXPLAINERS, explainer_named, word_of
from sufficit.perturbation.heatmaps import check_heatmaps, normalize, resize
from sufficit.perturbation.predict import halved
from sufficit.progress import bar

OwnMethod = Callable[[Classifier, Tensor, Tensor], Tensor]
"""A function of the user's: (classifier, images, targets) -> heatmaps [N,H,W] in 0..1."""
Method = str | tuple[str, Mapping[str, Any]] | Explainer | OwnMethod | Lax
Methods = Sequence[str] | Mapping[str, Method]
"""Names, or names and methods."""
Known = Mapping[str, Explainer | OwnMethod]
_ROUNDING = 1e-6  # a smaller spread, as a share of the map's peak, is rounding


@dataclass(frozen=True)
class DrawnMaps:
    """Heatmaps at the size a method drew them, and whether resizing alone finishes them."""

    maps: Tensor  # [N,h,w]
    final: bool  # values in 0..1; else the positive part is stretched before and after resizing

    def at(self, size: tuple[int, int]) -> Tensor:
        """The finished heatmaps at the image's size: [N,H,W] in 0..1."""
        return resize(self.maps, size) if self.final else _stretched(self.maps, size)


Drawn = dict[str, tuple[DrawnMaps, Tensor]]
"""By method: the maps as drawn, and the finished heatmaps [N,H,W]."""


def explain(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None = None,
    method: Method = "gradcam",
    *,
    layer: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Tensor:
    """Heatmaps of images in 0..1: [N,C,H,W] -> [N,H,W] in 0..1, on the classifier's device.

    `method` is a word as on the command line ("gradcam", "finer-cam:nearest=5"), a name with
    options, ("finer-cam", {"nearest": 5}), an Explainer, a trained Lax, or a function of your own,
    (classifier, images, targets) -> [N,H,W]. Without targets, the model's own prediction is
    explained. `layer` is named as in model.named_modules(). `seed` is for methods that draw lots.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 2, 1, bias=False), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> _ = model[0].weight.data.copy_(torch.tensor([1.0, -1.0])[:, None, None, None])
    >>> images = torch.tensor([[[[0.0, 0.5], [0.25, 1.0]]]])
    >>> explain(Classifier(model, layer="0"), images, torch.tensor([0]))[0]
    tensor([[0.0000, 0.5000],
            [0.2500, 1.0000]])
    """
    method = word_of(*method) if isinstance(method, tuple) else method
    name = method if isinstance(method, str) else getattr(method, "__name__", "own method")
    given = (classifier, images, targets, {name: method})
    found = explain_all(*given, layer=layer, batch_size=batch_size, seed=seed, progress=progress)
    return found[name]


def explain_all(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None = None,
    methods: Methods = CAMS,
    *,
    layer: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> dict[str, Tensor]:
    """Heatmaps by several methods, each equal to `explain`'s, from one forward pass in all.

    Methods that read gradients share the backward pass to the feature layer; Finer-CAM adds one
    more, from the logits to that layer. `methods` are names, or names and methods.
    """
    given = (classifier, images, targets, methods)
    drawn = draw_all(*given, layer=layer, batch_size=batch_size, seed=seed, progress=progress)
    return {name: heatmaps for name, (_, heatmaps) in drawn.items()}


def draw_all(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None = None,
    methods: Methods = CAMS,
    *,
    layer: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    names: Sequence[object] | None = None,
) -> Drawn:
    """The heatmaps of `explain_all`, each with the maps that its method drew before resizing.

    Errors name images by `names`, or by number.
    """
    names = names or range(len(images))
    wanted = methods_for(methods, classifier, check=False)
    checks.check_classifier(classifier)
    checks.check_form(images)
    given = checks.check_targets(targets, len(images))
    with torch.inference_mode(False):
        goals = None if given is None else given.cpu().clone()
    size = usual_batch(images, classifier.device) if batch_size is None else batch_size
    if size < 1:
        raise UserError(f"batch_size must be 1 or more, got {size}: leave it out for a good one")
    if not all(isinstance(method, Explainer) for method in wanted.values()):
        checks.check_extremes(torch.stack(images.aminmax()))  # a user's function gets 0..1 only
    judged = [name for some in _split(wanted) for name in some]
    batches, peaks = list[Drawn](), list[Tensor]()
    with bar("explaining", progress) as tick:
        start = 0
        while start < len(images):
            part = slice(start, start + size)
            some = None if goals is None else goals[part]
            try:
                drawn = _draw(classifier, images[part], some, wanted, layer, seed, names[part])
            except UserError:
                _check_methods(wanted)  # a method that does not fit has the better error
                raise
            except torch.OutOfMemoryError:
                drawn = None  # the model's memory is free once the exception is gone
            if drawn is None:
                size = halved(min(size, len(images) - start), stacklevel=3)
                continue
            batches.append(drawn)
            tops = [drawn[name][1].amax((1, 2)) for name in judged]
            peaks += [torch.stack(tops)] if tops else []  # before the checks below wait for a GPU
            if not start:  # a GPU is busy by now, so that these checks cost no time
                extremes = torch.stack(images.aminmax())
                _check_methods(wanted)
                checks.check_extremes(extremes)
            start += size
            if tick:
                tick(min(start, len(images)), len(images))
    found: Drawn = {}
    for name, method in wanted.items():
        if name in batches[0]:
            maps = _joined([batch[name][0].maps for batch in batches])
            heatmaps = _joined([batch[name][1] for batch in batches])
            found[name] = DrawnMaps(maps, batches[0][name][0].final), heatmaps
        elif isinstance(method, Explainer):  # all images at once: batches must not change noise
            heatmaps = method.draw(images, seed).to(classifier.device)
            found[name] = DrawnMaps(heatmaps, final=True), heatmaps
    _judge(judged, peaks)
    return found


def _split(methods: Known) -> tuple[dict[str, Explainer], dict[str, Explainer]]:
    """The methods that read a forward pass, which they share, and those that call the model."""
    known = {n: m for n, m in methods.items() if isinstance(m, Explainer) and m.needs != "images"}
    asking = {name: method for name, method in known.items() if method.needs == "model"}
    return {name: method for name, method in known.items() if name not in asking}, asking


def _draw(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None,
    methods: Known,
    layer: str | None,
    seed: int,
    names: Sequence[object],
) -> Drawn:
    """What every method but the controls draws, with one forward pass per layer: [N,C,H,W], [N]."""
    watching, asking = _split(methods)
    own = {name: m for name, m in methods.items() if not isinstance(m, Explainer)}
    if not watching and not asking and not own:
        return {}
    _check_extras(asking)
    here = images.to(classifier.device)
    found: Drawn = {}
    with torch.inference_mode(False):
        # Before the pass: a copy to a GPU waits for all the work it was given before.
        goals = None if targets is None else targets.to(classifier.device)
        if layer is None and any(m.layer is None for m in watching.values()):
            with torch.no_grad(), classifier.in_eval_mode():
                layer = classifier.feature_layer(classifier.normalize(here[:1]))
        by_layer: dict[str, dict[str, Explainer]] = {}
        for name, explainer in watching.items():
            by_layer.setdefault(explainer.layer or layer or "", {})[name] = explainer
        for name, some in by_layer.items():
            folds = {m.draw for m in some.values() if m.needs == "attention"}
            if len(folds) > 1:
                raise UserError("only one method may fold attention at a time: explain with each")
            differentiate = any(m.needs == "gradients" for m in some.values())
            fold = next(iter(folds), None)
            earlier = dict.fromkeys(one for m in some.values() for one in m.reads[:-1])
            options: Any = {"differentiate": differentiate, "fold": fold, "earlier": [*earlier]}
            seen = look(classifier, here, name, **options)
            if targets is not None:  # they are on the CPU: no wait for a GPU
                checks.check_range(targets, seen.logits.shape[1])
            goals = seen.logits.detach().argmax(1) if goals is None else goals
            found |= _finished(_maps(seen, goals, some), images)
    if (own or asking) and goals is None:
        with torch.no_grad():
            goals = classifier(here).argmax(1)
    if asking:
        found |= _finished(_asked(classifier, here, goals, asking, layer, seed), images)
    for name, own_method in own.items():
        assert goals is not None
        heatmaps = own_method(classifier, here.clone(), goals.clone())  # it may work in place
        try:
            check_heatmaps(heatmaps, here, names)
        except UserError as error:
            raise UserError(f"method {name}: {error}") from error
        heatmaps = heatmaps.detach().to(here.device, torch.float32)
        found[name] = DrawnMaps(heatmaps, final=True), heatmaps
    return found


def _asked(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None,
    methods: Mapping[str, Explainer],
    layer: str | None,
    seed: int,
) -> dict[str, DrawnMaps]:
    """The maps of methods that call the model themselves, each [N,h,w]."""
    found = {}
    with torch.inference_mode(False):
        images = images.detach().clone() if images.is_inference() else images.detach()
        for name, method in methods.items():
            given = (classifier, images, targets)
            maps = method.draw(*given, layer=method.layer or layer, seed=seed).detach().float()
            maps = maps.abs() if method.sign == "absolute" else maps
            found[name] = DrawnMaps(maps, method.final)
    return found


def _check_extras(methods: Mapping[str, Explainer]) -> None:
    for name, method in methods.items():
        if method.extra is not None:
            extra(method.extra, f"the method {name}")


def methods_for(
    methods: Methods, classifier: Classifier, *, check: bool = True
) -> dict[str, Explainer | OwnMethod]:
    """Methods by name; raise for unknown ones and, with `check`, for those that do not fit.

    The methods it returns, adapters included, also draw for changed copies of the classifier.
    """
    methods = [methods] if isinstance(methods, str) else methods
    named = methods if isinstance(methods, Mapping) else {name: name for name in methods}
    if not named:
        raise UserError(f"no method given: name one or more of {', '.join(EXPLAINERS)}")
    found = {name: _known(method, classifier) for name, method in named.items()}
    if check:
        _check_methods(found)
    return found


def _check_methods(methods: Known) -> None:
    for method in methods.values():
        if isinstance(method, Explainer):
            method.check()
    _check_extras(_split(methods)[1])


def _known(method: Method, classifier: Classifier) -> Explainer | OwnMethod:
    if isinstance(method, Lax):
        return learned(method, classifier)
    if method == "lax":
        raise UserError(
            "lax is trained for each classifier: train an adapter with train_lax, or load one with"
            " Lax.from_pretrained, and give it as the method; --methods takes its folder"
        )
    if isinstance(method, tuple):
        method = word_of(*method)
    if isinstance(method, str):
        return explainer_named(method)
    if not isinstance(method, Explainer) and not callable(method):
        came = type(method).__name__
        raise UserError(f"a method is a name or a function, got {came}: use explain_all for lists")
    if not isinstance(method, Explainer):
        check_arguments(method, "method", "classifier", "images", "targets")
    return method


def learned(lax: Lax, classifier: Classifier) -> Explainer:
    """A trained adapter as a method, which raises for a classifier it was not trained on."""
    checks.check_classifier(classifier)
    low = classifier.dtype in (torch.bfloat16, torch.float16)  # the adapter's precision follows

    def draw(stages: Sequence[Tensor], targets: Tensor) -> Tensor:
        device = stages[0].device
        casting = torch.autocast(device.type, classifier.dtype, enabled=low)
        with eval_mode(lax), casting:
            drawn: Tensor = lax.to(device)(stages, targets)
            return drawn

    line, check = "trained for this classifier", partial(lax.check, classifier)
    given: Any = {"layer": lax.layer, "reads": lax.layers, "final": True, "check": check}
    return Explainer(line, "stages", draw, sign="none", class_agnostic=lax.classes is None, **given)


def usual_batch(images: Tensor, device: torch.device) -> int:
    """How many such images are explained at a time by default."""
    # A GPU waits for Python once per batch.
    elements, most = (2**26, 2048) if device.type == "cuda" else (2**22, 512)
    return max(1, min(most, elements // images[0].numel()))


def _finished(drawn: Mapping[str, DrawnMaps], images: Tensor) -> Drawn:
    """The maps as drawn and finished; those to stretch are finished together, by their size."""
    h, w = images.shape[2:]
    found = {name: (one, one.at((h, w))) for name, one in drawn.items() if one.final}
    by_size: dict[torch.Size, list[str]] = {}
    for name in drawn:
        if name not in found:
            by_size.setdefault(drawn[name].maps.shape, []).append(name)
    for some in by_size.values():
        finished = _stretched(torch.cat([drawn[name].maps for name in some]), (h, w))
        for name, heatmaps in zip(some, finished.split(len(images)), strict=True):
            found[name] = drawn[name], heatmaps
    return found


def _joined(batches: Sequence[Tensor]) -> Tensor:
    return batches[0] if len(batches) == 1 else torch.cat(list(batches))


def _maps(seen: Pass, targets: Tensor, methods: Mapping[str, Explainer]) -> dict[str, DrawnMaps]:
    """The maps of a pass by every method, at the features' size: each [N,h,w]."""
    found = {}
    with torch.autocast(targets.device.type, enabled=False):
        scores = list(dict.fromkeys(m.score for m in methods.values() if m.needs == "gradients"))
        gradients = {}
        for score in scores:
            with torch.enable_grad():
                values = score(seen.logits, targets)
            gradients[score] = seen.gradients(values, last=score is scores[-1])
        with torch.no_grad():
            for name, method in methods.items():
                if method.needs == "attention":
                    assert seen.tokens is not None
                    maps = seen.tokens
                elif method.needs == "stages":  # an adapter, which chooses its own precision
                    maps = method.draw(seen.stages(method.reads), targets)
                else:
                    scored = (gradients[method.score],) if method.needs == "gradients" else ()
                    maps = method.draw(seen.features.float(), *scored)
                found[name] = DrawnMaps(maps, method.final)
    return found


def _stretched(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Positive part, stretched, resized, stretched again: [N,h,w] -> [N,H,W]."""
    positive = maps.clamp(min=0)
    low, high = (end[:, None, None] for end in positive.flatten(1).aminmax(dim=1))
    spread = high - low
    spread = spread.masked_fill(spread <= _ROUNDING * high, torch.inf)  # such maps become zeros
    return normalize(resize((positive - low) / spread, size))


def _judge(methods: Sequence[str], batches: Sequence[Tensor]) -> None:
    """Raise for heatmaps that are not finite; warn, once, of those without a positive part.

    `batches` are the highest values of their heatmaps: each [methods,N].
    """
    peaks = torch.cat(list(batches), 1).cpu() if batches else torch.ones(1, 1)
    if (peaks > 0).all():  # NaN is not
        return
    images, broken = peaks.shape[1], peaks.isnan().any(0).nonzero().flatten().tolist()
    if broken:
        wrong = f"NaN or infinite values for {len(broken)} of {images} images"
        remedy = f"the first is {broken[0]}: check its weights and precision"
        raise NotFiniteError(f"the model gave {wrong}, {remedy}", broken)
    empty = (peaks == 0).sum(1).tolist()
    counts = ", ".join(f"{name} {n}" for name, n in zip(methods, empty, strict=True) if n)
    if counts:
        wrong = f"heatmaps with no positive part are all zeros, of {images} images: {counts}"
        warnings.warn(wrong, EmptyHeatmapWarning, stacklevel=4)
