"""Four frozen ImageNet networks: features at four depths, logits, and the evidence of the head.

On a GPU they run in bfloat16 with BatchNorm folded into the convolutions, compiled; on a CPU in
float32. Inputs are images that `Network.normalize` has normalised.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

NAMES = ("resnet50", "mobilenet_v2", "efficientnet_lite0", "deit_tiny")
Features = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class Network:
    """A frozen classifier as four consecutive stages and a linear head."""

    name: str
    stages: list[Callable[[Tensor], Tensor]]  # outputs of strides 4, 8, 16, 32; tokens for a ViT
    pool: Callable[[Tensor], Tensor]  # the last stage's output -> what the head reads [N,K]
    grid: Callable[[Tensor], Tensor]  # a stage's output -> features [N,C,h,w]
    weight: Tensor  # [classes,K]
    bias: Tensor  # [classes]
    channels: tuple[int, int, int, int]  # of the four features
    mean: Tensor
    std: Tensor
    device: str
    dtype: torch.dtype

    def normalize(self, images: Tensor) -> Tensor:
        """Normalise images in 0..1, in the precision and layout of the network."""
        wanted = torch.contiguous_format if self.name == "deit_tiny" else torch.channels_last
        return ((images - self.mean) / self.std).to(self.dtype).contiguous(memory_format=wanted)

    def _logits(self, inputs: Tensor) -> Tensor:
        x = inputs
        for stage in self.stages:
            x = stage(x)
        return F.linear(self.pool(x), self.weight, self.bias)

    def _features(self, inputs: Tensor) -> tuple[Features, Tensor]:
        found, x = [], inputs
        for stage in self.stages:
            x = stage(x)
            found.append(self.grid(x))
        return tuple(found), F.linear(self.pool(x), self.weight, self.bias)

    def compile(self) -> None:
        """Compile both ways through the network."""
        self.logits = torch.compile(self._logits, dynamic=False)
        self.features = torch.compile(self._features, dynamic=False)

    def __post_init__(self) -> None:
        self.logits = self._logits  # [N,3,224,224] -> [N,classes]
        self.features = self._features  # [N,3,224,224] -> four features, logits

    def cells(self, last: Tensor) -> Tensor:
        """Return what the head reads at every cell of the last features: [N,K,h,w]."""
        return last[:, -self.weight.shape[1] :]

    def class_evidence(self, last: Tensor, targets: Tensor) -> Tensor:
        """Apply the target's row of the head at every cell: Grad-CAM before ReLU, [N,h,w]."""
        cells = self.cells(last).float()
        return torch.einsum("nkhw,nk->nhw", cells, self.weight[targets].float())

    def evidence(self, last: Tensor, targets: Tensor) -> Tensor:
        """Apply the whole head at every cell: the class, its lead, its log-softmax [N,3,h,w]."""
        cells = self.cells(last)
        every = torch.einsum("nkhw,ck->nchw", cells, self.weight.to(cells.dtype)).float()
        index = targets.view(-1, 1, 1, 1).expand(-1, 1, *every.shape[2:])
        own = every.gather(1, index)
        lead = own - every.scatter(1, index, -1e4).amax(1, keepdim=True)
        log_share = own - every.logsumexp(1, keepdim=True)
        return torch.cat([standardize(own), standardize(lead), log_share / 10], 1)


def standardize(maps: Tensor) -> Tensor:
    """Give each map [N,C,h,w] mean 0 and spread 1."""
    spread = maps.std((2, 3), keepdim=True) + 1e-4
    return (maps - maps.mean((2, 3), keepdim=True)) / spread


def weights_of(root: Path, stem: str) -> dict[str, Tensor]:
    """Read weights, which may lie in several files ROOT/STEM*.safetensors, as float32."""
    found: dict[str, Tensor] = {}
    for path in sorted(root.glob(f"{stem}*.safetensors")):
        found |= load_file(path)
    if not found:
        raise SystemExit(f"no weights {root}/{stem}*.safetensors: see prepare_weights.py")
    return {
        key: value.float() if value.is_floating_point() else value for key, value in found.items()
    }


def fold(module: nn.Module) -> None:
    """Fold every BatchNorm into the convolution before it."""
    children = list(module.named_children())
    for (name, first), (after, second) in pairwise(children):
        if isinstance(first, nn.Conv2d) and isinstance(second, nn.BatchNorm2d):
            setattr(module, name, fuse_conv_bn_eval(first, second))
            setattr(module, after, nn.Identity())
    for _, child in module.named_children():
        fold(child)


def _frozen(model: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    fold(model)
    return model.to(device=device, dtype=dtype, memory_format=torch.channels_last)


def _convolutional(
    name, model, body, cuts, channels, weight, bias, mean, std, device, dtype
) -> Network:
    weight, bias = weight.detach().float().to(device), bias.detach().float().to(device)
    _frozen(model, device, dtype)
    layers = body(model)
    starts = (0, *cuts[:-1])
    return Network(
        name=name,
        stages=[nn.Sequential(*layers[a:b]) for a, b in zip(starts, cuts, strict=True)],
        pool=lambda x: x.float().mean((2, 3)),
        grid=lambda x: x,
        weight=weight,
        bias=bias,
        channels=channels,
        mean=torch.tensor(mean, device=device).view(1, 3, 1, 1),
        std=torch.tensor(std, device=device).view(1, 3, 1, 1),
        device=device,
        dtype=dtype,
    )


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def resnet50(root: Path) -> nn.Module:
    """ResNet50 as its weights want it: strides in the first convolution, another epsilon."""
    model = torchvision.models.resnet50()
    for layer in (model.layer2, model.layer3, model.layer4):  # these weights stride in conv1
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    model.load_state_dict(weights_of(root, "resnet50_v1_imagenet"), strict=False)
    return model


def _resnet50(root: Path, device: str, dtype: torch.dtype) -> Network:
    model = resnet50(root)

    def body(m):
        return [m.conv1, m.bn1, m.relu, m.maxpool, m.layer1, m.layer2, m.layer3, m.layer4]

    return _convolutional(
        "resnet50", model, body, (5, 6, 7, 8), (256, 512, 1024, 2048),
        model.fc.weight, model.fc.bias, *IMAGENET, device, dtype,
    )  # fmt: skip


def mobilenet_v2(root: Path) -> nn.Module:
    """MobileNetV2 by torchvision."""
    model = torchvision.models.mobilenet_v2()
    model.load_state_dict(weights_of(root, "mobilenet_v2"))
    return model


def _mobilenet_v2(root: Path, device: str, dtype: torch.dtype) -> Network:
    model = mobilenet_v2(root)
    head = model.classifier[1]
    return _convolutional(
        "mobilenet_v2", model, lambda m: list(m.features), (4, 7, 14, 19), (24, 32, 96, 1280),
        head.weight, head.bias, *IMAGENET, device, dtype,
    )  # fmt: skip


class SamePadded(nn.Conv2d):
    """A convolution that pads as TensorFlow does: with stride 2 more at the right and below."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve [N,C,H,W]."""
        whole = self.kernel_size[0] - self.stride[0]
        before = whole // 2
        x = F.pad(x, (before, whole - before, before, whole - before))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, 1, self.groups)


class LiteBlock(nn.Module):
    """An inverted residual block of EfficientNet-Lite, by its weights' names."""

    def __init__(
        self, wide: int, narrow: int, out: int, kernel: int, stride: int, expand: bool
    ) -> None:
        super().__init__()
        self.expand, self.adds = expand, stride == 1 and narrow == out
        if expand:
            self._expand_conv = nn.Conv2d(narrow, wide, 1, bias=False)
            self._bn0 = nn.BatchNorm2d(wide, eps=1e-3)
        self._depthwise_conv = SamePadded(wide, wide, kernel, stride, groups=wide, bias=False)
        self._bn1 = nn.BatchNorm2d(wide, eps=1e-3)
        self._project_conv = nn.Conv2d(wide, out, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(out, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """Pass features [N,C,h,w] through the block."""
        inner = F.relu6(self._bn0(self._expand_conv(x))) if self.expand else x
        inner = F.relu6(self._bn1(self._depthwise_conv(inner)))
        inner = self._bn2(self._project_conv(inner))
        return x + inner if self.adds else inner


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0, by its weights' names."""

    def __init__(self, saved: dict[str, Tensor]) -> None:
        super().__init__()
        strides = {1: 2, 3: 2, 5: 2, 11: 2}  # the first block of a group that halves
        blocks = []
        for number in range(16):
            mine = f"_blocks.{number}."
            out = saved[mine + "_project_conv.weight"].shape[0]
            wide, _, kernel, _ = saved[mine + "_depthwise_conv.weight"].shape
            expand = mine + "_expand_conv.weight" in saved
            narrow = saved[mine + "_expand_conv.weight"].shape[1] if expand else wide
            blocks.append(LiteBlock(wide, narrow, out, kernel, strides.get(number, 1), expand))
        self._conv_stem = SamePadded(3, 32, 3, 2, bias=False)
        self._bn0 = nn.BatchNorm2d(32, eps=1e-3)
        self._first = nn.ReLU6()
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = nn.Conv2d(320, 1280, 1, bias=False)
        self._bn1 = nn.BatchNorm2d(1280, eps=1e-3)
        self._last = nn.ReLU6()
        self._fc = nn.Linear(1280, 1000)
        self.load_state_dict(saved)

    def layers(self) -> list[nn.Module]:
        """Everything before the pooling, one after the other."""
        stem = [self._conv_stem, self._bn0, self._first]
        return [*stem, *self._blocks, self._conv_head, self._bn1, self._last]

    def forward(self, x: Tensor) -> Tensor:
        """Classify images: [N,3,224,224] -> [N,1000]."""
        for layer in self.layers():
            x = layer(x)
        return self._fc(x.mean((2, 3)))


def efficientnet_lite0(root: Path) -> nn.Module:
    """EfficientNet-Lite0 with its weights."""
    return EfficientNetLite0(weights_of(root, "efficientnet_lite0"))


def _efficientnet_lite0(root: Path, device: str, dtype: torch.dtype) -> Network:
    model = efficientnet_lite0(root)
    return _convolutional(
        "efficientnet_lite0", model, lambda m: m.layers(), (6, 8, 14, 22), (24, 40, 112, 1280),
        model._fc.weight, model._fc.bias, (0.5,) * 3, (0.5,) * 3, device, dtype,
    )  # fmt: skip


class VitStage(nn.Module):
    """Some consecutive blocks of a vision transformer; the last adds what tokens contribute."""

    def __init__(self, model: nn.Module, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.blocks = nn.ModuleList(list(model.encoder.layers)[first:last])
        if first == 0:
            self.conv_proj, self.class_token = model.conv_proj, model.class_token
            self.positions = model.encoder.pos_embedding
        self.norm = model.encoder.ln if last == 12 else None

    def _heads(self, block: nn.Module, tokens: Tensor) -> list[Tensor]:
        attention = block.self_attention
        joined = F.linear(tokens, attention.in_proj_weight, attention.in_proj_bias)
        shape = (attention.num_heads, attention.head_dim)
        return [part.unflatten(2, shape).transpose(1, 2) for part in joined.chunk(3, 2)]

    def block(self, block: nn.Module, tokens: Tensor) -> Tensor:
        """Pass tokens [N,1+P,K] through one block."""
        return self.after_norm(block, tokens, block.ln_1(tokens))

    def after_norm(self, block: nn.Module, tokens: Tensor, normed: Tensor) -> Tensor:
        """Pass tokens through one block whose first norm is given."""
        q, k, v = self._heads(block, normed)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        tokens = tokens + block.self_attention.out_proj(mixed)
        return tokens + block.mlp(block.ln_2(tokens))

    def contributions(self, block: nn.Module, tokens: Tensor) -> Tensor:
        """Return what each token adds to the class token through attention: [N,1+P,K]."""
        q, k, v = self._heads(block, block.ln_1(tokens))
        weights = (q[:, :, :1] @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)[:, :, 0]
        added = (weights[..., None] * v).transpose(1, 2).flatten(2)
        return F.linear(added, block.self_attention.out_proj.weight).float()

    def forward(self, x: Tensor) -> Tensor:
        """Pass tokens (images for the first stage) on: [N,1+P,K], for the last stage [N,1+P,2K]."""
        if self.first == 0:
            x = self.conv_proj(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks[:-1] if self.norm is not None else self.blocks:
            x = self.block(block, x)
        if self.norm is None:
            return x
        added = self.contributions(self.blocks[-1], x)
        x = self.block(self.blocks[-1], x)
        # The last norm of the class token is taken as a fixed scale, so contributions add up.
        added = added - added.mean(2, keepdim=True)
        added = added / (x[:, :1].float().std(2, keepdim=True) + 1e-4) * self.norm.weight.float()
        return torch.cat([self.norm(x), added.to(x.dtype)], 2)


def deit_tiny(root: Path) -> nn.Module:
    """DeiT-tiny as torchvision's vision transformer."""
    model = torchvision.models.VisionTransformer(
        image_size=224, patch_size=16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768
    )
    model.load_state_dict(weights_of(root, "deit_tiny_imagenet"))
    return model


def _deit_tiny(root: Path, device: str, dtype: torch.dtype) -> Network:
    model = deit_tiny(root)
    head = model.heads.head
    weight, bias = head.weight.detach().to(device), head.bias.detach().to(device)
    _frozen(model, device, dtype)
    stages = [VitStage(model, a, b) for a, b in ((0, 3), (3, 6), (6, 9), (9, 12))]
    mean, std = IMAGENET
    return Network(
        name="deit_tiny",
        stages=stages,
        pool=lambda x: x[:, 0, :192].float(),
        grid=lambda x: x[:, 1:].transpose(1, 2).unflatten(2, (14, 14)),
        weight=weight,
        bias=bias,
        channels=(192, 192, 192, 384),
        mean=torch.tensor(mean, device=device).view(1, 3, 1, 1),
        std=torch.tensor(std, device=device).view(1, 3, 1, 1),
        device=device,
        dtype=dtype,
    )


LOADERS = {
    "resnet50": _resnet50,
    "mobilenet_v2": _mobilenet_v2,
    "efficientnet_lite0": _efficientnet_lite0,
    "deit_tiny": _deit_tiny,
}


def load(name: str, root: Path, device: str) -> Network:
    """Load one network; on a GPU in bfloat16 and compiled."""
    network = LOADERS[name](root, device, torch.bfloat16 if device == "cuda" else torch.float32)
    if device == "cuda":
        network.compile()
    return network
