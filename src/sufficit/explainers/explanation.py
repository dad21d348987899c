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
        """Return the finished heatmaps at the image's size, float64 if cut: [N,H,W] in 0..1."""
        if self.shares is not None:
            return cut_at(resize(self.maps, size), self.shares.to(self.maps.device))
        return resize(self.maps, size) if self.final else normalize(resize(self.stretched, size))

    def order_at(self, size: tuple[int, int]) -> Tensor:
        """Return the order of all pixels, negative parts included: [N,H,W] in 0..1."""
        return normalize(resize(self.maps, size))

    @property
    def stretched(self) -> Tensor:
        """The positive part in 0..1, zeros where it has no spread: [N,h,w]."""
        positive = self.maps.clamp(min=0)
        low, high = (end[:, None, None] for end in positive.flatten(1).aminmax(dim=1))
        spread = high - low
        return (positive - low) / spread.masked_fill(spread <= _ROUNDING * high, torch.inf)


def cut_at(order: Tensor, shares: Tensor) -> Tensor:
    """Return maps that mark the first share of the pixels by rank: [N,H,W], [N] -> float64 [N,H,W].

    Values fall by rank from 1 to 0.995 inside and from 0.005 to 0 outside, so that alpha_min 0.5
    marks exactly the region, and the order of all pixels stays. Float32 could not tell apart as
    many values so near to 1.

    >>> cut_at(torch.tensor([[[0.3, 0.9], [0.1, 0.7]]]), torch.tensor([0.5])) >= 0.5
    tensor([[[False,  True],
             [False,  True]]])
    """
    pixels = order[0].numel()
    places = ranks(order).double()
    # To the nearest whole pixel, as the bands of `perturbation` count. A share such as 0.3 times
    # the pixels may end in .4999999: six decimals take that away before it is rounded.
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
    """Return heatmaps by several methods, from one forward pass in all: each [N,H,W] in 0..1.

    Methods that read gradients share the backward pass to the feature layer; Finer-CAM adds one
    more, from the logits to that layer.

    - classifier: the model.
    - images: [N,C,H,W] in 0..1.
    - targets: the class of each image [N]; None: the model's prediction.
    - methods: names, or names and methods.
    - layer: the layer that CAMs read; None: the one that the classifier finds.
    - batch_size: images at a time; None: a good size for the device.
    - seed: of methods that draw random numbers.
    - progress: show a progress bar; None: where the output is a terminal.
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
        return {name: maps.at((h, w)) for name, maps in drawn.items()}


def recommended(classifier: Classifier, images: Tensor) -> str:
    """Return the method that is recommended for a model, which is tried on the first image."""
    attribution = RECOMMENDED["transformer"]
    # Only a try tells whether a model attends: attention may be inside any module.
    copy = classifier.over(classifier.model)  # so that no layer that is found stays
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmptyHeatmapWarning)
            draw_all(copy, images[:1], None, [attribution], progress=False)
    except UserError:  # no attention that it could read
        return RECOMMENDED["convolutional"]
    return attribution


# It takes the options of `explain_all`, and `names` for errors.
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
    """Return the heatmaps of `explain_all` as their methods drew them, not yet resized.

    Errors name images by `names`, or by number.
    """
    with torch.inference_mode(False):  # whose tensors no gradient could be taken of
        explainers = methods_for(methods, classifier)
        checks.check_images(images)
        if layer is not None:
            check_name(layer)
        goals = checks.check_targets(targets, len(images))
        goals = None if goals is None else goals.cpu().clone()
        asking = {name: method for name, method in explainers.items() if method.needs != "images"}
        drawing = _Drawing(classifier, asking, layer, seed)
        parts = drawing.in_batches(images, goals, batch_size, progress, names)
        drawn = {}
        for name, method in explainers.items():
            if name in asking:
                maps = torch.cat(parts[name])
            else:  # all images at once: batches must not change noise
                maps = method.draw(images, seed).to(classifier.device)
            shares = None if method.shares is None else method.shares(maps).cpu()
            final = method.final or method.needs == "images"
            drawn[name] = DrawnMaps(maps, final, shares)
        # A user's own function may give a map of zeros; `check_heatmaps` has judged it already.
        judged = [name for name, method in asking.items() if method.needs != "own"]
        _judge({name: _peaks(drawn[name]) for name in judged})
        return drawn


@dataclass(frozen=True)
class _Drawing:
    """Methods that ask a model, and what all of them get."""

    classifier: Classifier
    methods: Mapping[str, Explainer]
    layer: str | None
    seed: int

    def in_batches(
        self,
        images: Tensor,
        targets: Tensor | None,
        batch_size: int | None,
        progress: bool | None,
        names: Sequence[object] | None,
    ) -> dict[str, list[Tensor]]:
        """Return the maps of every method, batch by batch; halve batches where memory is short."""
        names = names or range(len(images))
        if batch_size is None:
            batch_size = usual_batch(self.classifier, images.shape[1:])
        if batch_size < 1:
            raise UserError(
                f"batch_size must be 1 or more, got {batch_size}: leave it out for a good one"
            )
        maps: dict[str, list[Tensor]] = {name: [] for name in self.methods}
        start = 0
        with bar("explaining", progress) as tick:
            while self.methods and start < len(images):
                part = slice(start, start + batch_size)
                goals = None if targets is None else targets[part]
                try:
                    drawn = self.batch(images[part], goals, names[part])
                except torch.OutOfMemoryError:
                    drawn = {}  # the model's memory is free once the exception is gone
                if not drawn:
                    batch_size = halved(min(batch_size, len(images) - start))
                    continue
                for name, tensor in drawn.items():
                    maps[name].append(tensor)
                start += batch_size
                if tick:
                    tick(min(start, len(images)), len(images))
        return maps

    def batch(
        self, images: Tensor, targets: Tensor | None, names: Sequence[object]
    ) -> dict[str, Tensor]:
        """Return the maps of a batch by every method, one forward pass per layer: each [N,h,w]."""
        here = images.detach().to(self.classifier.device)
        here = here.clone() if here.is_inference() else here
        # Before the pass: a copy to a GPU waits for all the work it was given before.
        goals = None if targets is None else targets.to(self.classifier.device)
        maps: dict[str, Tensor] = {}
        layer = self._layer(here)
        for place, watching in self._by_layer(layer).items():
            seen = look(
                self.classifier,
                here,
                place,
                differentiate=any(
                    method.needs == "gradients" or method.differentiates
                    for method in watching.values()
                ),
                earlier=_together(method.reads[:-1] for method in watching.values()),
                inputs=_together(method.inputs for method in watching.values()),
            )
            if targets is not None:  # they are on the CPU: no wait for a GPU
                checks.check_range(targets, seen.logits.shape[1])
            goals = seen.logits.detach().argmax(1) if goals is None else goals
            maps |= _maps(seen, goals, watching)
        needs = [method.needs for method in self.methods.values()]
        # A pass has told the predictions already; without one they cost a pass of their own.
        if goals is None and ("model" in needs or "own" in needs):
            with torch.no_grad():
                goals = self.classifier(here).argmax(1)
        for name, method in self.methods.items():
            if method.needs in ("model", "attention"):
                attributions = method.draw(
                    self.classifier,
                    here,
                    goals,
                    layer=method.layer or layer,
                    seed=self.seed,
                )
                signed = attributions.detach().float()
                maps[name] = signed.abs() if method.sign == "absolute" else signed
            elif method.needs == "own":
                assert goals is not None
                maps[name] = self._own(name, here, goals, names)
        return maps

    def _layer(self, images: Tensor) -> str | None:
        """Return the layer that CAMs read; finding it takes a forward pass, so only for them."""
        reading = [method for method in self.methods.values() if method.needs in _PASS]
        if self.layer is None and any(method.layer is None for method in reading):
            return self.classifier.feature_layer(images)
        return self.layer

    def _by_layer(self, layer: str | None) -> dict[str, dict[str, Explainer]]:
        """Return the methods that read a forward pass, by the layer they read."""
        by_layer: dict[str, dict[str, Explainer]] = {}
        for name, method in self.methods.items():
            if method.needs in _PASS:
                by_layer.setdefault(method.layer or layer or "", {})[name] = method
        return by_layer

    def _own(self, name: str, images: Tensor, targets: Tensor, names: Sequence[object]) -> Tensor:
        """Return the heatmaps of a user's function, checked: [N,H,W]."""
        function = self.methods[name].draw

        def call(rows: Sequence[int]) -> Tensor:
            indices = list(rows)
            # Indexing copies: the function may work in place.
            return function(self.classifier, images[indices], targets[indices])

        heatmaps = call_guarded(
            f"method {name}",
            function,
            call,
            join_tensors,
            classifier=self.classifier,
            images=images,
            names=names,
            seed=self.seed,
        )
        try:
            check_heatmaps(heatmaps, images, names)
        except UserError as error:
            raise UserError(f"method {name}: {error}") from error
        return heatmaps.detach().to(images.device, torch.float32)


def _together(lists: Iterable[Sequence[str]]) -> list[str]:
    """Return all names, each once."""
    return list(dict.fromkeys(name for names in lists for name in names))


def methods_for(methods: Methods, classifier: Classifier) -> dict[str, Explainer]:
    """Return methods by name; raise for unknown ones and for those that do not fit the classifier.

    The methods it returns, adapters included, also draw for changed copies of the classifier.
    """
    checks.check_classifier(classifier)
    methods = [methods] if isinstance(methods, str) else methods
    named = methods if isinstance(methods, Mapping) else {name: name for name in methods}
    if not named:
        raise UserError(f"no method given: name one or more of {', '.join(EXPLAINERS)}")
    explainers = {name: _as_explainer(method, classifier) for name, method in named.items()}
    for name, explainer in explainers.items():
        explainer.check()
        if explainer.extra is not None:
            extra(explainer.extra, f"the method {name}")
    return explainers


def _as_explainer(method: Method, classifier: Classifier) -> Explainer:
    """Return the method behind a word, a word with options, a function or an adapter."""
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
    """Return a trained adapter as a method, which raises for a classifier it was not trained on."""
    # An adapter of a model in low precision draws in that precision, under autocast.
    low = classifier.dtype in (torch.bfloat16, torch.float16)

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
    """Return the maps of a pass by every method, at the features' size: each [N,h,w]."""
    with torch.autocast(targets.device.type, enabled=False):
        differentiated = [m.score for m in methods.values() if m.needs == "gradients"]
        scores = list(dict.fromkeys(differentiated))  # a backward pass for each, not per method
        gradients = {}
        maps = {}
        with torch.no_grad():  # adapters first: the last gradient frees the graph
            for name, method in methods.items():
                if method.needs == "stages":  # it chooses its own precision
                    maps[name] = method.draw(seen, targets)
        for score in scores:
            with torch.enable_grad():
                values = score(seen.logits, targets)
            gradients[score] = seen.gradients(values, last=score is scores[-1])
        with torch.no_grad():
            for name, method in methods.items():
                if method.needs != "stages":
                    scored = (gradients[method.score],) if method.needs == "gradients" else ()
                    maps[name] = method.draw(seen.features.float(), *scored)
    return maps


def _peaks(drawn: DrawnMaps) -> Tensor:
    """Return the highest value of each map, of its positive part: [N]."""
    maps = drawn.maps if drawn.final else drawn.stretched
    return maps.amax((1, 2))


def _judge(drawn: Mapping[str, Tensor]) -> None:
    """Raise for peaks that are not finite; warn, once, of maps without a positive part."""
    if not drawn:
        return
    peaks = torch.stack([*drawn.values()]).cpu()  # [methods,N]
    if (peaks > 0).all():  # NaN is not
        return
    images = peaks.shape[1]
    broken = peaks.isnan().any(0).nonzero().flatten().tolist()
    if broken:
        wrong = f"NaN or infinite values for {len(broken)} of {images} images"
        remedy = f"the first is {broken[0]}: check its weights and precision"
        raise NotFiniteError(f"the model gave {wrong}, {remedy}", broken)
    empty = (peaks == 0).sum(1).tolist()
    counts = ", ".join(f"{name} {n}" for name, n in zip(drawn, empty, strict=True) if n)
    if counts:
        wrong = f"heatmaps with no positive part are all zeros, of {images} images: {counts}"
        warn_user(wrong, EmptyHeatmapWarning)
