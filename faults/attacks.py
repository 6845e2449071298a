"""Requests that try to read the server's files, to make it fetch addresses, or to break the page."""

from __future__ import annotations

import json
import random
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import httpx
from scenes import encoder, write_images

from xcompat.retrieval import commands
from xcompat.retrieval.originals import load_originals
from xcompat.serve.app import listen, make_app
from xcompat.serve.connections import make_server
from xcompat.serve.guard import IMAGE_PATH
from xcompat.serve.options import Options
from xcompat.serve.site import NEW, Shelf, Side, Site, Source

SECRET = "a secret of the server"
PATHS = (
    "/api/search",
    IMAGE_PATH,
    *(f"/api/{name}" for name in ("filters", "differing", "gallery", "work", "job")),
    "/login",
    "/logout",
)
FIELDS = (
    *("kind", "text", "item", "gallery", "where", "k", "rerank"),
    *("direction", "order", "page", "verb", "job", "password", "data"),
)
METHODS = ("POST", "POST", "POST", "POST", "GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")
ANSWERED_EVERY = 50
"""Requests between two plain searches, which must find what they found at first."""


class Target:
    """A page that is attacked.

    Args:
        folder: where its gallery, its images and a file with a secret lie.
        address: of the page.
        canary: a server that nobody may ask.
    """

    def __init__(self, folder: Path, address: str, canary: socket.socket) -> None:
        self.folder, self.canary = folder, canary
        self.client = httpx.Client(base_url=address, timeout=30)
        secret = folder / "secret.txt"
        self.names = [
            str(secret),
            "../secret.txt",
            f"file://{secret}",
            "/etc/passwd",
            "/dev/zero",
            f"http://127.0.0.1:{canary.getsockname()[1]}/",
        ]
        self.found = self.search()

    def search(self) -> str:
        return self.client.post("/api/search", json={"kind": "text", "text": "a red shoe", "k": 3}).text

    def problem(self, draw: random.Random) -> str | None:
        """Send one request and return what is wrong with the answer; None if nothing is."""
        method, path = draw.choice(METHODS), self._path(draw)
        body, kind = self._body(draw)
        headers = {"content-type": kind} | draw.choice([{}, {}, {"host": "evil.example"}, {"origin": "http://evil.example"}])
        try:
            answer = self.client.request(method, path, content=body, headers=headers)
        except httpx.TransportError:  # the page ends what is no HTTP
            answer = None
        told = f"{method} {path[:80]} {body[:120]!r}"
        if answer is not None:
            if SECRET in answer.text or "root:x:" in answer.text:
                return f"{told}: the answer holds a file of the server"
            if answer.status_code >= 500 and answer.status_code != 503:
                return f"{told}: status {answer.status_code}: {answer.text[:200]}"
            if "Traceback" in answer.text or any(f"{self.folder}/{name}" in answer.text for name in ("gallery", "photos")):
                return f"{told}: the answer shows the inside of the server: {answer.text[:200]}"
        with suppress(BlockingIOError):
            self.canary.accept()
            return f"{told}: the server asked another one"
        return None

    def _path(self, draw: random.Random) -> str:
        name = draw.choice(self.names)
        return draw.choice(
            [
                *PATHS,
                *PATHS,
                f"/{quote(name, safe='')}",
                f"/{draw.choice(('file=', 'static/', '..%2f..%2f', 'gradio_api/file='))}{quote(name, safe='')}",
                f"{IMAGE_PATH}?gallery={quote(name, safe='')}&k={draw.choice(('1', '-1', 'NaN', '9' * 400))}",
                f"/?kind=item&item={quote(name, safe='')}",
                "/report",
                "/openapi.json",
            ]
        )

    def _body(self, draw: random.Random) -> tuple[bytes, str]:
        plain: dict[str, Any] = {"kind": draw.choice(("text", "item", "image")), "text": "a", "item": "0.png"}
        for _ in range(draw.randrange(3)):
            plain[draw.choice(FIELDS)] = self._value(draw, 3)
        body = json.dumps(plain).encode()
        if draw.random() < 0.2:  # damaged
            place = draw.randrange(len(body))
            body = body[:place] + draw.randbytes(draw.randrange(4)) + body[place + draw.randrange(8) :]
        if draw.random() < 0.1:
            body = draw.choice((b"", b"\x00" * 100, b"[" * 10_000, draw.choice(self.names).encode()))
        return body, draw.choice(("application/json",) * 4 + ("text/plain", "multipart/form-data; boundary=x", "image/png"))

    def _value(self, draw: random.Random, depth: int) -> Any:
        name = draw.choice(self.names)
        described = {"path": name, "url": name, "meta": {"_type": "gradio.FileData"}}
        values = [name, described, 10**400, -1, 0.5, None, True, "\ud800", "a" * 20_000]
        if depth and draw.random() < 0.3:
            return [self._value(draw, depth - 1) for _ in range(draw.randrange(4))]
        return draw.choice(values)


@contextmanager
def attacked(folder: Path) -> Iterator[Target]:
    photos, embedder = write_images(folder / "photos"), encoder(folder)
    (folder / "secret.txt").write_text(SECRET)
    commands.build(folder / "gallery", load_originals(photos), embedder, "Flat", None)
    site = Site("shop", {"shop": Shelf("shop", folder / "gallery", [Source(photos)])}, [Side(NEW, embedder)])
    found = listen(Options(port=0))
    server = make_server(make_app(site, Options()))
    thread = threading.Thread(target=server.run, args=([found],))
    thread.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as canary:
            canary.settimeout(0)
            yield Target(folder, f"http://127.0.0.1:{found.getsockname()[1]}", canary)
    finally:
        server.should_exit = True
        thread.join()


def attacks(folder: Path, trials: int, seed: int = 0) -> Iterator[str | None]:
    """Send hostile requests; now and then a plain search has to find what it found at first.

    Args:
        folder: an empty one.
        trials: how many requests.
        seed: of the requests.

    Yields:
        What is wrong with each; None when nothing is.
    """
    draw, temporary = random.Random(seed), folder / "tmp"
    temporary.mkdir(parents=True)
    with mock.patch.object(tempfile, "tempdir", str(temporary)), attacked(folder) as target:
        files = sorted(folder.rglob("*"))
        for trial in range(trials):
            problem = target.problem(draw)
            if problem is None and trial % ANSWERED_EVERY == 0 and target.search() != target.found:
                problem = f"after {trial} requests a search finds something else"
            yield problem
        if sorted(folder.rglob("*")) != files:
            yield "the requests left files behind"
