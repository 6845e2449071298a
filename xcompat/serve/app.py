"""Web application for the page: routes, and queues for their work."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from xcompat.core.errors import XcompatError
from xcompat.core.progress import console, literal
from xcompat.serve import queries
from xcompat.serve.connections import make_server
from xcompat.serve.differing_queries import page
from xcompat.serve.documents import main_page, report_page
from xcompat.serve.error_responses import answer_failure
from xcompat.serve.galleries import Jobs, describe_gallery, prepare_work
from xcompat.serve.guard import IMAGE_PATH, Access, Guard
from xcompat.serve.lane import Lane
from xcompat.serve.login import SESSION_SECONDS, Login
from xcompat.serve.search import answer, facets_of, restore_query

if TYPE_CHECKING:
    from starlette.requests import Request

    from xcompat.serve.options import Options
    from xcompat.serve.site import Site

T = TypeVar("T")
WAITING = 256
"""Maximum searches in the queue."""
WAIT_SECONDS, WORK_SECONDS = 60.0, 60.0


def serve(site: Site, options: Options) -> None:
    """Serve a page until interrupted.

    Args:
        site: the page.
        options: its address and password.

    Raises:
        XcompatError: the port is in use, or other machines can reach the page and it has no password.
    """
    options.require_password()
    sockets = [listen(options)]
    host, port = sockets[0].getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    console.print(f"[green]✓[/] {literal(site.title)}: {address}  [dim](Ctrl-C ends it)[/]", soft_wrap=True)
    if options.browser:
        webbrowser.open(address)
    with suppress(KeyboardInterrupt):  # the server closes its connections first, then raises it
        make_server(make_app(site, options)).run(sockets)


def listen(options: Options) -> socket.socket:
    """Return a socket that listens at the page's address.

    Raises:
        XcompatError: the address is unavailable.
    """
    try:
        return socket.create_server(
            (options.host, options.port), family=socket.AF_INET6 if ":" in options.host else socket.AF_INET
        )
    except OSError as error:
        raise XcompatError(
            f"cannot listen at {options.host}:{options.port} ({error.strerror}); choose another --port or --host"
        ) from None


def make_app(site: Site, options: Options) -> Guard:
    """Return the application.

    Args:
        site: the page.
        options: its host names and password.
    """
    login = None if options.password is None else Login(options.password)
    access = Access(options.host, options.names, login)
    handlers = _Handlers(site, access)
    routes = [
        _route("/healthz", handlers.health),
        _route("/", handlers.page),
        _route("/login", handlers.check_login),
        _route("/login", handlers.log_in, "POST"),
        _route("/logout", handlers.log_out, "POST"),
        _route("/report", handlers.report),
        _route("/api/search", handlers.search, "POST"),
        _route(IMAGE_PATH, handlers.search_image, "POST"),
        _route("/api/filters", handlers.filters, "POST"),
        _route("/api/differing", handlers.differing, "POST"),
        _route("/api/gallery", handlers.gallery, "POST"),
        _route("/api/work", handlers.work, "POST"),
        _route("/api/job", handlers.job, "POST"),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={HTTPException: _answer_refusal}), access)


async def _answer_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(error.detail, error.status_code, headers=error.headers)


Handler = Callable[["Request"], Awaitable[Response]]


def _route(path: str, handler: Handler, method: str = "GET") -> Route:
    """Return a route that answers failures in one line."""

    async def answer_request(request: Request) -> Response:
        try:
            return await handler(request)
        except HTTPException:
            raise
        except Exception as error:
            return answer_failure(error)

    return Route(path, answer_request, methods=[method])


@dataclass
class _Handlers:
    site: Site
    access: Access
    models: Lane = field(default_factory=lambda: Lane(WAITING, WAIT_SECONDS, WORK_SECONDS))
    looks: Lane = field(default_factory=lambda: Lane(WAITING, WAIT_SECONDS, WORK_SECONDS))
    jobs: Jobs = field(default_factory=lambda: Jobs(Lane(8)))

    async def health(self, _: Request) -> Response:
        return PlainTextResponse("ok")

    async def page(self, request: Request) -> Response:
        response = main_page(self.site, restore_query(self.site, request.query_params.multi_items()))
        if self.access.login is None and self.access.cookie not in request.cookies:  # so that visitors of one address take turns
            response.set_cookie(self.access.cookie, secrets.token_urlsafe(16), httponly=True, samesite="strict")
        return response

    async def check_login(self, request: Request) -> Response:
        token = request.cookies.get(self.access.cookie, "")
        return Response(status_code=204 if self.access.login is None or self.access.login.has_session(token) else 401)

    async def log_in(self, request: Request) -> Response:
        given = await queries.read_json(request, queries.PasswordQuery)
        if self.access.login is None:
            return Response(status_code=204)
        token = self.access.login.start_session(given.password, request.state.client.address)
        if token is None:
            raise HTTPException(403, "wrong password")
        response = Response(status_code=204)
        is_encrypted = request.headers.get("origin", "").startswith("https:")
        response.set_cookie(
            self.access.cookie, token, max_age=SESSION_SECONDS, httponly=True, samesite="strict", secure=is_encrypted
        )
        return response

    async def log_out(self, request: Request) -> Response:
        if self.access.login is not None:
            self.access.login.end_session(request.cookies.get(self.access.cookie, ""))
        response = Response(status_code=204)
        response.delete_cookie(self.access.cookie, httponly=True, samesite="strict")
        return response

    async def report(self, request: Request) -> Response:
        if self.site.report is None:
            raise HTTPException(404, "this page has no report")
        return await self._run(self.looks, request, lambda: self._report)

    @cached_property
    def _report(self) -> Response:
        assert self.site.report is not None
        return report_page(self.site.report)

    async def search(self, request: Request) -> Response:
        query = await queries.read_json(request, queries.SearchQuery)
        if query.kind == "image":
            raise HTTPException(422, f"kind: send the bytes of an image to {IMAGE_PATH}")
        return HTMLResponse(await self._run(self.models, request, lambda: answer(self.site, query)))

    async def search_image(self, request: Request) -> Response:
        query, image = queries.read_parameters(request), await request.body()
        return HTMLResponse(await self._run(self.models, request, lambda: answer(self.site, query, image)))

    async def filters(self, request: Request) -> Response:
        query = await queries.read_json(request, queries.GalleryQuery)
        return JSONResponse(await self._run(self.looks, request, lambda: facets_of(self.site.shelf(query.gallery))))

    async def differing(self, request: Request) -> Response:
        query = await queries.read_json(request, queries.DifferingQuery)
        shown = await self._run(self.models, request, lambda: page(self.site, query.direction, query.order, query.page))
        return HTMLResponse(shown)

    async def gallery(self, request: Request) -> Response:
        query = await queries.read_json(request, queries.GalleryQuery)
        return HTMLResponse(await self._run(self.looks, request, lambda: describe_gallery(self.site, query.gallery)))

    async def work(self, request: Request) -> Response:
        query = await queries.read_json(request, queries.WorkQuery)
        return JSONResponse({"job": self.jobs.start(request.state.client, prepare_work(self.site, query))})

    async def job(self, request: Request) -> Response:
        job = self.jobs.find((await queries.read_json(request, queries.JobQuery)).job)
        if job is None:
            raise HTTPException(404, "this job has expired")
        return JSONResponse(asdict(job))

    async def _run(self, lane: Lane, request: Request, work: Callable[[], T]) -> T:
        return await lane.run(request.state.client, work, request.is_disconnected)
