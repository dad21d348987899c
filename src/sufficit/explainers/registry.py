"""Every method by its name on the command line; a new one is a function and an entry here."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from sufficit.errors import UserError, unknown
from sufficit.explainers import attention, cams, extremal, gradients, masking, relevance
from sufficit.explainers.explainer import Explainer, Option, method_word, of_library, split_word
from sufficit.explainers.libraries import library_method
from sufficit.explainers.region_search import SEARCHED_FILLS, region_search
from sufficit.perturbation.heatmaps import normalize


def explainer_named(word: str) -> Explainer:
    """Return the method of a word such as gradcam or finer-cam:nearest=5.

    A value without a name is that of the method's first option.

    >>> explainer_named("finer-cam:nearest=5").settings
    {'nearest': 5, 'reading': 'weighted'}
    """
    name, parts = split_word(word)
    entry = _entry(name)
    options: dict[str, str] = {}
    for option, value in parts:
        key = option or next(iter(entry.takes), value)
        if key in options:
            raise UserError(f"{word} gives {key} twice: leave one out")
        options[key] = value
    return entry.with_options(name, options)


def full_word(word: str) -> str:
    """Return the word with the value of every option, also of those left at their defaults.

    >>> full_word("finer-cam:nearest=5"), full_word("gradcam")
    ('finer-cam:nearest=5:reading=weighted', 'gradcam')
    """
    return method_word(split_word(word)[0], explainer_named(word).settings)


def word_of(name: str, options: Mapping[str, Any]) -> str:
    """Return the word for a method's name and options, which are checked first."""
    if not isinstance(name, str) or not isinstance(options, Mapping):
        wanted = '("integrated-gradients", {"steps": 20})'
        raise UserError(f"a method with options is {wanted}, got {(name, options)!r:.200}")
    _entry(name).with_options(name, options)
    return method_word(name, options)


def _entry(name: str) -> Explainer:
    """Return the method of a name, before its options are set; raise for an unknown one."""
    if of_library(name):
        return library_method(name)
    if name not in EXPLAINERS:
        raise unknown("method", name, EXPLAINERS)
    return EXPLAINERS[name]


def method_facts(explainer: Explainer) -> dict[str, Any]:
    """Return the facts of a method that lists show."""
    return {
        "description": explainer.description,
        "for": explainer.what_for,
        "reference": explainer.reference,
        "cost": explainer.passes,
        "nets": explainer.nets,
        "class_agnostic": explainer.class_agnostic,
        "sign": explainer.sign,
        "extra": explainer.extra,
        "options": {name: asdict(option) for name, option in explainer.takes.items()},
    }


def random(images: Tensor, seed: int = 0) -> Tensor:
    """Return uniform noise in each pixel, the same on every device: [N,C,H,W] -> [N,H,W]."""
    n, _, h, w = images.shape
    generator = torch.Generator(device="cpu").manual_seed(seed)
    noise = torch.rand(n, h, w, generator=generator, dtype=torch.float32, device="cpu")
    return noise.to(images.device)


def center(images: Tensor, seed: int = 0) -> Tensor:
    """Return a Gaussian in the middle, a quarter of each side wide: [N,C,H,W] -> [N,H,W].

    >>> center(torch.zeros(1, 3, 3, 3))[0]
    tensor([[0.0000, 0.2913, 0.0000],
            [0.2913, 1.0000, 0.2913],
            [0.0000, 0.2913, 0.0000]])
    """
    n, _, h, w = images.shape
    middles = [(torch.arange(side, device=images.device) + 0.5) / side * 2 - 1 for side in (h, w)]
    down, right = (torch.exp(-2 * middle.square()) for middle in middles)  # over -1..1
    return normalize((down[:, None] * right)[None]).expand(n, h, w).clone()


def everything(images: Tensor, seed: int = 0) -> Tensor:
    """Return ones: the whole image is marked: [N,C,H,W] -> [N,H,W]."""
    n, _, h, w = images.shape
    return torch.ones(n, h, w, dtype=torch.float32, device=images.device)


_GRADIENT = 3  # a forward and a backward pass
_GAMMA = Option(0.25, "more weight for contributions of the output's sign", least=0.0)
_FILL = Option("black", "what hidden pixels show", choices=("black", "mean", "blur", "noise"))
# captum and zennit have some of these too, as captum:NAME and zennit:NAME. One of theirs would take
# the place of ours where it needs at most a tenth more time and memory on a GPU. None does on both
# networks that were measured, a CNN and a transformer (benchmarks/methods.py).
EXPLAINERS: dict[str, Explainer] = {
    # CAMs share a forward pass, and a backward pass for each score, to the layer alone. captum's
    # takes passes of its own, three times the time and six times the memory, and reads no tokens.
    "gradcam": Explainer(
        description="channels weighted by their mean gradient",
        needs="gradients",
        draw=cams.gradcam,
        what_for="the usual first look at a CNN",
        reference="Selvaraju et al. 2017",
        cost=_GRADIENT,
    ),
    "gradcam++": Explainer(
        description="channels weighted by their positive gradients, higher orders included",
        needs="gradients",
        draw=cams.gradcam_plus_plus,
        what_for="several objects of one class in an image",
        reference="Chattopadhay et al. 2018",
        cost=_GRADIENT,
    ),
    "layercam": Explainer(
        description="each cell weighted by its own positive gradient",
        needs="gradients",
        draw=cams.layercam,
        what_for="finer maps, also from early layers",
        reference="Jiang et al. 2021",
        cost=_GRADIENT,
    ),
    "hirescam": Explainer(
        description="features times gradients, cell by cell",
        needs="gradients",
        draw=cams.hirescam,
        what_for="cells that provably raised the logit, if one linear layer follows the features",
        reference="Draelos and Carin 2020",
        cost=_GRADIENT,
    ),
    "kpca-cam": Explainer(
        description="first kernel principal component of the features, the same for every class",
        needs="features",
        draw=cams.kpca_cam,
        what_for="what stands out in the features, without gradients",
        reference="Karmani et al. 2024",
        class_agnostic=True,
    ),
    "eigencam": Explainer(
        description=(
            "projection on the first principal component of the features, the same for every class"
        ),
        needs="features",
        draw=cams.eigencam,
        what_for="what stands out in the features, without gradients",
        reference="Muhammad and Yeasin 2020",
        class_agnostic=True,
    ),
    "finer-cam": Explainer(
        description="Grad-CAM of the target's logit against those of the nearest classes",
        needs="gradients",
        draw=cams.gradcam,
        what_for="what sets the class apart from similar ones",
        reference="Zhang et al. 2025",
        cost=_GRADIENT,
        score=cams.contrast,
        options={
            "nearest": Option(3, "classes to compare with", least=1),
            "reading": Option(
                "weighted",
                "the grad-cam package's formula, or the paper's mean",
                choices=("weighted", "mean"),
            ),
        },
    ),
    # captum and zennit have none of the next three.
    "rollout": Explainer(
        description="product of all blocks' attention, the same for every class",
        needs="attention",
        draw=attention.rollout,
        what_for="where a transformer's tokens come from",
        reference="Abnar and Zuidema 2020",
        class_agnostic=True,
        nets="transformer",
        sign="none",
    ),
    "generic-attribution": Explainer(
        description="attention times its gradient, rolled over the blocks",
        needs="model",
        draw=attention.generic_attribution,
        what_for="the tokens of a transformer that speak for the class",
        reference="Chefer et al. 2021",
        cost=_GRADIENT,
        nets="transformer",
        sign="none",
    ),
    "attnlrp": Explainer(
        description="the logit brought back through a transformer by rules of relevance",
        needs="model",
        draw=relevance.attnlrp,
        what_for="pixels that speak for the class of a transformer, in one backward pass",
        reference="Achtibat et al. 2024",
        cost=_GRADIENT,
        nets="transformer",
        signed=True,
        options={"gamma": replace(_GAMMA, default=0.05)},
    ),
    # zennit's takes 1.6 times the time: it changes a copy of the model; ours replaces functions.
    "lrp": Explainer(
        description="the logit brought back through a CNN by the rules epsilon, gamma and box",
        needs="model",
        draw=relevance.lrp,
        what_for="pixels that speak for the class of a CNN, in one backward pass",
        reference="Montavon et al. 2019",
        cost=_GRADIENT,
        nets="convolutional",
        signed=True,
        options={"gamma": _GAMMA},
    ),
    # captum's takes two to three times the time, for the copy of the model that it works on.
    "input-x-gradient": Explainer(
        description="the image times its gradient",
        needs="model",
        draw=gradients.input_x_gradient,
        what_for="the cheapest attribution per pixel",
        reference="Shrikumar et al. 2016",
        signed=True,
        cost=_GRADIENT,
    ),
    # captum's is within a tenth on a ResNet50 and a quarter slower on a transformer; it has no
    # baseline but black.
    "integrated-gradients": Explainer(
        description="gradients along the line from a baseline, times the difference to it",
        needs="model",
        draw=gradients.integrated_gradients,
        what_for="attributions per pixel that sum to the change of the logit",
        reference="Sundararajan et al. 2017",
        cost=lambda steps, **_: 3 * steps,
        signed=True,
        options={
            "steps": Option(50, "points on the line", least=1),
            "baseline": replace(_FILL, about="the image that shows nothing"),
        },
    ),
    # captum draws the random numbers of this and the next for a batch as a whole. So that no map
    # depends on another image, its GradientShap takes one image at a time, and five to ten times
    # the time. Its SmoothGrad, in batches, is as fast on a CNN and a sixth slower on a transformer.
    "expected-gradients": Explainer(
        description=(
            "integrated gradients over many baselines, each with a random point of its line"
        ),
        needs="model",
        draw=gradients.expected_gradients,
        what_for="attributions per pixel that hang on no single baseline",
        reference="Erion et al. 2021",
        cost=lambda samples, **_: 3 * samples,
        signed=True,
        options={
            "samples": Option(50, "baselines drawn", least=1),
            "baselines": Option("noise", "noise, or a folder of images such as the training data"),
        },
    ),
    "smoothgrad": Explainer(
        description="the mean gradient at noisy copies of the image",
        needs="model",
        draw=gradients.smoothgrad,
        what_for="pixels the logit reacts to, without the noise of one gradient",
        reference="Smilkov et al. 2017",
        cost=lambda samples, **_: 3 * samples,
        sign="absolute",
        signed=True,
        options={
            "samples": Option(25, "noisy copies", least=1),
            "noise": Option(0.15, "std of the noise, as a share of the image's range", least=0.0),
        },
    ),
    # Masks go to the model as those of all columns do: with every fill, by confidence or by a score
    # of the user's, in batches that are halved where memory is short. captum's Occlusion takes 1.2
    # to 1.8 times the memory, its KernelShap four to eight times the time. It has no Score-CAM and
    # no RISE.
    "scorecam": Explainer(
        description="channels weighted by the logit that each leaves as a mask",
        needs="model",
        draw=masking.scorecam,
        what_for="a CAM without gradients",
        reference="Wang et al. 2020",
        cost=lambda channels, **_: channels + 1 if channels else "K + 1",
        options={"channels": Option(0, "ask those with the highest mean only; 0: all", least=0)},
    ),
    "occlusion": Explainer(
        description="how much the confidence falls when a square is hidden",
        needs="model",
        draw=masking.occlusion,
        what_for="a measured effect per place, for any model",
        reference="Zeiler and Fergus 2014",
        cost=lambda grid, window, **_: (grid - window + 1) ** 2 + 1,
        signed=True,
        options={
            "grid": Option(14, "cells per side; the square moves by one", least=1),
            "window": Option(2, "cells per side of the square", least=1),
            "fill": _FILL,
        },
    ),
    "rise": Explainer(
        description="mean of random masks, weighted by the confidence that they leave",
        needs="model",
        draw=masking.rise,
        what_for="any model that answers, also without gradients",
        reference="Petsiuk et al. 2018",
        cost=lambda masks, **_: masks,
        sign="none",
        options={
            "masks": Option(4000, "random masks, the same for all images", least=1),
            "cells": Option(7, "cells per side", least=1),
            "share": Option(0.5, "probability that a cell is shown", least=0.01, most=1.0),
            "fill": _FILL,
        },
    ),
    "kernel-shap": Explainer(
        description="Shapley values of square cells",
        needs="model",
        draw=masking.kernel_shap,
        what_for="a fair share of the logit for every place",
        reference="Lundberg and Lee 2017",
        cost=lambda samples, **_: samples + 2,
        signed=True,
        options={
            "grid": Option(7, "cells per side", least=1),
            "samples": Option(1000, "coalitions of cells", least=2),
            "fill": _FILL,
        },
    ),
    # captum and zennit have none of the next two.
    "extremal-perturbation": Explainer(
        description=(
            "the smooth mask of a given area that keeps the logit highest, by gradient steps"
        ),
        needs="model",
        draw=extremal.extremal_perturbation,
        what_for="the part of an image that suffices, searched for each image",
        reference="Fong et al. 2019",
        final=True,
        cost=lambda steps, **_: 3 * steps,
        sign="none",
        options={
            "area": Option(0.1, "share of the pixels to keep", least=0.001, most=0.999),
            "steps": Option(800, "gradient steps", least=1),
        },
    ),
    "region-search": Explainer(
        description=(
            "the box of each image that scores best when it is asked: the ceiling, not an"
            " explanation"
        ),
        needs="model",
        draw=region_search,
        what_for="what a method can reach, and with one fill what MSI can be made to say",
        final=True,
        cost=lambda calls, **_: calls,
        sign="none",
        options={
            "calls": Option(1500, "forward passes per image, at most", least=18),
            "fills": Option("+".join(SEARCHED_FILLS), "fills to search with, + between them"),
            "score": Option("confidence", "what a box scores", choices=("accuracy", "confidence")),
        },
    ),
    # Controls ignore the image: a method must beat them.
    "everything": Explainer(
        "control: the whole image, the zero line",
        "images",
        everything,
        "a map with a lower MSI is worse than marking the whole image",
        class_agnostic=True,
        cost=0,
        sign="none",
    ),
    "random": Explainer(
        description="control: uniform noise",
        needs="images",
        draw=random,
        what_for="a control that any method must beat",
        class_agnostic=True,
        cost=0,
        sign="none",
    ),
    "center": Explainer(
        description="control: a Gaussian in the middle",
        needs="images",
        draw=center,
        what_for="a control that any method must beat",
        class_agnostic=True,
        cost=0,
        sign="none",
    ),
}

CAMS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")
"""The five CAMs of the paper's tables."""
RECOMMENDED = {"convolutional": "gradcam", "transformer": "generic-attribution"}
"""What a region is cut from if no method is named, by the kind of network."""
