"""Say whether a map's order or its size is at fault, on held-out photographs.

    python experiments/lax/diagnose.py --data ROOT --weights ROOT --network resnet50 --out FOLDER

Four numbers for each map: insertion by rank, MSI at the best common size, MSI at the best size of
each image, and the correlation of the size at which the map cuts itself (alpha_min 0.5 of its
min-max) with the size that was needed. Beside them the fit, pointing and the outlines' leak.
Maps: Grad-CAM's order (before ReLU), Layer-CAM's, center, random, Grad-CAM smoothed; or any maps of
one's own with --maps FILE.npz (`images` names, `maps` [N,h,w]).
"""

import argparse
import json
import time
from pathlib import Path

import measure
import numpy as np
import photographs
import torch
import torch.nn.functional as F
from fills import SCORED, enlarged, gaussian
from torch import Tensor

import networks

STEP = 192 if torch.cuda.is_available() else 4  # photographs in one forward pass for features


@torch.no_grad()
def describe(
    network: networks.Network, photos: photographs.Photographs
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last features [N,K,h,w], the logits [N,C] and the predictions [N]."""
    last, logits = [], []
    for some in measure.padded(torch.arange(len(photos), device=network.device), STEP).split(STEP):
        features, said = network.features(network.normalize(photos.images(some)))
        last.append(features[3])
        logits.append(said)
    logits = torch.cat(logits)[: len(photos)]
    return torch.cat(last)[: len(photos)], logits, logits.argmax(1)


def at_image_size(maps: Tensor) -> Tensor:
    """Resize maps [N,h,w] to 224 px."""
    return enlarged(maps)


def vit_cams(
    network: networks.Network, photos: photographs.Photographs, targets: Tensor
) -> dict[str, Tensor]:
    """Return Grad-CAM and Layer-CAM at the first norm of a ViT's last block: [N,14,14] each."""
    stage = network.stages[3]
    block = stage.blocks[-1]
    found: dict[str, list[Tensor]] = {"gradcam_ln1": [], "layercam": []}
    for some in torch.arange(len(photos), device=network.device).split(STEP):
        with torch.no_grad():
            tokens = network.normalize(photos.images(some))
            for early in network.stages[:3]:
                tokens = early(tokens)
            for inner in stage.blocks[:-1]:
                tokens = stage.block(inner, tokens)
            normed = block.ln_1(tokens)
        with torch.enable_grad():
            normed = normed.requires_grad_()
            out = stage.norm(stage.after_norm(block, tokens, normed))[:, 0].float()
            logits = F.linear(out, network.weight, network.bias)
            gradient = torch.autograd.grad(logits.gather(1, targets[some, None]).sum(), normed)[0]
        values, gradient = normed.detach().float()[:, 1:], gradient.float()[:, 1:]
        weights = gradient.mean(1, keepdim=True)
        found["gradcam_ln1"].append((weights * values).sum(2).unflatten(1, (14, 14)))
        found["layercam"].append((gradient.relu() * values).sum(2).unflatten(1, (14, 14)))
    return {name: torch.cat(parts) for name, parts in found.items()}


def center(count: int, device: str) -> Tensor:
    """Return a Gaussian in the middle, a quarter of each side wide: [N,224,224]."""
    middle = (torch.arange(224, device=device) + 0.5) / 224 * 2 - 1
    line = torch.exp(-2 * middle.square())
    return (line[:, None] * line).expand(count, 224, 224)


def random_maps(count: int, device: str) -> Tensor:
    """Return uniform noise in each pixel: [N,224,224]."""
    drawn = torch.rand(count, 224, 224, generator=torch.Generator().manual_seed(0))
    return drawn.to(device)


def draw(
    network: networks.Network, photos: photographs.Photographs
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the order of every method at 224 px, and the predictions."""
    last, _, targets = describe(network, photos)
    maps = {"gradcam": at_image_size(network.class_evidence(last, targets))}
    if network.name == "deit_tiny":
        maps |= {
            name: at_image_size(found) for name, found in vit_cams(network, photos, targets).items()
        }
    else:
        positive = network.weight[targets].relu()
        maps["layercam"] = at_image_size(torch.einsum("nkhw,nk->nhw", last.float(), positive))
    maps["center"] = center(len(photos), network.device)
    maps["random"] = random_maps(len(photos), network.device)
    return maps, targets


def own_sizes(maps: Tensor) -> Tensor:
    """Return the share of pixels at which a map cuts itself: ReLU, min-max, at least 0.5 [N]."""
    positive = maps.relu()
    low, high = positive.amin((1, 2), keepdim=True), positive.amax((1, 2), keepdim=True)
    return ((positive - low) / (high - low).clamp(min=1e-9) >= 0.5).double().mean((1, 2)).cpu()


def rounded(value: object) -> object:
    """Round every float of a nested dict to four places."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    """Score every map on every part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--network", choices=networks.NAMES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="choose,report")
    parser.add_argument(
        "--only-choose", default="random,gradcam smooth 4,gradcam smooth 8,gradcam smooth 16"
    )
    parser.add_argument("--maps", type=Path)
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    started = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = networks.load(args.network, args.weights, device)
    parts = photographs.load(args.data, device, args.limit)
    print(f"[{time.time() - started:.0f}s] read", flush=True)
    rows, arrays, calibrated = [], {}, {}
    for part in args.parts.split(","):
        photos = parts[part]
        maps, targets = draw(network, photos)
        right = (targets == photos.labels).double().mean().item()
        for width in (4, 8, 16):
            maps[f"gradcam smooth {width}"] = gaussian(maps["gradcam"], width)
        if args.maps:
            own = np.load(args.maps)
            place = {str(name): number for number, name in enumerate(own["images"])}
            mine = torch.from_numpy(own["maps"])[[place[name] for name in photos.names]]
            maps = {args.maps.stem: at_image_size(mine.to(device))}
        plain = measure.ask_plain(network, photos, targets, SCORED)
        for name, drawn in maps.items():
            if part != "choose" and name in args.only_choose.split(","):
                continue
            answers = measure.ask(network, photos, drawn, targets, plain)
            calibrated.setdefault(name, measure.common_size(answers))
            row = {
                "network": network.name,
                "map": name,
                "part": part,
                "accuracy": right,
                **measure.summary(answers, calibrated[name], own_sizes(drawn)),
                "pointing": measure.points_at_box(drawn, photos).double().mean().item(),
            }
            leaks = measure.leak(network, photos, drawn, targets)
            row["leak"] = {
                str(size): measure.mean_and_interval(leaks[number])
                for number, size in enumerate(measure.LEAK_SIZES)
            }
            arrays |= answers.arrays(f"{network.name}/{name}/{part}", probabilities=True)
            arrays[f"{network.name}/{name}/{part}/leak"] = leaks.half().numpy()
            rows.append(rounded(row))
            shown = {
                key: row[key] for key in ("common_size", "size black+blur", "corr own", "pointing")
            }
            print(
                f"[{time.time() - started:.0f}s]",
                name,
                part,
                json.dumps(rounded(shown)),
                flush=True,
            )
            for fill in answers.kept:
                print("   ", fill, json.dumps(rounded(row[fill])), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"diagnosis-{network.name}" if not args.maps else f"{args.maps.stem}-{network.name}"
    (args.out / f"{name}.json").write_text(json.dumps(rows, indent=1))
    np.savez_compressed(args.out / f"{name}.npz", **arrays)
    print(f"[{time.time() - started:.0f}s] done", flush=True)


if __name__ == "__main__":
    main()
