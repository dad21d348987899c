"""Generic attribution and AttnLRP against second writings, for each library's transformers."""

import warnings
from collections.abc import Callable

import pytest
import torch
from test_attention import shaken, timm_vit, torchvision_vit, transformers_vit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # zennit's own imports are not ours to mend
    from zennit.attribution import Gradient
    from zennit.canonizers import SequentialMergeBatchNorm
    from zennit.composites import EpsilonGammaBox
    from zennit.torchvision import ResNetCanonizer
from torch import Tensor, nn
from torch.nn import functional as F

from small_models import SmallMemory, Traces, random_images, settled
from sufficit import Classifier, UserError, explain
from sufficit.explainers.attention import WrittenAttention, cells_of
from sufficit.explainers.relevance import RelevanceRules, attnlrp, lrp

PLAIN = {"layer": None, "seed": 0}
TARGETS = torch.tensor([1, 3])


def rolled_by_hand(attentions: list[Tensor], goal: Tensor) -> Tensor:
    """Head by head and image by image, from attentions whose graph leads to the goal: [N,T,T]."""
    gradients = torch.autograd.grad(goal, attentions)
    n, heads, tokens, _ = attentions[0].shape
    found = []
    for i in range(n):
        relevance = torch.eye(tokens, dtype=torch.double)
        for attention, gradient in zip(attentions, gradients, strict=True):
            block = torch.zeros(tokens, tokens, dtype=torch.double)
            for head in range(heads):
                product = attention[i, head].detach().double() * gradient[i, head].double()
                block += product.relu() / heads
            relevance = relevance + block @ relevance
        found.append(relevance)
    return torch.stack(found).float()


def by_hand(model: nn.Module, images: Tensor, attentions: list[Tensor], logits: Tensor) -> Tensor:
    tokens = rolled_by_hand(attentions, logits.gather(1, TARGETS[:, None]).sum())
    maps = cells_of(Classifier(model), images, tokens, None)
    for _ in range(2):
        low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
        maps = F.interpolate(((maps - low) / (high - low))[:, None], (32, 32), mode="bilinear")[
            :, 0
        ]
    return maps


def torchvision_forward(model: nn.Module, images: Tensor) -> tuple[list[Tensor], Tensor]:
    """The forward pass written out, with every block's attention."""
    found, tokens = [], model._process_input(images)
    tokens = torch.cat([model.class_token.expand(len(images), -1, -1), tokens], dim=1)
    tokens = tokens + model.encoder.pos_embedding
    for block in model.encoder.layers:
        layer, inputs = block.self_attention, block.ln_1(tokens)
        mixed = inputs @ layer.in_proj_weight.T + layer.in_proj_bias
        query, key, value = (p.unflatten(2, (4, 8)).transpose(1, 2) for p in mixed.chunk(3, 2))
        attention = (query @ key.transpose(2, 3) / 8**0.5).softmax(3)
        found.append(attention)
        out = (attention @ value).transpose(1, 2).flatten(2)
        tokens = tokens + out @ layer.out_proj.weight.T + layer.out_proj.bias
        tokens = tokens + block.mlp(block.ln_2(tokens))
    return found, model.heads(model.encoder.ln(tokens)[:, 0])


def test_generic_attribution_of_torchvision_equals_the_slow_one() -> None:
    model, images = torchvision_vit(), random_images(2, 32)
    attentions, logits = torchvision_forward(model, images)
    assert torch.allclose(logits, model(images), atol=1e-4)
    wanted = by_hand(model, images, attentions, logits)
    found = explain(Classifier(model), images, TARGETS, "generic-attribution")
    assert torch.allclose(found, wanted, atol=1e-4)
    assert found.std() > 0.1


@pytest.mark.parametrize("kind", ["eager", "sdpa", "flex_attention"])
def test_generic_attribution_of_transformers_equals_the_slow_one(kind: str) -> None:
    images, slow = random_images(2, 32), transformers_vit("eager")
    output = slow(images, output_attentions=True)
    wanted = by_hand(slow, images, list(output.attentions), output.logits)
    model = transformers_vit(kind)
    found = explain(Classifier(model), images, TARGETS, "generic-attribution")
    assert torch.allclose(found, wanted, atol=1e-4)
    assert model.config._attn_implementation == kind


@pytest.mark.parametrize("method", ["generic-attribution", "attnlrp"])
def test_fused_and_written_attention_of_timm_agree(method: str) -> None:
    model, images = timm_vit(), random_images(2, 32)
    maps = []
    for fused in (True, False):
        for block in model.blocks:
            block.attn.fused_attn = fused
        maps.append(explain(Classifier(model), images, TARGETS, method))
    assert torch.allclose(maps[0], maps[1], atol=1e-3)
    assert maps[0].std() > 0.05


@pytest.mark.parametrize("build", [torchvision_vit, timm_vit, lambda: transformers_vit("sdpa")])
@pytest.mark.parametrize(
    "mode", [WrittenAttention, lambda: RelevanceRules({"linear": 0.1, "conv2d": 0.1})]
)
def test_the_modes_change_no_value(build: Callable[[], nn.Module], mode: Callable) -> None:
    model, images = build(), random_images(2, 32).requires_grad_()
    plain = model(images)
    with mode():
        seen = model(images)
    plain, seen = (getattr(one, "logits", one) for one in (plain, seen))
    assert torch.allclose(seen, plain, atol=1e-4)


class OneBlock(nn.Module):
    """The smallest transformer: patches, attention of one head, an MLP, their mean, a head."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.gated = nn.Conv2d(3, 4, 4, stride=4), gated
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.up, self.down, self.head = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        query, key, value = self.qkv(self.norm1(x)).chunk(3, 2)
        if self.gated:  # as QuickGELU, and attention written by the model
            attention = (query @ key.mT * 0.5).softmax(-1)
            x = x + self.out(attention @ value)
            y = self.up(self.norm2(x))
            return self.head((x + self.down(y * torch.sigmoid(1.7 * y))).mean(1))
        x = x + self.out(
            F.scaled_dot_product_attention(*(t[:, None] for t in (query, key, value)))[:, 0]
        )
        return self.head((x + self.down(F.gelu(self.up(self.norm2(x))))).mean(1))


def gamma_rule(R: Tensor, x: Tensor, weight: Tensor, bias: Tensor, gamma: float) -> Tensor:
    """Element by element: R of the outputs [O] -> R of the inputs [I]."""
    found = torch.zeros_like(x)
    for o in range(len(weight)):
        parts = [float(x[i] * weight[o, i]) for i in range(len(x))]
        sign = 1 if sum(parts) + float(bias[o]) > 0 else -1
        raised = [p * (1 + gamma) if p * sign > 0 else p for p in parts]
        shift = float(bias[o]) * (1 + gamma if float(bias[o]) * sign > 0 else 1)
        for i, part in enumerate(raised):
            found[i] += part / (sum(raised) + shift) * R[o]
    return found


def norm_rule(R: Tensor, x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm with a constant divisor is a matrix: every output shares its relevance."""
    n = len(x)
    deviation = (x.var(unbiased=False) + norm.eps).sqrt()
    matrix = (torch.eye(n, dtype=x.dtype) - 1 / n) / deviation * norm.weight[:, None]
    outputs = matrix @ x + norm.bias
    return sum(x * matrix[o] / outputs[o] * R[o] for o in range(n))


def relevance_by_hand(model: OneBlock, image: Tensor, target: int, gamma: float) -> Tensor:
    """Back through the block, rule by rule: [3,8,8] -> [8,8]."""
    cells = F.unfold(image[None], 4, stride=4)[0].T  # [T,48]
    kernel = model.patches.weight.flatten(1)
    x = cells @ kernel.T + model.patches.bias
    normed = model.norm1(x)
    query, key, value = model.qkv(normed).chunk(3, 1)
    scores = query @ key.T * 0.5
    attention = scores.softmax(1)
    mixed = attention @ value
    branch = model.out(mixed)
    y = x + branch
    hidden = model.up(model.norm2(y))
    active = hidden * torch.sigmoid(1.7 * hidden) if model.gated else F.gelu(hidden)
    last = y + model.down(active)
    pooled = last.mean(0)
    R = torch.zeros(3, dtype=x.dtype)
    R[target] = model.head(pooled)[target]
    tokens = range(len(x))
    R = gamma_rule(R, pooled, model.head.weight, model.head.bias, gamma)
    R = last / len(x) / pooled * R
    mlp = model.down(active)
    down = [gamma_rule((mlp / last * R)[t], active[t], model.down.weight, model.down.bias, gamma)
            for t in tokens]  # fmt: skip
    up = [gamma_rule(down[t], model.norm2(y)[t], model.up.weight, model.up.bias, gamma)
          for t in tokens]  # fmt: skip
    Ry = y / last * R + torch.stack([norm_rule(up[t], y[t], model.norm2) for t in tokens])
    Rx, Rb = x / y * Ry, branch / y * Ry
    Rm = torch.stack(
        [gamma_rule(Rb[t], mixed[t], model.out.weight, model.out.bias, gamma) for t in tokens]
    )
    Ra = 0.5 * attention * ((Rm / mixed) @ value.T)
    Rv = 0.5 * value * (attention.T @ (Rm / mixed))
    Rs = scores * (Ra - attention * Ra.sum(1, keepdim=True))
    Rq = 0.5 * query * ((Rs / scores) @ key) * 0.5
    Rk = 0.5 * key * ((Rs / scores).T @ query) * 0.5
    Rqkv = torch.cat([Rq, Rk, Rv], 1)
    Rn = [gamma_rule(Rqkv[t], normed[t], model.qkv.weight, model.qkv.bias, gamma) for t in tokens]
    Rx = Rx + torch.stack([norm_rule(Rn[t], x[t], model.norm1) for t in tokens])
    Rp = torch.stack(
        [gamma_rule(Rx[t], cells[t], kernel, model.patches.bias, gamma) for t in tokens]
    )
    return F.fold(Rp.T[None], (8, 8), 4, stride=4)[0].sum(0)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 0.2])
def test_attnlrp_equals_the_rules_of_the_paper(gated: bool, gamma: float) -> None:
    model = shaken(OneBlock(gated)).double().requires_grad_(False)
    image = random_images(1, 8).double()
    wanted = relevance_by_hand(model, image[0], 2, gamma)
    found = attnlrp(Classifier(model), image, torch.tensor([2]), **PLAIN, gamma=gamma)[0]
    assert torch.allclose(found, wanted.float(), rtol=1e-3, atol=1e-4 * wanted.abs().max().item())


@pytest.mark.parametrize("method", ["generic-attribution", "attnlrp"])
@pytest.mark.parametrize("build", [torchvision_vit, timm_vit, lambda: transformers_vit("sdpa")])
def test_batches_memory_precision_and_traces(method: str, build: Callable[[], nn.Module]) -> None:
    images = random_images(2, 32)
    model = build().train()
    model.requires_grad_(False)
    traces = Traces(model)
    wanted = explain(Classifier(model), images, TARGETS, method)
    each = explain(Classifier(model), images, TARGETS, method, batch_size=1)
    assert torch.allclose(each, wanted, atol=1e-4)
    with pytest.raises(UserError, match="targets must lie in 0..4"):
        explain(Classifier(model), images, TARGETS + 7, method)
    traces.check()
    assert torch.overrides._len_torch_function_stack() == 0
    with pytest.warns(RuntimeWarning, match="out of memory"):
        tight = explain(Classifier(SmallMemory(build(), room=1)), images, TARGETS, method)
    assert torch.allclose(tight, wanted, atol=1e-4)
    half = explain(Classifier(build().bfloat16()), images, TARGETS, method)
    assert half.dtype == torch.float32
    assert (half - wanted).abs().mean() < 0.1


@pytest.mark.parametrize(
    ("name", "canonizer"), [("vgg11_bn", SequentialMergeBatchNorm), ("resnet18", ResNetCanonizer)]
)
def test_lrp_equals_zennits(name: str, canonizer: Callable) -> None:
    """Zennit merges batch norms into the weights of the model itself; the map is the same."""
    model = settled(name, 64)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # as after training
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    classifier = Classifier(model, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    images, targets = random_images(2, 64), torch.tensor([1, 7])
    low, high = (classifier.normalize(fill(images)) for fill in (torch.zeros_like, torch.ones_like))
    composite = EpsilonGammaBox(low=low, high=high, gamma=0.25, canonizers=[canonizer()])
    traces = Traces(model)
    found = lrp(classifier, images, targets, **PLAIN, gamma=0.25)
    traces.check()
    chosen = lambda logits: F.one_hot(targets, 20) * logits  # noqa: E731  # what they attribute
    with Gradient(model, composite) as attributor:
        theirs = attributor(classifier.normalize(images), chosen)[1].sum(1)
    assert (found - theirs).abs().max() < 1e-3 * theirs.abs().max()


@pytest.mark.parametrize("method", ["generic-attribution", "attnlrp"])
def test_models_without_attention_are_refused(method: str) -> None:
    from small_models import cnn

    with pytest.raises(UserError, match=f"{method} needs a transformer that attends with torch"):
        explain(Classifier(cnn()), random_images(1, 16), method=method)


def test_lrp_of_a_model_with_a_sigmoid_is_that_of_its_logits() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    ended = Classifier(nn.Sequential(net, nn.Sigmoid()), layer="0.1", output="probabilities")
    images, targets = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    wanted = explain(Classifier(net, layer="1"), images, targets, method="lrp")
    assert torch.allclose(explain(ended, images, targets, method="lrp"), wanted, atol=1e-4)


def test_the_divisor_of_normalize_counts_as_a_constant() -> None:
    vectors = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with RelevanceRules({}):
        unit = F.normalize(vectors, dim=1)
    assert torch.allclose(unit, vectors / vectors.norm(dim=1, keepdim=True))
    (found,) = torch.autograd.grad(unit[:, 0].sum(), vectors)
    wanted = F.one_hot(torch.zeros(2, dtype=torch.long), 5) / vectors.norm(dim=1, keepdim=True)
    assert torch.allclose(found, wanted)
