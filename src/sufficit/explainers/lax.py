"""LAX: a small adapter that draws the heatmap from the features of a frozen classifier."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin, snapshot_download
from torch import Tensor, nn
from torch.nn import functional as F

from sufficit.classifier import fingerprint as fingerprints
from sufficit.classifier.checkpoint import limited_by, load_weights, weights_as_bytes
from sufficit.classifier.classifier import Classifier
from sufficit.classifier.digit_net import SMALL_NETS
from sufficit.classifier.fingerprint import Fingerprint
from sufficit.errors import GoneError, UserError, unknown
from sufficit.explainers.adapter_nets import WIDTHS, TopDown, convnet
from sufficit.explainers.evidence import Evidence, as_saved, read_evidence
from sufficit.explainers.forward_pass import Pass, look
from sufficit.explainers.onnx_file import export
from sufficit.explainers.order_net import BLOCKS, WIDTH, OrderNet
from sufficit.explainers.size_head import SizeHead
from sufficit.files import check_output, make_folder, place, read_json, writing

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
OURS = "sufficit:"  # prefix of an adapter that ships with the package, for a network that does
NAMED = "lax:"  # prefix of one that ships, for a network that does not
SHIPPED = {f"{OURS}{name}": folder / "lax" for name, folder in SMALL_NETS.items()}
SHIPPED |= {
    f"{NAMED}{folder.name}": folder
    for folder in sorted((Path(__file__).parents[1] / "assets" / "lax").glob("*/"))
    if (folder / "config.json").is_file()
}
"""The folders of these adapters, by name."""
_MAX_CHANNELS, _MAX_UPSAMPLE = 2**16, 32  # more than any classifier has or needs
_MAX_WEIGHTS, _MAX_LAYERS = 2**27, 64  # half a gigabyte
_MAX_STAGES, _MAX_CLASSES = 8, 10**6
_MOST_CELLS = 256  # along an order
_MOST_SIZES = 256
SIZE = 0.33  # share of the image that an order marks until its size is calibrated
_SHAPE = ("steps", "joined", "classes", "evidence", "width")
_CARD = """---
library_name: sufficit
tags: [explainability, saliency]
---
# A LAX adapter

It draws the heatmaps of one classifier from the features of `{layer}`:
`sufficit.explain(classifier, images, method=sufficit.Lax.from_pretrained("this folder"))`.
{facts}`config.json` says under `trained` how it was trained.
"""
_FACTS = (
    *(("model", "Classifier"), ("data", "Trained on")),
    *(("verdict", "Verdict"), ("licence", "Licence")),
)
"""What `about` of a training may say, and what the card calls it."""


class Lax(nn.Module, PyTorchModelHubMixin):
    """Features [N,K,h,w] of one classifier's layers -> heatmaps [N,h,w].

    With a `head`, the evidence of the classifier's own head, it is an `OrderNet` of `width`,
    `cells` and `block`: it orders the cells, and `size` is the share of the image that its map
    marks; with `sizes` a `SizeHead` predicts which of them that is.

    With the channels of several layers, the coarsest last, and no `head`, it is a top-down net,
    whose maps are in 0..1: with `classes` it draws for the class that is asked for, which with
    `evidence` it looks for in every cell. `steps` doubles the side of its map so often. The
    `joined` last layers have one size, as in a ViT, and are read at once. `width` is the number
    of its channels, by default 64, or 32 for few features. With one number of channels it is
    the paper's convnet K-256-128-64-1, whose map has `upsample` times the features' side, or a
    module of your own (`net`) that gives one channel.

    >>> import torch
    >>> lax = Lax([128, 256, 512], classes=10)
    >>> stages = [torch.rand(2, k, side, side) for k, side in ((128, 16), (256, 8), (512, 4))]
    >>> lax(stages, torch.tensor([3, 7])).shape
    torch.Size([2, 32, 32])
    >>> Lax(512, upsample=2)(torch.rand(2, 512, 4, 4)).shape
    torch.Size([2, 8, 8])
    """

    def __init__(
        self,
        channels: int | Sequence[int],
        *,
        upsample: int = 1,
        widths: Sequence[int] = WIDTHS,
        steps: int = 0,
        joined: int = 1,
        classes: int | None = None,
        bias: float = 0.0,
        evidence: bool = False,
        width: int | None = None,
        head: Evidence | dict[str, str] | None = None,
        cells: int | None = None,
        block: str = "separable",
        size: float = SIZE,
        sizes: Sequence[float] | None = None,
        net: nn.Module | None = None,
        layer: str | Sequence[str] | None = None,
        fingerprint: dict[str, Any] | Fingerprint | None = None,
        trained: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.channels = channels if isinstance(channels, int) else tuple(channels)
        self.per_layer = (channels,) if isinstance(channels, int) else tuple(channels)
        self.upsample, self.widths = upsample, tuple(widths)
        self.steps, self.joined = steps, joined
        self.classes, self.evidence, self.width = classes, evidence, width
        self.head = head if isinstance(head, Evidence | None) else read_evidence(head)
        self.cells, self.block, self.size = cells, block, size
        self.sizes = None if sizes is None else tuple(sizes)
        self.own_net = net is not None
        _check_sizes(self)
        self.size_head = None if self.sizes is None else SizeHead(self.sizes)
        self.layers = (layer,) if isinstance(layer, str) else tuple(layer or ())
        n = len(self.per_layer)
        if self.layers and len(self.layers) != n:
            raise UserError(
                f"channels of {n} layers need as many names, got {self.layers}: name each layer"
            )
        if net is not None:
            self.net = net
        elif self.head is not None:
            assert cells is not None  # checked
            self.width = width or WIDTH
            self.net = OrderNet(self.per_layer, width=self.width, cells=cells, block=block)
        elif isinstance(channels, int):
            self.net = convnet(channels, self.widths, upsample, bias)
        else:
            options = {name: getattr(self, name) for name in _SHAPE}
            self.net = TopDown(self.per_layer, bias=bias, **options)
        if fingerprint is not None and not isinstance(fingerprint, Fingerprint):
            fingerprint = fingerprints.read(fingerprint)
        self.fingerprint = fingerprint
        self.trained: dict[str, Any] = dict(trained or {})

    @property
    def layer(self) -> str | None:
        """The last, coarsest layer that it reads."""
        return self.layers[-1] if self.layers else None

    @property
    def class_free(self) -> bool:
        """Whether it draws one map per image, whichever class is asked for."""
        if self.head is not None:
            return self.head.kind == "none"
        return self.classes is None

    @property
    def passes(self) -> int:
        """Forward passes of the classifier per map, a backward pass counted as two."""
        return 1 + (0 if self.head is None else self.head.passes)

    @property
    def reads(self) -> tuple[str, ...]:
        """The layers whose features it needs, the coarsest that it reads last."""
        own = () if self.head is None else (self.head.layer,)
        return tuple(dict.fromkeys([*(one for one in own if one != self.layer), *self.layers]))

    def look(self, classifier: Classifier, images: Tensor) -> Pass:
        """One forward pass that keeps what the adapter reads."""
        assert self.layer is not None
        return look(
            classifier,
            images,
            self.layer,
            differentiate=self.head is not None and self.head.differentiates,
            earlier=self.reads[:-1],
            inputs=() if self.head is None else self.head.inputs,
        )

    def draw(self, seen: Pass, targets: Tensor) -> Tensor:
        """The maps for the targets from what a pass has kept: [N,h,w].

        Heatmaps in 0..1, or an order with a `head`, in which larger values come first.
        """
        if self.head is None:
            return self(seen.stages(self.layers), targets)  # type: ignore[no-any-return]  # a Tensor
        return self(*self.head.read(seen, self.layers, targets))  # type: ignore[no-any-return]  # a Tensor

    def shares(self, orders: Tensor) -> Tensor:
        """The share of each image that its map marks, by its order: [N,h,w] -> [N]."""
        if self.size_head is None:
            # Not len(orders): an export must not take the number of images for a constant.
            return torch.full((orders.shape[0],), self.size, device=orders.device)
        with torch.autocast(orders.device.type, enabled=False):
            found: Tensor = self.size_head(orders)
            return found

    def predict_sizes(self, sizes: Sequence[float]) -> None:
        """Cut each order at one of these sizes, by a head that has to be fitted."""
        self.sizes = tuple(sizes)
        self.size_head = SizeHead(self.sizes)

    def one_size(self, size: float) -> None:
        """Cut every order at this size, predicted or not before."""
        self.size, self.sizes, self.size_head = size, None, None

    def forward(self, features: Tensor | Sequence[Tensor], given: Tensor | None = None) -> Tensor:
        """The heatmaps in 0..1, or the order: each [N,K,h,w] -> [N,h,w].

        An adapter that takes a class needs the targets [N], one with a `head` the evidence
        [N,3,h,w] for them.
        """
        if isinstance(self.net, OrderNet):
            features = self._checked(features)
            if given is None:
                raise UserError("this adapter draws from evidence: give it as [N,3,h,w]")
            return self.net(features, given)[:, 0]  # type: ignore[no-any-return]  # a Tensor
        return self.logits(features, given).sigmoid()

    def _checked(self, features: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The features that it reads; raise for those of other layers."""
        given = (features,) if isinstance(features, Tensor) else tuple(features)
        if isinstance(self.channels, int):
            given = given[-1:]  # of several stages it reads the last
        if [one.shape[1] if one.ndim == 4 else None for one in given] != [*self.per_layer]:
            came = ", ".join(str(list(one.shape)) for one in given)
            ks = ", ".join(map(str, self.per_layer))
            raise UserError(
                f"this adapter reads features [N,K,h,w] with K = {ks}, got {came}: check layer and"
                " classifier"
            )
        if not torch.is_autocast_enabled(given[0].device.type):  # autocast chooses the dtype itself
            dtype = next(self.net.parameters(), given[0]).dtype
            given = tuple(one.to(dtype) for one in given)
        return given

    def logits(self, features: Tensor | Sequence[Tensor], targets: Tensor | None = None) -> Tensor:
        """The heatmaps before the sigmoid: each [N,K,h,w] -> [N,h,w]."""
        given = self._checked(features)
        if self.classes is not None and targets is None:
            raise UserError("this adapter draws for a class: give the targets [N]")
        if isinstance(self.net, TopDown):
            return self.net(given, targets)[:, 0].float()  # type: ignore[no-any-return]  # a Tensor
        found: Tensor = self.net(given[0])
        found = found[:, None] if found.ndim == 3 else found
        if found.ndim != 4 or found.shape[1] != 1 or len(found) != len(given[0]):
            came = str(list(found.shape))
            raise UserError(f"an adapter's net must give one channel, [N,1,h,w], got {came}")
        if self.own_net and self.upsample > 1:
            size = [side * self.upsample for side in given[0].shape[2:]]
            found = F.interpolate(found, size=size, mode="bilinear")
        return found[:, 0].float()

    @torch.no_grad()
    def standardize(self, stages: Sequence[Tensor]) -> None:
        """Scale what a top-down net reads by the features of some images: each [N,K,h,w]."""
        if isinstance(self.net, TopDown):
            self.net.standardize([stage.to(self.net.head.weight.device) for stage in stages])

    @torch.no_grad()
    def sharpen(self, contrast: float, level: float) -> None:
        """Multiply the logits of a top-down net by `contrast`, around the logit of `level`.

        Cells above the level come nearer to 1, the others to 0, in the same order. A level of 0 has
        no logit: there it is 0.5. In images larger than the map, edges move by part of a cell.

        >>> import torch
        >>> lax, features = Lax([2, 4]), [torch.rand(1, 2, 4, 4), torch.rand(1, 4, 2, 2)]
        >>> before = lax(features)
        >>> lax.sharpen(8.0, level=0.4)
        >>> bool(((lax(features) > 0.4) == (before > 0.4)).all())
        True
        """
        if not isinstance(self.net, TopDown):
            raise UserError(
                "only maps of a top-down adapter can be sharpened: use the recipe robust or crisp"
            )
        if not (0 < contrast < math.inf and 0 <= level < 1):
            raise UserError(
                "contrast must be a finite number above 0 and level in 0..1, 1 excluded, got"
                f" {contrast:g} and {level:g}"
            )
        middle = math.log(level / (1 - level)) if level else 0.0
        head = self.net.head
        self.trained = self.trained | {"sharpened": [contrast, level]}
        head.weight.mul_(contrast)
        head.bias.sub_(middle).mul_(contrast).add_(middle)  # type: ignore[union-attr]  # it has one

    def check(self, classifier: Classifier) -> None:
        """Raise unless this is the classifier the adapter was trained on."""
        known = self.fingerprint
        if known and not fingerprints.same(known, fingerprints.fingerprint(classifier)):
            raise UserError(
                f"this adapter was trained on another classifier than {classifier!r}: load its own"
                " (weights, mean and std must be the same), or train one for this classifier, with"
                f" sufficit train-lax --model {model_word(classifier)} --data PHOTOS --out NEW-LAX"
            )

    def belong_to(self, classifier: Classifier, *layers: str) -> None:
        """Record the classifier and the layers whose features the adapter reads."""
        self.layers, self.fingerprint = layers, fingerprints.fingerprint(classifier)

    @property
    def config(self) -> dict[str, Any]:
        """Everything but the weights that is needed to build the adapter again."""
        shape: dict[str, Any] = {"channels": self.channels, "upsample": self.upsample}
        shape |= {"widths": list(self.widths), "layer": self.layer}
        if not isinstance(self.channels, int):
            shape = {"channels": list(self.per_layer), "layer": list(self.layers)}
            shape |= {name: getattr(self, name) for name in _SHAPE}
        if self.head is not None:
            shape = {"channels": list(self.per_layer), "layer": list(self.layers)}
            shape |= {"head": as_saved(self.head), "size": self.size}
            shape |= {"width": self.width, "cells": self.cells, "block": self.block}
            shape |= {} if self.sizes is None else {"sizes": list(self.sizes)}
        return shape | {
            "own_net": type(self.net).__name__ if self.own_net else None,
            "fingerprint": asdict(self.fingerprint) if self.fingerprint else None,
            "trained": self.trained,
        }

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        half: bool = False,
        push_to_hub: bool = False,
        **push: Any,
    ) -> str | None:
        """Write model.safetensors, config.json and a card, each complete or not at all.

        With `half` the weights take half of the space and have a tenth of a percent of error.
        """
        folder = place(save_directory)
        check_output(folder)
        make_folder(folder)
        with writing(folder / WEIGHTS) as path:
            path.write_bytes(weights_as_bytes(copy.deepcopy(self).half() if half else self))
        config = json.dumps(self.config, indent=2) + "\n"
        card = _CARD.format(layer=", ".join(self.layers), facts=self._facts())
        for name, text in ((CONFIG, config), ("README.md", card)):
            with writing(folder / name) as path:
                path.write_text(text)
        repository = push.pop("repo_id", folder.name)
        return str(self.push_to_hub(repository, **push)) if push_to_hub else None

    def export(
        self, classifier: Classifier, path: str | Path, size: tuple[int, int] | None = None
    ) -> Path:
        """Write classifier and adapter as one ONNX file, checked against PyTorch; return its path.

        Its input `images` [N,C,H,W] is in 0..1, with N of any size and the height and width of
        `size`, by default the classifier's own. Its outputs are `logits`, and for the class that
        they predict the `heatmap` and the uncut `order`. It needs the extra `onnx`.
        """
        return export(self, classifier, path, size)

    @property
    def marks(self) -> str:
        """How much of an image its maps mark, in words."""
        if self.size_head is None:
            return f"{self.size:.0%} of an image"
        return f"a share of an image that is predicted for each, {self.size:.0%} on average"

    def _facts(self) -> str:
        """The rows of the card: data, numbers, verdict and licence, as far as they are known."""
        about, looks = dict(self.trained.get("about") or {}), self.trained.get("history") or []
        rows = {title: about[name] for name, title in _FACTS if name in about}
        last = next((row for row in reversed(looks) if "size" in row), None)
        if last is not None:
            rows["Maps mark"] = self.marks
            rows["MSI at that size, on the images that chose it"] = f"{last['msi']:.2f}"
            rows["Insertion by rank, on the same"] = f"{last['insertion']:.2f}"
        lines = "".join(f"- {title}: {fact}\n" for title, fact in rows.items())
        return f"\n{lines}\n" if lines else ""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, net: nn.Module | None = None, **hub: Any
    ) -> "Lax":
        """The adapter in a folder, or in a repository of the Hugging Face hub.

        "sufficit:digits" and "sufficit:pets" ship, for the classifiers of these names, and
        "lax:NAME" for public weights; `SHIPPED` lists all. An adapter that was trained with a net
        of your own needs that net again, as `net`.
        """
        folder = _folder(pretrained_model_name_or_path, hub)
        if not (folder / CONFIG).is_file():
            raise UserError(f"no adapter in {folder}: it has no {CONFIG}")
        config = read_json(folder / CONFIG)
        layers = config.get("layer") if isinstance(config, dict) else 0
        several = isinstance(layers, list) and all(isinstance(one, str) for one in layers)
        if not several and not isinstance(layers, str | None):
            raise UserError(f"{folder / CONFIG} does not describe an adapter")
        own = config.pop("own_net", None)
        if (own is None) != (net is None):
            how = f"with net=, a {own}" if own else "with no net="
            raise UserError(f"the adapter in {folder} was saved {how}: load it with the same")
        try:
            with limited_by(folder / WEIGHTS):
                lax = cls(**config, net=net)
        except GoneError:
            raise
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UserError(f"{folder / CONFIG} does not describe an adapter: {error}") from error
        load_weights(lax, folder / WEIGHTS)
        return lax.eval()

    def __repr__(self) -> str:
        kinds = {OrderNet: "order", TopDown: "top-down"}
        kind = type(self.net).__name__ if self.own_net else kinds.get(type(self.net), "convnet")
        asked = "" if self.classes is None else f", classes={self.classes}"
        return f"Lax({kind}, K={self.channels}, layers={list(self.layers)}{asked})"


def _check_sizes(lax: Lax) -> None:
    """Raise for sizes that no adapter has, before anything of that size is made."""
    channels, sizes = lax.per_layer, [*lax.per_layer, *lax.widths]
    several = not isinstance(lax.channels, int)

    def whole(value: object, least: int, most: int) -> bool:  # a bool is an int, but no size
        return type(value) is int and least <= value <= most

    if not channels or not lax.widths or not all(whole(k, 1, _MAX_CHANNELS) for k in sizes):
        shown = f"{sizes[:8]}" + (", ..." if len(sizes) > 8 else "")
        wanted = f"whole numbers in 1..{_MAX_CHANNELS}"
        raise UserError(f"channels and widths must be {wanted}, got {shown}")
    if len(channels) > _MAX_STAGES:
        raise UserError(
            f"an adapter reads at most {_MAX_STAGES} layers, got {len(channels)}: name fewer"
        )
    for name, least, most in (
        *(("upsample", 1, _MAX_UPSAMPLE), ("steps", 0, 5)),
        ("joined", 1, len(channels)),
        *([] if lax.classes is None else [("classes", 2, _MAX_CLASSES)]),
        *([] if lax.width is None else [("width", 2, _MAX_CHANNELS)]),
    ):
        if not whole(value := getattr(lax, name), least, most):
            raise UserError(f"{name} must be a whole number in {least}..{most}, got {value!r}")
    if not several and (lax.classes is not None or lax.steps):
        raise UserError(
            "classes and steps need a top-down adapter: give the channels of its layers as a list"
        )
    if lax.head is not None:
        _check_order(lax)
    weights = sum(k * m * max(9, lax.upsample**2) for k, m in pairwise(sizes))
    if not several and (weights > _MAX_WEIGHTS or len(sizes) > _MAX_LAYERS):
        limit = f"at most {_MAX_LAYERS} of {_MAX_WEIGHTS} are allowed"
        raise UserError(f"widths make {len(sizes)} layers of {weights} weights: {limit}")


def _check_order(lax: Lax) -> None:
    """Raise for an order that no adapter draws."""
    if isinstance(lax.channels, int) or lax.own_net or lax.classes is not None or lax.steps:
        raise UserError(
            "an adapter with a head takes the channels of its layers as a list, and no net, classes"
            " or steps"
        )
    if type(lax.cells) is not int or not 1 <= lax.cells <= _MOST_CELLS:
        raise UserError(f"cells must be a whole number in 1..{_MOST_CELLS}, got {lax.cells!r}")
    if lax.block not in BLOCKS:
        raise unknown("block", str(lax.block), BLOCKS)
    for size in (lax.size, *(lax.sizes or ())):
        if type(size) not in (int, float) or not 0 < size <= 1:
            raise UserError(f"size must be a share of the image in 0..1, got {size!r}")
    if lax.sizes is not None and not 1 <= len(lax.sizes) <= _MOST_SIZES:
        raise UserError(f"an adapter chooses among 1 to {_MOST_SIZES} sizes: name fewer")


def model_word(classifier: Classifier) -> str:
    """What loads a classifier, as far as it is known."""
    return classifier.recipe.source if classifier.recipe else "MODEL"


def is_shipped(source: str | Path) -> bool:
    """Whether a word names an adapter that ships, or that might."""
    return str(source).startswith((OURS, NAMED))


def name_of(source: str | Path) -> str:
    """An adapter's name in files and tables: its folder's, which is lax for those that ship."""
    return "lax" if is_shipped(source) else place(source).resolve().name


def _folder(source: str | Path, hub: dict[str, Any]) -> Path:
    """The folder itself, the one that ships, or the hub's in its local cache."""
    if is_shipped(source):
        if str(source) not in SHIPPED:
            raise unknown("adapter", str(source), SHIPPED)
        return SHIPPED[str(source)]
    path = place(source)
    if path.is_dir():
        return path
    if not isinstance(source, str) or source.count("/") != 1 or path.is_absolute():
        raise UserError(f"no adapter at {source}: give the folder that save_pretrained wrote")
    try:
        return Path(snapshot_download(str(source), allow_patterns=[CONFIG, WEIGHTS], **hub))
    except Exception as error:
        raise UserError(f"no adapter at {source}, and none on the hub: {error}") from error
