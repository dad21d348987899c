"""A method of the registry: what it draws, what it costs, which options it takes."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from sufficit.errors import UserError, unknown
from sufficit.explainers import cams

Sign = Literal["positive", "absolute", "none"]
Value = int | float | str
_MOST = 10**9  # of a number, whatever the option
LIBRARIES = {"captum": "captum", "zennit": "lrp"}
"""Libraries whose attributions are methods, as in captum:DeepLift, and their extras."""


@dataclass(frozen=True)
class Option:
    """An option of a method: its default (None: it must be given), meaning, and allowed values."""

    default: Value | None
    about: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    def read(self, name: str, given: Any) -> Value:
        """Return the value of a word or number; raise for one that the option does not take."""
        kind = str if self.default is None else type(self.default)
        words = {int: "a whole number", float: "a number", str: "a word"}
        value: Any = None
        with suppress(TypeError, ValueError, OverflowError):
            value = kind(given)
        # int(2.5) is 2: a number must not change as it is read.
        exact = isinstance(given, str) or (kind is not str and value == given)
        large = kind is not str and value is not None and not abs(value) <= _MOST  # NaN too
        if value is None or not exact or large or isinstance(given, bool):
            raise UserError(f"{name} must be {words[kind]}, got {given!r:.100}")
        if self.choices and value not in self.choices:
            raise unknown(name, str(value), self.choices)
        too_low = self.least is not None and value < self.least
        too_high = self.most is not None and value > self.most
        if too_low or too_high:
            bounds = [] if self.least is None else [f"{self.least:g} or more"]
            bounds += [] if self.most is None else [f"{self.most:g} or less"]
            raise UserError(f"{name} must be {' and '.join(bounds)}, got {given}")
        checked: Value = value
        return checked


@dataclass(frozen=True)
class Explainer:
    """A method; `needs` says what `draw` gets.

    - gradients: draw(features [N,K,h,w], gradients of `score` [N,K,h,w]) -> maps [N,h,w], where
      score(logits [N,C], targets [N], **options) -> [N]
    - features: draw(features [N,K,h,w]) -> maps [N,h,w]
    - stages: draw(a Pass with the features of `reads` and `inputs`, targets [N]) -> maps [N,h,w]
    - model: draw(classifier, images [N,C,H,W] in 0..1, targets [N], *, layer, seed, **options) ->
      maps [N,h,w] of any size; it calls the model itself
    - attention: the same, but targets may be None
    - images: draw(images [N,C,H,W], seed) -> heatmaps [N,H,W], final
    - own: draw(classifier, images [N,C,H,W], targets [N]) -> heatmaps [N,H,W], a user's function

    Methods with the same `score` share one backward pass. Maps that are not `final` are finished
    the same way for all: their positive part (or absolute value) is stretched to 0..1, resized to
    the image and stretched again.
    """

    description: str  # what it draws
    needs: Literal["gradients", "features", "stages", "attention", "model", "images", "own"]
    draw: Callable[..., Tensor]
    what_for: str = "a method of your own"
    reference: str = ""  # the paper
    score: Callable[..., Tensor] = cams.target_logits
    layer: str | None = None  # the layer it reads, if that is always the same
    reads: tuple[str, ...] = ()  # the layers whose features `stages` gets, the last one `layer`
    inputs: tuple[str, ...] = ()  # the modules whose arguments `stages` gets
    differentiates: bool = False  # `stages` takes gradients at its layer
    # Of the images that its maps mark, which are orders: [N,h,w] -> [N]; None: no cut.
    shares: Callable[[Tensor], Tensor] | None = None
    final: bool = False  # it draws values in 0..1, which are only resized
    check: Callable[[], None] = lambda: None  # raises if it does not fit the classifier
    class_agnostic: bool = False  # it draws one map for every class
    # Forward passes per image, a backward pass counted as two; a function of the options, or a
    # formula if it depends on the model.
    cost: int | str | Callable[..., int | str] = 1
    nets: Literal["any", "convolutional", "transformer"] = "any"
    extra: str | None = None  # the extra of the package that it needs
    sign: Sign = "positive"  # the part of the map that is kept; none: the map has no sign
    signed: bool = False  # `sign` is an option too
    options: Mapping[str, Option] = field(default_factory=dict)
    chosen: Mapping[str, Value] = field(default_factory=dict)  # the options that were given

    @property
    def takes(self) -> dict[str, Option]:
        """Every option, the sign last."""
        if not self.signed:
            return {**self.options}
        sign = Option(
            self.sign,
            "keep the positive part or the absolute value",
            choices=("positive", "absolute"),
        )
        return {**self.options, "sign": sign}

    @property
    def settings(self) -> dict[str, Value]:
        """The value of every option."""
        values = {
            name: self.chosen.get(name, option.default) for name, option in self.takes.items()
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def passes(self) -> int | str:
        """Forward passes per image with these options."""
        options = {name: value for name, value in self.settings.items() if name != "sign"}
        return self.cost(**options) if callable(self.cost) else self.cost

    def facts(self) -> dict[str, Any]:
        """Return what results record of a method."""
        return {
            "options": self.settings,
            "sign": self.sign,
            "class_agnostic": self.class_agnostic,
            "passes": self.passes,
            "reference": self.reference,
        }

    def with_options(self, name: str, given: Mapping[str, Any]) -> "Explainer":
        """Return the method with options; raise for unknown names or values, and missing ones."""
        for option in given:
            if option not in self.takes:
                if not self.takes:
                    raise UserError(f"{name} takes no options, got {option!r}: write {name} alone")
                raise unknown(f"option of {name}", option, self.takes)
        chosen = {
            option: self.takes[option].read(f"{option} of {name}", value)
            for option, value in given.items()
        }
        required = [word for word, option in self.takes.items() if option.default is None]
        missing = [word for word in required if word not in chosen]
        if missing:
            wanted = f"{name}:{missing[0].upper()}"
            raise UserError(f"{name} needs its {missing[0]}: write {wanted}")
        sign: Any = chosen.get("sign", self.sign)
        method = replace(self, chosen=chosen, sign=sign)
        inner = {option: value for option, value in method.settings.items() if option != "sign"}
        if not inner:
            return method
        # A CAM's options change the score that is differentiated, as in Finer-CAM.
        if self.needs == "gradients":
            return replace(method, score=partial(self.score, **inner))
        return replace(method, draw=partial(self.draw, **inner))


def of_library(word: str) -> bool:
    """Return whether a word names an attribution of a library, as captum:DeepLift does."""
    library, colon, _ = word.partition(":")
    return bool(colon) and library in LIBRARIES


def split_word(word: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a method's name and its options, with "" for the name of the first if that has none.

    >>> split_word("integrated-gradients:steps=20:sign=absolute")
    ('integrated-gradients', [('steps', '20'), ('sign', 'absolute')])
    >>> split_word("expected-gradients:baselines=s3://bucket/birds:samples=5")
    ('expected-gradients', [('baselines', 's3://bucket/birds'), ('samples', '5')])
    >>> split_word("captum:GradientShap:n_samples=20")
    ('captum:GradientShap', [('n_samples', '20')])
    """
    name, *parts = word.split(":")
    if of_library(word):
        name = f"{name}:{parts.pop(0)}"
    options: list[tuple[str, str]] = []
    for part in parts:
        option, equals, value = part.partition("=")
        named = bool(equals) and option.replace("_", "").isalnum()
        if named:
            options.append((option, value))
        elif not options:
            options.append(("", part))
        else:  # a colon inside a value, as in a URL
            option, start = options[-1]
            options[-1] = (option, f"{start}:{part}")
    return name, options


def method_word(name: str, options: Mapping[str, Any]) -> str:
    """Return the word for a method with options.

    >>> method_word("integrated-gradients", {"steps": 20})
    'integrated-gradients:steps=20'
    """
    return ":".join([name, *(f"{option}={value}" for option, value in options.items())])
