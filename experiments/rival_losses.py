"""The losses of the methods nearest to LAX: RT-saliency, masked-in/masked-out, Learn to Rank.

    lax = train("rt-saliency", classifier, loader)

trains the adapter of `robust`, class-free, with the loss of another work.
"""

from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torchvision.transforms.functional import gaussian_blur

from sufficit import Classifier, Lax, LaxRecipe, train_lax
from sufficit.training import Loss, TrainingStep

PRESERVED, DESTROYED = 1.0, 5.0  # margins in logits of RT-saliency
BORDER = 0.3  # weight of a mask's values at the border in `smooth`
BINS = 16  # of equally many cells, from the highest to the lowest
LEVELS = 2  # points of the insertion and deletion curves that a step of learn_to_rank draws
_ROUNDS, _TEMPERATURE = 20, 0.05  # of Sinkhorn's normalisation


def rt_saliency(step: TrainingStep) -> dict[str, Tensor]:
    """The loss of Dabkowski and Gal (2017), with the margins of its later implementations."""
    inside, outside = step.views("kept", "rest")
    return {
        "preserve": 0.3 * margin(inside, step.targets, PRESERVED),
        "destroy": destroyed(outside, step.targets, DESTROYED),
        "sparse": 8 * sparse(step.masks),
        "smooth": 0.5 * smooth(step.masks),
    }


def masked_in_out(step: TrainingStep) -> dict[str, Tensor]:
    """Cross-entropy inside, entropy outside, and a reward for small masks that work."""
    inside, outside = step.views("kept", "rest")
    known = step.predicted == step.targets  # without a mask
    right = inside.argmax(1) == step.targets
    wrong = known & (outside.argmax(1) != step.targets)
    return {
        "keep": F.cross_entropy(inside, step.targets),
        "blank": blank(outside, known),
        "earned": 10 * earned(step.masks, right, wrong),
    }


def learn_to_rank(step: TrainingStep) -> Tensor:
    """Deletion minus insertion at drawn levels, through soft ranks of the cells."""
    height, width = step.images.shape[2:]
    tops = F.interpolate(
        soft_tops(step.cells, LEVELS, step.generator), size=(height, width), mode="bilinear"
    ).unbind(1)
    asked = [(step.images, top) for top in tops] + [(step.images, 1 - top) for top in tops]
    logits = step.ask(asked)
    inserted, removed = torch.cat(logits[:LEVELS]), torch.cat(logits[LEVELS:])
    return ranking(inserted, removed, step.targets.repeat(LEVELS))


def rt_saliency_final(step: TrainingStep, size: float = 1.0) -> dict[str, Tensor]:
    """RT-saliency as its authors train it on ImageNet: hidden pixels show the image blurred.

    `size` scales the term that pays for small masks. Their classes that are not there, three images
    in ten, have no place in an adapter that takes no class.
    """
    shown = blurred_or_colour(step.images, step.generator)
    masks = step.masks[:, None]
    full = torch.ones_like(step.masks)
    inside, outside = step.ask(
        [
            (torch.lerp(shown, step.images, masks), full),
            (torch.lerp(step.images, shown, masks), full),
        ]
    )
    return {
        "preserve": 0.3 * margin(inside, step.targets, PRESERVED),
        "destroy": destroyed(outside, step.targets, DESTROYED),
        "sparse": 8 * size * sparse(step.masks),
        "smooth": 0.005 * smooth(step.masks),
    }


def masked_in_out_final(step: TrainingStep, size: float = 1.0) -> dict[str, Tensor]:
    """Masked-in/masked-out with its authors' final weights for a fixed classifier.

    `size` scales the reward for small masks.
    """
    inside, outside = step.views("kept", "rest")
    known = step.predicted == step.targets
    means = step.masks.mean((1, 2))
    right = inside.argmax(1) == step.targets
    wrong = known & (outside.argmax(1) != step.targets)
    kept, left = (F.relu(works.to(means) - means).mean() for works in (right, wrong))
    return {
        "keep": F.cross_entropy(inside, step.targets),
        "blank": blank(outside, known),
        "earned": -size * (kept + 10 * left),
        "variation": 0.001 * variation(step.masks),
    }


def blurred_or_colour(images: Tensor, generator: Generator) -> Tensor:
    """Each image blurred with a spread of 10 pixels in 224, or a random colour with noise."""
    n, device = len(images), images.device
    side = max(3, round(61 * images.shape[2] / 224) | 1)
    blurred = gaussian_blur(images, [side, side], [side / 6.1] * 2)
    colour = torch.rand(n, images.shape[1], 1, 1, generator=generator, device=device)
    noise = 0.2 * torch.rand(images.shape, generator=generator, device=device) - 0.1
    coin = torch.rand(n, 1, 1, 1, generator=generator, device=device) < 0.5
    return torch.where(coin, blurred, (colour + noise).clamp(0, 1))


def variation(masks: Tensor) -> Tensor:
    """Absolute differences of neighbours, summed over pixels, mean over images.

    >>> variation(torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]))
    tensor(2.)
    """
    total = masks.diff(dim=1).abs().sum() + masks.diff(dim=2).abs().sum()
    return total / len(masks)


LOSSES: dict[str, Loss] = {
    "rt-saliency": rt_saliency,
    "masked-in-out": masked_in_out,
    "learn-to-rank": learn_to_rank,
}
ADAPTER = LaxRecipe(stages=3)
RECIPES = dict.fromkeys(LOSSES, ADAPTER)
RECIPES["rt-saliency"] = LaxRecipe(stages=3, fills=("colour", "blurred"))
FINAL = {"rt-saliency": rt_saliency_final, "masked-in-out": masked_in_out_final}
FINAL_RECIPES = {"rt-saliency": LaxRecipe(stages=3), "masked-in-out": LaxRecipe(stages=2)}
"""With their authors' final settings; masked-in/masked-out reads the last two stages."""


def train(name: str, classifier: Classifier, loader: Any, **options: Any) -> Lax:
    """Train an adapter with the loss of another work; options are those of `train_lax`."""
    return train_lax(classifier, loader, recipe=RECIPES[name], loss=LOSSES[name], **options)


def margin(logits: Tensor, targets: Tensor, wanted: float) -> Tensor:
    """max(0, best other logit - own + wanted), mean over images: [N,C], [N] -> scalar.

    >>> margin(torch.tensor([[2.0, 0.5, 1.5]]), torch.tensor([0]), 1.0)
    tensor(0.5000)
    """
    return F.relu(_behind(logits, targets) + wanted).mean()


def destroyed(logits: Tensor, targets: Tensor, wanted: float) -> Tensor:
    """max(0, own logit - best other + wanted), mean over images: [N,C], [N] -> scalar.

    >>> destroyed(torch.tensor([[2.0, 0.5, 1.5]]), torch.tensor([0]), 5.0)
    tensor(5.5000)
    """
    return F.relu(wanted - _behind(logits, targets)).mean()


def _behind(logits: Tensor, targets: Tensor) -> Tensor:
    """By how much the best other class leads: [N,C], [N] -> [N]."""
    own = F.one_hot(targets, logits.shape[1]).bool()
    return logits.masked_fill(own, -torch.inf).amax(1) - logits.gather(1, targets[:, None])[:, 0]


def sparse(masks: Tensor) -> Tensor:
    """Mean of (M + 0.0005)^0.3, which pays most for the first bit of a pixel: [N,H,W] -> scalar.

    >>> sparse(torch.tensor([[[0.0, 1.0]]]))
    tensor(0.5512)
    """
    return (masks + 0.0005).pow(0.3).mean()


def smooth(masks: Tensor) -> Tensor:
    """Half the squared differences of neighbours, and of the border to 0: [N,H,W] -> scalar.

    A sum over pixels, mean over images, so that the size of the image hardly matters.

    >>> smooth(torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]))  # 2 edges, 4 border values of which twice
    tensor(1.6000)
    """
    edges = masks.diff(dim=1).square().sum() + masks.diff(dim=2).square().sum()
    sides = (masks[:, 0], masks[:, -1], masks[:, :, 0], masks[:, :, -1])
    border = torch.stack([side.square().sum() for side in sides]).sum()
    return (edges + BORDER * border) / (2 * len(masks))


def blank(logits: Tensor, counted: Tensor) -> Tensor:
    """Minus the entropy of the classes, 0 for images not counted: [N,C], [N] -> scalar.

    >>> blank(torch.zeros(2, 4), torch.tensor([True, False]))  # half of -log 4
    tensor(-0.6931)
    """
    logs = logits.log_softmax(1)
    return ((logs.exp() * logs).sum(1) * counted).mean()


def earned(masks: Tensor, kept_right: Tensor, left_wrong: Tensor) -> Tensor:
    """The reward, negative, of small masks that work: [N,H,W], [N] twice -> scalar.

    -(max(0, right - m) + max(0, wrong - m)) for the mean mask m: nothing is asked of the size of a
    mask where the kept part is not yet recognised, nor where what is left still is.

    >>> mask = torch.full((1, 2, 2), 0.25)
    >>> earned(mask, torch.tensor([True]), torch.tensor([False]))
    tensor(-0.7500)
    """
    means = masks.mean((1, 2))
    parts = [F.relu(works.to(means) - means) for works in (kept_right, left_wrong)]
    return -(parts[0] + parts[1]).mean()


def soft_bins(values: Tensor, noise: Tensor | None = None) -> Tensor:
    """How far each value is in each of BINS bins of equal size, highest first: [N,n] -> [N,n,BINS].

    Sinkhorn's normalisation of -(value - middle of the bin)^2 / temperature: rows sum to 1, each
    bin holds an equal share. `noise` [N,n,BINS], Gumbel's, is added before.
    """
    spread = values.std(1, keepdim=True).clamp(min=1e-6)
    scaled = (values - values.mean(1, keepdim=True)) / spread
    n = values.shape[1]
    places = ((torch.arange(BINS, device=values.device) + 0.5) / BINS * n).long()
    middles = scaled.sort(dim=1, descending=True).values[:, places]
    logs = -(scaled[:, :, None] - middles[:, None]).square()
    logs = (logs if noise is None else logs + noise) / _TEMPERATURE
    for _ in range(_ROUNDS):
        logs = logs - logs.logsumexp(1, keepdim=True)
        logs = logs - logs.logsumexp(2, keepdim=True)
    return logs.exp()


def soft_tops(cells: Tensor, count: int, generator: Generator) -> Tensor:
    """Soft masks of the highest cells, of `count` drawn shares: [N,h,w] -> [N,count,h,w]."""
    n, h, w = cells.shape
    uniform = torch.rand(n, h * w, BINS, generator=generator, device=cells.device)
    gumbel = -(-uniform.clamp(1e-6, 1 - 1e-6).log()).log()
    bins = soft_bins(cells.flatten(1), _TEMPERATURE * gumbel)
    levels = torch.randint(1, BINS, (count,), generator=generator, device=cells.device)
    tops = bins.cumsum(2)[:, :, levels - 1]
    return tops.transpose(1, 2).reshape(n, count, h, w).clamp(0, 1)


def ranking(inserted: Tensor, removed: Tensor, targets: Tensor) -> Tensor:
    """Mean probability without the top cells less that with them alone: [N,C] twice -> scalar.

    >>> sure, unsure = torch.tensor([[9.0, -9.0]]), torch.zeros(1, 2)
    >>> ranking(sure, unsure, torch.tensor([0]))
    tensor(-0.5000)
    """
    with_top, without = (
        logits.softmax(1).gather(1, targets[:, None]).mean() for logits in (inserted, removed)
    )
    return without - with_top
