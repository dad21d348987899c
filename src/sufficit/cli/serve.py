"""`sufficit serve`."""

import socket
from importlib.util import find_spec
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
    from sufficit.web import Limits


@app.command()
def serve(
    model: ModelOption,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods that are selected at the start, comma separated: names, folders of LAX"
            " adapters, your own python:FILE.py:FUNCTION. Without it: the CAMs. The page offers all"
            " other methods that work on the model too."
        ),
    ] = "",
    host: Annotated[
        str, typer.Option(help="127.0.0.1: only this machine; 0.0.0.0: the network as well.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port.", min=0, max=65535)] = 8000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name besides localhost that requests may use; repeatable."),
    ] = None,
    open_page: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open a browser; the default is: in a terminal."),
    ] = None,
    example: Annotated[
        Path | None, typer.Option(help="Image behind the button Try an example.")
    ] = None,
    value_step: Annotated[
        float, typer.Option(help="Default curve step; smaller is slower.", min=0.01)
    ] = 0.05,
    max_mb: Annotated[float, typer.Option(help="Largest upload, in MB.", min=0.01)] = 10.0,
    max_megapixels: Annotated[
        float, typer.Option(help="Largest image, in million pixels.", min=0.01)
    ] = 25.0,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; further ones get 503.", min=0)
    ] = 16,
    layer: LayerOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = Precision.fp32,
    weights: WeightsOption = "default",
    num_classes: ClassesOption = None,
    size: SizeOption = None,
) -> None:
    """Serve a page for one model: drop an image, see its heatmaps and their scores.

    **Examples**

    sufficit serve --model sufficit:digits --methods sufficit:digits,gradcam --open

    sufficit serve --model torchvision:resnet50 --port 9000

    sufficit serve --model saved/birds --methods birds-lax,layercam --example wren.jpg
    """
    missing = [m for m in ("fastapi", "uvicorn", "python_multipart") if find_spec(m) is None]
    if missing:
        raise UserError(f"the page needs {', '.join(missing)}: pip install '.[web]'")
    from sufficit import web
    from sufficit.classifier.loading import load_classifier
    from sufficit.explainers.sources import methods_from
    from sufficit.web.server import bind, is_local, url

    limits = web.Limits(
        bytes=int(max_mb * 1e6), pixels=int(max_megapixels * 1e6), places=1 + max_waiting
    )
    with bind(host, port) as listening:  # before the model: a taken port fails at once
        classifier = load_classifier(
            model,
            weights=weights,
            num_classes=num_classes,
            size=size,
            device=device,
            precision=precision,
            layer=layer,
        )
        image = None if example is None else _example(example, limits)
        service = web.open_service(classifier, model, methods_from(methods), value_step)
        local = is_local(listening)
        names = [*(allow_host or []), *([] if local else [socket.gethostname()])]
        page = web.make_app(service, limits, example=image, names=names, loopback=local)
        out.print(literal(f"{model} at {url(listening)}; Ctrl-C stops it."), highlight=False)
        out.file.flush()  # a log file gets the line now
        if not local:
            err.print(
                "[yellow]Warning:[/] the page has no password: anyone who can reach this port can"
                " use it."
            )
        show_page(url(listening), open_page)  # the browser waits until the server starts
        web.serve(page, listening)


def _example(path: Path, limits: "Limits") -> bytes:
    """An image file as PNG."""
    from starlette.exceptions import HTTPException

    from sufficit.web.app import example_image

    try:
        return example_image(path.read_bytes(), limits)
    except (OSError, HTTPException) as error:
        reason = error.detail if isinstance(error, HTTPException) else error.strerror
        raise UserError(f"cannot use --example {path}: {reason}") from error
