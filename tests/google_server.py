"""The part of Google's storage API that gcsfs reads with: a bucket in memory, on the loopback."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote

from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "birds"


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None: ...


class GoogleServer:
    """A bucket: name -> content."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        path = environ["REQUEST_URI"].partition("?")[0]
        query = {key: one[0] for key, one in parse_qs(environ["QUERY_STRING"]).items()}
        place = re.fullmatch(r"/(?:\w+/)?storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?/?", path)
        name = unquote(place[2]) if place and place[2] else None
        if place is None or place[1] != BUCKET or (name and name not in self.objects):
            start("404 Not Found", [("Content-Type", "application/json")])
            return [b'{"error": {"code": 404, "message": "Not Found"}}']
        if name and query.get("alt") == "media":
            start("206 Partial Content", [])
            low, high = re.findall(r"\d+", environ.get("HTTP_RANGE", "0-")), None
            high = int(low[1]) + 1 if len(low) > 1 else None
            return [self.objects[name][int(low[0]) : high]]
        found = self._about(name) if name in self.objects else self._listed(query)
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(found).encode()]

    def _about(self, name: str) -> dict[str, Any]:
        size = str(len(self.objects[name]))
        times = dict.fromkeys(("updated", "timeCreated"), "2026-01-01T00:00:00Z")
        return {"name": name, "bucket": BUCKET, "size": size, "generation": "1", **times}

    def _listed(self, query: dict[str, str]) -> dict[str, Any]:
        start, sign = query.get("prefix", ""), query.get("delimiter", "\0")
        names = [name for name in sorted(self.objects) if name.startswith(start)]
        rest = {name: name.removeprefix(start) for name in names}
        items = [self._about(name) for name in names if sign not in rest[name]]
        folders = {start + rest[n].partition(sign)[0] + sign for n in names if sign in rest[n]}
        return {"name": BUCKET, "items": items, "prefixes": sorted(folders)}


@contextmanager
def google_server() -> Iterator[tuple[str, GoogleServer]]:
    """Its address, and what it holds."""
    app = GoogleServer()
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", app
    finally:
        server.shutdown()
        server.server_close()
