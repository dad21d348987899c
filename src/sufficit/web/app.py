"""The endpoints: receive, wait in line, ask the studio."""

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from torch import Tensor

from sufficit import __version__
from sufficit.errors import UserError
from sufficit.perturbation.fills import FILLS
from sufficit.progress import Progress
from sufficit.web import pages
from sufficit.web.guard import Guard
from sufficit.web.limits import Limits
from sufficit.web.line import Line
from sufficit.web.refusals import MEANINGS, GoneError, RefusedError, failure
from sufficit.web.schemas import (
    Explained,
    ExplainForm,
    Failure,
    Health,
    LimitFacts,
    MethodFacts,
    ModelFacts,
    Scored,
    ScoreForm,
    form_body,
)
from sufficit.web.studio import Studio
from sufficit.web.uploads import Upload, check_picture, decode, receive

Form = TypeVar("Form", bound=BaseModel)
Answer = TypeVar("Answer")
FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure, "description": text} for status, text in MEANINGS.items()
}
FAILURES[503]["headers"] = {
    "Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}
}
ALWAYS: dict[int | str, dict[str, Any]] = {status: FAILURES[status] for status in (400, 403)}


def make_app(
    studio: Studio,
    limits: Limits | None = None,
    *,
    example: bytes | None = None,
    names: Collection[str] = (),
    loopback: bool = True,
) -> FastAPI:
    """The page of a studio, its endpoints and their schema.

    `names` are further hosts that it may be asked for; `example` is a picture to begin with.
    """
    limits = limits or Limits()
    line = Line(limits.places)
    app = FastAPI(
        title="Sufficit",
        version=__version__,
        description="Heatmaps of an image classifier and their scores.",
        docs_url=None,  # FastAPI's own fetches its script from elsewhere
        redoc_url=None,
    )
    app.add_middleware(Guard, names=names, loopback=loopback)
    _add_failures(app)
    _add_facts(app, studio, limits, line)
    _add_work(app, studio, limits, line)
    _add_pages(app, studio, limits, example or pages.example_picture())
    return app


def _add_failures(app: FastAPI) -> None:
    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> Response:
        return failure(error.status, str(error))

    @app.exception_handler(UserError)
    async def wrong(request: Request, error: UserError) -> Response:
        return failure(422, str(error))

    @app.exception_handler(GoneError)
    async def gone(request: Request, error: GoneError) -> Response:
        return failure(408, "the request was given up")

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        return failure(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(Exception)  # it goes on to the terminal after this answer
    async def failed(request: Request, error: Exception) -> Response:
        return failure(500, "something failed here; the terminal of the server says what")


def _add_facts(app: FastAPI, studio: Studio, limits: Limits, line: Line) -> None:
    @app.get("/api/health", responses=ALWAYS)
    async def health() -> Health:
        """Whether the server lives, and how busy it is."""
        return Health(taken=line.taken, places=line.places)

    @app.get("/api/model", responses=ALWAYS)
    async def model() -> ModelFacts:
        """The model, its classes, the methods and the limits."""
        return _facts(studio, limits)


def _facts(studio: Studio, limits: Limits) -> ModelFacts:
    classifier = studio.classifier
    return ModelFacts(
        name=studio.name,
        classes=None if classifier.classes is None else list(classifier.classes),
        n_classes=studio.n_classes,
        height=studio.size[0],
        width=studio.size[1],
        channels=classifier.view.channels if classifier.view else 3,
        device=str(classifier.device),
        methods=[
            MethodFacts(name=name, about=studio.about(name), usual=name in studio.usual)
            for name in studio.methods
        ],
        fills=list(FILLS),
        value_step=studio.value_step,
        limits=LimitFacts(
            bytes=limits.bytes,
            pixels=limits.pixels,
            places=limits.places,
            seconds=limits.seconds,
        ),
    )


def _add_work(app: FastAPI, studio: Studio, limits: Limits, line: Line) -> None:
    names = list(studio.methods)
    work = partial(_work, studio, limits, line)

    @app.post("/api/explain", responses=FAILURES, openapi_extra=form_body(ExplainForm, names))
    async def explain(request: Request) -> Explained:
        """Prediction and heatmaps of an image, without scores: quick."""
        return await work(
            request, ExplainForm, lambda images, form, _: studio.explain(images, form)
        )

    @app.post("/api/score", responses=FAILURES, openapi_extra=form_body(ScoreForm, names))
    async def score(request: Request) -> Scored:
        """The scores and curves of one method on an image: a model call for each mask."""
        return await work(request, ScoreForm, studio.score)


async def _work(
    studio: Studio,
    limits: Limits,
    line: Line,
    request: Request,
    kind: type[Form],
    answer: Callable[[Tensor, Form, Progress], Answer],
) -> Answer:
    """Take a place, receive, wait for the model, answer."""
    try:
        with line.place():
            upload: Upload = await receive(request, limits)
            form = upload.read(kind)
            await asyncio.to_thread(check_picture, upload.file, limits)

            def job(progress: Progress) -> Answer:
                progress(0, 1)  # whoever went away while waiting is not worked for
                images = decode(upload.file, studio.classifier.view, limits)
                return answer(images, form, progress)

            return await line.work(job, _left(request))
    finally:
        line.rest()


async def _left(request: Request) -> None:
    """Returns when whoever asked has gone; the request must have been received."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_pages(app: FastAPI, studio: Studio, limits: Limits, example: bytes) -> None:
    page = pages.page(studio, limits)
    content = {"image/png": {"schema": {"type": "string", "format": "binary"}}}

    @app.get(
        "/api/example",
        response_class=Response,
        responses={200: {"content": content, "description": "A picture."}, **ALWAYS},
    )
    async def picture() -> Response:
        """A picture to begin with."""
        return Response(example, media_type="image/png")

    @app.get("/", include_in_schema=False)
    async def home() -> HTMLResponse:
        return HTMLResponse(page.text, headers={"Content-Security-Policy": page.policy})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        found = pages.endpoints(app.openapi())
        return HTMLResponse(found.text, headers={"Content-Security-Policy": found.policy})
