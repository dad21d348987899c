"""The socket and the server behind `sufficit serve`."""

import socket
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address

import uvicorn
from starlette.types import ASGIApp

from sufficit.errors import UserError

CONNECTIONS = 64  # open at once; uvicorn answers 503 to further ones
SECONDS_TO_STOP = 3  # for requests that run
Ready = Callable[[uvicorn.Server], None]


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a host and port; uvicorn's would end the process."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen at {host} port {port} ({reason}): give another --host or --port"
        ) from error


def is_local(listening: socket.socket) -> bool:
    """Return whether only this machine can reach a socket."""
    return ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def url(listening: socket.socket) -> str:
    """Return the URL of the page."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: ASGIApp, listening: socket.socket, *, ready: Ready = lambda server: None) -> None:
    """Answer requests until interrupted; `ready` gets the server before it starts."""
    config = uvicorn.Config(
        app,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=SECONDS_TO_STOP,
    )
    server = uvicorn.Server(config)
    ready(server)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after the shutdown
        server.run(sockets=[listening])
