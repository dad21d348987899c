"""Small models, images for them, and a record of what a call may have changed in a model."""

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer, get_model

from sufficit import Classifier


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def random_images(n: int = 3, side: int = 16, channels: int = 3, seed: int = 1) -> Tensor:
    return rand(n, channels, side, side, seed=seed)


class Linear(nn.Module):
    """Features are the image's channels, logits are linear in them: gradients are the weights."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.features = nn.Identity()
        self.weights = nn.Parameter(weights)  # [C,K,h,w]

    def forward(self, images: Tensor) -> Tensor:
        return torch.einsum("nkhw,ckhw->nc", self.features(images), self.weights)


def linear(weights: Tensor) -> Classifier:
    return Classifier(Linear(weights), layer="features")


def small_model(channels: int = 3, classes: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 6, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, classes),
    )


def small(channels: int = 3, classes: int = 5) -> Classifier:
    return Classifier(small_model(channels, classes).eval(), layer="4")


def cnn(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 9, 3, padding=1, stride=2),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(9, 4),
    ).eval()


def small_vit(size: int = 32) -> nn.Module:
    return VisionTransformer(
        image_size=size, patch_size=8, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=24
    )


def transformers_vit(classes: int = 5) -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=classes,
    )
    return transformers.ViTForImageClassification(config)


def settled(name: str, side: int) -> nn.Module:
    """A model with random weights, and batch statistics that keep its features of a usual size."""
    torch.manual_seed(0)
    model = get_model(name, weights=None, num_classes=20)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(random_images(4, side))
    return model.eval()


class Sum(nn.Module):
    """The sum of the channels, with or without a channel axis."""

    def __init__(self, axis: bool) -> None:
        super().__init__()
        self.axis, self.scale = axis, nn.Parameter(torch.tensor(2.0))

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * features.sum(1, keepdim=self.axis)


class Spy(nn.Module):
    """A model that records its calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.sizes: list[int] = []
        self.inputs: list[tuple[torch.dtype, bool]] = []
        self.grad_enabled: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.inputs.append((x.dtype, x.is_contiguous(memory_format=torch.channels_last)))
        self.grad_enabled.add(torch.is_grad_enabled())
        return self.model(x)


class SmallMemory(Spy):
    """Has no room for more than `room` images at a time."""

    def __init__(self, model: nn.Module, room: int) -> None:
        super().__init__(model)
        self.room = room
        self.failures = 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.room:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(x)


def mixed_modes(model: nn.Module) -> None:
    """Leave `cnn` half trained: modes, frozen weights and gradients of its own."""
    model.train()
    model[1].eval()
    model[3].weight.requires_grad_(False)
    model[8].weight.grad = torch.ones(4, 9)


class Traces:
    """Everything in modules that a call could leave changed."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = [m for module in modules for m in module.modules()]
        self.tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        self.before = self.now()
        self.values = [t.detach().clone() for t in self.tensors]
        self.gradients = [None if t.grad is None else t.grad.clone() for t in self.tensors]

    def now(self) -> list[object]:
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        found: list[object] = [torch.is_grad_enabled()]
        found += [(m.training, sorted(vars(m))) for m in self.modules]
        found += [len(getattr(m, name)) for m in self.modules for name in hooks]
        return found + [(t.requires_grad, t.grad is None) for t in self.tensors]

    def check(self) -> None:
        assert self.now() == self.before
        assert all(map(torch.equal, self.tensors, self.values))
        for tensor, gradient in zip(self.tensors, self.gradients, strict=True):
            assert gradient is None or torch.equal(tensor.grad, gradient)
