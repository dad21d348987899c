"""What a request must pass: host, origin and size; and the JSON that says why it does not."""

import asyncio
import re
from collections import Counter
from collections.abc import Collection, Mapping
from ipaddress import ip_address

from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sufficit.errors import UserError
from sufficit.web.schemas import Limits

MOST_FIELDS, FIELD_BYTES = 40, 1000
MEANINGS = {
    400: "The request or its image cannot be read, or its Host header is not allowed.",
    403: "The request comes from a page of another site.",
    408: "The request takes too long to arrive.",
    413: "The request or its image is larger than the limit.",
    415: "The file is not an image of a known format, or the request is not multipart/form-data.",
    422: "A field is missing, unknown or invalid.",
    500: "Internal server error; see the server log.",
    503: "Queue full; retry after the time in Retry-After.",
}
SECURITY = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s/?#@:\\\[\]]+))(?::\d{1,5})?")
HANDLED = (HTTPException, RequestValidationError, UserError, ClientDisconnect, Exception)


class Guard:
    """Refuses requests that a page of another site makes a browser send; adds security headers.

    Such a page can point its own host name at this machine (DNS rebinding): then Host is that name.
    Or it can send a form here: then Origin is that page. Starlette's TrustedHostMiddleware cannot
    allow every IP address, which no site can rebind, and answers in plain text instead of JSON.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], loopback: bool) -> None:
        self.app, self.loopback = app, loopback
        self.names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with 400 or 403."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    found.setdefault(name, value)
            await send(message)

        refusal = self.refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (refusal or self.app)(scope, receive, send_with_headers)

    def refusal(self, headers: Headers) -> JSONResponse | None:
        """The answer to a request that is not allowed; only browsers send the headers of sites."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.knows(host):
            text = "the Host header is not a name of this server: add the name with --allow-host"
            return failure(400, text)
        crosses = headers.get("sec-fetch-site") == "cross-site"
        fetched = crosses and headers.get("sec-fetch-mode") != "navigate"
        if fetched or (origin is not None and origin.partition("://")[2] != host):
            text = "pages of other sites may not use this server: open its own page instead"
            return failure(403, text)
        return None

    def knows(self, host: str) -> bool:
        """Whether a Host header is an IP address of this machine or a name that it allows."""
        match = HOST.fullmatch(host)
        if match is None:
            return False
        name = (match[1] or match[2]).lower()
        try:
            return ip_address(name).is_loopback or not self.loopback
        except ValueError:
            return name in self.names


def failure(status: int, text: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A failure as JSON, whatever characters of the request are in its text."""
    safe = text.encode("utf-8", "replace").decode()
    return JSONResponse({"error": safe}, status, {**SECURITY, **(headers or {})})


async def failed(request: Request, error: Exception) -> Response:
    """What a client gets for any exception; starlette logs those that answer 500."""
    if isinstance(error, HTTPException):
        return failure(error.status_code, str(error.detail), error.headers)
    if isinstance(error, RequestValidationError):
        return failure(422, _first_error(error))
    if isinstance(error, UserError):
        return failure(422, str(error))
    if isinstance(error, ClientDisconnect):
        return failure(408, "the client disconnected: send the request again")
    return failure(500, "internal server error: see the server log")


def _first_error(error: RequestValidationError) -> str:
    first = error.errors()[0]
    field = str(first["loc"][-1] if isinstance(first["loc"][-1], str) else first["loc"][1])[:40]
    if first["type"] == "extra_forbidden":
        return f"unknown field {field!r}: remove it"
    if field == "file":
        return "the field 'file' must be an uploaded file: send the image in it"
    came = f", got {first['input'][:40]!r}" if isinstance(first["input"], str) else ""
    return f"{field}: {first['msg'].removeprefix('Value error, ')}{came}"


async def read_form(request: Request, limits: Limits) -> Request:
    """The same request with its form, which was read within the limits."""
    kind, length = (request.headers.get(f"content-{name}", "") for name in ("type", "length"))
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise HTTPException(415, "send multipart/form-data, with the image in the field file")
    most = f"the limit is {limits.bytes / 1e6:g} MB: send a smaller one"
    too_large = HTTPException(413, f"the file is too large, {most}")
    if length.isdecimal() and int(length[:20]) > limits.bytes:
        raise too_large
    total, receive = 0, request.receive

    async def count() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > limits.bytes:
            raise too_large
        return message

    request = Request(request.scope, count)
    try:
        async with asyncio.timeout(limits.seconds):
            form = await request.form(
                max_files=1, max_fields=MOST_FIELDS, max_part_size=FIELD_BYTES
            )
    except TimeoutError as error:
        text = f"the request did not arrive within {limits.seconds:g} seconds: send it again"
        raise HTTPException(408, text) from error
    except ValueError as error:  # python-multipart and codecs raise it for broken headers
        raise HTTPException(400, f"the form is corrupt ({error}): send it again") from error
    for name, times in Counter(name for name, _ in form.multi_items()).items():
        if times > 1 and name != "methods":
            await form.close()
            raise HTTPException(422, f"field {name[:40]!r} is given {times} times: give it once")
    return request
