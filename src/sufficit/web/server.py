"""The server: a socket of one's own, and what the terminal says of it."""

import socket
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address

import uvicorn
from starlette.types import ASGIApp

from sufficit.errors import UserError

CONNECTIONS = 256  # at once; more are answered with 503
IDLE = 5  # seconds a connection may be silent between two requests


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{host} port {port} can't be listened at ({reason}): give another --host or --port"
        ) from error


def address(listening: socket.socket) -> str:
    """Where a browser finds the page."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: ASGIApp,
    listening: socket.socket,
    *,
    ready: Callable[[uvicorn.Server], None] | None = None,
) -> None:
    """Answer until interrupted; `ready` is given the server before it starts."""
    config = uvicorn.Config(
        app,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=3,
    )
    server = uvicorn.Server(config)
    if ready:
        ready(server)
    with suppress(KeyboardInterrupt):  # which uvicorn passes on once all is ended
        server.run(sockets=[listening])
