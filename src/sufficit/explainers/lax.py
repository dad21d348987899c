"""LAX: a small adapter that draws the heatmap from the features of a frozen classifier."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise, product
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
from sufficit.files import check_output, make_folder, place, read_json, writing

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
OURS = "sufficit:"  # prefix of an adapter that ships with the package
WIDTHS = (256, 128, 64)
_MAX_CHANNELS, _MAX_UPSAMPLE = 2**16, 32  # more than any classifier has or needs
_MAX_WEIGHTS, _MAX_LAYERS = 2**27, 64  # half a gigabyte
_CARD = """---
library_name: sufficit
tags: [explainability, saliency]
---
# A LAX adapter

It draws the heatmaps of one classifier from the features of its layer `{layer}`:
`sufficit.explain(classifier, images, method=sufficit.Lax.from_pretrained("this folder"))`.
`config.json` says under `trained` how it was trained.
"""


class Lax(nn.Module, PyTorchModelHubMixin):
    """Features [N,K,h,w] of one layer of one classifier -> heatmaps [N,h,w] in 0..1.

    A convnet K-256-128-64-1, or a module of your own (`net`) that gives one channel. `upsample`
    multiplies the height and width of the features.

    >>> import torch
    >>> lax = Lax(512, upsample=2)
    >>> lax(torch.rand(2, 512, 4, 4)).shape
    torch.Size([2, 8, 8])
    """

    def __init__(
        self,
        channels: int,
        *,
        upsample: int = 1,
        widths: Sequence[int] = WIDTHS,
        bias: float = 0.0,
        net: nn.Module | None = None,
        layer: str | None = None,
        fingerprint: dict[str, Any] | Fingerprint | None = None,
        trained: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(channels, upsample, widths)
        self.channels, self.upsample, self.widths = channels, upsample, tuple(widths)
        self.own_net, self.layer = net is not None, layer
        self.net = _convnet(channels, self.widths, upsample, bias) if net is None else net
        if fingerprint is not None and not isinstance(fingerprint, Fingerprint):
            fingerprint = fingerprints.read(fingerprint)
        self.fingerprint = fingerprint
        self.trained: dict[str, Any] = dict(trained or {})

    def forward(self, features: Tensor) -> Tensor:
        """The heatmaps: [N,K,h,w] -> [N,h,w] in 0..1."""
        return self.logits(features).sigmoid()

    def logits(self, features: Tensor) -> Tensor:
        """The heatmaps before the sigmoid: [N,K,h,w] -> [N,h,w]."""
        if features.ndim != 4 or features.shape[1] != self.channels:
            wrong = f"K = {self.channels}, got {list(features.shape)}: check layer and classifier"
            raise UserError(f"this adapter reads features [N,K,h,w] with {wrong}")
        if not torch.is_autocast_enabled(features.device.type):  # autocast chooses the dtype itself
            features = features.to(next(self.net.parameters(), features).dtype)
        found: Tensor = self.net(features)
        if found.ndim == 4 and found.shape[1] == 1:
            found = found[:, 0]
        if found.ndim != 3 or len(found) != len(features):
            came = list(found.shape)
            raise UserError(f"an adapter's net must give one channel, [N,1,h,w], got {came}")
        if self.own_net and self.upsample > 1:
            size = [side * self.upsample for side in features.shape[2:]]
            found = F.interpolate(found[:, None], size=size, mode="bilinear")[:, 0]
        return found.float()

    def check(self, classifier: Classifier) -> None:
        """Raise unless this is the classifier the adapter was trained on."""
        known = self.fingerprint
        if known and not fingerprints.same(known, fingerprints.fingerprint(classifier)):
            raise UserError(
                f"this adapter was trained on another classifier than {classifier!r}: load its own"
                " (weights, mean and std must be the same), or train one for this classifier"
            )

    def belong_to(self, classifier: Classifier, layer: str) -> None:
        """Record the classifier and the layer whose features the adapter reads."""
        self.layer, self.fingerprint = layer, fingerprints.fingerprint(classifier)

    @property
    def config(self) -> dict[str, Any]:
        """Everything but the weights that is needed to build the adapter again."""
        return {
            "channels": self.channels,
            "upsample": self.upsample,
            "widths": list(self.widths),
            "own_net": type(self.net).__name__ if self.own_net else None,
            "layer": self.layer,
            "fingerprint": asdict(self.fingerprint) if self.fingerprint else None,
            "trained": self.trained,
        }

    def save_pretrained(
        self, save_directory: str | Path, *, push_to_hub: bool = False, **push: Any
    ) -> str | None:
        """Write model.safetensors, config.json and a card, each complete or not at all."""
        folder = place(save_directory)
        check_output(folder)
        make_folder(folder)
        with writing(folder / WEIGHTS) as path:
            path.write_bytes(weights_as_bytes(self))
        config = json.dumps(self.config, indent=2) + "\n"
        for name, text in ((CONFIG, config), ("README.md", _CARD.format(layer=self.layer))):
            with writing(folder / name) as path:
                path.write_text(text)
        repository = push.pop("repo_id", folder.name)
        return str(self.push_to_hub(repository, **push)) if push_to_hub else None

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, net: nn.Module | None = None, **hub: Any
    ) -> "Lax":
        """The adapter in a folder, or in a repository of the Hugging Face hub.

        "sufficit:digits" ships with the package, for the classifier of that name. An adapter that
        was trained with a net of your own needs that net again, as `net`.
        """
        folder = _folder(pretrained_model_name_or_path, hub)
        if not (folder / CONFIG).is_file():
            raise UserError(f"no adapter in {folder}: it has no {CONFIG}")
        config = read_json(folder / CONFIG)
        if not isinstance(config, dict) or not isinstance(config.get("layer"), str | None):
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
        kind = type(self.net).__name__ if self.own_net else "convnet"
        return f"Lax({kind}, K={self.channels}, layer={self.layer!r}, upsample={self.upsample})"


def _convnet(channels: int, widths: Sequence[int], upsample: int, bias: float) -> nn.Sequential:
    """K-256-128-64-1: the first layer mixes channels, the others read neighbouring cells too.

    To upsample, the layer before the last mixes channels to several cells from each.
    """
    layers: list[nn.Module] = []
    for number, (k, m) in enumerate(pairwise([channels, *widths])):
        grows = upsample > 1 and number == len(widths) - 1
        wide = m * upsample**2 if grows else m
        layer = Mix(k, wide) if number == 0 or grows else nn.Conv2d(k, wide, 3, padding=1)
        layers += [layer, nn.ReLU(inplace=True)]
    last = Finer(widths[-1], upsample) if upsample > 1 else nn.Conv2d(widths[-1], 1, 3, padding=1)
    nn.init.constant_(last.bias, bias)  # type: ignore[arg-type]  # it has one
    return nn.Sequential(*layers, last)


class Mix(nn.Conv2d):
    """A 1x1 convolution; channels-last, a matrix product, which halves its time on a GPU."""

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__(channels, wide, 1)

    def forward(self, features: Tensor) -> Tensor:
        """The mixed channels."""
        if not features.is_contiguous(memory_format=torch.channels_last):
            return super().forward(features)
        cells = F.linear(features.permute(0, 2, 3, 1), self.weight[:, :, 0, 0], self.bias)
        return cells.permute(0, 3, 1, 2)


class Finer(nn.Conv2d):
    """A pixel shuffle and a 3x3 convolution to one channel: [N,c t t,h,w] -> [N,1,t h,t w].

    Up to t = 4 the shuffled map is never made: each of its cells is a channel of the coarse map,
    so a 3x3 convolution of the coarse map, with the weights rearranged, gives the same values.
    That saves a GPU most of the work. Beyond, the rearranged kernels would be mostly zeros.
    """

    taps: Tensor | None

    def __init__(self, channels: int, times: int) -> None:
        super().__init__(channels, 1, 3, padding=1)
        self.times = times
        self.register_buffer("taps", _taps(times) if times <= 4 else None, persistent=False)

    def forward(self, coarse: Tensor) -> Tensor:
        """The heatmaps before the sigmoid, with their channel axis."""
        if self.taps is None:
            return super().forward(F.pixel_shuffle(coarse, self.times))
        cells = self.times**2
        known = F.pad(self.weight.flatten(2)[0], (0, 1))  # [c,10], the last is 0
        kernels = known[:, self.taps].transpose(0, 1).reshape(cells, -1, 3, 3)
        assert self.bias is not None
        found = F.conv2d(coarse, kernels, self.bias.expand(cells), padding=1)
        return F.pixel_shuffle(found, self.times)


def _taps(times: int) -> Tensor:
    """Which of the nine weights connects a fine cell to a cell of a neighbour: [t t,t t,3,3]."""
    # Axes: the cell that is computed, the one that is read, the coarse step; 9: no neighbours.
    found = torch.full((times**2, times**2, 3, 3), 9)
    for y, x, down, right in product(range(times), range(times), range(3), range(3)):
        row, column = y + down - 1, x + right - 1
        seen = row % times * times + column % times
        found[y * times + x, seen, row // times + 1, column // times + 1] = 3 * down + right
    return found


def _check_sizes(channels: int, upsample: int, widths: Sequence[int]) -> None:
    # A bool is an int, but no size.
    sizes = [channels, *widths]
    if not widths or not all(type(k) is int and 0 < k <= _MAX_CHANNELS for k in sizes):
        shown = f"{sizes[:8]}" + (", ..." if len(sizes) > 8 else "")
        wanted = f"whole numbers in 1..{_MAX_CHANNELS}"
        raise UserError(f"channels and widths must be {wanted}, got {shown}")
    if type(upsample) is not int or not 1 <= upsample <= _MAX_UPSAMPLE:
        raise UserError(f"upsample must be a whole number in 1..{_MAX_UPSAMPLE}, got {upsample!r}")
    weights = sum(k * m * max(9, upsample**2) for k, m in pairwise(sizes))
    if weights > _MAX_WEIGHTS or len(sizes) > _MAX_LAYERS:
        limit = f"at most {_MAX_LAYERS} of {_MAX_WEIGHTS} are allowed"
        raise UserError(f"widths make {len(sizes)} layers of {weights} weights: {limit}")


def name_of(source: str | Path) -> str:
    """An adapter's name in files and tables: its folder's, which is lax for those that ship."""
    return "lax" if str(source).startswith(OURS) else place(source).resolve().name


def _folder(source: str | Path, hub: dict[str, Any]) -> Path:
    """The folder itself, the one that ships, or the hub's in its local cache."""
    if str(source).startswith(OURS):
        name = str(source).removeprefix(OURS)
        if name not in SMALL_NETS:
            raise unknown("adapter", str(source), [f"{OURS}{known}" for known in SMALL_NETS])
        return SMALL_NETS[name] / "lax"
    path = place(source)
    if path.is_dir():
        return path
    if not isinstance(source, str) or source.count("/") != 1 or path.is_absolute():
        raise UserError(f"no adapter at {source}: give the folder that save_pretrained wrote")
    try:
        return Path(snapshot_download(str(source), allow_patterns=[CONFIG, WEIGHTS], **hub))
    except Exception as error:
        raise UserError(f"no adapter at {source}, and none on the hub: {error}") from error
