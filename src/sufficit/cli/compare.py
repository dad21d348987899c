"""`sufficit compare`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sufficit.cli.app import app, err, literal, out, print_skipped
from sufficit.cli.options import (
    AlphaOption,
    BatchOption,
    ClassesOption,
    DataOrNoneOption,
    DeviceOption,
    DevicesOption,
    FillOption,
    HeldOutFillOption,
    JsonOption,
    LayerOption,
    ModelOrNoneOption,
    NodesOption,
    OnError,
    OnErrorOption,
    OutOption,
    PercentStepOption,
    Precision,
    PrecisionOption,
    Score,
    ScoreOption,
    SeedOption,
    SizeOption,
    Targets,
    TargetsOption,
    ValueStepOption,
    WeightsOption,
    was_given,
)
from sufficit.comparing.settings import METHODS, Settings, read_run, settings_from
from sufficit.crews import leads
from sufficit.files import check_output

if TYPE_CHECKING:
    from sufficit.comparing.outcome import Comparison

NOT_SETTINGS = ("config", "out_folder", "as_json", "overwrite", "devices", "num_nodes")


@app.command()
def compare(
    ctx: typer.Context,
    model: ModelOrNoneOption = None,
    data: DataOrNoneOption = None,
    methods: Annotated[
        str, typer.Option("--methods", "-m", help="Methods by name, as in gradcam,layercam.")
    ] = ",".join(METHODS),
    lax: Annotated[
        list[str] | None, typer.Option(help="A trained adapter's folder; may be given again.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A RUN.toml that sets what no flag does.")
    ] = None,
    out_folder: OutOption = Path("sufficit-compare"),
    controls: Annotated[
        bool, typer.Option(help="Score random and center too, outside the contest.")
    ] = True,
    alpha_min: AlphaOption = "0.5",
    score: ScoreOption = Score.accuracy,
    fill: FillOption = "black",
    held_out_fill: HeldOutFillOption = None,
    targets: TargetsOption = Targets.auto,
    leak: Annotated[
        bool, typer.Option(help="Also whether masks tell the class by their shape alone.")
    ] = True,
    donors: Annotated[
        int, typer.Option(help="Images of other classes under each mask, for the leak.", min=1)
    ] = 16,
    alpha_curve: Annotated[
        bool, typer.Option(help="Also MSI over alpha_min, on up to 16 of the images.")
    ] = True,
    value_step: ValueStepOption = 0.01,
    percent_step: PercentStepOption = 0.02,
    layer: LayerOption = None,
    batch_size: BatchOption = None,
    device: DeviceOption = "auto",
    devices: DevicesOption = 1,
    num_nodes: NodesOption = 1,
    precision: PrecisionOption = Precision.fp32,
    weights: WeightsOption = "default",
    num_classes: ClassesOption = None,
    size: SizeOption = None,
    on_error: OnErrorOption = OnError.skip,
    save_heatmaps: Annotated[
        bool, typer.Option("--save-heatmaps", help="Keep METHOD/heatmaps.npz, which are large.")
    ] = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew in --out, whatever it holds.")
    ] = False,
) -> None:
    """Which method explains your model best? Explain and score every image by every method.

    A run that was stopped goes on where it was when the same command is given again.

    **Examples**

    sufficit compare --model torchvision:resnet50 --data photos --methods gradcam,layercam

    sufficit compare --model saved/birds --data birds --lax birds-lax --alpha-min search

    sufficit compare --config sufficit-compare/RUN.toml --seed 1 --out again

    sufficit compare --model torchvision:resnet50 --data photos --devices 8

    sufficit compare --model timm:resnet50 --data 'web/{000..099}.tar' --targets prediction
    """
    settings = _settings(ctx, config)
    comparison = _compared(settings, out_folder, as_json, overwrite, devices, num_nodes)
    if comparison is None:
        return
    print_skipped({skipped.name: skipped.reason for skipped in comparison.skipped})
    if as_json:
        typer.echo(json.dumps(_report(comparison), indent=2, allow_nan=False))
        return
    _print(comparison, out_folder)


def _compared(
    settings: Settings, folder: Path, as_json: bool, overwrite: bool, devices: int, nodes: int
) -> "Comparison | None":
    """What comes out, in the first of the processes that share the work."""
    first = leads(devices, nodes)
    if first:
        check_output(folder, [Path(settings.data)], overwrite=overwrite, command="compare")
    from sufficit.compare import compare_folder
    from sufficit.parsing import device_from
    from sufficit.training.processes import crew_for

    progress = False if as_json else None
    with crew_for(device_from(settings.device), devices, nodes) as crew:
        return compare_folder(settings, folder, crew=crew, overwrite=overwrite, progress=progress)


def _settings(ctx: typer.Context, config: Path | None) -> Settings:
    """What the flags say, else the file, else what is usual."""
    given = {name: value for name, value in ctx.params.items() if was_given(ctx, name)}
    flags = {name: _plain(name, given[name]) for name in given if name not in NOT_SETTINGS}
    return settings_from((read_run(config) if config else {}) | flags)


def _plain(name: str, value: Any) -> Any:
    """A flag's value as RUN.toml would have it."""
    if name == "methods":
        return [part.strip() for part in value.split(",") if part.strip()]
    if name == "alpha_min" and value != "search":
        try:
            return float(value)
        except ValueError:
            return value
    return str(value) if isinstance(value, Path) else getattr(value, "value", value)


def _report(comparison: "Comparison") -> dict[str, Any]:
    from dataclasses import asdict

    from sufficit.results import as_json, plain

    columns = {name: as_json(comparison.summaries[name]) for name in comparison.order()}
    standing: dict[str, Any] = plain(asdict(comparison.standing))
    return {**plain(comparison.facts()), "columns": columns, "standing": standing}


def _print(comparison: "Comparison", folder: Path) -> None:
    from sufficit.comparing.telling import sentences, table, warnings_of, where_to_look

    out.print(table(comparison))
    for sentence in sentences(comparison):
        out.print(literal(sentence), highlight=False)
    for remark in warnings_of(comparison):
        err.print("[yellow]Warning:[/]", literal(remark))
    out.print(literal(where_to_look(folder)), highlight=False)
