"""`explain_all`: images in, heatmaps out. Methods share their forward and backward passes."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier import classifier as checks
from sufficit.classifier.classifier import Classifier
from sufficit.classifier.layers import check_name, eval_mode
from sufficit.classifier.loading import extra
from sufficit.classifier.source_code import check_arguments
from sufficit.errors import EmptyHeatmapWarning, NotFiniteError, UserError, warn_user
from sufficit.explainers.explainer import Explainer
from sufficit.explainers.forward_pass import Pass, look
from sufficit.explainers.guard import call_guarded, join_tensors
from sufficit.explainers.lax import Lax
from sufficit.explainers.registry import (
    CAMS,
    EXPLAINERS,
    RECOMMENDED,
    explainer_named,
    word_of,
)
from sufficit.perturbation.bands import ranks
from sufficit.perturbation.heatmaps import check_heatmaps, normalize, resize
from sufficit.perturbation.predict import halved, usual_batch
from sufficit.progress import bar

OwnMethod = Callable[[Classifier, Tensor, Tensor], Tensor]
"""A function of the user's: (classifier, images, targets) -> heatmaps [N,H,W] in 0..1."""
Method = str | tuple[str, Mapping[str, Any]] | Explainer | OwnMethod | Lax
Methods = Sequence[str] | Mapping[str, Method]
"""Names, or names and methods."""
_PASS = ("gradients", "features", "stages")  # needs of methods that share a pass
EDGE = 0.005  # how far values of a cut map are from 1 inside, and from 0 outside
_ROUNDING = 1e-6  # a smaller spread, as a share of the map's peak, is rounding


@dataclass(frozen=True)
class DrawnMaps:
    """Heatmaps at the size a method drew them, and whether resizing alone finishes them."""

    maps: Tensor  # [N,h,w]
    final: bool  # values in 0..1; else the positive part is stretched before and after resizing
    shares: Tensor | None = None  # [N] of the pixels that a cut map marks; None: it is not cut

    def at(self, size: tuple[int, int]) -> Tensor:
        """The finished heatmaps at the image's size, float64 if cut: [N,H,W] in 0..1."""
        if self.shares is not None:
            return cut_at(resize(self.maps, size), self.shares.to(self.maps.device))
        return resize(self.maps, size) if self.final else normalize(resize(self.stretched, size))

    def order_at(self, size: tuple[int, int]) -> Tensor:
        """The order of all pixels, negative parts included: [N,H,W] in 0..1."""
        return normalize(resize(self.maps, size))

    @property
    def stretched(self) -> Tensor:
        """The positive part in 0..1, zeros where it has no spread: [N,h,w]."""
        positive = self.maps.clamp(min=0)
        low, high = (end[:, None, None] for end in positive.flatten(1).aminmax(dim=1))
        spread = high - low
        return (positive - low) / spread.masked_fill(spread <= _ROUNDING * high, torch.inf)


def cut_at(order: Tensor, shares: Tensor) -> Tensor:
    """Maps that mark the first share of the pixels by rank: [N,H,W], [N] -> float64 [N,H,W].

    Values fall by rank from 1 to 0.995 inside and from 0.005 to 0 outside, so that alpha_min 0.5
    marks exactly the region, and the order of all pixels stays. Float32 could not tell apart as
    many values so near to 1.

    >>> cut_at(torch.tensor([[[0.3, 0.9], [0.1, 0.7]]]), torch.tensor([0.5])) >= 0.5
    tensor([[[False,  True],
             [False,  True]]])
    """
    pixels = order[0].numel()
    places = ranks(order).double()
    # To the nearest whole pixel, as `runs` counts.
    inside = ((shares.double() * pixels).round(decimals=6) + 0.5).floor()[:, None, None]
    marked = 1 - EDGE * places / inside.clamp(min=1)
    rest = EDGE * (pixels - places) / (pixels - inside).clamp(min=1)
    return torch.where(places < inside, marked, rest.clamp(max=EDGE))


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
    """Heatmaps by several methods, from one forward pass in all: each [N,H,W] in 0..1.

    Methods that read gradients share the backward pass to the feature layer; Finer-CAM adds one
    more, from the logits to that layer. `methods` are names, or names and methods.
    """
    drawn = draw_all(
        classifier,
        images,
        targets,
        methods,
        layer=layer,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
    )
    h, w = images.shape[2:]
    with torch.inference_mode(False):
        return {name: one.at((h, w)) for name, one in drawn.items()}


def recommended(classifier: Classifier, images: Tensor) -> str:
    """The method that is recommended for a model, which is tried on the first image."""
    attribution = RECOMMENDED["transformer"]
    copy = classifier.over(classifier.model)  # so that no layer that is found stays
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmptyHeatmapWarning)
            draw_all(copy, images[:1], None, [attribution], progress=False)
    except UserError:  # no attention that it could read
        return RECOMMENDED["convolutional"]
    return attribution


def draw_all(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None,
    methods: Methods,
    *,
    layer: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    names: Sequence[object] | None = None,
) -> dict[str, DrawnMaps]:
    """The heatmaps of `explain_all` as their methods drew them, not yet resized.

    Errors name images by `names`, or by number.
    """
    with torch.inference_mode(False):  # whose tensors no gradient could be taken of
        wanted = methods_for(methods, classifier)
        checks.check_images(images)
        if layer is not None:
            check_name(layer)
        goals = checks.check_targets(targets, len(images))
        goals = None if goals is None else goals.cpu().clone()
        drawing = {name: method for name, method in wanted.items() if method.needs != "images"}
        parts = _in_batches(
            classifier, images, goals, drawing, layer, batch_size, seed, progress, names
        )
        found = {}
        for name, method in wanted.items():
            if name in drawing:
                maps = torch.cat(parts[name])
            else:  # all images at once: batches must not change noise
                maps = method.draw(images, seed).to(classifier.device)
            shares = None if method.shares is None else method.shares(maps).cpu()
            found[name] = DrawnMaps(maps, method.final or method.needs == "images", shares)
        _judge({name: _peaks(found[name]) for name in drawing if drawing[name].needs != "own"})
        return found


def _in_batches(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None,
    methods: Mapping[str, Explainer],
    layer: str | None,
    batch_size: int | None,
    seed: int,
    progress: bool | None,
    names: Sequence[object] | None,
) -> dict[str, list[Tensor]]:
    """The maps of every method, batch by batch; batches are halved where memory is short."""
    names = names or range(len(images))
    size = usual_batch(classifier, images.shape[1:]) if batch_size is None else batch_size
    if size < 1:
        raise UserError(f"batch_size must be 1 or more, got {size}: leave it out for a good one")
    found: dict[str, list[Tensor]] = {name: [] for name in methods}
    start = 0
    with bar("explaining", progress) as tick:
        while methods and start < len(images):
            part = slice(start, start + size)
            some = None if targets is None else targets[part]
            try:
                drawn = _draw(classifier, images[part], some, methods, layer, seed, names[part])
            except torch.OutOfMemoryError:
                drawn = {}  # the model's memory is free once the exception is gone
            if not drawn:
                size = halved(min(size, len(images) - start))
                continue
            for name, maps in drawn.items():
                found[name].append(maps)
            start += size
            if tick:
                tick(min(start, len(images)), len(images))
    return found


def _draw(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None,
    methods: Mapping[str, Explainer],
    layer: str | None,
    seed: int,
    names: Sequence[object],
) -> dict[str, Tensor]:
    """The maps of a batch by every method, with one forward pass per layer: each [N,h,w]."""
    here = images.detach().to(classifier.device)
    here = here.clone() if here.is_inference() else here
    # Before the pass: a copy to a GPU waits for all the work it was given before.
    goals = None if targets is None else targets.to(classifier.device)
    watching = {name: method for name, method in methods.items() if method.needs in _PASS}
    if layer is None and any(method.layer is None for method in watching.values()):
        layer = classifier.feature_layer(here)
    by_layer: dict[str, dict[str, Explainer]] = {}
    for name, method in watching.items():
        by_layer.setdefault(method.layer or layer or "", {})[name] = method
    found: dict[str, Tensor] = {}
    for place, some in by_layer.items():
        seen = look(
            classifier,
            here,
            place,
            differentiate=any(m.needs == "gradients" or m.differentiates for m in some.values()),
            earlier=_together(method.reads[:-1] for method in some.values()),
            inputs=_together(method.inputs for method in some.values()),
        )
        if targets is not None:  # they are on the CPU: no wait for a GPU
            checks.check_range(targets, seen.logits.shape[1])
        goals = seen.logits.detach().argmax(1) if goals is None else goals
        found |= _maps(seen, goals, some)
    if goals is None and any(method.needs in ("model", "own") for method in methods.values()):
        with torch.no_grad():
            goals = classifier(here).argmax(1)
    for name, method in methods.items():
        if method.needs in ("model", "attention"):
            given = {"layer": method.layer or layer, "seed": seed}
            maps = method.draw(classifier, here, goals, **given).detach().float()
            found[name] = maps.abs() if method.sign == "absolute" else maps
        elif method.needs == "own":
            assert goals is not None
            found[name] = _own(classifier, here, goals, name, method.draw, seed, names)
    return found


def _together(names: Iterable[Sequence[str]]) -> list[str]:
    """All names, each once."""
    return list(dict.fromkeys(name for some in names for name in some))


def _own(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor,
    name: str,
    function: OwnMethod,
    seed: int,
    names: Sequence[object],
) -> Tensor:
    """The heatmaps of a user's function, checked: [N,H,W]."""

    def call(rows: Sequence[int]) -> Tensor:
        some = list(rows)
        return function(classifier, images[some], targets[some])  # copies: it may work in place

    heatmaps = call_guarded(
        f"method {name}",
        function,
        call,
        join_tensors,
        classifier=classifier,
        images=images,
        names=names,
        seed=seed,
    )
    try:
        check_heatmaps(heatmaps, images, names)
    except UserError as error:
        raise UserError(f"method {name}: {error}") from error
    return heatmaps.detach().to(images.device, torch.float32)


def methods_for(methods: Methods, classifier: Classifier) -> dict[str, Explainer]:
    """Methods by name; raise for unknown ones and for those that do not fit the classifier.

    The methods it returns, adapters included, also draw for changed copies of the classifier.
    """
    checks.check_classifier(classifier)
    methods = [methods] if isinstance(methods, str) else methods
    named = methods if isinstance(methods, Mapping) else {name: name for name in methods}
    if not named:
        raise UserError(f"no method given: name one or more of {', '.join(EXPLAINERS)}")
    found = {name: _known(method, classifier) for name, method in named.items()}
    for name, method in found.items():
        method.check()
        if method.extra is not None:
            extra(method.extra, f"the method {name}")
    return found


def _known(method: Method, classifier: Classifier) -> Explainer:
    if isinstance(method, Lax):
        return learned(method, classifier)
    if isinstance(method, tuple):
        method = word_of(*method)
    if method == "lax":
        raise UserError(
            "lax is trained for each classifier: train an adapter with train_lax, or load one with"
            " Lax.from_pretrained, and give it as the method; --methods takes its folder"
        )
    if isinstance(method, str):
        return explainer_named(method)
    if isinstance(method, Explainer):
        return method
    if not callable(method):
        came = type(method).__name__
        raise UserError(f"a method is a name or a function, got {came}: use explain_all for lists")
    check_arguments(method, "method", "classifier", "images", "targets")
    line = (method.__doc__ or "your own function").strip().partition("\n")[0]
    agnostic = getattr(method, "class_agnostic", False) is True
    return Explainer(line, "own", method, final=True, sign="none", class_agnostic=agnostic)


def learned(lax: Lax, classifier: Classifier) -> Explainer:
    """A trained adapter as a method, which raises for a classifier it was not trained on."""
    low = classifier.dtype in (torch.bfloat16, torch.float16)  # the adapter's precision follows

    def draw(seen: Pass, targets: Tensor) -> Tensor:
        device = targets.device
        casting = torch.autocast(device.type, classifier.dtype, enabled=low)
        with eval_mode(lax), casting:
            return lax.to(device).draw(seen, targets)

    return Explainer(
        "trained for this classifier",
        "stages",
        draw,
        sign="none",
        layer=lax.layer,
        reads=lax.reads,
        inputs=() if lax.head is None else lax.head.inputs,
        differentiates=lax.head is not None and lax.head.differentiates,
        final=True,
        shares=None if lax.head is None else lax.shares,
        check=partial(lax.check, classifier),
        class_agnostic=lax.class_free,
        cost=lax.passes,
    )


def _maps(seen: Pass, targets: Tensor, methods: Mapping[str, Explainer]) -> dict[str, Tensor]:
    """The maps of a pass by every method, at the features' size: each [N,h,w]."""
    with torch.autocast(targets.device.type, enabled=False):
        scores = list(dict.fromkeys(m.score for m in methods.values() if m.needs == "gradients"))
        gradients = {}
        found = {}
        with torch.no_grad():  # adapters first: the last gradient frees the graph
            for name, method in methods.items():
                if method.needs == "stages":  # it chooses its own precision
                    found[name] = method.draw(seen, targets)
        for score in scores:
            with torch.enable_grad():
                values = score(seen.logits, targets)
            gradients[score] = seen.gradients(values, last=score is scores[-1])
        with torch.no_grad():
            for name, method in methods.items():
                if method.needs != "stages":
                    scored = (gradients[method.score],) if method.needs == "gradients" else ()
                    found[name] = method.draw(seen.features.float(), *scored)
    return found


def _peaks(drawn: DrawnMaps) -> Tensor:
    """The highest value of each map, of its positive part: [N]."""
    maps = drawn.maps if drawn.final else drawn.stretched
    return maps.amax((1, 2))


def _judge(drawn: Mapping[str, Tensor]) -> None:
    """Raise for peaks that are not finite; warn, once, of maps without a positive part."""
    if not drawn:
        return
    peaks = torch.stack([*drawn.values()]).cpu()  # [methods,N]
    if (peaks > 0).all():  # NaN is not
        return
    images, broken = peaks.shape[1], peaks.isnan().any(0).nonzero().flatten().tolist()
    if broken:
        wrong = f"NaN or infinite values for {len(broken)} of {images} images"
        remedy = f"the first is {broken[0]}: check its weights and precision"
        raise NotFiniteError(f"the model gave {wrong}, {remedy}", broken)
    empty = (peaks == 0).sum(1).tolist()
    counts = ", ".join(f"{name} {n}" for name, n in zip(drawn, empty, strict=True) if n)
    if counts:
        wrong = f"heatmaps with no positive part are all zeros, of {images} images: {counts}"
        warn_user(wrong, EmptyHeatmapWarning)
