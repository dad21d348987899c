"""The app: refuse what is not allowed, read the form, wait for the model, answer."""

import asyncio
import io
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Form, Request, Response
from fastapi import Path as PathField
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from markupsafe import Markup
from starlette.exceptions import HTTPException
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from sufficit import __version__
from sufficit.data.digits import synthetic_digits
from sufficit.data.image_files import FORMATS, BadImageError, decode_image
from sufficit.errors import UserError
from sufficit.progress import Progress
from sufficit.report.html import asset, environment, look_and_feel
from sufficit.web import schemas
from sufficit.web.decoding import FORMAT_NAMES, Decoder
from sufficit.web.guard import HANDLED, MEANINGS, Guard, failed, read_form
from sufficit.web.schemas import LEAST_STEP, ExplainForm, Limits, ScoreForm
from sufficit.web.service import ModelQueue, Service

HOME = "sufficit.web"
STEPS = (LEAST_STEP, 0.02, 0.05, 0.1)
EXAMPLE_SEED = 20  # a digit on which the methods differ
FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Failure, "description": text} for status, text in MEANINGS.items()
}
SECONDS = {"description": "Seconds.", "schema": {"type": "integer"}}
FAILURES[503]["headers"] = {"Retry-After": SECONDS}
ALWAYS: dict[int | str, dict[str, Any]] = {status: FAILURES[status] for status in (400, 403)}
PNG = {"image/png": {"schema": {"type": "string", "format": "binary"}}}
SHUT = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
AnyForm = TypeVar("AnyForm", bound=schemas.ImageForm)
Answer = TypeVar("Answer", bound=schemas.ImageAnswer)


def make_app(
    service: Service,
    limits: Limits | None = None,
    *,
    examples: Sequence[tuple[str, bytes]] = (),
    title: str = "",
    names: Collection[str] = (),
    loopback: bool = True,
) -> FastAPI:
    """The page of a model, its endpoints and their schema.

    `names` are host names that requests may use besides localhost, `loopback` says whether only
    this machine can reach the server, `examples` are names and PNG files to try, `title` is the
    page's heading.
    """
    limits = limits or Limits()
    facts = service.facts.model_copy(update={"limits": limits})
    # From elsewhere, no address may take all places.
    queue = ModelQueue(limits.places, None if loopback else max(1, limits.places * 3 // 4))
    app = FastAPI(
        title="Sufficit",
        version=__version__,
        description="Heatmaps of an image classifier and their scores.",
        docs_url=None,  # FastAPI's own pages load scripts from a CDN
        redoc_url=None,
        exception_handlers=dict.fromkeys(HANDLED, failed),
    )
    app.state.queue = queue
    app.add_middleware(Guard, names=names, loopback=loopback)

    @app.get("/api/health", responses=ALWAYS)
    async def health() -> schemas.Health:
        """Whether the server runs, and its load."""
        return schemas.Health(taken=queue.taken, places=queue.places)

    @app.get("/api/model", responses=ALWAYS)
    async def model() -> schemas.ModelFacts:
        """The model, its classes, the methods and the limits."""
        return facts

    app.include_router(_work(service, limits, queue))
    _add_pages(app, service, limits, list(examples) or [("The example", example_image())], title)
    forms = app.openapi()["components"]["schemas"]
    forms["ExplainForm"]["properties"]["methods"]["items"]["enum"] = list(service.methods)
    forms["ScoreForm"]["properties"]["method"]["enum"] = list(service.methods)
    for name in ("ExplainForm", "ScoreForm"):
        forms[name]["properties"]["fill"]["enum"] = facts.fills
    return app


def _work(service: Service, limits: Limits, queue: ModelQueue) -> APIRouter:
    """The endpoints that read an image and wait for the model."""
    decoder = Decoder(limits)

    class LimitedRoute(APIRoute):
        """Takes a place in the queue before it reads the form, and reads no more than allowed."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """FastAPI's handler, which finds the form that was read within the limits."""
            handle = super().get_route_handler()

            async def limited(request: Request) -> Response:
                with queue.place(request.client.host if request.client else ""):
                    return await handle(await read_form(request, limits))

            return limited

    async def answer(
        request: Request, form: AnyForm, work: Callable[[Tensor, AnyForm, Progress], Answer]
    ) -> Answer:
        content = await form.file.read()
        if not content:
            raise HTTPException(400, "the file is empty: choose another")

        task = asyncio.current_task()
        assert task is not None

        async def watch() -> None:  # the whole request has been read
            while (await request.receive())["type"] != "http.disconnect":
                pass
            task.cancel()

        watching = asyncio.ensure_future(watch())
        try:
            images = await decoder.decode(content, service.classifier.view)

            def job(progress: Progress) -> Answer:
                progress(0, 1)  # raises if the client disconnected while it waited
                started = time.monotonic()
                found = work(images, form, progress)
                found.seconds = round(time.monotonic() - started, 3)
                return found

            return await queue.run(job)
        finally:
            watching.cancel()

    router = APIRouter(prefix="/api", route_class=LimitedRoute, responses=FAILURES)
    multipart = Form(media_type="multipart/form-data")

    @router.post("/explain")
    async def explain(
        request: Request, form: Annotated[ExplainForm, multipart]
    ) -> schemas.Explained:
        """The prediction and the heatmaps of an image, without scores: fast."""
        return await answer(request, form, service.explain)

    @router.post("/score")
    async def score(request: Request, form: Annotated[ScoreForm, multipart]) -> schemas.Scored:
        """The scores and curves of one method on an image: one model call per mask."""
        return await answer(request, form, service.score)

    return router


def _add_pages(
    app: FastAPI,
    service: Service,
    limits: Limits,
    examples: Sequence[tuple[str, bytes]],
    title: str,
) -> None:
    templates, feel, facts = environment(HOME), look_and_feel(HOME), service.facts
    names = [service.class_name(number) for number in range(facts.n_classes)]
    count = Counter(names)  # classes that share a name get their number as well
    options = [f"{name} ({i})" if count[name] > 1 else name for i, name in enumerate(names)]
    targets = {option: number for number, option in enumerate(options)}
    settings = {name: str(field.default) for name, field in ScoreForm.model_fields.items()}
    settings["value_step"] = str(facts.value_step)  # what the fields of the page hold at first
    page = templates.get_template("page.html").render(
        facts=facts,
        megabytes=limits.bytes / 1e6,
        formats=FORMAT_NAMES,
        form=ScoreForm.model_json_schema()["properties"],
        steps=sorted({*STEPS, facts.value_step}),
        options=options,
        title=title,
        examples=[name for name, _ in examples],
        data={
            "bytes": limits.bytes,
            "targets": targets,
            "examples": [name for name, _ in examples],
            "model": facts.name,
            "version": __version__,
            "settings": settings,
        },
        more=Markup(asset("live.css", HOME)),
        **feel,
    )
    allowed = (
        f"img-src 'self' data: blob:; connect-src 'self';"
        f" script-src 'sha256-{feel['script_digest']}'"
    )
    policy = f"{SHUT}; {allowed}; base-uri 'none'; form-action 'none'"
    png = {200: {"content": PNG, "description": "A PNG file."}, 422: FAILURES[422], **ALWAYS}

    @app.get("/api/examples/{number}", response_class=Response, responses=png)
    async def example_file(
        number: Annotated[int, PathField(ge=0, le=len(examples) - 1)],
    ) -> Response:
        """An image to try the page with; they are numbered from 0."""
        return Response(examples[number][1], media_type="image/png")

    @app.get("/", include_in_schema=False)
    async def home() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        text = templates.get_template("endpoints.html").render(schema=app.openapi(), **feel)
        return HTMLResponse(text, headers={"Content-Security-Policy": f"{SHUT}; img-src data:"})


def example_image(file: Path | None = None, limits: Limits | None = None) -> bytes:
    """An image file within the limits as PNG; without one, a synthetic digit."""
    if file is None:
        pixels = synthetic_digits(1, seed=EXAMPLE_SEED).images[0]
    else:
        try:
            pixels = decode_image(file, None, FORMATS, (limits or Limits()).pixels)
        except BadImageError as error:
            raise UserError(f"cannot use --example {file}: {error}") from error
    png = io.BytesIO()
    to_pil_image(pixels).save(png, "png")
    return png.getvalue()
