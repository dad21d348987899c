"""CLIP and the like as classifiers of prompts: the image tower and the texts' features."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sufficit.errors import UserError, setting

_SHAPE = "vision_model with a pooler_output, get_text_features and logit_scale"


class ZeroShot(nn.Module):
    """The image tower of a CLIP-like model and the texts' features: [N,C,H,W] -> [N,C].

    Logits are scale * cosine + bias. The text tower is not kept.
    """

    texts: Tensor  # [C,K] of length 1
    scale: Tensor
    bias: Tensor

    def __init__(self, model: Any, texts: Tensor) -> None:
        super().__init__()
        self.vision = model.vision_model
        self.projection = getattr(model, "visual_projection", None) or nn.Identity()
        bias = getattr(model, "logit_bias", None)
        shift = torch.zeros(1) if bias is None else bias.detach().clone().view(1)
        self.register_buffer("texts", nn.functional.normalize(texts.detach().clone(), dim=1))
        self.register_buffer("scale", model.logit_scale.detach().exp().clone().view(1))
        self.register_buffer("bias", shift)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of the prompts."""
        features = self.projection(self.vision(pixel_values=images).pooler_output)
        cosines = nn.functional.normalize(features, dim=1) @ self.texts.T
        logits: Tensor = self.scale * cosines + self.bias
        return logits


def zero_shot(model: Any, tokenizer: Any, prompts: Sequence[str]) -> ZeroShot:
    """Return a classifier of prompts from a model of transformers and its tokenizer."""
    parts = ("vision_model", "get_text_features", "logit_scale")
    if not all(hasattr(model, part) for part in parts):
        raise UserError(
            f"clip: needs a CLIP-like model, with {_SHAPE}, got {type(model).__name__}: for a plain"
            " classifier write transformers:NAME"
        )
    # SigLIP was trained on texts of one length.
    fixed = "siglip" in str(model.config.model_type)
    padding = {"padding": "max_length", "max_length": 64} if fixed else {"padding": True}
    tokens = tokenizer(list(prompts), truncation=True, return_tensors="pt", **padding)
    with torch.no_grad():
        features = model.eval().get_text_features(**tokens)
    # Newer versions of transformers return an object, older ones the tensor.
    return ZeroShot(model, getattr(features, "pooler_output", features))


def check_prompts(prompts: Any) -> list[str]:
    """Return the prompts, two or more different texts; raise for anything else."""
    texts = [text.strip() if isinstance(text, str) else text for text in prompts or ()]
    wrong = isinstance(prompts, str) or not all(isinstance(text, str) and text for text in texts)
    if wrong or len(texts) < 2 or len({*texts}) < len(texts):
        raise UserError(
            f"clip: needs two or more different prompts, one per class, got {prompts!r:.200}:"
            f' give prompts=["a cat", "a dog"], or {setting("prompts", ("a cat", "a dog"))}'
        )
    return texts
