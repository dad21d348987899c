"""The fill `drop`: tokens of hidden patches are left out of a ViT's forward pass.

A mask becomes a union of patches: a patch is kept if at least half of its pixels are. Its token,
with its position embedding, goes through the blocks as in the model's own forward pass, after the
class and register tokens, which always do (Jain et al. 2022, Missingness Bias in Model Debugging).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sufficit.classifier.classifier import Classifier
from sufficit.classifier.layers import first
from sufficit.errors import UserError

DROP = "drop"
AGREE = 1e-3  # largest difference of logits to the model's own, relative, in float32


@dataclass(frozen=True)
class TokenModel:
    """A ViT in two parts: images to tokens, prefix first, and tokens to logits."""

    patches: nn.Module  # the layer that embeds patches
    # [N,C,H,W] -> [N,prefix+L,K], positions added; the prefix, as a class token, is never left out.
    embed: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor], Tensor]  # [N,prefix+k,K] -> [N,classes]

    @property
    def patch(self) -> tuple[int, int]:
        """The height and width of a patch."""
        assert isinstance(self.patches, nn.Conv2d)
        return self.patches.kernel_size[0], self.patches.kernel_size[1]

    def check(self, classifier: Classifier, inputs: Tensor) -> None:
        """Raise unless all tokens together give the model's own logits."""
        own = classifier.plain_logits_of(inputs).float()
        by_tokens = classifier.as_logits(self.finish(self.embed(inputs.clone()))).float()
        allowed = max(AGREE, torch.finfo(inputs.dtype).eps ** 0.5) * float(own.abs().max())
        # A model that returns NaN has NaN in its columns, with any fill.
        if own.shape != by_tokens.shape or float((own - by_tokens).abs().max()) > allowed:
            raise UserError(
                f'fill="drop" repeats the forward pass of {type(classifier.bare).__name__} token by'
                " token, and its logits differ from the model's own: use another fill"
            )


def token_model(classifier: Classifier, size: tuple[int, ...] | None = None) -> TokenModel:
    """Return a classifier's ViT in two parts; raise for another model or images [H,W]."""
    model = classifier.bare
    # Subclasses count too, as timm's variants of its VisionTransformer; `check` compares logits.
    names = (f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(model).__mro__)
    read = next((READERS[name] for name in names if name in READERS), None)
    if read is None:
        raise UserError(
            'fill="drop" leaves out tokens of a ViT: it needs a VisionTransformer of torchvision or'
            " timm, or a ViT or DeiT of transformers, unwrapped, got"
            f" {type(model).__name__}: use another fill, such as black"
        )
    tokens = read(model)
    conv = tokens.patches
    if not isinstance(conv, nn.Conv2d) or conv.stride != conv.kernel_size or any(conv.padding):
        raise UserError(
            'fill="drop" needs a ViT whose patches do not overlap, one convolution with its kernel'
            f" as stride, got {type(conv).__name__}: use another fill, such as black"
        )
    if size and (size[0] % tokens.patch[0] or size[1] % tokens.patch[1]):
        raise UserError(
            f'fill="drop" needs images of whole patches of {list(tokens.patch)} pixels, got'
            f" {list(size)}: resize them"
        )
    return tokens


def drops(fill: str | Tensor | None) -> bool:
    """Return whether hidden tokens are left out instead of filled."""
    return isinstance(fill, str) and fill == DROP


def _torchvision(model: Any) -> TokenModel:
    """Split a ViT of torchvision, as its `forward` runs it."""

    def embed(inputs: Tensor) -> Any:
        tokens = model.conv_proj(inputs).flatten(2).mT
        tokens = torch.cat([model.class_token.expand(len(inputs), -1, -1), tokens], dim=1)
        return model.encoder.pos_embedding + tokens

    def finish(tokens: Tensor) -> Any:
        return model.heads(model.encoder.ln(model.encoder.layers(tokens))[:, 0])

    return TokenModel(model.conv_proj, embed, finish)


def _timm(model: Any) -> TokenModel:
    """Split a ViT of timm, as its `forward_features` and `forward_head` run it."""

    def embed(inputs: Tensor) -> Any:
        return model.norm_pre(model._pos_embed(model.patch_embed(inputs)))

    def finish(tokens: Tensor) -> Any:
        if tokens.shape[1] > pooled:
            return model.forward_head(model.norm(model.blocks(tokens)))
        # A mean over no tokens is zero.
        return model.head(model.fc_norm(tokens.new_zeros(len(tokens), tokens.shape[2])))

    over_prefix = model.global_pool == "token" or getattr(model, "pool_include_prefix", False)
    pooled = 0 if over_prefix else model.num_prefix_tokens  # tokens before those that are pooled
    hybrid = hasattr(model.patch_embed, "backbone")
    return TokenModel(model.patch_embed if hybrid else model.patch_embed.proj, embed, finish)


def _transformers(model: Any) -> TokenModel:
    """Split a ViT or DeiT of transformers."""
    base = model.base_model
    # Versions of transformers differ in where the blocks are.
    blocks = base.layers if hasattr(base, "layers") else base.encoder.layer

    def finish(tokens: Tensor) -> Any:
        for block in blocks:
            tokens = first(block(tokens))
        return model.classifier(base.layernorm(tokens)[:, 0])

    patches = base.embeddings.patch_embeddings.projection
    return TokenModel(patches, base.embeddings, finish)


READERS: dict[str, Callable[[Any], TokenModel]] = {
    "torchvision.VisionTransformer": _torchvision,
    "timm.VisionTransformer": _timm,
    "transformers.ViTForImageClassification": _transformers,
    "transformers.DeiTForImageClassification": _transformers,
}


def kept_patches(ranks: Tensor, spans: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return which patches each run of ranks keeps: [N,H,W], [N,B,2] -> bool [N,B,L].

    >>> ranks = torch.tensor([[[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]])
    >>> kept_patches(ranks, torch.tensor([[[0, 1], [0, 2], [1, 6]]]), (2, 2))
    tensor([[[False, False],
             [ True, False],
             [ True,  True]]])
    """
    n, h, w = ranks.shape
    p, q = patch
    cells = ranks.view(n, h // p, p, w // q, q).transpose(2, 3).reshape(n, -1, p * q)
    cells = cells.sort(dim=2).values
    kept = torch.empty(n, spans.shape[1], cells.shape[1], dtype=torch.bool, device=ranks.device)
    for i, cell in enumerate(cells):  # counts of all images at once would not fit
        edges = spans[i].to(cell).flatten().expand(len(cell), -1).contiguous()
        below = torch.searchsorted(cell, edges).unflatten(1, (-1, 2))  # [L,B,2]
        kept[i] = (2 * (below[..., 1] - below[..., 0]) >= p * q).T
    return kept


def patches_of(masks: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return which patches a mask of pixels keeps: bool [M,H,W] -> bool [M,L]."""
    m, h, w = masks.shape
    p, q = patch
    return (2 * masks.view(m, h // p, p, w // q, q).sum((2, 4)) >= p * q).flatten(1)


def distinct_patches(kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct masks of all images, and the place of each band's among them.

    bool [N,B,L] -> the image of each [T], its patches [T,L]; [N,B].
    """
    n, bands, _ = kept.shape
    rows = kept.flatten(0, 1)
    each = torch.arange(n * bands, device=kept.device)
    codes = each // bands
    for part in rows.split(31, dim=1):  # exact: two rows have one code if and only if they agree
        bits = (part.long() << torch.arange(part.shape[1], device=part.device)).sum(1)
        codes = (codes << 31 | bits).unique(return_inverse=True)[1]
    total = int(codes.max()) + 1
    # Of the masks that are the same, the first.
    example = each.new_zeros(total).scatter_reduce_(0, codes, each, "amin", include_self=False)
    return example // bands, rows[example], codes.view(n, bands)


@dataclass(frozen=True)
class TokenMasker:
    """Selects tokens of images that are already embedded; masks are sorted by tokens kept."""

    tokens: Tensor  # [N,prefix+L,K]
    owners: Tensor  # [T] which image each mask is of
    kept: Tensor  # bool [T,L]

    @cached_property
    def counts(self) -> list[int]:
        """How many tokens each mask keeps, in ascending order: a batch has one count."""
        return self.kept.sum(1).tolist()

    def batch(self, start: int, stop: int) -> Tensor:
        """Return the tokens of masks start..stop, which keep equally many: [T,prefix+k,K]."""
        kept = self.kept[start:stop]
        prefix = self.tokens.shape[1] - kept.shape[1]
        kept = torch.cat([kept.new_ones(len(kept), prefix), kept], dim=1)
        # Not nonzero, for whose size a GPU would have to be waited for.
        numbers = kept.byte().argsort(dim=1, descending=True, stable=True)
        count = prefix + self.counts[start]
        return self.tokens[self.owners[start:stop, None], numbers[:, :count]]
