"""Ask a network about the level sets of maps, and score the answers.

`ask` is the only part that needs the network; what it returns (`Answers`) is enough for insertion,
for MSI at one common size, at the best size of each image and fitted, and for other rules of a fit.
"""

from dataclasses import dataclass

import numpy as np
import torch
from fills import fill_of
from photographs import Photographs
from torch import Tensor

from networks import Network

SIZES = (
    0.02, 0.03, 0.04, 0.06, 0.08, 0.10, 0.125, 0.15, 0.18, 0.21, 0.25, 0.29,
    0.33, 0.38, 0.43, 0.48, 0.54, 0.60, 0.66, 0.72, 0.78, 0.84, 0.90, 0.95,
)  # fmt: skip
TOGETHER = 16 if torch.cuda.is_available() else 2  # images whose 24 level sets make one batch


@dataclass
class Answers:
    """What a network says of the level sets of one map per image, by fill."""

    kept: dict[str, Tensor]  # fill -> bool [N,24] the region alone gives the target
    rest: dict[str, Tensor]  # fill -> bool [N,24] the rest alone gives the target
    empty: dict[str, Tensor]  # fill -> bool [N] the fill alone gives the target
    kept_p: dict[str, Tensor]  # fill -> half [N,24] the target's probability for the region alone
    whole_p: Tensor  # [N] the target's probability for the whole image

    def arrays(self, prefix: str, probabilities: bool) -> dict[str, np.ndarray]:
        """Return the answers as arrays to save, answers as packed bits."""
        found = {f"{prefix}/whole_p": self.whole_p.half().numpy()}
        for fill in self.kept:
            for kind in ("kept", "rest", "empty"):
                bits = np.packbits(getattr(self, kind)[fill].numpy(), axis=-1)
                found[f"{prefix}/{fill}/{kind}"] = bits
            if probabilities:
                found[f"{prefix}/{fill}/kept_p"] = self.kept_p[fill].half().numpy()
        return found

    @classmethod
    def read(cls, arrays: dict[str, np.ndarray], prefix: str) -> "Answers":
        """Read what `arrays` returned."""
        whole = torch.from_numpy(arrays[f"{prefix}/whole_p"])
        count = len(whole)
        fills = sorted(
            {
                key.split("/")[-2]
                for key in arrays
                if key.startswith(prefix + "/") and key.endswith("/kept")
            }
        )

        def bits(fill: str, kind: str, width: int) -> Tensor:
            return torch.from_numpy(
                np.unpackbits(arrays[f"{prefix}/{fill}/{kind}"], axis=-1, count=width)
            ).bool()

        return cls(
            kept={fill: bits(fill, "kept", len(SIZES)) for fill in fills},
            rest={fill: bits(fill, "rest", len(SIZES)) for fill in fills},
            empty={fill: bits(fill, "empty", count) for fill in fills},
            kept_p={
                fill: torch.from_numpy(arrays[f"{prefix}/{fill}/kept_p"])
                for fill in fills
                if f"{prefix}/{fill}/kept_p" in arrays
            },
            whole_p=whole,
        )


def ranks_of(maps: Tensor) -> Tensor:
    """Rank the pixels of each map [N,H,W], largest first, ties in pixel order: int32 [N,H,W]."""
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    numbers = torch.arange(order.shape[1], device=maps.device, dtype=torch.int32).expand_as(order)
    return torch.empty_like(numbers).scatter_(1, order, numbers).view_as(maps)


def padded(rows: Tensor, multiple: int) -> Tensor:
    """Repeat the last row until the number of rows is a multiple."""
    missing = -len(rows) % multiple
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


def donors_of(count: int) -> Tensor:
    """Return for each image another one, always the same: [count]."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(7))
    donors = torch.empty(count, dtype=torch.long)
    donors[order] = order.roll(1)
    return donors


Plain = tuple[Tensor, dict[str, Tensor]]


@torch.no_grad()
def ask_plain(
    network: Network, photographs: Photographs, targets: Tensor, fills: tuple[str, ...]
) -> Plain:
    """Return the target's probability for whole images [N], and whether each fill gives it."""
    count = len(photographs)
    rows = padded(torch.arange(count, device=targets.device), TOGETHER * len(SIZES))
    donors = donors_of(count).to(targets.device)
    whole, empty = [], {fill: [] for fill in fills}
    for some in rows.split(TOGETHER * len(SIZES)):
        images = photographs.images(some)
        logits = network.logits(network.normalize(images))
        whole.append(logits.softmax(1).gather(1, targets[some, None])[:, 0])
        for fill in fills:
            blank = fill_of(fill, images, photographs.images(donors[some]))
            said = network.logits(network.normalize(blank)).argmax(1)
            empty[fill].append(said == targets[some])
    found = {fill: torch.cat(parts)[:count].cpu() for fill, parts in empty.items()}
    return torch.cat(whole)[:count].cpu(), found


@torch.no_grad()
def ask(
    network: Network, photographs: Photographs, maps: Tensor, targets: Tensor, plain: Plain
) -> Answers:
    """Ask the network about the 24 level sets of each map, and what each leaves, under each fill.

    maps [N,224,224] on the network's device, targets [N]; `plain` is what `ask_plain` returned, and
    gives the fills.
    """
    count, pixels = len(photographs), maps[0].numel()
    cuts = torch.tensor([round(size * pixels) for size in SIZES], device=maps.device)
    rows = padded(torch.arange(count, device=maps.device), TOGETHER)
    donors = donors_of(count).to(maps.device)
    whole_p, empty = plain
    kept, rest, kept_p = ({fill: [] for fill in empty} for _ in range(3))
    for some in rows.split(TOGETHER):
        images = photographs.images(some)
        inputs = network.normalize(images)[:, None]
        masks = (ranks_of(maps[some])[:, None] < cuts.view(1, -1, 1, 1))[:, :, None]
        repeated = targets[some].repeat_interleave(len(SIZES))
        for fill in empty:
            blank = network.normalize(fill_of(fill, images, photographs.images(donors[some])))[
                :, None
            ]
            for region in (True, False):
                shown = torch.where(masks if region else ~masks, inputs, blank).flatten(0, 1)
                logits = network.logits(shown.contiguous(memory_format=layout(network)))
                hits = (logits.argmax(1) == repeated).view(-1, len(SIZES))
                (kept if region else rest)[fill].append(hits)
                if region:
                    chosen = logits.softmax(1).gather(1, repeated[:, None])
                    kept_p[fill].append(chosen.view(-1, len(SIZES)).half())

    def joined(parts: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        return {fill: torch.cat(found)[:count].cpu() for fill, found in parts.items()}

    return Answers(joined(kept), joined(rest), empty, joined(kept_p), whole_p)


def layout(network: Network) -> torch.memory_format:
    """Return the memory layout that the network reads."""
    return torch.contiguous_format if network.name == "deit_tiny" else torch.channels_last


def _sizes() -> Tensor:
    return torch.tensor(SIZES, dtype=torch.float64)


def insertion(answers: Answers, fill: str) -> Tensor:
    """Return the area under kept over the size, from nothing to the whole image: [N]."""
    sizes = torch.cat([torch.zeros(1), _sizes(), torch.ones(1)])
    whole = torch.ones(len(answers.whole_p), 1)
    curve = torch.cat(
        [answers.empty[fill][:, None].double(), answers.kept[fill].double(), whole], 1
    )
    return torch.trapezoid(curve, sizes, dim=1)


def msi(answers: Answers, fill: str) -> Tensor:
    """Return MSI of every level set as a binary mask: [N,24]."""
    kept, rest = answers.kept[fill].double(), answers.rest[fill].double()
    empty = answers.empty[fill][:, None].double()
    return 0.5 * (kept - rest) + 0.5 * (kept - empty) - _sizes()


def msi_whole(answers: Answers, fill: str) -> Tensor:
    """Return MSI of marking the whole image: [N]."""
    return -answers.empty[fill].double()


def common_size(answers: Answers, fill: str = "black") -> int:
    """Return the number of the one size that is best for all images together."""
    return int(msi(answers, fill).mean(0).argmax())


def needed_size(answers: Answers, fill: str = "black") -> Tensor:
    """Return the smallest size that suffices, 1 where none does: [N]."""
    kept = answers.kept[fill]
    return torch.where(kept.any(1), _sizes()[kept.int().argmax(1)], 1.0)


def fit(answers: Answers, fills: tuple[str, ...], share: float = 0.0) -> Tensor:
    """Choose a size per image by the rule of the fit: [N], 24 where no size suffices.

    A size suffices if the region gives the target with every fill (and, with `share`, at least so
    much of the whole image's probability). Kept and rest are averaged over fills and over a size
    and its two neighbours, ends repeated; the highest kept - rest / 2 - size among those that suffice
    wins, ties the smaller. In integers, so that ties are ties.
    """
    kept = torch.stack([answers.kept[fill] for fill in fills]).long()
    rest = torch.stack([answers.rest[fill] for fill in fills]).long()
    enough = kept.bool()
    if share:
        least = share * answers.whole_p.float()[:, None]
        enough = enough & torch.stack([answers.kept_p[fill].float() >= least for fill in fills])

    def around(counts: Tensor) -> Tensor:
        wide = torch.cat([counts[:, :1], counts, counts[:, -1:]], 1)
        return wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]

    unit = 3 * len(fills)
    thousandths = (_sizes() * 1000).round().long()
    score = 1000 * (2 * around(kept.sum(0)) - around(rest.sum(0))) - 2 * unit * thousandths
    score = torch.where(enough.all(0), score, torch.iinfo(torch.long).min)
    best = score.amax(1, keepdim=True)
    first = (score == best).int().argmax(1)
    return torch.where(enough.all(0).any(1), first, len(SIZES))


def msi_at(answers: Answers, fill: str, chosen: Tensor) -> Tensor:
    """Return MSI of each image's map cut at the chosen size [N], 24 being the whole image: [N]."""
    every = torch.cat([msi(answers, fill), msi_whole(answers, fill)[:, None]], 1)
    return every.gather(1, chosen[:, None])[:, 0]


def size_at(chosen: Tensor) -> Tensor:
    """Return the chosen sizes as shares of the image: [N]."""
    return torch.cat([_sizes(), torch.ones(1, dtype=torch.float64)])[chosen]


FITS = {"black+blur": ("black", "blur"), "black+blur+noise": ("black", "blur", "noise")}


def summary(answers: Answers, common: int, own_size: Tensor | None = None) -> dict[str, object]:
    """Return the numbers of one map: per fill, and over all.

    `common` is the number of the size calibrated on other photographs (or on these, and said so);
    `own_size` [N] the size at which the map cuts itself, if it does.
    """
    fills = tuple(answers.kept)
    chosen = {name: fit(answers, asked) for name, asked in FITS.items() if set(asked) <= set(fills)}
    rows: dict[str, object] = {"n": len(answers.whole_p), "common_size": SIZES[common]}
    for fill in fills:
        every = msi(answers, fill)
        rows[fill] = {
            "insertion": insertion(answers, fill).mean().item(),
            "common": every[:, common].mean().item(),
            "best_common": every.mean(0).max().item(),
            "hindsight": every.amax(1).mean().item(),
            **{
                f"fit {name}": msi_at(answers, fill, at).mean().item()
                for name, at in chosen.items()
            },
            "everything": msi_whole(answers, fill).mean().item(),
        }
    for name, at in chosen.items():
        rows[f"size {name}"] = size_at(at).mean().item()
        rows[f"found {name}"] = (at < len(SIZES)).double().mean().item()
    needed = needed_size(answers).log()
    for name, at in chosen.items():
        rows[f"corr {name}"] = correlation(size_at(at).log(), needed)
    if own_size is not None:
        rows["own_size"] = own_size.mean().item()
        rows["corr own"] = correlation(own_size.clamp(min=1e-3).log(), needed)
    return rows


def correlation(a: Tensor, b: Tensor) -> float:
    """Return Pearson's correlation; 0 where one has no spread."""
    if a.std() == 0 or b.std() == 0:
        return 0.0
    return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()


def points_at_box(maps: Tensor, photographs: Photographs) -> Tensor:
    """Return whether the highest pixel of each map, the first of equals, lies in a box: [N]."""
    side = maps.shape[2]
    peaks = maps.flatten(1).argmax(1).cpu()
    found = []
    for peak, boxes in zip(peaks.tolist(), photographs.boxes, strict=True):
        x, y = peak % side + 0.5, peak // side + 0.5
        found.append(any(a <= x <= a + w and b <= y <= b + h for a, b, w, h in boxes))
    return torch.tensor(found)


LEAK_SIZES = (0.10, 0.25, 0.45)


@torch.no_grad()
def leak(network: Network, photographs: Photographs, maps: Tensor, targets: Tensor) -> Tensor:
    """Measure what the outline alone says, at three sizes: [3,N].

    The target's log p on a donor photograph under the image's own mask, minus that under another
    image's mask of the same size; black around it.
    """
    count = len(photographs)
    generator = torch.Generator().manual_seed(3)
    donors = torch.randperm(count, generator=generator).to(maps.device)
    others = torch.randperm(count, generator=generator).to(maps.device)
    together = max(1, TOGETHER * len(SIZES) // (2 * len(LEAK_SIZES)))
    rows = padded(torch.arange(count, device=maps.device), together)
    found = []
    for some in rows.split(together):
        inputs = network.normalize(photographs.images(donors[some]))
        blank = network.normalize(torch.zeros_like(photographs.images(donors[some])))
        shown = []
        for ranks in (ranks_of(maps[some]), ranks_of(maps[others[some]])):
            for size in LEAK_SIZES:
                mask = (ranks < round(size * ranks[0].numel()))[:, None]
                shown.append(torch.where(mask, inputs, blank))
        logits = network.logits(torch.cat(shown).contiguous(memory_format=layout(network)))
        said = logits.log_softmax(1).view(2, len(LEAK_SIZES), together, -1)
        index = targets[some].view(1, 1, -1, 1).expand(2, len(LEAK_SIZES), -1, 1)
        log_p = said.gather(3, index)[..., 0]
        found.append(log_p[0] - log_p[1])
    return torch.cat(found, 1)[:, :count].cpu()


def mean_and_interval(values: Tensor) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    return values.mean().item(), 1.96 * values.std().item() / len(values) ** 0.5
