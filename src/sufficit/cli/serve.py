"""`sufficit serve`."""

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sufficit.cli.app import app, err, literal, out
from sufficit.cli.browser import show_page
from sufficit.cli.options import (
    ClassesOption,
    DeviceOption,
    LayerOption,
    ModelOption,
    Precision,
    PrecisionOption,
    SizeOption,
    WeightsOption,
)
from sufficit.errors import UserError

if TYPE_CHECKING:
    from sufficit.classifier.classifier import Classifier
    from sufficit.web import Limits


@app.command()
def serve(
    model: ModelOption,
    lax: Annotated[
        list[str] | None, typer.Option(help="A trained adapter's folder; may be given again.")
    ] = None,
    host: Annotated[str, typer.Option(help="127.0.0.1 is for this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name the page may be asked for beside localhost; may be given again."),
    ] = None,
    open_page: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="In a browser; by default in a terminal only."),
    ] = None,
    example: Annotated[
        Path | None, typer.Option(help="The image of the button Try an example.")
    ] = None,
    value_step: Annotated[
        float, typer.Option(help="Step of the curves at first; smaller is slower.", min=0.01)
    ] = 0.05,
    max_mb: Annotated[float, typer.Option(help="Largest upload, in MB.", min=0.01)] = 10.0,
    max_megapixels: Annotated[float, typer.Option(help="Largest image.", min=0.01)] = 25.0,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; more are sent away.", min=0)
    ] = 16,
    layer: LayerOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = Precision.fp32,
    weights: WeightsOption = "default",
    num_classes: ClassesOption = None,
    size: SizeOption = None,
) -> None:
    """A page for one model: drop an image, see heatmaps, scores and what the model sees of it.

    **Examples**

    sufficit serve --model sufficit:digits --lax sufficit:digits --open

    sufficit serve --model torchvision:resnet50 --port 9000

    sufficit serve --model saved/birds --lax birds-lax --example wren.jpg
    """
    _check_installed()
    from sufficit.parsing import classifier_from
    from sufficit.web import Limits
    from sufficit.web.memory import share_arenas
    from sufficit.web.server import bound

    share_arenas()  # before the model's threads have arenas of their own
    limits = Limits(max_mb, max_megapixels, max_waiting)
    listening = bound(host, port)
    try:
        classifier = classifier_from(model, weights, num_classes, size, device, precision, layer)
        picture = None if example is None else _example(example, limits)
        folders, names = lax or [], allow_host or []
        _serve(classifier, model, folders, value_step, limits, picture, names, listening, open_page)
    finally:
        listening.close()


def _serve(
    classifier: "Classifier",
    model: str,
    lax: list[str],
    value_step: float,
    limits: "Limits",
    example: bytes | None,
    names: list[str],
    listening: socket.socket,
    open_page: bool | None,
) -> None:
    from sufficit.parsing import methods_from
    from sufficit.web import make_app, open_studio
    from sufficit.web import serve as answer
    from sufficit.web.server import address, is_loopback

    studio = open_studio(classifier, model, methods_from(",".join(lax)), value_step)
    loopback = is_loopback(listening.getsockname()[0])
    known = [*names, *([] if loopback else [socket.gethostname()])]
    page = make_app(studio, limits, example=example, names=known, loopback=loopback)
    out.print(literal(f"{model} at {address(listening)}; Ctrl-C ends it."), highlight=False)
    out.file.flush()  # a log must not wait for the end
    if not loopback:
        err.print(
            "[yellow]Warning:[/] whoever reaches this port can use the page: it asks for no"
            " password."
        )
    show_page(address(listening), open_page)  # it waits until the page is answered
    answer(page, listening)


def _example(path: Path, limits: "Limits") -> bytes:
    """A picture as PNG, whatever it was."""
    from sufficit.web.pages import as_png
    from sufficit.web.refusals import RefusedError

    try:
        return as_png(path.read_bytes(), limits)
    except (OSError, RefusedError) as error:
        raise UserError(f"--example {path}: {error}") from error


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [m for m in ("fastapi", "uvicorn", "python_multipart") if find_spec(m) is None]
    if missing:
        raise UserError(f"the page needs {', '.join(missing)}: pip install 'sufficit[web]'")
