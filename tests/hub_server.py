"""A server on the loopback that answers as the Hugging Face Hub does for a data set."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

CONVERTED = "refs/convert/parquet"  # the branch that the Hub itself writes
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_of(datasets: Path, requests: list[str]) -> Iterator[str]:
    """The address of a hub with the data sets OWNER/NAME below a folder; each has one revision."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: PLR0911  # an answer of each kind
            path = unquote(urlsplit(self.path).path)
            requests.append(path)
            api = path.startswith("/api/")
            if path.count("/") < 3:  # what the library asks of the Hub itself
                return self._fails("EntryNotFound")
            path = path.replace(CONVERTED, "main")
            owner, name, *rest = path.removeprefix("/api").split("/")[2:]
            repo = datasets / owner / name
            if not repo.is_dir():
                return self._fails("RepoNotFound")
            kind, revision, *inside = rest or ["revision", "main"]
            if revision not in ("main", COMMIT):
                return self._fails("RevisionNotFound")
            place = repo.joinpath(*inside)
            if not place.exists():
                return self._fails("EntryNotFound")
            if api and kind == "tree":
                deep = "recursive=true" in self.path.lower()
                found = sorted(place.rglob("*") if deep else place.iterdir())
                return self._send([self._about(one, repo) for one in found])
            if api:
                return self._send({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": []})
            return self._range(place.read_bytes())

        def _about(self, place: Path, repo: Path) -> dict[str, object]:
            kind = "directory" if place.is_dir() else "file"
            size = 0 if place.is_dir() else place.stat().st_size
            path = place.relative_to(repo).as_posix()
            return {"type": kind, "oid": COMMIT, "size": size, "path": path}

        def _send(self, found: object) -> None:
            self._reply(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

        def _range(self, content: bytes) -> None:
            asked = self.headers.get("Range")
            if not asked:
                return self._reply(200, content, {})
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(content)) + 1, len(content))
            where = {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}
            return self._reply(206, content[start:end], where)

        def _fails(self, code: str) -> None:
            self._reply(404, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def _reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
