"""A copy of a classifier for many forward passes: batch norms folded, channels-last, compiled."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sufficit.classifier.classifier import Classifier
from sufficit.errors import warn_user

PAYS_FROM = 1_000_000  # forward passes: on a ResNet50 they save 26 s, compiling takes 19 s
AGREE = 1e-3  # largest difference of logits between the folded copy and the model, relative


class SlowModelWarning(UserWarning):
    """The model could not be compiled; it is used as it is."""


def pays(classifier: Classifier, device: str, calls: int, wanted: str) -> bool:
    """Whether to compile for so many forward passes on a device; `wanted` is auto, on or off."""
    if wanted != "auto":
        return wanted == "on"
    # Without batch norms to fold, as in a ViT, the compiled copy was slower than the model.
    normed = any(isinstance(module, nn.BatchNorm2d) for module in classifier.bare.modules())
    return device.startswith("cuda") and normed and calls >= PAYS_FROM


def accelerated(classifier: Classifier, shape: Sequence[int]) -> Classifier:
    """A compiled copy that has been tried on a batch [N,C,H,W]; the classifier where that fails.

    The copy shares nothing with the model. It is for predictions; explain with the original, since
    layers of the copy may have other names.
    """
    if is_compiled(classifier):
        return classifier
    few = torch.rand(2, *shape[1:], generator=torch.Generator().manual_seed(0), device="cpu")
    inputs = classifier.normalize(few.repeat(-(-shape[0] // 2), 1, 1, 1)[: shape[0]])
    try:
        with torch.no_grad(), classifier.in_eval_mode():
            model = _folded(copy.deepcopy(classifier.bare), inputs)
            model.to(inputs.device, classifier.dtype).to(memory_format=torch.channels_last)
            model.requires_grad_(False)
            fast = classifier.over(torch.compile(model, dynamic=False))  # type: ignore[arg-type]  # a module for a module
            fast.logits_of(inputs.contiguous(memory_format=torch.channels_last))
    except Exception as error:  # the compiler has many of its own
        reason = " ".join(str(error).split())[:200]
        warn_user(
            f"the model cannot be compiled ({type(error).__name__}: {reason}): it is used as it is",
            SlowModelWarning,
        )
        return classifier
    return fast


class FastCopy:
    """A compiled copy of a classifier, made when the first images come; pickled without it."""

    def __init__(self, classifier: Classifier, batch_size: int | None = None) -> None:
        self.classifier = classifier
        self.batch_size = batch_size
        self._made: Classifier | None = None

    def of(self, shape: Sequence[int], usual: int) -> Classifier:
        """The copy for images [C,H,W], sent in batches of the usual size unless one was given."""
        if self._made is None:
            self._made = accelerated(self.classifier, (self.batch_size or usual, *shape))
        return self._made

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_made": None}


def is_compiled(classifier: Classifier) -> bool:
    """Whether torch.compile made the model, so that every new batch size is compiled again."""
    return hasattr(classifier.model, "_orig_mod")


def _folded(model: nn.Module, inputs: Tensor) -> nn.Module:
    """The model with batch norms folded into convolutions, where tracing it works."""
    from torch.fx.experimental.optimization import fuse

    precise = model.float()
    some = inputs[:2].float()
    before = precise(some.clone())
    try:
        folded: nn.Module = fuse(precise)
        after = folded(some.clone())
    except Exception:  # control flow that cannot be traced: the compiler does without
        return model
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return model
    close = torch.allclose(before, after, rtol=AGREE, atol=AGREE * float(before.abs().max()))
    return folded if close else model
