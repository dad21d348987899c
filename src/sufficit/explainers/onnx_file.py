"""A classifier and its adapter as one ONNX file: images in, logits, heatmaps and orders out."""

import copy
import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sufficit.classifier.classifier import Classifier, check_has_classes
from sufficit.classifier.loading import extra
from sufficit.errors import UserError
from sufficit.explainers.order_net import resized
from sufficit.files import check_output, make_folder, place, writing

if TYPE_CHECKING:
    from sufficit.explainers.lax import Lax

EXTRA = "onnx"
NAMES = ("logits", "heatmap", "order")
OPSET = 20
TRIED = 3  # images that the file is checked with, and traced with
CLOSE = 1e-4  # of the range of logits and orders
SWITCHED = 1e-3  # share of the pixels that may lie on the other side of the cut
EDGE = 0.005  # as in a map that is cut: values fall by rank from 1 inside, to 0 outside


class Explained(nn.Module):
    """A classifier that gives its logits, and the heatmap and the order for its own prediction."""

    def __init__(self, classifier: Classifier, lax: "Lax") -> None:
        super().__init__()
        self.classifier = classifier
        self.model, self.lax = classifier.bare, lax

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images in 0..1 [N,C,H,W] -> logits [N,classes], heatmap [N,H,W], order [N,H,W]."""
        seen = self.lax.look(self.classifier, images)
        drawn = self.lax.draw(seen, seen.logits.argmax(1))
        order = resized(drawn[:, None].float(), images.shape[2:])[:, 0]
        heatmap = order if self.lax.head is None else cut(order, self.lax.shares(drawn))
        return seen.logits, heatmap, order


def cut(order: Tensor, shares: Tensor) -> Tensor:
    """Maps that mark the first share of the pixels by rank, as `cut_at` does: [N,H,W], [N].

    >>> cut(torch.tensor([[[0.3, 0.9], [0.1, 0.7]]]), torch.tensor([0.5])) >= 0.5
    tensor([[[False,  True],
             [False,  True]]])
    """
    flat = order.flatten(1)
    pixels = flat.shape[1]
    # To a millionth first: 0.145 in float32 is less than 0.145.
    inside = ((shares.double() * 1e6).round() * pixels / 1e6 + 0.5).floor().float()[:, None]
    places = torch.arange(pixels, dtype=torch.float32)
    values = 1 - EDGE * places / inside.clamp(min=1)
    rest = EDGE * (pixels - places) / (pixels - inside).clamp(min=1)
    by_rank = torch.where(places < inside, values, rest.clamp(max=EDGE))
    sorted_places = flat.topk(pixels, dim=1).indices  # a sort that ONNX has
    return torch.zeros_like(flat).scatter(1, sorted_places, by_rank).view_as(order)


def export(
    lax: "Lax", classifier: Classifier, path: str | Path, size: tuple[int, int] | None = None
) -> Path:
    """Write the file, checked against PyTorch, for images of a size or of the classifier's own."""
    check_has_classes(classifier)
    extra(EXTRA, "an export")
    extra("onnxscript", "an export")
    lax.check(classifier)
    if lax.head is not None and lax.head.differentiates:
        raise UserError(
            "this adapter reads a gradient of the model, which ONNX has not: export an adapter of a"
            " model whose head is linear in the mean of its features, or in its class token"
        )
    if lax.layer is None:
        raise UserError("this adapter belongs to no classifier: train it, or load a trained one")
    size = size or (classifier.view.crop if classifier.view is not None else None)
    if size is None:
        raise UserError("the size of the images is not known: give size=(height, width), or --size")
    path = place(path)
    if path.suffix != ".onnx":
        raise UserError(f"the file of an export must end in .onnx, got {path.name}")
    check_output(path.parent)
    make_folder(path.parent)
    # On a copy: the user's model stays where it is, in its own precision.
    plain = classifier.over(copy.deepcopy(classifier.bare).float().cpu().eval())
    explained = Explained(plain, copy.deepcopy(lax).float().cpu().eval()).eval()
    shape = (TRIED, classifier.channels, *size)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu")
    with torch.no_grad():
        wanted = explained(images)
        program = _program(explained, images)
    with writing(path) as part:
        program.save(str(part), external_data=False)
        check_file(part, images, wanted, lax)
    return path


def _program(explained: Explained, images: Tensor):  # type: ignore[no-untyped-def]  # torch's own
    """The traced program; torch prints how it goes, which is of no use here."""
    batch = {0: torch.export.Dim("batch", min=1)}
    quiet = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(quiet), redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            traced = torch.export.export(
                explained, (images,), dynamic_shapes={"images": batch}, strict=False
            )
            return torch.onnx.export(
                traced,
                dynamo=True,
                input_names=["images"],
                output_names=list(NAMES),
                opset_version=OPSET,
                verbose=False,
            )
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"this model cannot be exported to ONNX ({type(error).__name__}: {reason}): it must run"
            " without decisions that depend on the images"
        ) from error


def check_file(path: Path, images: Tensor, wanted: tuple[Tensor, ...], lax: "Lax") -> None:
    """Raise unless onnxruntime finds in the file what PyTorch found."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    # In another number of images than it was traced with.
    parts = [session.run(list(NAMES), {"images": some.numpy()}) for some in images.split(2)]
    found = {
        name: torch.cat([torch.from_numpy(part[number]) for part in parts])
        for number, name in enumerate(NAMES)
    }
    known = dict(zip(NAMES, wanted, strict=True))
    for name in ("logits", "order"):
        spread = float(known[name].max() - known[name].min())
        error = float((found[name] - known[name]).abs().max())
        if not error <= CLOSE * max(spread, 1e-12):
            raise UserError(
                f"the exported {name} differ from PyTorch's by {error:.2g}, of a range of"
                f" {spread:.2g}: this model cannot be exported faithfully"
            )
    switched = ((found["heatmap"] >= 0.5) != (known["heatmap"] >= 0.5)).double().mean()
    if not switched <= SWITCHED:
        raise UserError(
            f"of the exported heatmaps {float(switched):.1%} of the pixels lie on the other side of"
            " the cut: this model cannot be exported faithfully"
        )
