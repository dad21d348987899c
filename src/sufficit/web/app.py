"""The page of a model and its JSON endpoints."""

import io
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio
from fastapi import FastAPI, Form, Request, Response
from fastapi import Path as PathField
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from markupsafe import Markup
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from sufficit import __version__
from sufficit.data.digits import synthetic_digits
from sufficit.data.image_files import FORMATS, BadImageError, decode_image
from sufficit.data.pictures import LargeImageError, NotAnImageError
from sufficit.errors import UserError
from sufficit.progress import Progress
from sufficit.report.html import asset, environment, look_and_feel
from sufficit.web.forms import LEAST_STEP, ExplainForm, ImageForm, Limits, RegionForm, ScoreForm
from sufficit.web.service import Answer, Service

HOME = "sufficit.web"
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
FORMAT_NAMES = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
STEPS = (LEAST_STEP, 0.02, 0.05, 0.1)
EXAMPLE_SEED = 20  # a digit on which the methods differ
SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data: blob:;"
    " connect-src 'self'; script-src 'sha256-{script_digest}';"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
ERROR = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"content": ERROR, "description": "The request is refused; `error` says why."},
    "5XX": {"content": ERROR, "description": "The server failed; its log says why."},
}
AnyForm = TypeVar("AnyForm", bound=ImageForm)


def make_app(
    service: Service,
    limits: Limits | None = None,
    *,
    examples: Sequence[tuple[str, bytes]] = (),
    title: str = "",
    names: Collection[str] = (),
) -> FastAPI:
    """Return the page of a model, its endpoints and their schema.

    - `examples`: names and PNG files to try; a synthetic digit without them.
    - `title`: the page's heading.
    - `names`: hosts that requests may name besides those of this machine.
    """
    limits = limits or Limits()
    app = FastAPI(
        title="Sufficit",
        version=__version__,
        description="Heatmaps of an image classifier and their scores.",
        docs_url=None,  # FastAPI's own pages load scripts from a CDN
        redoc_url=None,
        responses=REFUSALS,
        exception_handlers=dict.fromkeys(
            (HTTPException, RequestValidationError, UserError, BadImageError, Exception), _failed
        ),
    )
    # A site may point its own name at this machine (DNS rebinding): then Host is that name.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_NAMES, *names])
    app.add_middleware(Guard, limits=limits)
    _add_endpoints(app, service, limits)
    _add_pages(app, service, limits, list(examples) or [("The example", example_image())], title)
    # The schema names the methods and fills that this model has.
    forms = app.openapi()["components"]["schemas"]
    forms["ExplainForm"]["properties"]["methods"]["items"]["enum"] = list(service.methods)
    for name in ("ScoreForm", "RegionForm"):
        forms[name]["properties"]["method"]["enum"] = list(service.methods)
    for name in ("ExplainForm", "ScoreForm"):
        forms[name]["properties"]["fill"]["enum"] = list(service.fills)
    return app


@dataclass(frozen=True)
class Guard:
    """Refuses what pages of other sites send, and what is too large; adds security headers."""

    app: ASGIApp
    limits: Limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a refusal, or pass the request on."""

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SAFE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self.refusal(scope["method"], Headers(scope=scope)) if "method" in scope else None
        await (refusal or self.app)(scope, receive, send_safely)

    def refusal(self, method: str, headers: Headers) -> Response | None:
        """Return the answer to a request that is not allowed; browsers tell where it comes from."""
        crosses = headers.get("sec-fetch-site") == "cross-site"
        fetched = crosses and headers.get("sec-fetch-mode") != "navigate"
        origin = headers.get("origin")
        if fetched or (origin is not None and origin.partition("://")[2] != headers.get("host")):
            return _failure(403, "pages of other sites may not use this server: open its own page")
        if method == "POST":
            # Before the body is read: what is too large is not even received.
            length = headers.get("content-length", "")
            if not length.isdecimal() or "transfer-encoding" in headers:
                return _failure(411, "the request has no Content-Length: send it in one piece")
            if len(length) > 15 or int(length) > self.limits.bytes:
                most = f"the limit is {self.limits.bytes / 1e6:g} MB: send a smaller one"
                return _failure(413, f"the file is too large, {most}")
        return None


async def _failed(request: Request, error: Exception) -> Response:
    """What a client gets for any exception; starlette logs those that answer 500."""
    status, text = 500, "internal server error: see the server log"
    match error:
        case HTTPException():
            status, text = error.status_code, str(error.detail)
        case RequestValidationError():
            first = error.errors()[0]
            field = [part for part in first["loc"] if isinstance(part, str)][-1]
            came = f", got {first['input'][:40]!r}" if isinstance(first["input"], str) else ""
            status, text = 422, f"{field[:40]}: {first['msg']}{came}"
        case UserError():
            status, text = 422, str(error)
        case NotAnImageError():
            status, text = 415, f"the file is not an image: send {FORMAT_NAMES}"
        case LargeImageError():
            status, text = 413, f"the image is {error}: send a smaller one"
        case BadImageError() if error.__cause__ is None:  # the words are ours
            status, text = 400, f"the image can't be used: {error}"
        case BadImageError():
            status, text = 400, "the image is corrupt or cut off: send it again, or another one"
    return _failure(status, text)


def _failure(status: int, text: str) -> Response:
    """Return the answer to a request that fails."""
    safe = text.encode("utf-8", "replace").decode()  # whatever the request held
    return JSONResponse({"error": safe}, status, SAFE_HEADERS)


def _add_endpoints(app: FastAPI, service: Service, limits: Limits) -> None:
    """Add what programs and the page call."""
    # One model, and its memory: the next request waits in its thread.
    one_at_a_time = anyio.CapacityLimiter(1)
    multipart = Form(media_type="multipart/form-data")

    async def answer(
        request: Request, form: AnyForm, work: Callable[[Tensor, AnyForm, Progress], Answer]
    ) -> Answer:
        """Decode the image and do the work in a thread, until the browser leaves."""
        content = await form.file.read()
        if not content:
            raise HTTPException(400, "the file is empty: choose another")

        def check(done: float, total: float) -> None:
            # Each forward pass asks: nobody waits for the rest of the work.
            if anyio.from_thread.run(request.is_disconnected):
                raise HTTPException(400, "the browser has left")

        def job() -> Answer:
            check(0, 1)  # it may have left while others were answered
            started = time.monotonic()
            image = decode_image(
                io.BytesIO(content), service.classifier.view, FORMATS, limits.pixels
            )
            found = work(image[None], form, check)
            return found | {"seconds": round(time.monotonic() - started, 3)}

        return await anyio.to_thread.run_sync(job, limiter=one_at_a_time)

    @app.get("/api/model")
    async def model() -> Answer:
        """The model, its classes, the methods and the limits."""
        return service.facts | {"limits": asdict(limits)}

    @app.post("/api/explain")
    async def explain(request: Request, form: Annotated[ExplainForm, multipart]) -> Answer:
        """The prediction and the heatmaps of an image, without scores: fast.

        `map` and `values` of a heatmap M are grey PNGs as data URLs: M > grid[i] where a pixel of
        `map` is above i; 255 M, rounded. `shares` are those of the pixels above each alpha.
        """
        return await answer(request, form, service.explain)

    @app.post("/api/score")
    async def score(request: Request, form: Annotated[ScoreForm, multipart]) -> Answer:
        """The scores and curves of one method on an image: one model call per mask.

        `curves` hold, along the grid, the model's predictions for the pixels `kept` (M > alpha),
        `hidden` (alpha_min < M <= alpha) and the `rest`: probabilities of the target; as
        `kept_hits` one character per alpha, 1 if the target is predicted, else 0, ? if unknown; as
        `kept_said` the predicted class if it is another. Numbers are null if the model gives NaN.
        """
        return await answer(request, form, service.score)

    @app.post("/api/region")
    async def region(request: Request, form: Annotated[RegionForm, multipart]) -> Answer:
        """The region of a method's map that is enough for the model, as a fit finds it.

        `order` is a grey PNG as a data URL, brighter where a pixel comes earlier. `sizes` hold, for
        each size in thousandths of the image, what the model says of the region and of the rest
        with each of `fills`: the confidence in the target; where another class comes first, that
        class and the confidence; null where it was not asked. With `size`, this size alone.
        """
        return await answer(request, form, service.region)


def _add_pages(
    app: FastAPI,
    service: Service,
    limits: Limits,
    examples: Sequence[tuple[str, bytes]],
    title: str,
) -> None:
    """Add the pages that people see, and their example images."""
    templates, feel = environment(HOME), look_and_feel(HOME)
    count = Counter(service.classes)  # classes that share a name get their number as well
    targets = {
        f"{name} ({number})" if count[name] > 1 else name: number
        for number, name in enumerate(service.classes)
    }
    settings = {name: str(field.default) for name, field in ScoreForm.model_fields.items()}
    page = templates.get_template("page.html").render(
        facts=service.facts,
        title=title,
        formats=FORMAT_NAMES,
        form=ScoreForm.model_json_schema()["properties"],
        steps=sorted({*STEPS, service.value_step}),
        data={
            "bytes": limits.bytes,
            "targets": targets,
            "examples": [name for name, _ in examples],
            "model": service.name,
            "version": __version__,
            "settings": settings | {"value_step": str(service.value_step)},
        },
        more=Markup(asset("live.css", HOME)),
        **feel,
    )
    # Only this page's own script runs, whatever a file name holds.
    policy = {"Content-Security-Policy": PAGE_POLICY.format(**feel)}
    png = {"image/png": {"schema": {"type": "string", "format": "binary"}}}

    @app.get(
        "/api/examples/{number}",
        response_class=Response,
        responses={200: {"content": png, "description": "A PNG file."}},
    )
    async def example_file(
        number: Annotated[int, PathField(ge=0, le=len(examples) - 1)],
    ) -> Response:
        """An image to try the page with; they are numbered from 0."""
        return Response(examples[number][1], media_type="image/png")

    @app.get("/", include_in_schema=False)
    async def home() -> HTMLResponse:
        return HTMLResponse(page, headers=policy)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        text = templates.get_template("endpoints.html").render(schema=app.openapi(), **feel)
        return HTMLResponse(text, headers=policy)


def example_image(file: Path | None = None, limits: Limits | None = None) -> bytes:
    """Return an image file within the limits as PNG; without one, a synthetic digit."""
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
