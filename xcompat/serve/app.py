"""The page as a web application: its address, its limits, and what it never does."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from xcompat.errors import XcompatError
from xcompat.progress import console, literal
from xcompat.serve.options import LOOPBACK, Options
from xcompat.serve.site import Site
from xcompat.serve.uploads import REQUEST_BYTES

if TYPE_CHECKING:
    from fastapi import FastAPI

CONTENT_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; font-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline' 'unsafe-eval'; connect-src 'self'; object-src 'none'; base-uri 'self'; "
    "frame-ancestors 'self'"
)
"""What a browser may load: this server's own files. Gradio evaluates its own scripts and templates."""
HEADERS = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
KEEPING_FILES = ("upload", "process_recording", "component_server", "component_server/", "deep_link")
"""What of Gradio writes to the disk what a visitor sends; no part of the page asks for it."""


def serve(site: Site, options: Options) -> None:
    """Serve a page until it is interrupted.

    Args:
        site: what it shows.
        options: where.

    Raises:
        XcompatError: the port is taken, or other machines reach the page and it has no password.
    """
    import uvicorn

    app = make_app(site, options.credentials())
    sockets = [listen(options)]
    host, port = sockets[0].getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    console.print(f"[green]✓[/] {literal(site.title)}: {address}  [dim](Ctrl-C ends it)[/]", soft_wrap=True)
    if options.browser:
        webbrowser.open(address)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3))
    server.run(sockets)


def listen(options: Options) -> socket.socket:
    """Return a socket that listens where a page is to be served.

    Raises:
        XcompatError: it cannot listen there.
    """
    try:
        return socket.create_server(
            (options.host, options.port), family=socket.AF_INET6 if ":" in options.host else socket.AF_INET
        )
    except OSError as error:
        raise XcompatError(
            f"nothing can be served at {options.host}:{options.port} ({error.strerror}); choose another --port or --host"
        ) from None


def make_app(site: Site, credentials: tuple[str, str] | None = None) -> FastAPI:
    """Return the application: the page, and ``/healthz``, which answers 200 as the models are loaded by now.

    Args:
        site: what it shows.
        credentials: user and password; None for a page without.
    """
    import gradio as gr
    from fastapi import FastAPI
    from fastapi.middleware.trustedhost import TrustedHostMiddleware
    from fastapi.responses import PlainTextResponse

    from xcompat.serve.page import make_page, theme
    from xcompat.serve.rendering import read

    app = FastAPI(title=site.title, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz", response_class=PlainTextResponse)
    def healthy() -> str:
        return "ok"

    def refuse_files() -> PlainTextResponse:
        return PlainTextResponse("this page reads pictures in memory, and keeps no files", status_code=404)

    for name in KEEPING_FILES:
        app.add_api_route(f"/gradio_api/{name}", refuse_files, methods=["GET", "POST"])
    app.add_middleware(_Guarded)
    if credentials is None:  # a name that a stranger lets point at this machine is no name of it
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, "[::1]"], www_redirect=False)
    return gr.mount_gradio_app(
        app,
        make_page(site),
        path="/",
        footer_links=[],
        run_history=False,
        auth=credentials and _checking(*credentials),
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme(),
        css=read("style.css"),
    )


def _checking(user: str, password: str) -> Callable[[str, str], bool]:
    """Return what compares a user and a password in a time that tells nothing."""

    def check(given_user: str, given_password: str) -> bool:
        same_user = secrets.compare_digest(given_user.encode(), user.encode())
        return secrets.compare_digest(given_password.encode(), password.encode()) and same_user

    return check


class _Guarded:
    """Refuses what is larger than a picture may make it or asked by another site's page; tells browsers to load nothing else."""

    def __init__(self, app: Any) -> None:  # noqa: ANN401 - an ASGI application
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        from fastapi.responses import PlainTextResponse

        async def guarded(message: Any) -> None:  # noqa: ANN401
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        refused = _refusal(dict(scope["headers"]))
        answer = PlainTextResponse(refused[1], status_code=refused[0]) if refused is not None else self.app
        await answer(scope, receive, guarded)


def _refusal(headers: dict[bytes, bytes]) -> tuple[int, str] | None:
    """Return status and words for a request that is not taken; None for one that is."""
    length = headers.get(b"content-length", b"0")
    if b"transfer-encoding" in headers or not length.isdigit() or int(length) > REQUEST_BYTES:
        return 413, "this is more than the page reads"
    if b"origin" in headers and urlsplit(headers[b"origin"]).netloc != headers.get(b"host"):
        return 403, "another site's page asks; only this one may"
    return None
