"""`region-search`: what a mask of one image can reach, found by asking the model.

It is no way to explain. It shows how much of MSI is there to be had, and, with one fill, what MSI
can be made to say (docs/limits.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError, unknown
from sufficit.perturbation.fills import check_fill_name
from sufficit.perturbation.predict import predict_views, whole_values
from sufficit.perturbation.predictions import ScoreKind, hits

SEARCHED_FILLS = ("black", "mean", "noise")  # blur is left for the held-out score
SHARE = 0.6  # of the calls for the boxes of the grid, the rest moves their edges
STARTS = 3  # boxes per image whose edges are moved
FEWEST = 9  # boxes of a grid of 2 x 2 cells
_MASK_ELEMENTS = 2**27  # of masks at a time
_MOVES = torch.cat([torch.eye(4, dtype=torch.long), -torch.eye(4, dtype=torch.long)])


# Its parameters are the options of the method; `layer` and `seed` are what every method gets.
def region_search(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor,
    *,
    calls: int = 1500,
    fills: str | Sequence[str] = SEARCHED_FILLS,
    score: ScoreKind = "confidence",
    batch_size: int | None = None,
    layer: str | None = None,
    seed: int = 0,
) -> Tensor:
    """Return the box of each image with the highest MSI: [N,C,H,W], [N] -> [N,H,W].

    Every box on a grid is asked, as fine a grid as 60 % of the calls allow. Then each edge of the
    three best boxes moves, in steps that start at half a cell and are halved where none helps. A
    box costs two calls per fill: itself, and the rest of the image. The heatmap is 1 inside the
    box. MSI is the mean over fills. `fills` may be one text, as in "black+noise". `seed` and
    `layer` are not used.
    """
    names = tuple(fills.split("+")) if isinstance(fills, str) else tuple(fills)
    for name in names:
        check_fill_name(name)
    if score not in ("accuracy", "confidence"):
        raise unknown("score", score, ("accuracy", "confidence"))
    budget = calls // (2 * max(1, len(names)))
    if not names or budget < FEWEST:
        least = 2 * FEWEST * max(1, len(names))
        raise UserError(
            f"region-search needs a fill and {least} calls or more for {len(names)} fills, got"
            f" {calls}: raise calls, or give fewer fills"
        )
    search = BoxSearch(classifier, images, targets.cpu(), names, score, batch_size)
    boxes = search.best(budget)
    return boxes_as_masks(boxes, images.shape[2:]).to(images.device, torch.float32)


@dataclass(frozen=True)
class BoxSearch:
    """Images, their classes, and what a box is worth."""

    classifier: Classifier
    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]
    fills: tuple[str, ...]
    score: ScoreKind
    batch_size: int | None = None

    @cached_property
    def whole(self) -> Tensor:
        """The values of the whole images by a score of the user's: [N]."""
        return whole_values(self.classifier, self.images, self.batch_size)

    def best(self, budget: int) -> Tensor:
        """Return the best box of each image after at most so many boxes were asked: [N,4]."""
        n = len(self.images)
        h, w = self.images.shape[2:]
        cells = grid_for(SHARE * budget, min(h, w))
        grid = grid_boxes(cells, h, w)  # [G,4]
        every = torch.arange(n).repeat_interleave(len(grid))
        highest, chosen = self.worths(grid.repeat(n, 1), every).view(n, -1).topk(STARTS)
        boxes = grid[chosen].flatten(0, 1)
        worths = highest.flatten()
        owners = torch.arange(n).repeat_interleave(STARTS)
        steps = torch.tensor([h, w, h, w]).repeat(len(boxes), 1).div(2 * cells).ceil().long()
        moving = torch.arange(len(boxes))  # the boxes whose edges still move
        for _ in range((budget - len(grid)) // (STARTS * len(_MOVES))):
            if not len(moving):
                break
            moved = within(boxes[moving, None] + _MOVES * steps[moving, None], h, w)  # [m,8,4]
            asked = owners[moving].repeat_interleave(len(_MOVES))
            best, which = self.worths(moved.flatten(0, 1), asked).view(len(moving), -1).max(1)
            # A box takes its best move; one that no move helps gets smaller steps, or stops.
            better = best > worths[moving]
            boxes[moving[better]] = moved[better, which[better]]
            worths[moving[better]] = best[better]
            done = ~better & (steps[moving] == 1).all(1)
            steps[moving[~better]] = (steps[moving[~better]] + 1) // 2
            moving = moving[~done]
        best = worths.view(n, -1).argmax(1)
        return boxes.view(n, -1, 4)[torch.arange(n), best]

    def worths(self, boxes: Tensor, owners: Tensor) -> Tensor:
        """Return MSI of each box but for a constant: [T,4], [T] -> [T].

        MSI of a mask of zeros and ones is kept - (rest + empty) / 2 - area in the limit of fine
        steps; `empty`, the score of a hidden image, is the same for all masks and left out.
        """
        h, w = self.images.shape[2:]
        parts = torch.arange(len(boxes)).split(max(1, _MASK_ELEMENTS // (2 * h * w)))
        kept = torch.cat([self._asked(boxes[part], owners[part]) for part in parts])
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / (h * w)
        return kept - area

    def _asked(self, boxes: Tensor, owners: Tensor) -> Tensor:
        """Return mean over fills of kept - rest / 2: [T,4], [T] -> [T]."""
        # Images share the boxes of the grid: each mask is made once.
        distinct, through = boxes.unique(dim=0, return_inverse=True)
        inside = boxes_as_masks(distinct, self.images.shape[2:]).to(self.classifier.device)
        masks = torch.cat([inside, ~inside])
        views = owners.repeat(2), torch.cat([through, through + len(distinct)])
        targets = self.targets[views[0]]
        total = torch.zeros(2 * len(boxes), dtype=torch.float64)
        for fill in self.fills:
            answers = predict_views(
                self.classifier,
                self.images,
                masks,
                views,
                targets=targets,
                fill=fill,
                batch_size=self.batch_size,
                whole=self.whole,
            )
            by_class = self.score == "accuracy"
            answers = answers.cpu()
            total += hits(answers.named, targets) if by_class else answers.confidences
        kept, rest = (total / len(self.fills)).nan_to_num(-1).chunk(2)  # NaN is never the best
        return kept - rest / 2


def grid_for(most: float, side: int) -> int:
    """Return the cells per side of the finest grid with at most so many boxes, two or more.

    >>> grid_for(450, 32), grid_for(0, 32), grid_for(10**9, 32)
    (6, 2, 32)
    """
    cells = 2
    while cells < side and ((cells + 1) * (cells + 2) // 2) ** 2 <= most:
        cells += 1
    return cells


def grid_boxes(cells: int, h: int, w: int) -> Tensor:
    """Return every box of whole cells (top, left, bottom, right), small ones first: [G,4].

    >>> grid_boxes(2, 4, 6)[:3].tolist(), len(grid_boxes(6, 32, 32))
    ([[0, 0, 2, 3], [0, 3, 2, 6], [2, 0, 4, 3]], 441)
    """
    lines = [[round(k * side / cells) for k in range(cells + 1)] for side in (h, w)]
    spans = (combinations(line, 2) for line in lines)
    boxes = [(top, left, end, right) for (top, end), (left, right) in product(*spans)]
    boxes.sort(key=lambda box: ((box[2] - box[0]) * (box[3] - box[1]), box))
    return torch.tensor(boxes)


def within(boxes: Tensor, h: int, w: int) -> Tensor:
    """Return boxes cut to the image, each at least a pixel high and wide: [...,4]."""
    top, left, bottom, right = boxes.unbind(-1)
    top = top.clamp(0, h - 1)
    left = left.clamp(0, w - 1)
    bottom = bottom.clamp(max=h).maximum(top + 1)
    right = right.clamp(max=w).maximum(left + 1)
    return torch.stack([top, left, bottom, right], -1)


def boxes_as_masks(boxes: Tensor, size: Sequence[int]) -> Tensor:
    """Return the pixels inside boxes (top, left, bottom, right): [T,4] -> bool [T,H,W].

    >>> boxes_as_masks(torch.tensor([[0, 1, 2, 3]]), (2, 3)).int().tolist()
    [[[0, 1, 1], [0, 1, 1]]]
    """
    top, left, bottom, right = boxes[:, :, None].unbind(1)
    down, across = (torch.arange(side) for side in size)
    rows = (down >= top) & (down < bottom)
    columns = (across >= left) & (across < right)
    return rows[:, :, None] & columns[:, None, :]
