"""`sufficit sanity`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from sufficit.cli.app import app, literal, out, print_skipped
from sufficit.cli.options import (
    ClassesOption,
    DataOption,
    DeviceOption,
    LayerOption,
    MethodsOption,
    ModelOption,
    OnError,
    OnErrorOption,
    OutOption,
    OverwriteOption,
    Precision,
    PrecisionOption,
    SeedOption,
    SizeOption,
    Targets,
    TargetsOption,
    WeightsOption,
)
from sufficit.files import check_output

if TYPE_CHECKING:
    from sufficit.sanity import SanityReport


@app.command()
def sanity(
    model: ModelOption,
    data: DataOption,
    methods: MethodsOption = "gradcam,center",
    images: Annotated[int, typer.Option(help="Most images, drawn by --seed.", min=1)] = 64,
    steps: Annotated[int, typer.Option(help="Most blocks to randomise, one by one.", min=1)] = 8,
    random_labels: Annotated[
        bool, typer.Option(help="Also train a copy on permuted labels of the images.")
    ] = False,
    epochs: Annotated[int, typer.Option(help="Epochs on random labels.", min=1)] = 30,
    train_images: Annotated[
        int, typer.Option(help="Most images to train on; they are kept in memory.", min=2)
    ] = 1000,
    targets: TargetsOption = Targets.auto,
    out_folder: OutOption = Path("sufficit-sanity"),
    layer: LayerOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = Precision.fp32,
    weights: WeightsOption = "default",
    num_classes: ClassesOption = None,
    size: SizeOption = None,
    on_error: OnErrorOption = OnError.skip,
    seed: SeedOption = 0,
    overwrite: OverwriteOption = False,
) -> None:
    """Check that heatmaps depend on the model: randomise its layers and compare.

    **Examples**

    sufficit sanity --model torchvision:resnet50 --data photos --methods gradcam,kpca-cam,center

    sufficit sanity --model saved/birds --data birds --random-labels --epochs 50

    sufficit sanity --model saved/birds --data birds --methods birds-lax,gradcam,center
    """
    check_output(out_folder, [data], overwrite=overwrite, command="sanity")
    from sufficit.classifier.loading import load_classifier
    from sufficit.explainers.sources import methods_from
    from sufficit.sanity import SanityOptions, check_folder, save_sanity

    options = SanityOptions(
        methods=methods_from(methods),
        images=images,
        steps=steps,
        random_labels=random_labels,
        epochs=epochs,
        train_images=train_images,
        targets=targets.value,
        layer=layer,
        on_error=on_error.value,
        seed=seed,
    )
    classifier = load_classifier(
        model,
        weights=weights,
        num_classes=num_classes,
        size=size,
        device=device,
        precision=precision,
    )
    result = check_folder(classifier, data, options)
    config: dict[str, Any] = {"model": model, "weights": weights, "data": str(data)}
    config |= {"methods": methods.split(","), "size": size, "precision": precision.value}
    save_sanity(out_folder, result, classifier, config | {"num_classes": num_classes}, options)
    print_skipped(result.skipped)
    _print_report(result.report)
    out.print(f"Written to {out_folder}: sanity.csv, sanity.png, run.json", highlight=False)


def _print_report(report: "SanityReport") -> None:
    out.print(_table(report))
    for name, sentence in report.sentences().items():
        out.print(f"[bold]{name}[/]", literal(sentence), highlight=False)
    remark = report.remark()
    if remark:
        out.print(remark, highlight=False)


def _table(report: "SanityReport") -> Table:
    """A row per method: its rank correlation after the first, a middle and the last step."""
    n = len(report.targets)
    title = f"Rank correlation with the original maps, mean over {n} images"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("method")
    steps = report.cascade_of(report.methods[0])
    shown = sorted({0, len(steps) // 2, len(steps) - 1})
    words = [f"{'down to ' if i else ''}{steps[i].layer} random" for i in shown]
    for word in [*words, *(["random labels"] if report.random_labels else [])]:
        table.add_column(literal(word), justify="right")
    labels = {found.method: found for found in report.random_labels}
    for name in report.methods:
        steps = report.cascade_of(name)
        found = [steps[i] for i in shown] + ([labels[name]] if name in labels else [])
        table.add_row(name, *(f"{float(f.rank_correlation.nanmean()):.2f}" for f in found))
    return table
