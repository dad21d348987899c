"""A real S3 server on the loopback (moto's), whose answers can be made to fail."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

SECRET = "canary/5ecre7+neverwritten"
KEY = "AKIACANARYCANARYCANA"
BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
MISSING = b"<Error><Code>NoSuchKey</Code><Message>There is no such key.</Message></Error>"

Fault = Callable[[dict[str, Any]], tuple[str, bytes] | None]


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None: ...


class ObjectServer:
    """Started on a free port; what it holds survives `stop` and `start`."""

    def __init__(self) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []  # method and path with query
        self.port, self.server = 0, None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach it. Few attempts, so that tests of failures are fast."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "3",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        if self.server is None:
            self.server: BaseWSGIServer | None = make_server(
                "127.0.0.1", self.port, self._answer, threaded=True, request_handler=_Quiet
            )
            self.port = self.server.server_port
            Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def client(self) -> Any:
        return boto3.client("s3", endpoint_url=self.url)

    def upload(self, folder: Path, to: str) -> None:
        """Copy a folder to s3://BUCKET/PREFIX, by the plain client."""
        bucket, _, prefix = to.removeprefix("s3://").partition("/")
        for path in (p for p in folder.rglob("*") if p.is_file()):
            key = f"{prefix}/{path.relative_to(folder).as_posix()}".lstrip("/")
            self.client().put_object(Bucket=bucket, Key=key, Body=path.read_bytes())

    def download(self, place: str, folder: Path) -> Path:
        """Copy s3://BUCKET/PREFIX to a folder, by the plain client."""
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        for key in self.keys(place):
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            found = self.client().get_object(Bucket=bucket, Key=f"{prefix}/{key}")
            path.write_bytes(found["Body"].read())
        return folder

    def keys(self, place: str) -> list[str]:
        """The names of the objects below s3://BUCKET/PREFIX."""
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        pages = (
            self.client()
            .get_paginator("list_objects_v2")
            .paginate(Bucket=bucket, Prefix=f"{prefix}/")
        )
        found = [one["Key"] for page in pages for one in page.get("Contents", ())]
        return [key.removeprefix(f"{prefix}/") for key in found]

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        self.requests.append((environ["REQUEST_METHOD"], f"{path}?{query}" if query else path))
        for fault in self.faults:
            if (found := fault(environ)) is not None:
                start(found[0], [("Content-Type", "application/xml")])
                return [] if environ["REQUEST_METHOD"] == "HEAD" else [found[1]]
        return self.app(environ, start)


def busy(times: int, method: str = "", within: str = "") -> Fault:
    """503 for the first so many requests of a method and a part of the path."""
    left = [times]

    def fault(environ: dict[str, Any]) -> tuple[str, bytes] | None:
        fits = method in environ["REQUEST_METHOD"] and within in environ["PATH_INFO"]
        left[0] -= fits
        return ("503 Slow Down", BUSY) if fits and left[0] >= 0 else None

    return fault


def denied(method: str = "", within: str = "") -> Fault:
    """403 for every request of a method and a part of the path."""
    return _always("403 Forbidden", DENIED, method, within)


def missing(method: str = "", within: str = "") -> Fault:
    """404 for every request of a method and a part of the path."""
    return _always("404 Not Found", MISSING, method, within)


def _always(status: str, body: bytes, method: str, within: str) -> Fault:
    def fault(environ: dict[str, Any]) -> tuple[str, bytes] | None:
        fits = method in environ["REQUEST_METHOD"] and within in environ["PATH_INFO"]
        return (status, body) if fits else None

    return fault


def slow(seconds: float) -> Fault:
    """Every answer comes late."""

    def fault(environ: dict[str, Any]) -> None:
        time.sleep(seconds)

    return fault


def environment_with(server: ObjectServer) -> dict[str, str]:
    """The environment of a process that reaches the server."""
    return {**os.environ, **server.environment}
