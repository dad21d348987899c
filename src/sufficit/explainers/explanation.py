"""`explain`: images in, heatmaps out; what several methods have in common is done once."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sufficit.classifier.classifier import (
    Classifier,
    check_classifier,
    check_extremes,
    check_form,
    check_range,
    check_targets,
)
from sufficit.errors import EmptyHeatmapWarning, NotFiniteError, UserError, unknown
from sufficit.explainers.entry import Explainer
from sufficit.explainers.forward_pass import Pass, look
from sufficit.explainers.lax import Lax
from sufficit.explainers.registry import CAMS, EXPLAINERS
from sufficit.perturbation.heatmaps import check_heatmaps, normalize, resize
from sufficit.perturbation.predict import halved
from sufficit.progress import bar

OwnMethod = Callable[[Classifier, Tensor, Tensor], Tensor]
"""A method of the user's: (classifier, images, targets) -> heatmaps [N,H,W] in 0..1."""
Method = str | Explainer | OwnMethod | Lax
Methods = Sequence[str] | Mapping[str, Method]
"""Names, or names and methods."""


@dataclass(frozen=True)
class DrawnMaps:
    """Heatmaps at the size a method drew them, and whether resizing alone finishes them."""

    maps: Tensor  # [N,h,w]
    final: bool  # values in 0..1; else the positive part is stretched before and after resizing

    def at(self, size: tuple[int, int]) -> Tensor:
        """The finished heatmaps at the image's size: [N,H,W] in 0..1."""
        return resize(self.maps, size) if self.final else _stretched(self.maps, size)


_BATCH_ELEMENTS = {"cuda": 2**26, "cpu": 2**22}
_BATCH_IMAGES = {"cuda": 2048}  # at most; a GPU waits for Python once a batch
_ROUNDING = 1e-6  # a map whose spread is a smaller share of its peak than this has none


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

    `method` is a name of EXPLAINERS, an Explainer such as finer_cam("mean"), a trained Lax, or a
    function of your own, (classifier, images, targets) -> [N,H,W]. Without targets, the model's own
    prediction is explained. `layer` is named as in model.named_modules(). `seed` is for "random".

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 2, 1, bias=False), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> _ = model[0].weight.data.copy_(torch.tensor([1.0, -1.0])[:, None, None, None])
    >>> images = torch.tensor([[[[0.0, 0.5], [0.25, 1.0]]]])
    >>> explain(Classifier(model, layer="0"), images, torch.tensor([0]))[0]
    tensor([[0.0000, 0.5000],
            [0.2500, 1.0000]])
    """
    name = method if isinstance(method, str) else getattr(method, "__name__", "own method")
    given = (classifier, images, targets, {name: method})
    return explain_all(*given, layer=layer, batch_size=batch_size, seed=seed, progress=progress)[
        name
    ]


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
    """Heatmaps by several methods, each as `explain` gives it, for one forward pass in all.

    Methods that look at gradients share the backward pass to the feature layer; Finer-CAM adds one
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
) -> dict[str, tuple[DrawnMaps, Tensor]]:
    """What `explain_all` returns, with the maps each method drew before they were finished."""
    wanted = _known_methods(methods, classifier)
    check_classifier(classifier)
    check_form(images)
    given = check_targets(targets, len(images))
    with torch.inference_mode(False):
        goals = None if given is None else given.cpu().clone()
    job = _Job(classifier, wanted, layer, seed)
    size = usual_batch(images, classifier.device) if batch_size is None else batch_size
    if size < 1:
        raise UserError(f"batch_size must be 1 or more, got {size}: leave it out for a good one")
    if job.own:
        check_extremes(torch.stack(images.aminmax()))
    parts: list[dict[str, tuple[DrawnMaps, Tensor]]] = []
    peaks: list[Tensor] = []
    with bar("explaining", progress) as tick:
        start = 0
        while start < len(images):
            part = slice(start, start + size)
            try:
                drawn = job.draw(images[part], None if goals is None else goals[part])
            except UserError:
                job.check()  # a method that does not fit says so in better words
                raise
            except torch.OutOfMemoryError:
                drawn = None  # what the model held is freed once the exception is gone
            if drawn is None:
                size = halved(min(size, len(images) - start), stacklevel=3)
                continue
            parts.append(drawn)
            peaks.append(job.peaks(drawn))
            if not start:  # a GPU has its work by now, and is waited for once
                extremes = torch.stack(images.aminmax())
                job.check()
                check_extremes(extremes)
            start += size
            if tick:
                tick(min(start, len(images)), len(images))
    _judge(list(job.watching), (torch.cat(peaks, 1) if len(peaks) > 1 else peaks[0]).cpu())
    return job.joined(parts, images)


@dataclass(frozen=True)
class _Job:
    """The methods that are wanted, and how a batch is put through all of them."""

    classifier: Classifier
    methods: dict[str, Explainer | OwnMethod]
    layer: str | None
    seed: int

    @property
    def watching(self) -> dict[str, Explainer]:
        """The methods that look at a forward pass."""
        return {name: m for name, m in self._explainers().items() if m.needs != "images"}

    @property
    def own(self) -> dict[str, OwnMethod]:
        """The user's own methods."""
        return {name: m for name, m in self.methods.items() if not isinstance(m, Explainer)}

    def check(self) -> None:
        """Raise where a method does not fit the classifier."""
        for method in self._explainers().values():
            method.check()

    def draw(self, images: Tensor, targets: Tensor | None) -> dict[str, tuple[DrawnMaps, Tensor]]:
        """What every method that is no control draws for a batch, and finished: each [N,H,W]."""
        if not self.watching and not self.own:
            return {}
        here = images.to(self.classifier.device)
        found: dict[str, tuple[DrawnMaps, Tensor]] = {}
        with torch.inference_mode(False):
            # Before the pass: a copy to a GPU waits until all that was asked before is done.
            goals = None if targets is None else targets.to(self.classifier.device)
            for layer, methods in self._by_layer(here).items():
                seen = self._look(here, layer, methods)
                if targets is not None:  # they are still on the CPU
                    check_range(targets, seen.logits.shape[1])
                goals = seen.logits.detach().argmax(1) if goals is None else goals
                found |= _drawn(seen, goals, methods, images)
        return found | _as_drawn(self._own(here, goals))

    def peaks(self, drawn: Mapping[str, tuple[DrawnMaps, Tensor]]) -> Tensor:
        """The highest value of every map that came out of a pass: [methods,N]."""
        found = [drawn[name][1].amax((1, 2)) for name in self.watching]
        return torch.stack(found) if found else torch.empty(0, 0)

    def joined(
        self, parts: list[dict[str, tuple[DrawnMaps, Tensor]]], images: Tensor
    ) -> dict[str, tuple[DrawnMaps, Tensor]]:
        """The heatmaps of all batches, in the order the methods were asked for."""
        found = _as_drawn(self._controls(images))
        for name in parts[0]:
            some = [part[name] for part in parts]
            maps = _joined([drawn.maps for drawn, _ in some])
            heatmaps = _joined([finished for _, finished in some])
            found[name] = DrawnMaps(maps, some[0][0].final), heatmaps
        return {name: found[name] for name in self.methods}

    def _controls(self, images: Tensor) -> dict[str, Tensor]:
        """The methods that look at the images alone, all at once: no batch may change them."""
        known = {name: m for name, m in self._explainers().items() if m.needs == "images"}
        drawn = {name: m.draw(images, self.seed) for name, m in known.items()}
        return {name: maps.to(self.classifier.device) for name, maps in drawn.items()}

    def _explainers(self) -> dict[str, Explainer]:
        return {name: m for name, m in self.methods.items() if isinstance(m, Explainer)}

    def _by_layer(self, images: Tensor) -> dict[str, dict[str, Explainer]]:
        """The methods that look at a pass, by the layer they look at."""
        if not self.watching:
            return {}
        usual = self.layer
        if usual is None and any(m.layer is None for m in self.watching.values()):
            with torch.no_grad(), self.classifier.in_eval_mode():
                usual = self.classifier.feature_layer(self.classifier.normalize(images[:1]))
        found: dict[str, dict[str, Explainer]] = {}
        for name, method in self.watching.items():
            found.setdefault(method.layer or usual or "", {})[name] = method
        return found

    def _look(self, images: Tensor, layer: str, methods: dict[str, Explainer]) -> Pass:
        entries = methods.values()
        folds = {m.draw for m in entries if m.needs == "attention"}
        if len(folds) > 1:
            raise UserError("one method that folds attention at a time: ask for them one by one")
        return look(
            self.classifier,
            images,
            layer,
            differentiate=any(m.needs == "gradients" for m in entries),
            fold=next(iter(folds), None),
        )

    def _own(self, images: Tensor, targets: Tensor | None) -> dict[str, Tensor]:
        """What the user's own methods draw; they get the prediction where no target was given."""
        if not self.own:
            return {}
        if targets is None:
            with torch.no_grad():
                targets = self.classifier(images).argmax(1)
        drawn = {name: m(self.classifier, images, targets) for name, m in self.own.items()}
        return {name: _checked(maps, images) for name, maps in drawn.items()}


def methods_for(methods: Methods, classifier: Classifier) -> dict[str, Explainer | OwnMethod]:
    """Methods by name, all known, and adapters checked to be this classifier's.

    What comes out may also be asked of changed copies of the classifier, adapters included.
    """
    found = _known_methods(methods, classifier)
    for method in found.values():
        if isinstance(method, Explainer):
            method.check()
    return found


def _known_methods(methods: Methods, classifier: Classifier) -> dict[str, Explainer | OwnMethod]:
    methods = [methods] if isinstance(methods, str) else methods
    named = methods if isinstance(methods, Mapping) else {name: name for name in methods}
    if not named:
        raise UserError(f"give at least one method of {', '.join(EXPLAINERS)}")
    return {name: _known(method, classifier) for name, method in named.items()}


def _known(method: Method, classifier: Classifier) -> Explainer | OwnMethod:
    if isinstance(method, Lax):
        return learned(method, classifier)
    if method == "lax":
        raise UserError(
            "lax is learned for each classifier: train one with train_lax, or load it with"
            " Lax.from_pretrained, and give it as the method; --method takes its folder"
        )
    if isinstance(method, str):
        if method not in EXPLAINERS:
            raise unknown("method", method, EXPLAINERS)
        return EXPLAINERS[method]
    if not isinstance(method, Explainer) and not callable(method):
        raise UserError(f"a method is a name or a function, got {type(method).__name__}")
    return method


def learned(lax: Lax, classifier: Classifier) -> Explainer:
    """A trained adapter as a method, which refuses a classifier it was not trained on."""
    check_classifier(classifier)
    low = classifier.dtype in (torch.bfloat16, torch.float16)  # as exact as the features are

    def draw(features: Tensor) -> Tensor:
        training = [module for module in lax.modules() if module.training]
        try:
            with torch.autocast(features.device.type, classifier.dtype, enabled=low):
                drawn: Tensor = lax.to(features.device).eval()(features)
            return drawn
        finally:
            for module in training:
                module.training = True

    return Explainer(
        "learned for this classifier",
        "features",
        draw,
        layer=lax.layer,
        final=True,
        check=lambda: lax.check(classifier),
    )


def usual_batch(images: Tensor, device: torch.device) -> int:
    """How many of such images are explained at a time, unless it is told."""
    elements, most = _BATCH_ELEMENTS.get(device.type, 2**22), _BATCH_IMAGES.get(device.type, 512)
    return max(1, min(most, elements // images[0].numel()))


def _drawn(
    seen: Pass, targets: Tensor, methods: dict[str, Explainer], images: Tensor
) -> dict[str, tuple[DrawnMaps, Tensor]]:
    """What every method draws of a pass, and finished; those to stretch all at once."""
    maps = dict(zip(methods, _maps(seen, targets, list(methods.values())), strict=True))
    drawn = {name: DrawnMaps(maps[name], method.final) for name, method in methods.items()}
    h, w = images.shape[2:]
    found = {name: (one, one.at((h, w))) for name, one in drawn.items() if one.final}
    raw = [name for name in methods if name not in found]
    if raw:
        finished = _stretched(torch.cat([maps[name] for name in raw]), (h, w))
        found |= {
            name: (drawn[name], some)
            for name, some in zip(raw, finished.split(len(images)), strict=True)
        }
    return found


def _as_drawn(heatmaps: Mapping[str, Tensor]) -> dict[str, tuple[DrawnMaps, Tensor]]:
    """Heatmaps that were drawn at the image's size."""
    return {name: (DrawnMaps(maps, final=True), maps) for name, maps in heatmaps.items()}


def _joined(batches: Sequence[Tensor]) -> Tensor:
    return batches[0] if len(batches) == 1 else torch.cat(list(batches))


def _maps(seen: Pass, targets: Tensor, methods: list[Explainer]) -> list[Tensor]:
    """The maps of a pass by every method, at the features' size: each [N,h,w]."""
    with torch.autocast(targets.device.type, enabled=False):
        scores = list(dict.fromkeys(m.score for m in methods if m.needs == "gradients"))
        gradients = {}
        for score in scores:
            with torch.enable_grad():
                values = score(seen.logits, targets)
            gradients[score] = seen.gradients(values, last=score is scores[-1])
        with torch.no_grad():
            return [_map(seen, method, gradients.get(method.score)) for method in methods]


def _map(seen: Pass, method: Explainer, gradients: Tensor | None) -> Tensor:
    if method.needs == "gradients":
        return method.draw(seen.features.float(), gradients)
    if method.needs == "features":
        return method.draw(seen.features if method.final else seen.features.float())
    assert seen.tokens is not None
    return seen.tokens


def _stretched(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Positive part, stretched, brought to size, stretched again: [N,h,w] -> [N,H,W]."""
    positive = maps.clamp(min=0)
    low, high = (end[:, None, None] for end in positive.flatten(1).aminmax(dim=1))
    spread = high - low
    spread = spread.masked_fill(spread <= _ROUNDING * high, torch.inf)  # such maps become zeros
    return normalize(resize((positive - low) / spread, size))


def _checked(heatmaps: Tensor, images: Tensor) -> Tensor:
    check_heatmaps(heatmaps, images)
    return heatmaps.detach().to(images.device, torch.float32)


def _judge(methods: list[str], peaks: Tensor) -> None:
    """Raise where a map is not finite; warn, once, where maps have no positive part.

    `peaks` are the highest values of their maps, [methods,N].
    """
    if (peaks > 0).all():  # a NaN is not
        return
    broken = peaks.isnan().any(0).nonzero().flatten().tolist()
    if broken:
        raise NotFiniteError(
            f"the model gave NaN or infinite values for {len(broken)} of {peaks.shape[1]} images, "
            f"the first is {broken[0]}: check its weights and precision",
            broken,
        )
    empty = (peaks == 0).sum(1).tolist()
    counts = ", ".join(f"{name} {n}" for name, n in zip(methods, empty, strict=True) if n)
    if counts:
        warnings.warn(
            f"heatmaps with no positive part are all zeros, of {peaks.shape[1]} images: {counts}",
            EmptyHeatmapWarning,
            stacklevel=4,
        )
