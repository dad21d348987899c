"""Any image classifier as one object: images in 0..1 go in, logits and features come out."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sufficit.classifier import layers, outputs
from sufficit.classifier.checkpoint import OUTPUTS, Recipe, View, check_mean_std, save
from sufficit.classifier.source_code import check_arguments, run_user_code
from sufficit.errors import UserError, setting, unknown, warn_user
from sufficit.files import place
from sufficit.outside import html_table


class Classifier:
    """A model, the layer its features come from, and the mean and std it was trained with.

    Every call, also one that raises, leaves modes, hooks, weights and gradients as they were.

    - `model`: any nn.Module from images to logits.
    - `layer`: the feature layer, named as in model.named_modules(); found if left out.
    - `mean`, `std`: of the normalisation, one number per channel; images go in with 0..1.
    - `classes`: names of the classes, in the order of the logits.
    - `view`: how the model sees an image file: crop, resize, channels.
    - `reshape`: turns an unusual output of the layer into a grid [N,K,h,w].
    - `recipe`: how to build the model again, which `save` needs; `load` sets it.
    - `output`: "probabilities" for a model that ends in a softmax or a sigmoid; calls return logits
      all the same.
    - `score`: a function from the model's output to one number per image, see `with_score`.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> classifier = Classifier(model, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    >>> features, logits = classifier.features(torch.rand(2, 3, 16, 16))
    >>> features.shape, logits.shape, classifier.layer
    (torch.Size([2, 8, 16, 16]), torch.Size([2, 8]), '0')
    """

    def __init__(
        self,
        model: nn.Module,
        layer: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        classes: Sequence[str] | None = None,
        view: View | None = None,
        reshape: Callable[[Any], Tensor] | None = None,
        recipe: Recipe | None = None,
        output: str = "logits",
        score: Callable[[Any], Tensor] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            came = type(model).__name__
            raise UserError(f"model must be an nn.Module, got {came}: Classifier.load takes names")
        self.model = model
        self.layer = layer if layer is None else layers.resolve(model, layer)
        self._found_at: tuple[int, int] | None = None  # the input size the layer was found for
        self.mean, self.std = check_mean_std(mean, std)
        if isinstance(classes, str):
            raise UserError(f"classes must be one name per class, got the one word {classes!r}")
        self.classes = tuple(classes) if classes is not None else None
        if not isinstance(view, View | None):
            raise UserError(f"view must be a View, got {view!r:.99}: as in View(crop=(224, 224))")
        self.view = view
        self.reshape = reshape
        self.recipe = recipe
        self.code = ""  # a digest of the user's code that made it, if `load` ran some
        if output not in OUTPUTS:
            raise unknown("output", str(output), OUTPUTS)
        self.output = output
        self.score = score  # what the model returns -> a number per image [N], instead of classes
        self.ends_in: str | None = None  # softmax or sigmoid, once the model was called
        self._looked = False

    @classmethod
    def load(
        cls, source: str | Path, *, weights: str | Path | None = "default", **options: Any
    ) -> "Classifier":
        """Return a classifier by its name, or the one that `save` wrote to a folder.

        - source: torchvision:NAME, timm:NAME, transformers:NAME, clip:NAME or sufficit:NAME; the
          folder of a saved classifier; python:FILE.py:FUNCTION or python:MODULE:FUNCTION, a
          function of your own that returns a model or a classifier.
        - weights: "default" for the published ones, None for random ones, or a file of your own.
        - options: go to the model's constructor.
        """
        from sufficit.classifier.loading import load  # it imports this module

        return load(source, weights, options)

    def with_score(self, score: Callable[[Any], Tensor]) -> "Classifier":
        """Return the same model, judged by one number per image: score(what it returns) -> [N].

        Its one logit is that number, so methods explain it. Scores are relative to that of the
        whole image.
        """
        if not callable(score):
            came = type(score).__name__
            raise UserError(f"score must be accuracy, confidence or a function, got {came}")
        check_arguments(score, "score", "what the model returns")
        judged = self.over(self.model)
        judged.score = score
        judged.classes = None
        judged.recipe = None  # a function cannot be saved
        return judged

    def over(self, model: nn.Module) -> "Classifier":
        """Return a copy with another model of the same layers and outputs."""
        other = copy.copy(self)
        other.model = model
        return other

    def save(self, folder: str | Path) -> Path:
        """Write weights and description to a folder that `load` reads; this needs a recipe."""
        return save(self, place(folder))

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> "Classifier":
        """Move the model itself, as `nn.Module.to` does."""
        self.model.to(device=device, dtype=dtype)
        if memory_format is not None:
            self.model.to(memory_format=memory_format)
        return self

    @property
    def bare(self) -> nn.Module:
        """The model inside torch.compile or DataParallel, where layers have their own names."""
        return layers.unwrapped(self.model)

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU if it has none."""
        return next(self._tensors(), torch.empty(0)).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's first floating parameter or buffer; float32 if it has none."""
        return next((t.dtype for t in self._tensors() if t.is_floating_point()), torch.float32)

    @property
    def channels(self) -> int:
        """1 if the model's first convolution takes one channel, else 3."""
        # The first module of a model is nearly always the first that is called.
        convolutions = (m for m in self.bare.modules() if isinstance(m, nn.Conv2d))
        return 1 if next((m.in_channels for m in convolutions), 3) == 1 else 3

    @property
    def class_count(self) -> int:
        """How many classes it names, or how many its last linear layer gives; 0 if there is none.

        The model is not called for it.
        """
        if self.classes is not None:
            return len(self.classes)
        linear = [one for one in self.bare.modules() if isinstance(one, nn.Linear | nn.Conv2d)]
        if not linear:
            return 0
        last = linear[-1]
        return last.out_features if isinstance(last, nn.Linear) else last.out_channels

    @property
    def memory_format(self) -> torch.memory_format:
        """Channels-last if the model's first convolution is, else contiguous."""
        last = torch.channels_last
        whole = torch.contiguous_format
        for tensor in self._tensors():
            # A 1 x 1 convolution is contiguous in both formats and says nothing.
            if tensor.ndim == 4 and min(tensor.shape[:2]) > 1 and tensor.shape[2:] != (1, 1):
                is_last = tensor.is_contiguous(memory_format=last)
                return last if is_last and not tensor.is_contiguous() else whole
        return whole

    def __call__(self, images: Tensor) -> Tensor:
        """Return logits of images in 0..1: [N,C,H,W] -> [N,classes]."""
        inputs = self.normalize(images)
        with self.in_eval_mode():
            return self.logits_of(inputs)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits, in one pass: [N,C,H,W] -> [N,K,h,w], [N,classes]."""
        (features,), logits = self.stages(images, (self.feature_layer(images),))
        return features, logits

    def stages(self, images: Tensor, names: Sequence[str]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the features of layers, and logits, in one pass: each [N,K,h,w], [N,classes]."""
        seen: dict[str, Any] = {}

        def record(name: str, _: nn.Module, __: object, output: Any) -> None:
            tensor = layers.first(output)
            if isinstance(tensor, Tensor):  # later layers may overwrite it
                output = layers.with_first(output, tensor.clone())
            seen[name] = output

        with self.in_eval_mode(), ExitStack() as stack:
            inputs = self.normalize(images)
            for name in names:
                stack.enter_context(layers.hooked(self.bare, name, partial(record, name)))
            logits = self.plain_logits_of(inputs)
        for name in names:
            if name not in seen:
                raise UserError(f"layer {name!r} is not used in the forward pass: choose another")
        return tuple(self.as_grid(seen[name], inputs, name) for name in names), logits

    def stage_layers(
        self, images: Tensor, most: int = 3, last: str | None = None
    ) -> tuple[str, ...]:
        """Return the feature layer, or `last`, after up to `most` - 1 finer or earlier ones."""
        last = layers.resolve(self.model, last or self.feature_layer(images))
        if most == 1 or self.reshape is not None:  # a reshape is for one layer
            return (last,)
        with self.in_eval_mode(), torch.no_grad():
            inputs = self.normalize(images[:1])  # one image shows all shapes
            return layers.find_stages(
                self.bare, lambda: self.plain_logits_of(inputs), inputs, last, most
            )

    def feature_layer(self, images: Tensor) -> str:
        """Return the layer that was given, else the last one with a grid at this size of images."""
        if self.layer is not None and self._found_at is None:
            return self.layer
        with torch.no_grad(), self.in_eval_mode():
            inputs = self.normalize(images[:1])
            size = (inputs.shape[2], inputs.shape[3])
            # In smaller images an earlier layer may be the last with more than one cell.
            if self.layer is None or self._found_at != size:
                self.layer = layers.find(self.bare, lambda: self.plain_logits_of(inputs), inputs)
                self._found_at = size
        return self.layer

    def as_grid(self, output: Any, inputs: Tensor, layer: str = "") -> Tensor:
        """Return a layer's output as [N,K,h,w], tokens in the image's layout.

        Errors name the layer.
        """
        return self.reshape(output) if self.reshape else layers.to_grid(output, inputs, layer)

    def normalize(self, images: Tensor) -> Tensor:
        """Return images in 0..1 as the model expects them: its device, mean, std and dtype."""
        # Only the form, at every call: to check values would wait for the GPU.
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            check_form(images)
        moved = images.to(self.device)
        # In half precision the division would round before the model does.
        moved = moved.float() if moved.dtype in (torch.bfloat16, torch.float16) else moved
        if self.mean is None or self.std is None:
            return moved.to(self.dtype)
        if moved.shape[1] != len(self.mean):
            wrong = f"images have {moved.shape[1]} channels, mean and std have {len(self.mean)}"
            raise UserError(f"{wrong}: give one number per channel")
        mean, std = (constant(v, moved.device, moved.dtype) for v in (self.mean, self.std))
        return ((moved - mean) / std).to(self.dtype)

    def logits_of(self, inputs: Tensor) -> Tensor:
        """Return logits of what `normalize` returned; the model must be in eval mode.

        The model gets a copy, because it may work in place on what may be the caller's images.
        """
        return self._forward(self.model, inputs.clone())

    def plain_logits_of(self, inputs: Tensor) -> Tensor:
        """Return the logits of the bare model, uncompiled and on one device, so that hooks fire."""
        with layers.uncompiled():
            return self._forward(self.bare, inputs.clone())

    def as_logits(self, output: Tensor) -> Tensor:
        """Return logits of what the model gives: [N,C]."""
        probabilities = self.output == outputs.PROBABILITIES
        return outputs.to_logits(output, self.ends_in) if probabilities else output

    def _forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        # What the user's function takes may be anything that the model returns: no logits are read.
        if self.score is not None:
            output = model(inputs)
            score = self.score
            name = f"the score {getattr(score, '__name__', type(score).__name__)}"
            return outputs.as_logit(run_user_code(name, lambda: score(output)), len(inputs))
        if self._looked:
            return self.as_logits(outputs.output_of(model, inputs, self.classes))
        output = outputs.output_of(model, inputs, self.classes)
        self._look(output)
        return self.as_logits(output)

    def _look(self, output: Tensor) -> None:
        """Find out, in the first call, whether the model gives probabilities."""
        declared = self.output == outputs.PROBABILITIES
        # Rows with NaN, of one bad image, do not sum to 1 whatever the model ends in.
        finite = output.detach()[output.isfinite().all(1)]
        if not len(finite):
            return  # the next call may say more
        self._looked = True
        self.ends_in = outputs.kind_of(finite, probabilities=declared)
        low, high = (float(edge) for edge in finite.aminmax())
        if declared and (low < 0 or high > 1.01):
            raise UserError(
                f"the model gives values in {low:.4g}..{high:.4g}, which are no probabilities: use"
                f' output="logits", or {setting("output", "logits")}'
            )
        if self.ends_in and not declared:
            warn_user(self.output_remark, outputs.OutputWarning)

    @property
    def output_remark(self) -> str:
        """Return a remark if outputs that are probabilities are taken for logits; else empty."""
        if self.output == outputs.PROBABILITIES or self.ends_in is None:
            return ""
        return (
            f"The model ends in a {self.ends_in}: it gives probabilities, which are taken for"
            " logits, so that confidences and gradients are wrong. Use"
            f' Classifier(..., output="probabilities"), or {setting("output", "probabilities")}.'
        )

    def in_eval_mode(self) -> AbstractContextManager[None]:
        """Put every module in eval mode inside; give each its own mode again outside."""
        return layers.eval_mode(self.model)

    def _tensors(self) -> Iterator[Tensor]:
        return chain(self.model.parameters(), self.model.buffers())

    def __repr__(self) -> str:
        name = self.recipe.source if self.recipe else type(self.model).__name__
        return f"Classifier({name}, layer={self.layer!r}, mean={self.mean}, std={self.std})"

    def _repr_html_(self) -> str:
        sees = "images as they are"
        classes = "no names"
        if self.view is not None and self.view.crop is not None:
            h, w = self.view.crop
            sees = f"{h} x {w} pixels, {self.view.channels} channels"
        if self.classes is not None:
            classes = f"{len(self.classes)}: {', '.join(self.classes[:3])}..."
        facts = {
            "model": self.recipe.source if self.recipe else type(self.bare).__name__,
            "weights": f"{sum(weight.numel() for weight in self.model.parameters()):,}",
            "feature layer": self.layer or "found in the first call",
            "sees": sees,
            "mean, std": f"{self.mean}, {self.std}" if self.mean else "-",
            "classes": classes,
            "output": self.output,
            "device": f"{self.device}, {str(self.dtype).removeprefix('torch.')}",
        }
        return html_table("Classifier", ("", ""), [*facts.items()])


@layers.kept
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return one number per channel: [C,1,1]."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None, None]


def check_classifier(classifier: Classifier) -> None:
    """Raise for anything but a Classifier."""
    if isinstance(classifier, nn.Module):
        raise UserError("wrap the model first: Classifier(model, mean=(...), std=(...))")
    if not isinstance(classifier, Classifier):
        raise UserError(f"classifier must be a Classifier, got {type(classifier).__name__}")


def check_has_classes(classifier: Classifier) -> None:
    """Raise for anything but a Classifier with classes."""
    check_classifier(classifier)
    if classifier.score is not None:
        raise UserError(
            "training and leakage need classes, which a score of your own has not: give the"
            " Classifier without with_score"
        )


def check_images(images: Tensor) -> None:
    """Raise unless images are [N,C,H,W], finite and in 0..1."""
    check_form(images)
    check_extremes(torch.stack(images.aminmax()))


def check_form(images: Tensor) -> None:
    """Raise unless images are floats [N,C,H,W]; their values are not checked."""
    if not isinstance(images, Tensor):
        files = "torch.stack what sufficit.data.images.read_image returns for your files"
        hint = "torch.from_numpy makes one" if hasattr(images, "__array__") else files
        raise UserError(f"images must be a tensor [N,C,H,W], got {type(images).__name__}: {hint}")
    came = list(images.shape)
    if images.ndim != 4 or 0 in came:
        hint = ": add the batch axis with images[None]" if images.ndim == 3 else ""
        raise UserError(f"images must be [N,C,H,W] with at least one image, got {came}{hint}")
    if came[3] in (1, 3) and came[1] > 4:
        hint = "convert channels-last images with images.permute(0, 3, 1, 2)"
        raise UserError(f"images must be [N,C,H,W], got {came}: {hint}")
    if not images.is_floating_point():
        raise UserError(f"images must be floats in 0..1, got {images.dtype}: divide by 255 first")


def check_extremes(extremes: Tensor) -> None:
    """Raise unless the least and the largest value of all images lie in 0..1: [2]."""
    low, high = extremes.tolist()
    if not (low >= 0 and high <= 1):
        text = f"images must lie in 0..1, got {low:.4g}..{high:.4g}"
        if not extremes.isfinite().all():
            raise UserError(f"{text}: keep only images[images.isfinite().flatten(1).all(1)]")
        if low >= 0 and high > 16:  # no mean and std give that
            raise UserError(f"{text}: divide by 255; Classifier(mean=..., std=...) normalises them")
        raise UserError(f"{text}: Classifier(mean=..., std=...) normalises them")


def check_targets(targets: Tensor | Sequence[int] | None, n: int) -> Tensor | None:
    """Return targets as whole numbers [N], or None."""
    if targets is None:
        return None
    try:
        numbers = targets if isinstance(targets, Tensor) else torch.as_tensor(targets, device="cpu")
    except (TypeError, ValueError) as error:
        raise UserError(f"targets must be class numbers [N] = [{n}]: {error}") from error
    if numbers.shape != (n,):
        raise UserError(f"targets must be [N] = [{n}], one per image, got {list(numbers.shape)}")
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise UserError(f"targets must be class numbers, got {numbers.dtype}: call .long()")
    if numbers.min() < 0:
        raise UserError(f"targets must be 0 or more, got {int(numbers.min())}")
    return numbers.long()


def check_range(targets: Tensor | int, classes: int) -> None:
    """Raise for a class, or a highest class, that the model does not have."""
    highest = targets if isinstance(targets, int) else int(targets.max())
    if highest >= classes:
        wanted = f"targets must lie in 0..{classes - 1}, the model has {classes} classes"
        raise UserError(f"{wanted}, got {highest}: use its class numbers")
