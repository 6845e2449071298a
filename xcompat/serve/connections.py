"""Limits on connections: their number, and the time to send a request or read an answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from xcompat.serve.hosts import client_address

if TYPE_CHECKING:
    from starlette.types import ASGIApp

CONNECTIONS, OF_ONE_ADDRESS = 512, 256
REQUEST_SECONDS = 10.0
"""Maximum time for the headers of a request."""
ANSWER_SECONDS = 30.0
"""Maximum time for a client to read the rest of an answer."""
HEADER_BYTES = 2**16


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 with limits against slow clients."""

    _deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = _address_of(self)
        same = sum(_address_of(other) == address for other in self.connections)
        if len(self.connections) > CONNECTIONS or same > OF_ONE_ADDRESS:
            transport.abort()
            return
        self._expect_request()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering():
            self._cancel_deadline()
        elif self._deadline is None:
            self._expect_request()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(ANSWER_SECONDS, self._abort_if_unread, self.cycle)

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._abort_if_incomplete)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _abort_if_incomplete(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.abort()

    def _abort_if_unread(self, cycle: object) -> None:
        if self.cycle is cycle and self.transport.get_write_buffer_size():
            self.transport.abort()


def _address_of(connection: Any) -> str:  # noqa: ANN401 - any protocol of uvicorn
    return client_address(connection.client[0] if connection.client else "")


def make_server(app: ASGIApp) -> Server:
    """Return an application's HTTP server, without websockets, trust in proxy headers, or a server header."""
    return Server(
        Config(
            app,
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_level="warning",
            h11_max_incomplete_event_size=HEADER_BYTES,
            timeout_graceful_shutdown=3,
        )
    )
