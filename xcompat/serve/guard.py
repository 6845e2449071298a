"""Request checks before the application: host, origin, login, size and time."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from xcompat.serve.hosts import client_address, is_own_host
from xcompat.serve.lane import Client
from xcompat.serve.uploads import UPLOAD_BYTES

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from xcompat.serve.login import Login

JSON_BYTES = 2**17
IMAGE_PATH = "/api/search/image"
BODY_SECONDS = 30.0
BODIES_BYTES, OF_ONE_ADDRESS = 128 * 10**6, 64 * 10**6
"""Maximum bytes of request bodies in memory, in total and per address."""
WITHOUT_LOGIN = ("/healthz", "/login")
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}
"""Default headers of answers."""


@dataclass(frozen=True)
class Access:
    """The page's host names and login.

    Args:
        host: the server's listening address.
        names: further host names.
        login: None for a page without a password.
        cookie: cookie name. Browsers share cookies between a machine's ports.
    """

    host: str = "127.0.0.1"
    names: tuple[str, ...] = ()
    login: Login | None = None
    cookie: str = field(default_factory=lambda: f"xcompat-{secrets.token_hex(4)}")


class Guard:
    """Application that forwards only allowed requests.

    Args:
        app: the application.
        access: host names and login.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access
        self._held: Counter[str] = Counter()  # bytes of bodies by address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = {name for name, _ in message.get("headers", [])}
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in known]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        request = Request(scope)
        refusal = self._check_headers(request) or self._check_login(request)
        if refusal is not None:
            await refusal(scope, receive, send_with_headers)
            return
        address, length = request.state.client.address, int(request.headers.get("content-length", "0"))
        if self._held.total() + length > BODIES_BYTES or self._held[address] + length > OF_ONE_ADDRESS:
            await _refuse(503, "the server is busy; try again in a moment")(scope, receive, send_with_headers)
            return
        self._held[address] += length
        try:
            await self._pass_on(scope, receive, send_with_headers)
        finally:
            self._held[address] -= length
            if not self._held[address]:
                del self._held[address]

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read_body(receive)
        except TimeoutError:
            await _refuse(408, "the request took too long to arrive")(scope, receive, send)
            return
        if body is None:  # the client has left
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, receive_again, send)

    def _check_headers(self, request: Request) -> Response | None:
        headers = request.headers
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not is_own_host(hosts[0], self.access.host, self.access.names):
            return _refuse(400, "unknown host name; start the page with --allow-host and this name")
        if not _is_same_site(headers, hosts[0], request.method == "GET" and request.url.path == "/"):
            return _refuse(403, "requests from pages of other sites are not allowed")
        if "transfer-encoding" in headers:
            return _refuse(411, "the request needs a Content-Length")
        length, most = headers.get("content-length", "0"), UPLOAD_BYTES if request.url.path == IMAGE_PATH else JSON_BYTES
        if not re.fullmatch("[0-9]{1,12}", length) or int(length) > most:
            return _refuse(413, f"the request is larger than {most:,} bytes")
        return _refuse(415, "compressed requests are not supported") if "content-encoding" in headers else None

    def _check_login(self, request: Request) -> Response | None:
        from xcompat.serve.documents import login_page

        token = request.cookies.get(self.access.cookie, "")[:100]
        login = self.access.login
        is_known = login is None or login.has_session(token)
        request.state.client = Client(client_address(request.client.host if request.client else ""), token if is_known else "")
        if is_known or request.url.path in WITHOUT_LOGIN:
            return None
        if request.method == "GET" and request.url.path == "/":
            return login_page()
        return _refuse(401, "log in first")


def _is_same_site(headers: Headers, host: str, is_visit: bool) -> bool:
    """Return whether a request comes from this page or a program. A visit may follow a link from anywhere."""
    if (origin := headers.get("origin")) is not None:
        try:
            return urlsplit(origin).netloc == host
        except ValueError:
            return False
    return is_visit or headers.get("sec-fetch-site", "none") in ("same-origin", "none")


async def _read_body(receive: Receive) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _refuse(status: int, line: str) -> Response:
    return PlainTextResponse(line, status)
