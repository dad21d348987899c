"""The socket and the server behind `sufficit serve`."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from sufficit.errors import UserError
from sufficit.web.service import GRACE, ModelQueue

CONNECTIONS, PER_ADDRESS = 256, 64  # open at once, in all and of one address
REQUEST_SECONDS = 10.0  # for the headers of a request to arrive
READ_SECONDS = 30.0  # for a client to read some of its answer
HEADER_BYTES = 2**15
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
    b'Connection: close\r\nContent-Length: 44\r\n\r\n{"error":"too many connections: retry soon"}'
)
Ready = Callable[[uvicorn.Server], None]


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at a host and port; uvicorn's own would end the process on failure."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen at {host} port {port} ({reason}): give another --host or --port"
        ) from error


def is_local(listening: socket.socket) -> bool:
    """Whether only this machine can reach a socket."""
    return ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def url(listening: socket.socket) -> str:
    """The URL of the page."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Connection(H11Protocol):
    """A connection that must bring its request in time, and gives way to others until it does.

    uvicorn has a time limit for a further request, but none for the first one, for headers that
    come slowly, or for a client that does not read its answer.
    """

    timer: asyncio.TimerHandle | None = None
    since: float | None = None  # when it began to wait for a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Make room for the connection, or refuse it."""
        super().connection_made(transport)
        self._wait()
        every = [one for one in self.connections if isinstance(one, Connection)]
        open_now = [one for one in every if not one.transport.is_closing()]
        alike = [one for one in open_now if one.address == self.address]
        for some, most in ((alike, PER_ADDRESS), (open_now, CONNECTIONS)):
            waiting = [one for one in some if one.since is not None and one is not self]
            if len(some) > most and waiting:
                min(waiting, key=lambda one: one.since or 0).transport.abort()
            elif len(some) > most:
                transport.write(BUSY)
                self._end()
                return

    @property
    def address(self) -> str:
        """Where it comes from."""
        return self.client[0] if self.client else ""

    def data_received(self, data: bytes) -> None:
        """Stop waiting once the headers of a request are complete."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
            self.since = None

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it is here."""
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._wait()

    def pause_writing(self) -> None:
        """Give the client some time to read."""
        super().pause_writing()
        self._start_timer(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_timer()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self.since = self.loop.time()
        self._start_timer(REQUEST_SECONDS, self._end)

    def _start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_timer()
        self.timer = self.loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def _end(self) -> None:
        self.transport.close()  # which waits until all is sent
        self._start_timer(READ_SECONDS, self.transport.abort)


class Server(uvicorn.Server):
    """A server that answers all requests before it stops."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer 503 to what waits, give what runs a moment, then close all connections."""
        app = self.config.app
        queue = getattr(getattr(app, "state", None), "queue", None)
        if isinstance(queue, ModelQueue):
            queue.close()
        asyncio.get_running_loop().call_later(GRACE + 1, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        for one in list(self.server_state.connections):
            one.transport.abort()


def serve(app: ASGIApp, listening: socket.socket, *, ready: Ready = lambda server: None) -> None:
    """Answer requests until interrupted; `ready` gets the server before it starts."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(GRACE) + 3,
    )
    server = Server(config)
    ready(server)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after the shutdown
        server.run(sockets=[listening])
