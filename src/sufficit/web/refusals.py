"""What is answered where a request can't be served: {"error": "a sentence"}."""

from collections.abc import Mapping

from starlette.responses import JSONResponse

BUSY_SECONDS = 5

MEANINGS = {
    400: "The request, or the image in it, can't be read; or it names a host that is not this one.",
    403: "The request comes from a page of another site.",
    408: "The request took too long to arrive.",
    413: "The request or the image is larger than the limits.",
    415: "The file is no image of a known kind, or the request is no multipart/form-data.",
    422: "A field is missing, unknown or has a value that can't be used.",
    500: "Something failed here; the terminal of the server says what.",
    503: "As many requests wait as may; Retry-After says when to try again.",
}


class RefusedError(Exception):
    """A request that can't be served, and why."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class GoneError(Exception):
    """Whoever asked has gone away."""


def failure(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A sentence as an answer, whatever characters strangers put into it."""
    safe = sentence.encode("utf-8", "replace").decode()
    more = {"Retry-After": str(BUSY_SECONDS)} if status == 503 else {}
    return JSONResponse({"error": safe}, status, {**more, **(headers or {})})
