"""`sufficit explain`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sufficit.cli.app import app, out, print_skipped
from sufficit.cli.options import (
    ClassesOption,
    DeviceOption,
    LayerOption,
    MethodOption,
    ModelOption,
    OnError,
    OnErrorOption,
    OverwriteOption,
    Precision,
    PrecisionOption,
    SizeOption,
    Targets,
    WeightsOption,
)
from sufficit.errors import UserError
from sufficit.files import check_output


@app.command()
def explain(
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    model: ModelOption,
    method: MethodOption = "gradcam",
    target: Annotated[
        str | None,
        typer.Option(help="One class for all images, by number or name."),
    ] = None,
    targets: Annotated[
        Targets, typer.Option(help="Without --target. auto: labels where there are any.")
    ] = Targets.auto,
    out_folder: Annotated[Path, typer.Option("--out", help="Where the pictures go.")] = Path(
        "sufficit-explain"
    ),
    layer: LayerOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = Precision.fp32,
    weights: WeightsOption = "default",
    num_classes: ClassesOption = None,
    size: SizeOption = None,
    on_error: OnErrorOption = OnError.skip,
    seed: Annotated[int, typer.Option(help="Of the method random.", min=0)] = 0,
    overwrite: OverwriteOption = False,
) -> None:
    """Draw heatmaps: overlays, one sheet of all, and files that `sufficit evaluate` reads.

    **Examples**

    sufficit explain cat.jpg --model torchvision:resnet50

    sufficit explain photos --model timm:vit_tiny_patch16_224 --method gradcam,rollout

    sufficit explain a.jpg b.jpg --model torchvision:resnet18 --method finer-cam --target tabby

    sufficit explain photos --model saved/birds --method birds-lax,gradcam
    """
    if target is not None and targets != Targets.auto:
        raise UserError(
            f"--target {target} is one class for all images, and --targets {targets.value} one for"
            " each: give one of them"
        )
    check_output(out_folder, images, overwrite=overwrite, command="explain")
    from sufficit.drawing import Wanted, class_number, explain_pictures, pictures_of, save_drawn
    from sufficit.parsing import classifier_from, methods_from

    methods = methods_from(method)
    pictures = pictures_of(images)
    classifier = classifier_from(model, weights, num_classes, size, device, precision)
    wanted: Wanted = targets.value
    if target is not None:
        wanted = class_number(target, classifier.classes)
    drawn = explain_pictures(
        classifier, pictures, methods, wanted, layer=layer, seed=seed, on_error=on_error.value
    )
    config: dict[str, Any] = {"model": model, "weights": weights, "methods": method.split(",")}
    config["target"] = wanted
    config |= {"layer": layer or classifier.layer, "size": size, "seed": seed}
    print_skipped(drawn.skipped)
    for path in save_drawn(out_folder, drawn, classifier, config):
        out.print(str(path), highlight=False, markup=False)
