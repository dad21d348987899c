"""The nets of an adapter: the paper's convnet over one layer, and the top-down net over several."""

from collections.abc import Sequence
from itertools import pairwise, product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sufficit.classifier.layers import kept

WIDTHS = (256, 128, 64)  # of the convnet
WIDTH, NARROW = 64, 32  # of the top-down net, the second for features of fewer channels than MANY
MANY = 128
MATRIX = 2**22  # weights of a bilinear step as one matrix, at most


class TopDown(nn.Module):
    """Features of several stages, the coarsest last -> logits [N,1,h,w].

    From each stage a 1x1 convolution; from the coarsest to the finest a bilinear step, the sum with
    the next stage and a 3x3 convolution. The `joined` last stages have one size: they are summed
    at once, so that no convolution is between the deepest of them and the rest. `steps` more
    bilinear steps, each with a 3x3 convolution, follow. The last step to twice the side is fixed
    and smooth, so that no cell shows: a quadratic spline of the logits. With `classes`, a class
    scales and shifts the channels of the coarsest level; with `evidence` it is also looked for in
    every cell of the last stage.
    """

    # They are what an adapter stores to build its net again.
    def __init__(
        self,
        channels: Sequence[int],
        *,
        steps: int = 0,
        joined: int = 1,
        classes: int | None = None,
        bias: float = 0.0,
        evidence: bool = False,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.joined = joined
        width = width or (WIDTH if channels[-1] >= MANY else NARROW)
        # The finest level, which has the most cells, has half the channels.
        finest = len(channels) - joined + steps
        widths = [width // 2 if k == finest > 0 else width for k in range(finest + 1)]
        after = [*widths[1:], widths[-1]]
        level = [widths[0]] * (joined - 1) + widths
        self.laterals = nn.ModuleList(
            Lateral(k, m) for k, m in zip(reversed(channels), level, strict=False)
        )
        self.merges = nn.ModuleList(
            nn.Conv2d(k, m, 3, padding=1) for k, m in zip(widths, after, strict=True)
        )
        self.head = nn.Conv2d(widths[-1], 1, 3, padding=1)
        nn.init.constant_(self.head.bias, bias)  # type: ignore[arg-type]  # it has one
        self.asked = None if classes is None else nn.Embedding(classes, 2 * widths[0])
        if self.asked is not None:
            nn.init.normal_(self.asked.weight, std=0.1)
        self.evidence = None
        if classes is not None and evidence:
            self.evidence = LearnedEvidence(channels[-1], classes, widths[0])

    def standardize(self, stages: Sequence[Tensor]) -> None:
        """Set the mean and spread that channels have, from the features of some images."""
        for lateral, stage in zip(self.laterals, reversed(stages), strict=True):
            lateral.standardize(stage)  # type: ignore[operator]  # a Lateral

    def forward(self, stages: Sequence[Tensor], targets: Tensor | None = None) -> Tensor:
        """The heatmaps before the sigmoid, at twice the side of the finest stage or step."""
        coarse_first = [*zip(reversed(stages), self.laterals, strict=True)]
        first, *others = (lateral(stage) for stage, lateral in coarse_first[: self.joined])
        found = sum(others, first)
        if self.asked is not None:
            scale, shift = self.asked(targets)[:, :, None, None].to(found.dtype).chunk(2, 1)
            found = torch.addcmul(shift, found, 1 + scale)
        if self.evidence is not None:
            found = torch.addcmul(found, *self.evidence(stages[-1], targets))
        for k, merge in enumerate(self.merges):
            if 0 < k <= len(stages) - self.joined:
                stage, lateral = coarse_first[self.joined - 1 + k]
                beside = lateral(stage)
                found = _enlarged(found, beside.shape[2:], beside)
            elif k > 0:
                found = _enlarged(found, [2 * side for side in found.shape[2:]])
            found = merge(found.relu_()).relu_()
        found = F.conv2d(found, self.head.weight, padding=1)
        bias = self.head.bias
        assert bias is not None
        with torch.autocast(stages[0].device.type, enabled=False):
            return smooth_double(found + bias.float()[:, None, None])  # in float32


class LearnedEvidence(nn.Module):
    """How much each cell speaks for a class: [N,K,h,w], [N] -> [N,1,h,w], and channels [m,1,1].

    It is one number per cell, the product of the features and the weights of the class, to be
    multiplied by one weight per channel. So what is learned of where the evidence is holds for
    every class.
    """

    mean: Tensor

    def __init__(self, channels: int, classes: int, wide: int) -> None:
        super().__init__()
        self.classes = nn.Embedding(classes, channels)
        nn.init.normal_(self.classes.weight, std=channels**-0.5)
        self.spread = nn.Conv2d(1, wide, 1, bias=False)
        self.register_buffer("mean", torch.zeros(channels))

    @torch.no_grad()
    def start(self, features: Tensor, weights: Tensor) -> None:
        """Take the mean of features, and weights of the classes [C,K], less their mean.

        They are scaled so that the evidence in these features has a spread of 1.
        """
        features = features.float()
        self.mean.copy_(features.mean((0, 2, 3)))
        weights = (weights - weights.mean(0)).to(features)
        cells = (features - self.mean.to(features)[:, None, None]).movedim(1, -1).flatten(0, -2)
        scale = (cells @ weights.T).std()
        self.classes.weight.copy_(weights / scale.clamp(min=1e-12))

    def forward(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The evidence for the targets, and the weights of the channels."""
        weights = self.classes(targets).to(features.dtype)
        usual = (weights @ self.mean.to(weights))[:, None, None]
        cells = torch.einsum("nkhw,nk->nhw", features, weights) - usual
        return cells[:, None], self.spread.weight[:, 0].to(cells.dtype)


def _enlarged(found: Tensor, size: Sequence[int], lateral: Tensor | None = None) -> Tensor:
    """Features at another size, bilinear, plus the lateral ones: [N,m,h,w] -> [N,m,H,W].

    Channels-last it is one matrix product: torch's own takes a GPU ten times as long, and its
    gradient has no fixed order.
    """
    (h, w), (rows, columns) = found.shape[2:], size
    if (h, w) == (rows, columns):
        return found if lateral is None else lateral.add_(found)
    given = (found,) if lateral is None else (found, lateral)
    last = all(one.is_contiguous(memory_format=torch.channels_last) for one in given)
    if not last or h * w * rows * columns > MATRIX:
        found = F.interpolate(found, (rows, columns), mode="bilinear", align_corners=False)
        return found if lateral is None else lateral.add_(found)
    cells = found.permute(0, 2, 3, 1).flatten(1, 2)
    matrix = _bilinear((h, w), (rows, columns), found.device, found.dtype)
    weights = matrix.expand(len(cells), -1, -1)
    if lateral is None:
        made = torch.bmm(weights, cells)
        return made.view(-1, rows, columns, made.shape[2]).permute(0, 3, 1, 2)
    lateral.permute(0, 2, 3, 1).flatten(1, 2).baddbmm_(weights, cells)
    return lateral


@kept
def _bilinear(
    size: tuple[int, int], wanted: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The weights of the wanted cells on those of a size: [H W,h w]."""
    cells = torch.eye(size[0] * size[1]).view(-1, 1, *size)
    found = F.interpolate(cells, wanted, mode="bilinear", align_corners=False)
    return found.flatten(1).T.contiguous().to(device, dtype)


def smooth_double(maps: Tensor) -> Tensor:
    """Maps at twice their side by a quadratic spline: [N,A,h,w] -> [N,A,2h,2w].

    Along a line, each new cell is 3/4, 1/4 of its two nearest (bilinear), and then 1/4, 1/2, 1/4 of
    itself and its neighbours, which removes the kinks at the old cells. Two matrix products do it.

    >>> smooth_double(torch.tensor([[[[0.0, 0.0, 8.0, 0.0]]]]))[0, 0, 0].tolist()
    [0.0, 0.0, 0.5, 2.5, 5.0, 5.0, 2.5, 0.5]
    """
    down, right = (_spline(side, maps.device, maps.dtype) for side in maps.shape[2:])
    return down @ (maps @ right.T)


@kept
def _spline(side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The weights of twice as many cells on the cells of a line: [2n,n]."""
    lines = F.interpolate(torch.eye(side)[None], scale_factor=2, mode="linear")
    padded = F.pad(lines, (1, 1), mode="replicate")[0]
    smooth = (padded[:, :-2] + padded[:, 2:] + 2 * padded[:, 1:-1]) / 4
    return smooth.T.contiguous().to(device, dtype)


def convnet(channels: int, widths: Sequence[int], upsample: int, bias: float) -> nn.Sequential:
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
        return _mixed(features, self.weight, self.bias)


class Lateral(Mix):
    """A 1x1 convolution of channels less their mean, over their spread.

    Layers differ in scale by orders of magnitude. The mean and spread are part of the weights, so
    that they cost nothing per cell.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__(channels, wide)
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("spread", torch.ones(channels))

    def standardize(self, features: Tensor) -> None:
        """Take the mean and spread of these features."""
        spread, mean = torch.std_mean(features.float(), (0, 2, 3), correction=0)
        self.mean.copy_(mean)
        # A channel that is constant here may not be so elsewhere.
        self.spread.copy_(spread.clamp(min=0.01 * float(spread.mean().clamp(min=1e-6))))

    def folded(self) -> tuple[Tensor, Tensor]:
        """The weights and bias that take the features as they are."""
        weight = self.weight / self.spread[:, None, None]
        assert self.bias is not None
        return weight, self.bias - weight[:, :, 0, 0] @ self.mean

    def forward(self, features: Tensor) -> Tensor:
        """The mixed channels."""
        return _mixed(features, *self.folded())


def _mixed(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not features.is_contiguous(memory_format=torch.channels_last):
        return F.conv2d(features, weight, bias)
    return F.linear(features.permute(0, 2, 3, 1), weight[:, :, 0, 0], bias).permute(0, 3, 1, 2)


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
