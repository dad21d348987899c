r"""Train the order of one nested map on the photographs to learn from, and score it on others.

    python experiments/lax/train_order.py --data ROOT --weights ROOT --network resnet50 \\
        --arms E2,wide+hit --steps 1520 --out FOLDER [--parts choose,report] [--save]

An arm is a sum of changes to the recipe as handed over (`CHANGES`); `E2` changes nothing. Sizes and
everything else are chosen on `choose`.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import measure
import numpy as np
import photographs
import table
import torch
import torch.nn.functional as F
from diagnose import STEP, own_sizes, rounded
from fills import SCORED, gaussian, training_fill
from order_map import OrderMap, at_image_size, mask_of_size
from photographs import Photographs
from safetensors.torch import save_file
from torch import Tensor

import networks


@dataclass(frozen=True)
class Recipe:
    """What one training does."""

    steps: int = 1520
    batch: int = 192
    lr: float = 1e-3
    width: int = 128
    cells: int = 28
    query: bool = False  # compare the class's row of the head with every cell
    gradients: bool = False  # gradient times activation of the last but one stage as evidence
    sizes: str = "log"  # log-uniform, uniform, or around the size each photograph needs
    kept: str = "power"  # (1 - p^.5) / .5, or a smooth count of misses
    rest: float = 0.5
    fills: str = "handed"
    hard: bool = False  # masks of 0 and 1 with a soft mask's gradient
    tau: tuple[float, float] = (0.5, 0.1)
    point: float = 0.0  # weight of the peak lying among the evidence's highest cells
    average: float = 0.0  # decay of an average of the weights
    kind: str = "full"  # of the convolutions, or separable
    attention: bool = False  # cells of the two coarsest levels read each other
    lean: bool = False  # no evidence of other classes
    last: int | None = None  # channels of the finest level
    mix: float = 0.0  # share of views with a part of another photograph in them
    zoom: bool = False  # crops down to .4 of the side
    photos: int | None = None  # so many of the photographs to learn from
    seed: int = 0


CHANGES: dict[str, dict[str, object]] = {
    "E2": {},
    "wide": {"fills": "wide"},
    "uniform": {"sizes": "uniform"},
    "needed": {"sizes": "needed"},
    "hit": {"kept": "hit"},
    "hard": {"hard": True},
    "fine": {"cells": 56},
    "query": {"query": True},
    "gradients": {"gradients": True},
    "w192": {"width": 192},
    "w64": {"width": 64},
    "w32": {"width": 32},
    "w48": {"width": 48},
    "w256": {"width": 256},
    "sep": {"kind": "separable"},
    "attn": {"attention": True},
    "lean": {"lean": True},
    "last48": {"last": 48},
    "mix": {"mix": 0.4},
    "zoom": {"zoom": True},
    "p300": {"photos": 300},
    "p1000": {"photos": 1000},
    "quarter": {"steps": 0.25},  # a factor, see recipe_of
    "sep64": {"kind": "separable", "width": 64},
    "point": {"point": 0.05},
    "average": {"average": 0.99},
    "sharp": {"tau": (0.3, 0.05)},
    "norest": {"rest": 0.0},
    "lr2": {"lr": 2e-3},
    "lr3": {"lr": 3e-3},
    "double": {"steps": 2},  # a factor, see recipe_of
    "seed1": {"seed": 1},
    "seed2": {"seed": 2},
}


def recipe_of(arm: str, steps: int) -> Recipe:
    """Return the recipe of an arm, changes joined by +."""
    recipe = Recipe(steps=steps)
    for change in arm.split("+"):
        wanted = dict(CHANGES[change])
        wanted["steps"] = round(recipe.steps * wanted.get("steps", 1))
        recipe = replace(recipe, **wanted)
    return recipe


def with_parts(images: Tensor, share: float) -> Tensor:
    """Paste a window of another photograph into a share of the images: [N,3,H,W]."""
    count, side, device = len(images), images.shape[2], images.device
    extent = torch.rand(count, 2, device=device) * 0.5 + 0.3
    start = torch.rand(count, 2, device=device) * (1 - extent)
    line = (torch.arange(side, device=device) + 0.5) / side
    inside = (line >= start[..., None]) & (line < (start + extent)[..., None])
    window = inside[:, 0, :, None] & inside[:, 1, None, :]
    window &= (torch.rand(count, device=device) < share)[:, None, None]
    return torch.where(window[:, None], images.roll(1, 0), images)


def views(images: Tensor, least: float = 0.6) -> Tensor:
    """Crop six in ten images to `least` to 1 of their side, flip half of them: [N,3,H,W]."""
    count, device = len(images), images.device
    scale = torch.rand(count, device=device) * (1 - least) + least
    scale = torch.where(torch.rand(count, device=device) < 0.4, 1.0, scale)
    flip = torch.where(torch.rand(count, device=device) < 0.5, 1.0, -1.0)
    shift = (torch.rand(count, 2, device=device) * 2 - 1) * (1 - scale)[:, None]
    matrix = torch.zeros(count, 2, 3, device=device)
    matrix[:, 0, 0], matrix[:, 1, 1], matrix[:, :, 2] = scale * flip, scale, shift
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False, padding_mode="reflection")


def gradient_evidence(
    network: networks.Network, features: networks.Features, targets: Tensor
) -> Tensor:
    """Return gradient times activation at the last stage but one, whole and positive: [N,2,h,w]."""
    with torch.enable_grad():
        inner = features[2].detach().requires_grad_()
        logits = F.linear(network.pool(network.stages[3](inner)), network.weight, network.bias)
        gradient = torch.autograd.grad(logits.gather(1, targets[:, None]).sum(), inner)[0].float()
    values = inner.detach().float()
    both = [(gradient * values).sum(1), (gradient.relu() * values).sum(1)]
    return networks.standardize(torch.stack(both, 1))


def mixed(device: str) -> torch.autocast:
    """Return bfloat16 arithmetic on a GPU, plain arithmetic elsewhere."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


@torch.no_grad()
def look(network: networks.Network, recipe: Recipe, inputs: Tensor, targets: Tensor | None = None):
    """Return the frozen inputs of the adapter for normalised images, and the targets."""
    features, logits = network.features(inputs)
    targets = logits.argmax(1) if targets is None else targets
    evidence = network.evidence(features[3], targets)
    extra = gradient_evidence(network, features, targets) if recipe.gradients else None
    return features, evidence, targets, extra


class Sizes:
    """Draws the size at which each view's map is cut."""

    def __init__(self, kind: str, count: int, device: str) -> None:
        self.kind = kind
        self.needed = torch.full((count,), 0.3, device=device)

    def draw(self, rows: Tensor) -> Tensor:
        """Return a size for each photograph [N]."""
        drawn = torch.rand(len(rows), device=rows.device)
        anywhere = 0.03 * (0.85 / 0.03) ** drawn
        if self.kind == "log":
            return anywhere
        if self.kind == "uniform":
            return 0.03 + 0.87 * drawn
        near = self.needed[rows] * torch.exp(0.5 * torch.randn(len(rows), device=rows.device))
        return torch.where(
            torch.rand(len(rows), device=rows.device) < 0.25, anywhere, near.clamp(0.03, 0.9)
        )

    def learn(self, rows: Tensor, hits: Tensor) -> None:
        """Move the needed sizes down after a hit, up after a miss; at rest where 70 % hit."""
        factor = torch.where(hits, math.exp(-0.15), math.exp(0.35))
        self.needed[rows] = (self.needed[rows] * factor).clamp(0.03, 0.9)


def misses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a smooth 1 where another class wins and 0 where the target does: [N]."""
    own = logits.gather(1, targets[:, None])[:, 0]
    best_other = logits.scatter(1, targets[:, None], -1e4).amax(1)
    return torch.sigmoid((best_other - own) / 1.5)


def loss_of(recipe: Recipe, kept: Tensor, rest: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of regions and what they leave: logits [N,C] each."""
    if recipe.kept == "hit":
        return misses(kept, targets).mean() + recipe.rest * (1 - misses(rest, targets)).mean()
    index = targets[:, None]
    p_kept = kept.softmax(1).gather(1, index).clamp(1e-6, 1)
    p_rest = rest.softmax(1).gather(1, index)
    return ((1 - p_kept.sqrt()) / 0.5).mean() + recipe.rest * p_rest.mean()


def peak_loss(z: Tensor, evidence: Tensor) -> Tensor:
    """Punish peaks outside the evidence's highest 5 %: z [N,1,h,w], evidence [N,3,h,w]."""
    own = F.interpolate(evidence[:, :1], size=z.shape[2:], mode="bicubic").flatten(1)
    among = own >= own.quantile(0.95, dim=1, keepdim=True)
    flat = z.flatten(1)
    share = (4 * flat / (flat.std(1, keepdim=True) + 1e-4)).softmax(1)
    return -((share * among).sum(1) + 1e-3).log().mean()


def train(network: networks.Network, photos: Photographs, recipe: Recipe, say) -> OrderMap:
    """Train one adapter; by the number of steps, so that a run can be repeated."""
    torch.manual_seed(recipe.seed)
    device = network.device
    extra = 2 if recipe.gradients else 0
    adapter = OrderMap(
        network,
        recipe.width,
        recipe.cells,
        recipe.query,
        extra,
        kind=recipe.kind,
        attention=recipe.attention,
        lean=recipe.lean,
        last=recipe.last,
    )
    adapter = adapter.to(device, memory_format=torch.channels_last)
    averaged = {key: value.clone() for key, value in adapter.state_dict().items()}
    optimizer = torch.optim.AdamW(adapter.parameters(), recipe.lr, weight_decay=0.02)
    sizes = Sizes(recipe.sizes, len(photos), device)
    for step in range(recipe.steps):
        done = step / recipe.steps
        warm = min(1.0, (step + 1) / (0.05 * recipe.steps))
        optimizer.param_groups[0]["lr"] = recipe.lr * warm * (0.5 + 0.5 * math.cos(math.pi * done))
        tau = recipe.tau[0] * (recipe.tau[1] / recipe.tau[0]) ** done
        count = min(recipe.photos or len(photos), len(photos))
        rows = torch.randint(count, (recipe.batch,), device=device) * (len(photos) // count)
        images = views(photos.images(rows), 0.4 if recipe.zoom else 0.6)
        if recipe.mix:
            images = with_parts(images, recipe.mix)
        features, evidence, targets, more = look(network, recipe, network.normalize(images))
        with mixed(device):
            z = adapter(features, evidence, targets, more)
        size = sizes.draw(rows)
        mask = mask_of_size(at_image_size(z), size, tau, recipe.hard)[:, None]
        region = torch.lerp(training_fill(images, recipe.fills), images, mask)
        left = torch.lerp(training_fill(images, recipe.fills), images, 1 - mask)
        logits = network.logits(network.normalize(torch.cat([region, left]))).float()
        kept, rest = logits.chunk(2)
        loss = loss_of(recipe, kept, rest, targets)
        if recipe.point:
            loss = loss + recipe.point * peak_loss(z.float(), evidence)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            if recipe.sizes == "needed":
                sizes.learn(rows, kept.argmax(1) == targets)
            if recipe.average:
                for key, value in adapter.state_dict().items():
                    averaged[key].lerp_(value.float(), 1 - min(recipe.average, step / (step + 10)))
        if (step + 1) % max(1, recipe.steps // 4) == 0:
            hits = (kept.argmax(1) == targets).float().mean().item()
            say(
                f"step {step + 1} loss {loss.item():.3f} hits {hits:.3f} "
                f"multiple {adapter.multiple.item():.2f}"
            )
    if recipe.average:
        adapter.load_state_dict(averaged)
    return adapter.eval()


@torch.no_grad()
def draw(network: networks.Network, adapter: OrderMap, recipe: Recipe, photos: Photographs):
    """Return the maps [N,224,224], the evidence at 224 px [N,224,224] and the predictions."""
    maps, evidences, said = [], [], []
    for some in measure.padded(torch.arange(len(photos), device=network.device), STEP).split(STEP):
        features, evidence, targets, more = look(
            network, recipe, network.normalize(photos.images(some))
        )
        with mixed(network.device):
            z = adapter(features, evidence, targets, more)
        maps.append(at_image_size(z))
        evidences.append(at_image_size(evidence[:, :1]))
        said.append(targets)
    return tuple(torch.cat(parts)[: len(photos)] for parts in (maps, evidences, said))


def pointing(maps: Tensor, evidence: Tensor, photos: Photographs) -> dict[str, float]:
    """Return pointing by the peak, the peak after smoothing, and evidence in the top share."""
    found = {"peak": maps, "gradcam": evidence}
    found |= {f"smooth {width}": gaussian(maps, width) for width in (4, 8, 16)}
    for share in (0.02, 0.05):
        top = measure.ranks_of(maps) < share * maps[0].numel()
        found[f"evidence in top {share}"] = evidence.masked_fill(~top, -1e4)
    return {
        name: measure.points_at_box(m, photos).double().mean().item() for name, m in found.items()
    }


def save(adapter: OrderMap, path: Path) -> None:
    """Write an adapter's weights in half precision."""
    weights = {key: value.half().contiguous() for key, value in adapter.state_dict().items()}
    save_file(weights, path)


def variants(maps: Tensor, evidence: Tensor, afters: str) -> dict[str, Tensor]:
    """Return the trained maps as they are, and smoothed or blended with the evidence as asked."""
    found = {"": maps}
    for after in filter(None, afters.split(",")):
        kind, amount = after[:6], float(after.lstrip("smothblend"))
        found["/" + after] = (
            gaussian(maps, amount) if kind == "smooth" else maps + amount * evidence
        )
    return found


def options() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--network", choices=networks.NAMES, required=True)
    parser.add_argument("--arms", default="E2")
    parser.add_argument("--steps", type=int, default=1520)
    parser.add_argument("--parts", default="choose")
    parser.add_argument("--fills", default=",".join(SCORED))
    parser.add_argument(
        "--after", default="", help="changes of the trained map to score: smooth8,blend0.3"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tag", default="arms")
    parser.add_argument("--save", action="store_true", help="write the adapters")
    parser.add_argument("--probabilities", action="store_true", help="write probabilities too")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch", type=int, default=192)
    return parser


def main() -> None:
    """Train and score every arm."""
    args = options().parse_args()
    started = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")

    def say(*words: object) -> None:
        print(f"[{time.time() - started:.0f}s] {args.network}", *words, flush=True)

    network = networks.load(args.network, args.weights, device)
    parts = photographs.load(args.data, device, args.limit)
    say("read")
    args.out.mkdir(parents=True, exist_ok=True)
    rows, arrays, plains, common = [], {}, {}, {}
    for arm in args.arms.split(","):
        recipe = replace(recipe_of(arm, args.steps), batch=args.batch)
        began = time.time()
        adapter = train(network, parts["learn"], recipe, lambda *words, arm=arm: say(arm, *words))
        if device == "cuda":
            torch.cuda.synchronize()
        training = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "seconds": time.time() - began,
            "weights": sum(p.numel() for p in adapter.parameters()),
            "recipe": asdict(recipe),
        }
        if args.save:
            save(adapter, args.out / f"order-{args.network}-{arm.replace('+', '_')}.safetensors")
        for part in args.parts.split(","):
            photos = parts[part]
            maps, evidence, targets = draw(network, adapter, recipe, photos)
            if part not in plains:
                fills = tuple(args.fills.split(","))
                plains[part] = measure.ask_plain(network, photos, targets, fills)
            for suffix, drawn in variants(maps, evidence, args.after).items():
                name = arm + suffix
                answers = measure.ask(network, photos, drawn, targets, plains[part])
                common.setdefault(name, measure.common_size(answers))
                leaks = measure.leak(network, photos, drawn, targets)
                key = f"{args.network}/{name}/{part}"
                arrays |= answers.arrays(key, args.probabilities)
                arrays[f"{key}/leak"] = leaks.half().numpy()
                scores = {
                    **measure.summary(answers, common[name], own_sizes(drawn)),
                    "pointing": pointing(drawn, evidence, photos),
                    "leak": {
                        str(size): measure.mean_and_interval(leaks[number])
                        for number, size in enumerate(measure.LEAK_SIZES)
                    },
                }
                row = {"network": args.network, "arm": name, "part": part, **training, **scores}
                rows.append(rounded(row))
                say(name, part, f"trained {training['seconds']:.0f} s")
                print(table.line(rows[-1]), flush=True)
            small = F.interpolate(maps[:24, None], size=112, mode="area")[:, 0]
            arrays[f"{args.network}/{arm}/{part}/sheet"] = small.half().cpu().numpy()
        (args.out / f"{args.tag}-{args.network}.json").write_text(json.dumps(rows, indent=1))
        np.savez_compressed(args.out / f"{args.tag}-{args.network}.npz", **arrays)
    say("done")


if __name__ == "__main__":
    main()
