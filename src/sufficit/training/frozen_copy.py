"""A frozen copy of a classifier that a training asks again and again: folded, in one precision."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sufficit.classifier.acceleration import AGREE, SlowModelWarning
from sufficit.classifier.classifier import Classifier
from sufficit.errors import warn_user

ROUGHLY = 0.1  # largest relative difference of logits that bfloat16 may make


def frozen_copy(
    classifier: Classifier, images: Tensor, layers: Sequence[str], dtype: torch.dtype
) -> Classifier:
    """A copy with batch norms folded and weights in `dtype`; the classifier where that fails.

    The modules keep their names, so the features of `layers` can be read. Logits and features are
    compared with those of the classifier on the images.
    """
    with classifier.in_eval_mode(), torch.no_grad(), _exactly(classifier.device):
        try:
            plain = classifier.over(copy.deepcopy(classifier.bare).requires_grad_(False))
            if classifier.dtype in (torch.bfloat16, torch.float16):  # to fold without rounding
                plain.to(dtype=torch.float32)
            wanted = _read(plain, images, layers)
            copied = classifier.over(copy.deepcopy(plain.bare))
            fold(copied.model, plain.normalize(images[:1]), layers)
            if not _close(_read(copied, images, layers), wanted, AGREE):
                copied = plain
            if classifier.device.type == "cuda":
                copied.to(memory_format=torch.channels_last)
            if dtype == copied.dtype:
                return copied
            copied.to(dtype=dtype)
            fits = _close(_read(copied, images, layers)[:1], wanted[:1], ROUGHLY)
        except Exception:  # code of the user's, which may take no copy and no other precision
            return classifier
    return copied if fits else classifier


def compiled(classifier: Classifier, images: Tensor) -> Classifier:
    """The classifier compiled forward and backward for images like these, where that works."""
    fast = classifier.over(torch.compile(classifier.model, dynamic=False))  # type: ignore[arg-type]  # a module for a module
    try:
        with torch.enable_grad():
            inputs = classifier.normalize(images).requires_grad_()
            torch.autograd.grad(fast.logits_of(inputs).float().sum(), inputs)
    except Exception as error:  # the compiler has many of its own
        reason = " ".join(str(error).split())[:200]
        warn_user(
            f"the model cannot be compiled ({type(error).__name__}: {reason}): it is trained on as"
            " it is",
            SlowModelWarning,
        )
        return classifier
    return fast


def fold(model: nn.Module, inputs: Tensor, layers: Sequence[str] = ()) -> None:
    """Put every batch norm that follows a convolution into its weights, in place.

    What follows what is seen in one forward pass, so that no code has to be traced. Convolutions
    among `layers` stay as they are.
    """
    made: list[tuple[str, Tensor]] = []  # by each call of a convolution
    pairs: list[tuple[str, str]] = []

    def keep(name: str, _: nn.Module, __: object, output: Tensor) -> None:
        made.append((name, output))

    def find(name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        pairs.extend((conv, name) for conv, output in made if output is given[0])

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d):
                stack.enter_context(module.register_forward_hook(partial(keep, name)))
            elif type(module) is nn.BatchNorm2d and module.running_mean is not None:
                stack.enter_context(module.register_forward_pre_hook(partial(find, name)))
        model(inputs.clone())
    calls = [name for name, _ in made]
    convs, norms = [conv for conv, _ in pairs], [norm for _, norm in pairs]
    for conv, norm in pairs:
        used_once = max(calls.count(conv), convs.count(conv), norms.count(norm)) == 1
        if not used_once or conv in layers:
            continue
        first, second = model.get_submodule(conv), model.get_submodule(norm)
        assert isinstance(first, nn.Conv2d)
        assert isinstance(second, nn.BatchNorm2d)
        fused = fuse_conv_bn_eval(first, second)
        model.set_submodule(conv, fused)
        model.set_submodule(norm, nn.Identity())


@contextmanager
def _exactly(device: torch.device) -> Iterator[None]:
    """Inside, float32 is float32: its short form on a GPU would hide what a copy changes."""
    short = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = short


def _read(classifier: Classifier, images: Tensor, layers: Sequence[str]) -> list[Tensor]:
    """The logits and the features of some layers, in float32."""
    stages, logits = classifier.stages(images, layers)
    return [logits.float(), *(stage.float() for stage in stages)]


def _close(found: Sequence[Tensor], wanted: Sequence[Tensor], relative: float) -> bool:
    """Whether each tensor is as wanted, up to a share of its norm."""
    return all(
        bool((one - other).norm() <= relative * other.norm())
        for one, other in zip(found, wanted, strict=True)
    )
