"""Evidence: how much each cell of the features speaks for a class, by the classifier's own head.

Nothing here is trained, so it holds for every class that the classifier has.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sufficit.classifier import layers
from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError, unknown
from sufficit.explainers.attention import WrittenAttention, torch_attention
from sufficit.explainers.cams import target_logits
from sufficit.explainers.forward_pass import Pass, look

Kind = Literal["pooled", "token", "gradient", "none"]
CHANNELS = 3  # of the evidence for a class
LOOKED_AT = 2  # images by which the head is found
CLOSE = 1e-3  # relative distance of two vectors that count as equal
MOST_VALUES = 2**28  # of the evidence for all classes, computed at a time
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda cells: cells,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
}
"""What some models apply to the features, as a function, before they take the mean."""


@dataclass(frozen=True)
class Evidence:
    """How a classifier's head reads the features, by the names of layers.

    - pooled: the head is linear in the mean over the cells of `layer`, after `activation`
    - token: the head is linear in the class token that the norm `layer` gives; a cell's evidence is
      what its token adds to the class token in the last attention, which is in `attention`
    - gradient: gradient times activation at `layer`, for one backward pass
    - none: no gradient reaches the features
    """

    kind: Kind
    layer: str
    head: str = ""
    activation: str = "none"
    attention: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The modules whose inputs a pass must keep."""
        return (self.attention, self.layer) if self.kind == "token" else ()

    @property
    def differentiates(self) -> bool:
        """Whether it needs a backward pass."""
        return self.kind == "gradient"

    @property
    def passes(self) -> int:
        """What it costs in forward passes, a backward pass counted as two."""
        return 2 if self.differentiates else 0

    @property
    def words(self) -> str:
        """Where the evidence comes from and what it costs, in a sentence."""
        return {
            "pooled": f"the weights of {self.head!r}, applied to every cell of {self.layer!r},"
            " at no further pass",
            "token": f"what each token adds to the class token in {self.attention!r}, at no"
            " further pass",
            "gradient": f"gradient times activation at {self.layer!r}, because the head is not"
            " linear in pooled features: one backward pass per image",
            "none": f"nothing, because no gradient reaches {self.layer!r}: the maps cannot tell"
            " one class from another",
        }[self.kind]

    def read(
        self, seen: Pass, names: Sequence[str], targets: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return the features of the layers `names`, and the evidence for the targets.

        Each feature is [N,K,h,w], the evidence [N,3,h,w]: the class's own, its lead over the best
        other class, its log-softmax over the classes. The last features of the kind `token` come
        with what each token adds to the class token.
        """
        features = [seen.features_of(name) for name in names]
        with torch.no_grad():
            if self.kind == "none":
                return features, _only(torch.zeros_like(features[-1][:, :1], dtype=torch.float32))
            if self.kind == "gradient":
                with torch.enable_grad():
                    scores = target_logits(seen.logits, targets)
                    gradients = seen.gradients(scores, last=False)
                own = (gradients * seen.features_of(self.layer).float()).sum(1, keepdim=True)
                return features, _only(standardized(own))
            if self.kind == "token":
                cells = self._added(seen)
                features[-1] = torch.cat([features[-1], cells.to(features[-1])], 1)
            else:
                cells = ACTIVATIONS[self.activation](seen.features_of(self.layer))
            weight = _weight(seen.classifier.bare.get_submodule(self.head))
            return features, evidence_for(cells, weight, targets)

    def _added(self, seen: Pass) -> Tensor:
        """What each token adds to the class token, as the head will read it: [N,K,h,w].

        The last norm is linear once its scale is taken from the class token that it is given.
        """
        module, norm = (seen.classifier.bare.get_submodule(name) for name in self.inputs)
        arguments, options = seen.inputs[self.attention]
        with torch_attention(seen.classifier.bare), layers.eval_mode(module):
            attention = LastAttention.of(partial(module, *arguments, **options))
        added = attention.added()
        class_token = seen.inputs[self.layer][0][0][:, :1].float()
        spread = (class_token.var(2, correction=0, keepdim=True) + norm.eps).sqrt()
        added = (added - added.mean(2, keepdim=True)) / spread * norm.weight.float()
        return layers.to_grid(added, seen.images, self.layer)


def evidence_for(cells: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The evidence for the targets by a head [C,K] in every cell: [N,K,h,w], [N] -> [N,3,h,w].

    >>> cells = torch.tensor([[[[1.0, 3.0]], [[0.0, 1.0]]]])    # two channels in two cells
    >>> evidence_for(cells, torch.eye(2), torch.tensor([0]))[0, 0]  # of class 0: 1 and 3
    tensor([[-0.7071,  0.7071]])
    """
    h, w = cells.shape[2:]
    together = max(1, MOST_VALUES // (len(weight) * h * w))
    if not torch.compiler.is_compiling() and len(cells) > together:
        parts = zip(cells.split(together), targets.split(together), strict=True)
        return torch.cat([evidence_for(some, weight, goals) for some, goals in parts])
    every = torch.einsum("nkhw,ck->nchw", cells, weight.to(cells.dtype)).float()
    index = targets.view(-1, 1, 1, 1).expand(-1, 1, h, w)
    own = every.gather(1, index)
    lead = own - every.scatter(1, index, -torch.inf).amax(1, keepdim=True)
    log_share = own - every.logsumexp(1, keepdim=True)
    return torch.cat([standardized(own), standardized(lead), log_share / 10], 1)


def standardized(maps: Tensor) -> Tensor:
    """Maps with mean 0 and spread 1, flat ones zeros: [N,C,h,w].

    >>> standardized(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[[[-0.7071,  0.7071]]]])
    """
    if maps.shape[2] * maps.shape[3] < 2:
        return torch.zeros_like(maps)
    spread = maps.std((2, 3), keepdim=True) + 1e-4
    return (maps - maps.mean((2, 3), keepdim=True)) / spread


def read_evidence(saved: Any) -> Evidence:
    """The evidence that a JSON file describes."""
    known = {field.name for field in fields(Evidence)}
    if not isinstance(saved, dict) or not {"kind", "layer"} <= saved.keys() <= known:
        raise UserError(f"the adapter's head must have {sorted(known)}, got {saved!r:.200}")
    if not all(isinstance(value, str) for value in saved.values()):
        raise UserError(f"the adapter's head must hold words, got {saved!r:.200}")
    found = Evidence(**saved)
    if found.kind not in get_args(Kind):
        raise unknown("kind of evidence", found.kind, get_args(Kind))
    if found.activation not in ACTIVATIONS:
        raise unknown("activation", found.activation, ACTIVATIONS)
    return found


def as_saved(evidence: Evidence) -> dict[str, str]:
    """The evidence as a JSON file describes it."""
    return asdict(evidence)


# Finding it


def find_evidence(classifier: Classifier, images: Tensor) -> Evidence:
    """How the classifier's head reads its features, checked on the first images."""
    some = images[:LOOKED_AT]
    last = layers.resolve(classifier.model, classifier.feature_layer(some))
    with classifier.in_eval_mode(), torch.no_grad():
        inputs = classifier.normalize(some)
        seen = _linear_head(classifier, inputs)
        if seen is not None:
            name, read = seen
            found = _pooled(classifier, inputs, name, read, last)
            found = found or _token(classifier, inputs, name, read)
            if found is not None:
                return found
    try:
        seen_back = look(classifier, some, last, differentiate=True)
        goals = seen_back.logits.argmax(1)
        gradients = seen_back.gradients(target_logits(seen_back.logits, goals), last=True)
    except UserError:
        return Evidence("none", last)
    reaches = bool(gradients.isfinite().all()) and bool((gradients != 0).any())
    return Evidence("gradient" if reaches else "none", last)


def _linear_head(classifier: Classifier, inputs: Tensor) -> tuple[str, Tensor] | None:
    """The last linear layer whose output is the logits, and what it reads: [N,K].

    Up to a number per image, which the log of a softmax takes off.
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, _: nn.Module, given: Any, output: Any) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(output, Tensor):
            seen.pop(name, None)  # the last call of a layer counts
            seen[name] = given[0].detach().clone(), output.detach().clone()

    with ExitStack() as stack:
        for name, module in classifier.bare.named_modules():
            if name and _is_linear(module):
                stack.enter_context(module.register_forward_hook(partial(keep, name)))
        logits = classifier.plain_logits_of(inputs).float()
    for name, (read, output) in reversed(seen.items()):
        cells = output[0].numel() // max(1, output.shape[1] if output.ndim > 1 else 1)
        if output.ndim not in (2, 4) or cells != 1 or output.flatten(1).shape != logits.shape:
            continue
        difference = output.flatten(1).float() - logits
        if _equal(difference - difference.mean(1, keepdim=True) + logits, logits):
            return name, read.flatten(1).float()
    return None


def _pooled(
    classifier: Classifier, inputs: Tensor, head: str, read: Tensor, last: str
) -> Evidence | None:
    """The last layer the mean of whose cells is what the head reads."""
    found: list[Evidence] = []

    def compare(name: str, _: nn.Module, __: object, output: Any) -> None:
        with suppress(UserError):
            cells = _grid_of(classifier, output, inputs, read.shape[1])
            if cells is None:
                return
            for activation, apply in ACTIVATIONS.items():
                if _equal(apply(cells.float()).mean((2, 3)), read):
                    found.append(Evidence("pooled", name, head, activation))
                    return

    with ExitStack() as stack:
        for name, module in classifier.bare.named_modules():
            # A reshape of the user's is for the feature layer alone.
            if name and (classifier.reshape is None or name == last):
                stack.enter_context(module.register_forward_hook(partial(compare, name)))
        classifier.plain_logits_of(inputs)
    return found[-1] if found else None


def _grid_of(classifier: Classifier, output: Any, inputs: Tensor, channels: int) -> Tensor | None:
    """A layer's output as [N,K,h,w] with K channels in two cells or more, or None."""
    first = layers.first(output)
    if classifier.reshape is None and (
        not isinstance(first, Tensor) or first.ndim not in (3, 4) or channels not in first.shape[1:]
    ):
        return None
    cells = classifier.as_grid(output, inputs)
    whole = isinstance(cells, Tensor) and cells.ndim == 4 and len(cells) == len(inputs)
    return cells if whole and cells.shape[1] == channels and cells[0, 0].numel() > 1 else None


def _token(classifier: Classifier, inputs: Tensor, head: str, read: Tensor) -> Evidence | None:
    """The norm whose first token is what the head reads, and the last attention before it."""
    if classifier.reshape is not None:
        return None
    norm = ""
    inside: list[str] = []  # the modules that run now, the outermost first
    watch = AttentionPlaces(inside)

    def enter(name: str, _: nn.Module, __: object) -> None:
        inside.append(name)

    def leave(name: str, module: nn.Module, _: object, output: Any) -> None:
        nonlocal norm
        inside.pop()
        is_norm = isinstance(module, nn.LayerNorm) and module.weight is not None
        tokens = isinstance(output, Tensor) and output.ndim == 3
        fits = is_norm and tokens and output.shape[2] == read.shape[1]
        if fits and _equal(output[:, 0].float(), read):
            norm = name

    with ExitStack() as stack:
        for name, module in classifier.bare.named_modules():
            if name:
                stack.enter_context(module.register_forward_pre_hook(partial(enter, name)))
                stack.enter_context(module.register_forward_hook(partial(leave, name)))
        with torch_attention(classifier.bare), layers.uncompiled(), watch:
            classifier.plain_logits_of(inputs)
    if not norm or watch.place is None:
        return None
    found = Evidence("token", norm, head, attention=watch.place)
    with suppress(UserError, RuntimeError, IndexError):
        seen = look(classifier, inputs_as_images(classifier, inputs), norm, inputs=found.inputs)
        maps = found.read(seen, [norm], seen.logits.argmax(1))[1]
        if bool(maps.isfinite().all()):
            return found
    return None


def inputs_as_images(classifier: Classifier, inputs: Tensor) -> Tensor:
    """Images that `normalize` turns into these inputs."""
    if classifier.mean is None or classifier.std is None:
        return inputs
    mean, std = (inputs.new_tensor(v)[:, None, None] for v in (classifier.mean, classifier.std))
    return inputs * std + mean


class LastAttention(WrittenAttention):
    """Keeps the weights, values and projection of the last attention that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: Tensor | None = None  # [N,heads,T,T]
        self.values: Tensor | None = None  # [N,heads,T,d]
        self.projection: Tensor | None = None  # [K,heads d], the linear map that follows

    @classmethod
    def of(cls, run: Any) -> "LastAttention":
        """That of a module that is run once more."""
        found = cls()
        with torch.no_grad(), layers.uncompiled(), found:
            run()
        return found

    def added(self) -> Tensor:
        """What each token adds to the first one: [N,T,K]."""
        if self.shown is None or self.values is None or self.projection is None:
            raise UserError("the last attention of this model cannot be read")
        parts = self.shown[:, :, 0, :, None].float() * self.values.float()
        return parts.transpose(1, 2).flatten(2) @ self.projection.float().mT

    def keep(self, weights: Tensor) -> None:
        """Keep the weights; values and projection follow."""
        self.shown, self.values, self.projection = weights, None, None

    def attention(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Attention as it is, and its weights."""
        result, weights = super().attention(*given, **options)
        self.values = given[2] if len(given) > 2 else options["value"]
        return result, weights

    def other(self, name: str, func: Any, args: Any, options: Any) -> Any:
        """Keep the values of a written-out attention, and the linear map after any attention."""
        if name in ("matmul", "__matmul__", "bmm") and args[0] is self.shown:
            self.values = args[1]
        if name == "linear" and self.values is not None and self.projection is None:
            weight = args[1] if len(args) > 1 else options["weight"]
            if weight.shape[1] == self.values.shape[1] * self.values.shape[-1]:
                self.projection = weight
        return func(*args, **options)


class AttentionPlaces(LastAttention):
    """Notes the innermost module that holds both the last attention and its projection."""

    def __init__(self, inside: list[str]) -> None:
        super().__init__()
        self.inside = inside
        self.place: str | None = None
        self._around: list[str] = []

    def keep(self, weights: Tensor) -> None:
        """Note the modules that run."""
        super().keep(weights)
        self._around = list(self.inside)

    def other(self, name: str, func: Any, args: Any, options: Any) -> Any:
        """Note what of them still runs where the projection follows."""
        before = self.projection
        result = super().other(name, func, args, options)
        if self.projection is not None and before is None:
            shared = [one for one in self._around if one in self.inside]
            self.place = shared[-1] if shared else None
        return result


def _is_linear(module: nn.Module) -> bool:
    one = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1
    return one or isinstance(module, nn.Linear)


def _weight(head: nn.Module) -> Tensor:
    """The weights of a linear layer or a 1x1 convolution: [C,K]."""
    weight = head.weight
    assert isinstance(weight, Tensor)
    return weight.detach().flatten(1)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    return bool((one - other).norm() <= CLOSE * other.norm().clamp(min=1e-12))


def _only(own: Tensor) -> Tensor:
    """Evidence of which the class's own is known alone: [N,1,h,w] -> [N,3,h,w]."""
    return torch.cat([own, torch.zeros_like(own), torch.zeros_like(own)], 1)
