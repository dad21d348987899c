"""What a page holds: images and heatmaps as data URLs, the viewer's data, files to download."""

import base64
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pandas
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from sufficit.outside import as_csv
from sufficit.perturbation import bands
from sufficit.perturbation.bands import ranks
from sufficit.perturbation.fills import fill_for
from sufficit.perturbation.predictions import Predictions
from sufficit.provenance import plain
from sufficit.report.content import Content
from sufficit.sources.certificate import Certificate, Said, Size

MOST_POINTS = 201  # of the slider of the threshold
CUTS = 200  # positions of the slider of the size
VIEWS = ("kept", "hidden", "rest")
IMAGE_ROOM = 900_000  # bytes that all images of a page may take together
MAP_ROOM = 1_200_000  # and all heatmaps
ORDER_ROOM = 120_000  # and the orders of one fitted method
QUALITIES = (88, 75, 60, 40, 20)
SIDES = (112, 84, 56, 42)
SMALL = 96  # images up to this side are stored without loss
BLUR_SIDE = 64  # a blurred image has no finer detail than this


# Images and heatmaps


def encode_images(images: Tensor) -> list[str]:
    """Return data addresses of WebP, in the best quality that fits: [N,C,H,W] in 0..1 -> N."""
    if max(images.shape[-2:]) <= SMALL:
        return _webp(images, lossless=True, quality=80)
    return _fitting(lambda quality: _webp(images, quality=quality), QUALITIES, IMAGE_ROOM)


def encode_heatmaps(
    heatmaps: Mapping[str, Tensor], grid: Sequence[float], sides: Sequence[int] = SIDES
) -> dict[str, list[str]]:
    """Return data addresses of 8-bit PNG that hold `steps` of the maps: [N,H,W] -> N per method."""
    maps = torch.cat([found.detach().cpu().float() for found in heatmaps.values()])

    def encode(side: int) -> list[str]:
        coded = steps(_reduced(maps[:, None], side)[:, 0], grid).numpy()
        return [_picture(Image.fromarray(code), "png", optimize=True) for code in coded]

    # All methods together, so that they have one size.
    found = _fitting(encode, sides, MAP_ROOM)
    n = len(found) // len(heatmaps)
    return {method: found[i * n : (i + 1) * n] for i, method in enumerate(heatmaps)}


def steps(heatmaps: Tensor, grid: Sequence[float]) -> Tensor:
    """Return the number of grid points below each value, so that M > grid[i] where steps > i.

    >>> steps(torch.tensor([0.0, 0.5, 0.51, 1.0]), (0.0, 0.5, 1.0))
    tensor([0, 1, 2, 2], dtype=torch.uint8)
    """
    edges = torch.tensor(grid, dtype=torch.float32)
    return torch.searchsorted(edges, heatmaps.float().contiguous()).to(torch.uint8)


NOT_DRAWN = {
    "road": " Hidden pixels are grey here; the model saw them imputed from their neighbours.",
    "drop": " Hidden pixels are black here; the model saw no token of a hidden patch.",
}  # fills that depend on the mask, and what the viewer shows instead


def encode_fill(images: Tensor, fill: str | Tensor) -> list[str]:
    """Return the fill of hidden pixels: a colour or an image, one for all or one per image."""
    filled = fill_for(images.detach().cpu().float(), fill)
    if filled.shape[-2:] == (1, 1):
        return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in _rgb(filled)[:, 0, 0].tolist()]
    filled = filled.expand(-1, -1, *images.shape[-2:])
    if isinstance(fill, str) and fill == "blur":
        filled = _reduced(filled, BLUR_SIDE)
    return _webp(filled, quality=80)


def encode_orders(orders: Tensor, side: int = SIDES[0]) -> list[str]:
    """Return data addresses of grey PNGs, brighter where a pixel comes earlier: [N,H,W] -> N.

    A shade per position of the slider, so that each of them cuts at the exact place.
    """
    places = ranks(orders.cpu())
    if max(places.shape[1:]) > side:
        places = ranks(-_reduced(places[:, None], side)[:, 0])
    ends = (torch.arange(1, CUTS + 1) * places[0].numel() / CUTS + 0.5).floor()
    shades = 255 - torch.bucketize(places, ends.to(places), right=True)
    coded = shades.to(torch.uint8).numpy()
    return [_picture(Image.fromarray(shade), "png", optimize=True) for shade in coded]


def _reduced(images: Tensor, side: int) -> Tensor:
    """Return images averaged down to at most this side: [N,C,H,W] -> [N,C,h,w]."""
    longest = max(images.shape[-2:])
    if longest <= side:
        return images
    size = [max(1, round(length * side / longest)) for length in images.shape[-2:]]
    return F.interpolate(images, size, mode="area")


def _fitting(make: Callable[[int], list[str]], tries: Sequence[int], room: int) -> list[str]:
    """Return the result of the first try that fits into the room, else of the last try."""
    found: list[str] = []
    for attempt in tries:
        found = make(attempt)
        if sum(map(len, found)) <= room:
            break
    return found


def _webp(images: Tensor, **options: int | bool) -> list[str]:
    """Return data addresses of images as WebP: [N,C,H,W] -> N."""
    return [_picture(Image.fromarray(pixels), "webp", **options) for pixels in _rgb(images)]


def _rgb(images: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return 8-bit colours, grey unless there are three channels: [N,C,H,W] -> [N,H,W,3]."""
    found = images.detach().cpu().float()
    # Grey where channels are no colours.
    found = found if found.shape[1] == 3 else found.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    pixels = found.clamp(0, 1).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1)
    return np.ascontiguousarray(pixels.numpy())


def _picture(image: Image.Image, kind: str, **options: int | bool) -> str:
    """Return an image as a data address."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return _address(file.getvalue(), f"image/{kind}")


def _address(content: bytes, kind: str) -> str:
    """Return bytes as a data address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


# The viewer


def stops(values: Sequence[float], own: Iterable[float]) -> tuple[float, ...]:
    """Return as many alphas of the curves as a slider needs, and every alpha_min.

    >>> stops((0.0, 0.5, 1.0), [0.4])
    (0.0, 0.4, 0.5, 1.0)
    """
    kept = values[:: -(-len(values) // MOST_POINTS)]
    return tuple(sorted({*kept, 1.0, *own}))


def viewer_data(content: Content) -> dict[str, Any]:
    """Return all that the script needs to show masks and what the model predicts for them.

    The slider has the alphas of the curves, and every alpha_min.
    """
    methods = content.methods
    shown = content.shown
    alphas = {found.alpha_min for found in content.scores.values()}
    grid = stops(content.first.schedule.values, alphas)
    maps = encode_heatmaps(shown.heatmaps, grid)
    curves: dict[str, list[dict[str, Any]]] = {}
    for method, scores in content.scores.items():
        answers = answers_along(scores.shown, scores.alpha_min, grid)
        shares = shares_of(shown.heatmaps[method], grid)
        curves[method] = [{"share": s} | a for s, a in zip(shares, answers, strict=True)]
    msi = {method: rounded(content.scores[method]["msi"]) for method in methods}
    regions: list[dict[int, dict[str, Any]]] = [{} for _ in shown.names]
    for method, certificates in shown.certificates.items():
        encode = partial(encode_orders, shown.heatmaps[method])
        orders = _fitting(encode, SIDES, ORDER_ROOM)
        for own, certificate, order in zip(regions, certificates, orders, strict=True):
            # By place, as the viewer counts methods.
            own[methods.index(method)] = region_data(certificate, order)
    targets = content.first.targets.tolist()
    images = [
        {
            "name": name,
            "target": content.class_name(target),
            "maps": [maps[method][i] for method in methods],
            "msi": [msi[method][i] for method in methods],
            "curves": [curves[method][i] for method in methods],
            "regions": regions[i],
        }
        for i, (name, target) in enumerate(zip(shown.names, targets, strict=True))
    ]
    named = {number for found in curves.values() for one in found for number in classes_in(one)}
    return {
        "grid": [round(alpha, 4) for alpha in grid],
        "starts": [grid.index(content.scores[method].alpha_min) for method in methods],
        "methods": methods,
        "best": methods.index(content.standing.best),
        "ranked": [k for k, method in enumerate(methods) if method in content.standing.ranking],
        "classes": {number: content.class_name(number) for number in sorted(named)},
        "fill": encode_fill(shown.images, shown.fill),
        "images": images,
    }


def region_data(certificate: Certificate, order: str) -> dict[str, Any]:
    """Return what the viewer shows of one image's regions: the fitted one, and the sizes asked."""
    around = certificate.fills
    fills = [one.fill for one in around]
    fitted = Size(
        share=certificate.share,
        region={one.fill: one.region for one in around},
        rest={one.fill: one.rest for one in around},
    )
    whole = Size(
        share=1.0,
        region={one.fill: certificate.whole for one in around},
        rest={one.fill: one.nothing for one in around},
    )
    sizes = {one.share: size_data(one, fills) for one in (*certificate.sizes, whole, fitted)}
    return {
        "order": order,
        "share": round(1000 * certificate.share),
        "sentence": certificate.sentence,
        "fills": fills,
        "sizes": [sizes[share] for share in sorted(sizes)],
    }


def size_data(size: Size, fills: Sequence[str]) -> list[Any]:
    """Return a size in thousandths, and the answers for region and rest with each fill.

    An answer is the confidence in the target; where another class comes first, that class and the
    confidence; None where the model was not asked.
    """

    def answer(said: Said | None) -> Any:
        if said is None:
            return None
        (confidence,) = rounded(torch.tensor([said.confidence]))
        return confidence if said.is_target else [said.name, confidence]

    parts = [[answer(said.get(fill)) for fill in fills] for said in (size.region, size.rest)]
    return [round(1000 * size.share), *parts]


def shares_of(heatmaps: Tensor, grid: Sequence[float]) -> list[list[float | None]]:
    """Return for each image the share of its pixels above each alpha: [N,H,W] -> N."""
    # Runs of ranks between two cuts: their sizes are the pixels between two alphas.
    counts = bands.runs(heatmaps.cpu(), [bands.show(a) for a in grid]).diff(dim=2)[:, :, 0]
    return [rounded(share) for share in counts / heatmaps[0].numel()]


def answers_along(
    predictions: Predictions, alpha_min: float, grid: Sequence[float]
) -> list[dict[str, Any]]:
    """Return for each image the predictions for what is kept, hidden and left at each alpha.

    For each view there are probabilities, None where the model was not asked; hits as one text of
    1, 0 and ?; and the predicted class, where it is known and not the target.
    """
    n = len(predictions.targets)
    found: list[dict[str, Any]] = [{} for _ in range(n)]
    views: dict[str, Callable[[float], bands.Band]] = {
        "kept": bands.show,
        "hidden": partial(bands.hide, alpha_min),  # what is between alpha_min and alpha
        "rest": bands.rest,
    }
    for view, band_at in views.items():
        every = [band_at(alpha) for alpha in grid]
        # A run of few columns, or of sampled masks, has not asked all of them.
        known = [place for place, band in enumerate(every) if predictions.asked([band])]
        asked = [every[place] for place in known]
        confidences = torch.full((n, len(grid)), torch.nan, dtype=torch.float64)
        confidences[:, known] = predictions.of(asked, "confidence")
        hits = torch.full((n, len(grid)), torch.nan, dtype=torch.float64)
        hits[:, known] = predictions.of(asked, "accuracy")
        classes = torch.full((n, len(grid)), -1)  # no class
        classes[:, known] = predictions.classes_of(asked).long()
        for row, one in enumerate(found):
            right = hits[row].tolist()
            named = classes[row].tolist()
            one[view] = rounded(confidences[row])
            one[f"{view}_hits"] = "".join("?" if math.isnan(hit) else f"{hit:.0f}" for hit in right)
            one[f"{view}_said"] = [
                number if hit == 0 and number >= 0 else None
                for hit, number in zip(right, named, strict=True)
            ]
    return found


def classes_in(answers: dict[str, Any]) -> set[int]:
    """Return the classes that the model predicts for one image and method, without the target."""
    return {n for view in VIEWS for n in answers[f"{view}_said"] if n is not None}


def rounded(values: Tensor) -> list[float | None]:
    """Return values with four digits, None for NaN: [N] -> N."""
    return [None if math.isnan(value) else round(value, 4) for value in values.tolist()]


# Downloads


def downloads(content: Content) -> list[tuple[str, str, str]]:
    """Return (file name, what it holds, data address) of every file that a reader can download."""
    summaries = {method: content.summaries[method] for method in content.methods}
    facts = {
        "title": content.title,
        "facts": asdict(content.facts) | {"n": content.n},
        "alpha_min": {name: found.alpha_min for name, found in content.scores.items()},
        "score": content.first.schedule.score,
        "methods": summaries,
        "standing": content.standing,
    }
    means = pandas.DataFrame(
        {"method": _text(method), "column": column} | asdict(estimate)
        for method, found in summaries.items()
        for column, estimate in found.items()
    )
    text = json.dumps(plain(facts), indent=2, ensure_ascii=False) + "\n"
    found = [
        ("methods.csv", "every mean with its interval", as_csv(means)),
        ("report.json", "means, comparisons and facts", text),
    ]
    frames = []
    for method in content.methods if content.rows else ():
        own = content.rows[method]
        targets = [_text(content.class_name(target)) for target in own["target"].tolist()]
        names = [_text(str(name)) for name in own["image"]]
        facts = {"method": _text(method), "image": names, "target": targets}
        columns = {name: own[name] for name in content.scores[method].columns}
        frames.append(pandas.DataFrame(facts | columns))
    if frames:
        every = as_csv(pandas.concat(frames).round(4))
        found.append(("images.csv", "the scores of every image", every))
    kinds = {"csv": "text/csv;charset=utf-8", "json": "application/json;charset=utf-8"}
    return [
        (name, what, _address(_text(text).encode(), kinds[name.rpartition(".")[2]]))
        for name, what, text in found
    ]


def _text(name: str) -> str:
    """Return a name with escapes for raw bytes of a file name, which are no text."""
    return name.encode("utf-8", "backslashreplace").decode()
