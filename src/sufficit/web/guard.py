"""What stands before every request: whose host it names, whose page it comes from."""

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sufficit.web.refusals import failure

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


class Guard:
    """Refuses requests that a page of another site made the browser send.

    Such a page may let its own name point at this machine (DNS rebinding): then Host is that name.
    Or it may send a form straight here: then Origin is that page's.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], loopback: bool) -> None:
        self.app = app
        self.names = {"localhost", *(name.lower() for name in names)}
        self.loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application around the other."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self.known(host):
            answer = failure(400, "this server does not go by the name in the Host header")
            await answer(scope, receive, _with_headers(send))
        elif _foreign(headers, host):
            answer = failure(403, "pages of other sites may not use this server")
            await answer(scope, receive, _with_headers(send))
        else:
            await self.app(scope, receive, _with_headers(send))

    def known(self, host: str) -> bool:
        """Whether a Host header is this machine's: an address can't be rebound, a name can."""
        name = _name(host)
        if name is None:
            return False
        try:
            address = ip_address(name)
        except ValueError:
            return name in self.names
        return address.is_loopback or not self.loopback


def _name(host: str) -> str | None:
    """The name or address in HOST or HOST:PORT, None where it is neither."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # refuses what is no port
    except ValueError:
        return None
    plain = parts.netloc == host and parts.username is None
    return parts.hostname if plain else None


def _foreign(headers: Headers, host: str) -> bool:
    """Whether a browser says that another site's page asks; other clients say nothing."""
    if (
        headers.get("sec-fetch-site") == "cross-site"
        and headers.get("sec-fetch-mode") != "navigate"
    ):
        return True
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != host


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
