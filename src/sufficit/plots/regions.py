"""A region as a picture: its outline on the photograph, beside the region alone on grey."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.classifier.classifier import check_images
from sufficit.errors import UserError
from sufficit.perturbation.bands import ranks
from sufficit.perturbation.heatmaps import check_heatmaps, resize
from sufficit.plots.style import INK

if TYPE_CHECKING:
    from PIL import Image, ImageFont

LEAST, MOST = 448, 1024  # pixels of a panel: of its shorter side at least, of its longer at most
GREY = 0.78  # behind a region that is shown alone
DIMMED = 0.68  # of the light outside a region, on the photograph
SOFT = "#6b7280"  # of the last lines of a caption
LINE = 1 / 190  # how wide an outline is, of the shorter side


def region_picture(
    photo: Tensor, heatmap: Tensor, title: str = "", lines: Sequence[str] = ()
) -> "Image.Image":
    """Draw a region, which is where a heatmap is 0.5 or more: [3,H,W], [h,w], both in 0..1.

    The photograph may have more pixels than the heatmap; the outline has those of the photograph.
    `title` and further lines are written below.
    """
    from PIL import Image

    _check(photo, heatmap)
    photo = _enlarged(photo)
    inside = mask_at(heatmap, (photo.shape[1], photo.shape[2]))
    gap = round(min(photo.shape[1:]) / 40)
    between = torch.ones(3, photo.shape[1], gap)
    panels = torch.cat([outlined(photo, inside), between, alone(photo, inside)], dim=2)
    pixels = (panels.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    drawn = Image.fromarray(pixels)
    if not title and not lines:
        return drawn
    return _with_caption(drawn, title, lines)


def region_on(image: Tensor, heatmap: Tensor) -> Tensor:
    """Return a region's outline on its image, enlarged: [C,H,W], [h,w] -> [H,W,3] in 0..1."""
    photo = _enlarged(image)
    return outlined(photo, mask_at(heatmap, (photo.shape[1], photo.shape[2]))).permute(1, 2, 0)


def mask_at(heatmap: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the region of a heatmap at another size, with the same edge: [h,w] -> bool [H,W].

    Not by enlarging the mask, whose edge would be stairs: the order of the pixels is enlarged, in
    which the edge runs between the last pixel inside and the first one outside.
    """
    marked = int((heatmap >= 0.5).sum())
    if marked == heatmap.numel():
        return torch.ones(size, dtype=torch.bool)
    places = ranks(heatmap.detach().cpu()[None])
    return resize(places, size)[0] < marked - 0.5


def outlined(photo: Tensor, inside: Tensor) -> Tensor:
    """Return a photograph with the outline of a region, darker outside: [3,H,W], bool [H,W]."""
    light = torch.where(inside, 1.0, DIMMED)
    width = max(2, round(min(photo.shape[1:]) * LINE))
    core = _edge(inside, width)
    # A dark line around the white one: visible on any background.
    halo = _edge(inside, 2 * width)
    drawn = photo * light
    drawn = torch.lerp(drawn, torch.zeros_like(drawn), 0.55 * halo)
    return torch.lerp(drawn, torch.ones_like(drawn), core)


def alone(photo: Tensor, inside: Tensor) -> Tensor:
    """Return a region alone, on grey: [3,H,W], bool [H,W]."""
    soft = _blurred(inside.float())
    return torch.lerp(torch.full_like(photo, GREY), photo, soft)


def _edge(inside: Tensor, width: int) -> Tensor:
    """Return how much of each pixel a line along the edge of a mask covers: bool [H,W] -> [H,W]."""
    reach = width // 2 + 1
    values = inside.float()[None, None]
    # The border of the picture is no edge.
    wide = F.pad(values, (reach,) * 4, mode="replicate")
    dilated = _pooled(wide, reach)
    eroded = 1 - _pooled(1 - wide, reach)
    return _blurred((dilated - eroded)[0, 0])


def _pooled(values: Tensor, reach: int) -> Tensor:
    """Return the highest value within a square around each pixel, one side after the other."""
    across = F.max_pool2d(values, (1, 2 * reach + 1), stride=1)
    return F.max_pool2d(across, (2 * reach + 1, 1), stride=1)


def _blurred(values: Tensor) -> Tensor:
    """Return values with soft steps, so that edges are no stairs: [H,W] -> [H,W]."""
    weights = torch.tensor([1.0, 2.0, 1.0]) / 4
    wide = F.pad(values[None, None], (1, 1, 1, 1), mode="replicate")
    across = F.conv2d(wide, weights.view(1, 1, 1, 3))
    return F.conv2d(across, weights.view(1, 1, 3, 1))[0, 0]


def _enlarged(photo: Tensor) -> Tensor:
    """In colours, and large enough for a crisp outline: [C,H,W] -> [3,H,W]."""
    shown = photo.detach().cpu().float()
    colours = shown if len(shown) == 3 else shown.mean(0, keepdim=True).expand(3, -1, -1)
    h, w = colours.shape[1:]
    factor = -(-LEAST // min(h, w))
    if factor == 1:
        return colours
    return resize(colours, (h * factor, w * factor)).clamp(0, 1)


def _with_caption(drawn: "Image.Image", title: str, lines: Sequence[str]) -> "Image.Image":
    """Return a picture with words below it."""
    from PIL import Image, ImageDraw

    size = max(15, round(drawn.width / 52))
    margin = round(0.8 * size)
    rows = [(title, _font(size, bold=True), INK)] if title else []
    small = _font(round(0.82 * size))
    rows += [(line, small, SOFT if number else INK) for number, line in enumerate(lines)]
    height = margin + round(1.45 * size) * len(rows) + margin // 2
    whole = Image.new("RGB", (drawn.width, drawn.height + height), "white")
    whole.paste(drawn)
    pen = ImageDraw.Draw(whole)
    top = drawn.height + margin
    for words, font, colour in rows:
        pen.text((margin // 3, top), _fitting(words, font, drawn.width - margin), colour, font)
        top += round(1.45 * size)
    return whole


def _fitting(words: str, font: "ImageFont.FreeTypeFont", width: int) -> str:
    """Return the words, or as many letters of them as fit."""
    if font.getlength(words) <= width:
        return words
    while words and font.getlength(f"{words}…") > width:
        words = words[:-1]
    return f"{words}…"


@cache
def _font(size: int, *, bold: bool = False) -> "ImageFont.FreeTypeFont":
    """Return the font of all figures, which comes with matplotlib."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(get_data_path()) / "fonts" / "ttf" / name, size)


def _check(photo: Tensor, heatmap: Tensor) -> None:
    """Raise unless the arguments are one image and one heatmap."""
    shapes = [list(one.shape) if isinstance(one, Tensor) else one for one in (photo, heatmap)]
    if not (isinstance(photo, Tensor) and photo.ndim == 3):
        raise UserError(f"a region needs one image [3,H,W], got {shapes[0]}: take images[0]")
    if not (isinstance(heatmap, Tensor) and heatmap.ndim == 2):
        raise UserError(f"a region needs one heatmap [h,w], got {shapes[1]}: take heatmaps[0]")
    check_images(photo[None])
    check_heatmaps(heatmap[None], heatmap[None, None])


def gallery(
    pictures: Sequence["Image.Image"],
    captions: Sequence[str],
    *,
    columns: int,
    title: str,
    lines: Sequence[str] = (),
) -> "Image.Image":
    """Pictures of one size in rows, a caption below each, with a title above and lines below all.

    >>> from PIL import Image
    >>> gallery([Image.new("RGB", (300, 100))] * 3, ["a", "b", "c"], columns=2, title="Abc").width
    636
    """
    from PIL import Image, ImageDraw

    width, height = pictures[0].size
    gap = width // 25
    whole = columns * width + (columns + 1) * gap
    size = max(15, whole // 55)
    cell = height + round(2.6 * size)
    top = round(2.4 * size)
    bottom = top + -(-len(pictures) // columns) * cell
    sheet = Image.new("RGB", (whole, bottom + round(1.3 * len(lines) * size)), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((gap, round(0.6 * size)), title, INK, _font(round(1.1 * size), bold=True))
    usual = _font(size)
    small = _font(round(0.75 * size))
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        row, column = divmod(number, columns)
        left = gap + column * (width + gap)
        upper = top + row * cell
        sheet.paste(picture, (left, upper))
        below = (left, upper + height + round(0.4 * size))
        pen.text(below, _fitting(caption, usual, width), INK, usual)
    for number, line in enumerate(lines):
        words = _fitting(line, small, whole - 2 * gap)
        pen.text((gap, bottom + round(1.2 * number * size)), words, INK, small)
    return sheet
