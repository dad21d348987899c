"""Every method that fits draws for models of twelve families of three libraries."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision import models

from small_models import Traces, random_images, settled, transformers_vit
from sufficit import Classifier, explain
from sufficit.explainers import EXPLAINERS

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

QUICK = {
    "integrated-gradients": "integrated-gradients:steps=2",
    "expected-gradients": "expected-gradients:samples=2",
    "smoothgrad": "smoothgrad:samples=2",
    "occlusion": "occlusion:grid=3",
    "rise": "rise:masks=6:cells=3",
    "kernel-shap": "kernel-shap:grid=2:samples=14",
    "extremal-perturbation": "extremal-perturbation:steps=2",
    "region-search": "region-search:calls=54",
}
# Their cost grows with the channels, or they are tested with adapters and on smaller nets.
SLOW = ("scorecam", "refine")
TINY = {"num_classes": 5}


def timm_model(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **TINY, **options).eval()


def torchvision_vit() -> nn.Module:
    torch.manual_seed(0)
    return models.VisionTransformer(32, 8, 2, 2, 12, 24, num_classes=5).eval()


def transformers_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "resnet":
        config = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=5
        )
        return transformers.ResNetForImageClassification(config).eval()
    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 12, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_labels": 5}
    config = transformers.Dinov2Config(**sizes, mlp_ratio=2)
    return transformers.Dinov2ForImageClassification(config).eval()


FAMILIES: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {  # model, side, a plain ViT?
    "torchvision resnet": (lambda: settled("resnet18", 32), 32, False),
    "torchvision mobilenet": (lambda: settled("mobilenet_v2", 32), 32, False),
    "torchvision densenet": (
        lambda: models.DenseNet(4, (2, 2), 8, num_classes=5).eval(),
        32,
        False,
    ),
    "torchvision vit": (torchvision_vit, 32, True),
    "timm resnet": (lambda: timm_model("test_resnet"), 32, False),
    "timm efficientnet": (lambda: timm_model("test_efficientnet"), 32, False),
    "timm convnext": (lambda: timm_model("test_convnext"), 64, False),
    "timm vit": (lambda: timm_model("test_vit", img_size=32, patch_size=8), 32, True),
    "timm nfnet": (lambda: timm_model("test_nfnet"), 32, False),
    "transformers vit": (lambda: transformers_vit().eval(), 32, True),
    "transformers dinov2": (lambda: transformers_model("dinov2"), 32, True),
    "transformers resnet": (lambda: transformers_model("resnet"), 32, False),
}


@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")  # random weights give some
@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_that_fits_draws_and_leaves_nothing(family: str) -> None:
    make, side, vit = FAMILIES[family]
    build = lambda: with_head(make())  # noqa: E731  # the same at each call
    model = build().train().requires_grad_(False)
    scale = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    full, half = Classifier(model, **scale), Classifier(build().bfloat16().eval(), **scale)
    given = (random_images(2, side), torch.tensor([1, 3]))
    traces, blank = Traces(model), []
    for name, entry in EXPLAINERS.items():
        if name in SLOW or (entry.nets != "any" and vit != (entry.nets == "transformer")):
            continue
        found, low = (explain(one, *given, QUICK.get(name, name)) for one in (full, half))
        assert found.shape == low.shape == (2, side, side), name
        assert found.isfinite().all(), name
        assert low.isfinite().all(), name
        blank += [name] if found.amax() == 0 else []
    assert len(blank) <= 5, blank
    traces.check()


def with_head(model: nn.Module) -> nn.Module:
    """A last layer that tells classes apart: some libraries start it at zero."""
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    nn.init.normal_(head.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    return model
