"""`sufficit serve`."""

import socket
from importlib.util import find_spec
from typing import Annotated

import typer

from sufficit.cli.console import app, out, say, show_page, warn
from sufficit.cli.options import run_options
from sufficit.errors import UserError
from sufficit.files import place
from sufficit.runs.config import MODEL, RunConfig


@app.command()
@run_options(
    *MODEL, "methods", "value_step", defaults={"methods": (), "value_step": 0.05, "data": ""}
)
def serve(
    config: RunConfig,
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
        list[str] | None, typer.Option(help="Image that the page offers to try; repeatable.")
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "",
    max_mb: Annotated[float, typer.Option(help="Largest upload, in MB.", min=0.01)] = 10.0,
    max_megapixels: Annotated[
        float, typer.Option(help="Largest image, in million pixels.", min=0.01)
    ] = 25.0,
) -> None:
    """Serve a page for one model: drop an image, see its heatmaps and their scores.

    --methods are selected at the start, the CAMs if there are none; the page offers all others that
    work on the model too. --value-step is the page's default; a smaller one is slower.

    **Examples**

    sufficit serve --model sufficit:digits --methods sufficit:digits,gradcam --open

    sufficit serve --model torchvision:resnet50 --port 9000

    sufficit serve --model saved/birds --methods birds-lax,layercam --example wren.jpg
    """
    missing = [m for m in ("fastapi", "uvicorn", "python_multipart") if find_spec(m) is None]
    if missing:
        raise UserError(f"the page needs {', '.join(missing)}: pip install '.[web]'")
    from sufficit import web
    from sufficit.explainers.words import methods_from
    from sufficit.runs.job import load_model
    from sufficit.web.server import bind, is_local, url

    limits = web.Limits(bytes=int(max_mb * 1e6), pixels=int(max_megapixels * 1e6))
    with bind(host, port) as listening:  # before the model: a taken port fails at once
        classifier = load_model(config)
        files = [place(word) for word in example or []]
        examples = [(file.name, web.example_image(file, limits)) for file in files]
        methods = methods_from(config.methods)
        service = web.open_service(classifier, config.model, methods, config.value_step)
        page, local = url(listening), is_local(listening)
        names = [*(allow_host or []), *([] if local else [socket.gethostname(), host])]
        app_of_page = web.make_app(service, limits, examples=examples, title=title, names=names)
        say(f"{config.model} at {page}; Ctrl-C stops it.")
        out.file.flush()  # a log file gets the line now
        if not local:
            warn(
                "the page has no password: anyone who can reach this port can use it. It belongs"
                f" behind a proxy that asks for one. Requests may name {', '.join(names)} and"
                " localhost as their host; --allow-host NAME adds another."
            )
        show_page(page, open_page)  # the browser waits until the server starts
        web.serve(app_of_page, listening)
