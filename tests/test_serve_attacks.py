"""Attacks on the page over raw HTTP: a real server, and clients that send whatever they like."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import warm
from conftest import store
from PIL import Image, PngImagePlugin

from xcompat import XcompatError
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery

pytest.importorskip("starlette")

from xcompat.serve import connections, galleries
from xcompat.serve import search as searching
from xcompat.serve.app import listen, make_app
from xcompat.serve.connections import make_server
from xcompat.serve.guard import BODIES_BYTES, IMAGE_PATH, JSON_BYTES
from xcompat.serve.lane import BusyError
from xcompat.serve.login import SESSION_SECONDS, Login
from xcompat.serve.options import Options
from xcompat.serve.site import NEW, Shelf, Side, Site, Source
from xcompat.serve.uploads import UPLOAD_BYTES

COUNT = 12
HOSTILE = "<script>alert(1)</script>\r\nSet-Cookie: a=b\x1b[31m"
HOSTILE_ID = '"><script>alert(1)</script>'
PASSWORD = "correct horse"
API = ("/api/search", IMAGE_PATH, "/api/filters", "/api/differing", "/api/gallery", "/api/work", "/api/job", "/logout")


@pytest.fixture(scope="module")
def site(old_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Return the page of a gallery whose ids, captions and metadata lead outside of its folder of images."""
    embedder, base = load_embedder(old_folder), tmp_path_factory.mktemp("attacked")
    (base / "photos").mkdir()
    Image.new("RGB", (8, 8), "red").save(base / "photos" / "0.png")
    Image.new("RGB", (8, 8), "blue").save(base / "outside.png")
    (base / "secret.txt").write_text("a secret of the server")
    ids = ["0.png", "../outside.png", "../secret.txt", str(base / "secret.txt"), HOSTILE_ID]
    ids += [f"{row}.png" for row in range(len(ids), COUNT)]
    gallery = Gallery.create(base / "gallery", embedder)
    about = [{"caption": HOSTILE, "colour": HOSTILE if row % 2 else "red"} for row in range(COUNT)]
    store(gallery, torch.nn.functional.normalize(torch.randn(COUNT, embedder.dim)).numpy(), ids, about)
    return Site("shop", {"shop": Shelf("shop", gallery.path, [Source(base / "photos")])}, [Side(NEW, embedder)])


@contextmanager
def serving(site: Site, **options: Any) -> Iterator[str]:
    found = listen(Options(port=0))
    server = make_server(make_app(site, Options(**options)))
    thread = threading.Thread(target=server.run, args=([found],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    with serving(site) as found:
        yield found


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


def text_query(text: object = "a shoe", **others: object) -> dict[str, object]:
    return {"kind": "text", "text": text, **others}


def connect(address: str, seconds: float | None = None) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=seconds)


def send_raw(address: str, data: bytes) -> bytes:
    with connect(address, seconds=20) as connection:
        connection.sendall(data)
        answer = b""
        with suppress(ConnectionResetError):  # the server closes while there is more to read
            while part := connection.recv(65536):
                answer += part
        return answer


def search(address: str, text: str = "a shoe", **headers: str) -> httpx.Response:
    return httpx.post(f"{address}/api/search", json=text_query(text), headers=headers, timeout=60)


@pytest.mark.parametrize("value", [{"path": "/etc/passwd"}, ["/etc/passwd"], {"url": "http://127.0.0.1:1/"}, 7, None, True])
@pytest.mark.parametrize("name", ["kind", "text", "item", "gallery", "where", "k"])
def test_a_field_of_another_type_is_refused(client: httpx.Client, name: str, value: object) -> None:
    if (name, value) == ("k", 7):
        value = "7"
    said = client.post("/api/search", json=text_query() | {name: value})
    assert said.status_code in (400, 422) and "root:" not in said.text
    assert said.headers["content-type"].startswith("text/plain") and "\n" not in said.text


@contextmanager
def watched(note: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Tell of every audited event of this process; the hook itself cannot be removed."""
    is_watching = [True]
    sys.addaudithook(lambda event, given: note(event, given) if is_watching[0] else None)
    yield
    is_watching[0] = False


def test_no_path_or_address_is_opened(client: httpx.Client, site: Site) -> None:
    folder = site.shelf("").path.parent
    opened: list[str] = []

    def note(event: str, given: tuple[Any, ...]) -> None:
        if event in ("open", "socket.connect", "socket.getaddrinfo"):
            opened.append(str(given[1] if event == "socket.connect" else given[0]))

    client.get("/healthz")  # so that this client is connected
    names = [str(folder / "secret.txt"), "/dev/zero", "file:///dev/zero", "http://localhost:1/secret"]
    with watched(note):
        for name in [*names, "../secret.txt", "../outside.png"]:
            for query in (text_query(name), {"kind": "item", "item": name}):
                assert "a secret of the server" not in client.post("/api/search", json=query).text
            client.post(IMAGE_PATH, content=name.encode())
            client.post("/api/gallery", json={"gallery": name})
    assert not [name for name in opened if "secret" in name or "outside" in name or "/dev/zero" in name or "localhost" in name]
    said = client.post("/api/search", json={"kind": "item", "item": "../outside.png"})
    wanted = "'../outside.png' has no known image or text; set the folder of images with --images"
    assert (said.status_code, said.text) == (400, wanted)


def test_there_are_no_other_addresses_and_verbs(client: httpx.Client) -> None:
    for path in (
        *("/page.js", "/static/page.js", "/../secret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/report", "/docs"),
        *("/openapi.json", "/config"),
    ):
        assert client.get(path).status_code == 404, path
        assert client.post(path, json={}).status_code in (404, 405), path
    for path in (*API, "/healthz", "/", "/login", "/report"):
        for verb in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", *(["GET"] if path in API else [])):
            assert client.request(verb, path).status_code == 405, (verb, path)


def test_no_upload_is_written_to_disk(client: httpx.Client) -> None:
    written: list[str] = []

    def note(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[0], str) and (given[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(given[0])
        elif event in ("tempfile.mkstemp", "tempfile.mkdtemp", "os.mkdir"):
            written.append(str(given[0]))

    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (1000, 1000, 3), dtype=np.uint8)).save(buffer, "PNG")
    with watched(note):
        found = client.post(IMAGE_PATH, content=buffer.getvalue(), params={"k": 3})
        broken = client.post(IMAGE_PATH, content=buffer.getvalue()[:50_000])
        form = client.post("/api/search", files={"text": ("a.png", buffer.getvalue()[:1000])})
    assert [each.status_code for each in (found, broken, form)] == [200, 400, 415] and found.text.count("data-item=") == 3
    assert not written


def test_bad_queries_are_refused_in_one_line(client: httpx.Client) -> None:
    for change in (
        *({"text": "a" * 10_001}, {"item": "a" * 10_001}, {"k": 10**9}, {"k": 0}, {"k": -1}, {"k": 2.0}),
        *({"where": ["a=b"] * 51}, {"where": ["a=" + "b" * 500]}, {"where": "a=b"}, {"where": [["a=b"]]}),
        *({"kind": "audio"}, {"kind": "image"}, {"more": 1}),
    ):
        said = client.post("/api/search", json=text_query() | change)
        assert said.status_code == 422 and len(said.text) <= 300 and next(iter(change)) in said.text, change
    for body in (
        *(b"", b"nothing", b"[" * 100_000, b'{"a":' * 20_000, b'{"kind": "text", "text": "\\ud800"}'),
        *(b'{"kind": "text", "text": "a", "k": NaN}', b'{"kind": "text", "text": "a", "k": ' + b"9" * 100_000 + b"}"),
        *(b"\xff\xfe{}", b'{"kind": "text", "text": "\x00"}', b"[]", b"null"),
    ):
        said = client.post("/api/search", content=body, headers={"content-type": "application/json"})
        assert said.status_code == 422 and "\n" not in said.text and "Traceback" not in said.text, body[:50]
    odd = ("colour", "=x", "colour=" + "[" * 490, "colour=NaN", "colour={}", "colour=" + "9" * 490, "\ufeff=1", "x\r\ny=1")
    for condition in odd:
        said = client.post("/api/search", json=text_query(where=[condition]))
        assert said.status_code == 400 or "nothing found" in said.text, condition


def test_large_compressed_and_endless_bodies_are_refused(client: httpx.Client, address: str) -> None:
    for path, most in (("/api/search", JSON_BYTES), (IMAGE_PATH, UPLOAD_BYTES)):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {most + 1}\r\n\r\n"
        assert send_raw(address, head.encode()).startswith(b"HTTP/1.1 413"), "before they are read"
    assert client.post("/api/search", content=iter([b"{}"])).status_code == 411
    bomb = zlib.compress(bytes(10**7))
    for coding in ("gzip", "deflate", "br"):
        said = client.post("/api/search", content=bomb, headers={"content-encoding": coding, "content-type": "application/json"})
        assert said.status_code == 415


def test_all_clients_share_a_limit_of_memory(address: str) -> None:
    """Connections announce images and do not send them."""
    head = f"POST {IMAGE_PATH} HTTP/1.1\r\nHost: {address[7:]}\r\nContent-Length: {UPLOAD_BYTES}\r\n\r\n".encode()
    waiting = [connect(address) for _ in range(BODIES_BYTES // UPLOAD_BYTES)]
    for connection in waiting:
        connection.sendall(head)
    refused = []
    for connection in waiting:
        connection.settimeout(0.5)
        try:
            refused.append(connection.recv(100))
        except TimeoutError:
            refused.append(b"")
    assert sum(answer.startswith(b"HTTP/1.1 503") for answer in refused) == len(waiting) - 6, "one address has 64 MB"
    assert search(address).status_code == 200
    for connection in waiting:
        connection.close()


@pytest.mark.parametrize("name", ["gradio", "many", "text", "tall", "postscript", "rare", "short"])
def test_hostile_images_are_refused(client: httpx.Client, name: str) -> None:
    buffer = io.BytesIO()
    if name == "many":  # 36 million pixels in 5 kB
        Image.new("1", (6_000, 6_000)).save(buffer, "PNG")
    elif name == "text":  # a compressed comment of 100 MB
        info = PngImagePlugin.PngInfo()
        info.add_text("comment", "a" * 10**8, zip=True)
        Image.new("RGB", (8, 8)).save(buffer, "PNG", pnginfo=info)
    elif name == "tall":
        Image.new("1", (1, 2**20)).save(buffer, "PNG")
    elif name in ("postscript", "rare"):
        Image.new("RGB", (8, 8)).save(buffer, {"postscript": "EPS", "rare": "PCX"}[name])
    elif name == "short":
        Image.effect_noise((500, 500), 50).save(buffer, "JPEG")
    data = {"gradio": b"/etc/passwd", "short": buffer.getvalue()[:2000]}.get(name, buffer.getvalue())
    said = client.post(IMAGE_PATH, content=data)
    assert said.status_code == 400 and said.text.startswith("the image cannot be read: "), said.text


def test_slow_clients_lose_their_connection(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr("xcompat.serve.guard.BODY_SECONDS", 0.3)
    with serving(site) as address:
        assert send_raw(address, b"") == b""
        assert send_raw(address, b"GET / HTTP/1.1\r\nHost: ") == b""
        answered = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"
        assert send_raw(address, answered).startswith(b"HTTP/1.1 200")
        head = "POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{"
        assert send_raw(address, head.encode()).startswith(b"HTTP/1.1 408")


def test_one_address_has_so_many_connections(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "OF_ONE_ADDRESS", 20)
    with serving(site) as address:
        held = [connect(address) for _ in range(20)]
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{address}/healthz")
        for connection in held:
            connection.close()

        def is_answering() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{address}/healthz").status_code == 200
            return False

        warm.wait_until(is_answering)


def test_odd_requests_are_refused(address: str) -> None:
    for request in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost/../evil\r\n\r\n",
        b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 50\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ):
        assert send_raw(address, request).startswith(b"HTTP/1.1 400"), request[:80]
    long = send_raw(address, b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert not long or long.startswith(b"HTTP/1.1 4")
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\n"
    assert send_raw(address, head + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n").startswith(
        b"HTTP/1.1 411"
    )
    upgrade = send_raw(address, head + b"Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\nContent-Length: 0\r\n\r\n")
    assert not upgrade.startswith(b"HTTP/1.1 101")


def hold_lane(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """Let searches wait for an event; note the texts in the order in which they are searched."""
    let_go, order, original = threading.Event(), [], searching.answer

    def answer(site: Site, asked: Any, image: bytes = b"") -> str:
        order.append(asked.text)
        assert let_go.wait(60)
        return original(site, asked, image)

    monkeypatch.setattr("xcompat.serve.app.answer", answer)
    return let_go, order


def test_one_visitor_cannot_starve_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xcompat.serve.app.WAITING", 10)
    let_go, order = hold_lane(monkeypatch)
    with serving(site) as address, ThreadPoolExecutor(40) as threads:
        cookie = httpx.get(address).headers["set-cookie"].partition(";")[0]
        flood = [threads.submit(search, address, f"flood {row}") for row in range(30)]
        warm.wait_until(lambda: sum(each.done() for each in flood) == 19)  # 1 is searched, 10 wait
        assert {each.result().status_code for each in flood if each.done()} == {429}
        assert all("too many requests of yours" in each.result().text for each in flood if each.done())
        visitor = threads.submit(search, address, "somebody else", cookie=cookie)
        warm.wait_until(lambda: sum(each.done() for each in flood) == 20)  # the flood made room
        assert httpx.get(f"{address}/healthz", timeout=5).text == "ok"
        let_go.set()
        assert visitor.result().status_code == 200
        assert sum(each.result().status_code == 200 for each in flood) == 10
        assert order.index("somebody else") <= 2, "visitors take turns"


def test_waiting_and_working_end_after_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xcompat.serve.app.WAIT_SECONDS", 0.2)
    monkeypatch.setattr("xcompat.serve.app.WORK_SECONDS", 0.5)
    let_go, _ = hold_lane(monkeypatch)
    with serving(site) as address, ThreadPoolExecutor(2) as threads:
        said = list(threads.map(search, [address] * 2, "ab"))
        assert [each.status_code for each in said] == [503, 503]
        assert {each.text for each in said} == {
            "the server is busy; try again in a moment",
            "this takes longer than 0.5 s; request fewer results",
        }
        let_go.set()
        warm.wait_until(lambda: search(address).status_code == 200)


def test_work_on_a_gallery_does_not_block_searches(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(galleries.commands, "verify", lambda gallery: let_go.wait(60))
    with serving(site) as address:
        verify = {"gallery": "shop", "verb": "verify"}
        jobs = [httpx.post(f"{address}/api/work", json=verify) for _ in range(12)]
        assert [job.status_code for job in jobs] == [200] * 9 + [503] * 3, "1 runs, 8 wait"
        assert search(address).status_code == 200
        let_go.set()
        last = {"job": jobs[8].json()["job"]}
        warm.wait_until(lambda: httpx.post(f"{address}/api/job", json=last).json()["done"])
        assert httpx.post(f"{address}/api/job", json={"job": "unknown"}).status_code == 404


def test_changes_need_the_option(client: httpx.Client) -> None:
    for verb in ("upgrade", "backfill", "rollback"):
        said = client.post("/api/work", json={"gallery": "shop", "verb": verb, "dry_run": True})
        assert (said.status_code, said.text) == (400, "this page is read-only; start it with --allow-changes")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(5, "Input/output error", "/srv/secret/place"),
        RuntimeError("a bug in /srv/secret/place"),
        XcompatError("/srv/secret/place/a.png is damaged"),
    ],
)
@pytest.mark.parametrize(
    "place",
    [
        "xcompat.models.embedder.Embedder.embed",
        "xcompat.retrieval.Gallery.search",
        "xcompat.retrieval.Gallery.open",
        "xcompat.serve.search.render",
    ],
)
def test_an_error_stops_no_one(client: httpx.Client, place: str, error: Exception) -> None:
    expected = client.post("/api/search", json=text_query())

    def fail(*_: object, **__: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place, fail)
        said = client.post("/api/search", json=text_query())
    assert said.status_code == (400 if isinstance(error, XcompatError) else 500)
    assert "/srv" not in said.text and "\n" not in said.text
    if isinstance(error, XcompatError):
        assert said.text.endswith("a.png is damaged")
    again = client.post("/api/search", json=text_query())
    assert (again.status_code, again.text) == (200, expected.text)


def test_names_and_captions_are_shown_as_text(client: httpx.Client) -> None:
    said = client.post("/api/search", json=text_query(HOSTILE, k=COUNT))
    assert said.status_code == 200 and said.text.count("&lt;script&gt;") >= COUNT
    assert "<script" not in said.text and "\x1b" not in said.text and "set-cookie" not in said.headers
    given = {"kind": "item", "item": '"><script>alert(1)</script>', "where": "<script>", "gallery": "<script>"}
    page = client.get("/", params=given)
    assert page.text.count("<script>") == 1, "its own"
    assert client.post("/api/search", json={"kind": "item", "item": HOSTILE_ID}).status_code == 400


def test_browsers_load_nothing_but_the_page(client: httpx.Client) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    for said in (page, client.get("/healthz"), client.post("/api/search", json=text_query()), client.get("/nowhere")):
        assert said.headers["x-content-type-options"] == "nosniff" and "server" not in said.headers
        assert "frame-ancestors" in said.headers["content-security-policy"] and said.headers["cache-control"] == "no-store"
    cookie = client.get("/", headers={"cookie": ""}).headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert client.get("/", headers={"range": "bytes=0-10"}).status_code == 200


def test_other_sites_cannot_ask(client: httpx.Client, address: str) -> None:
    def status(**headers: str) -> int:
        return client.post(
            "/api/search", json=text_query(), headers={name.replace("_", "-"): each for name, each in headers.items()}
        ).status_code

    own = address.removeprefix("http://")
    port = own.partition(":")[2]
    assert status() == status(origin=address, sec_fetch_site="same-origin") == 200
    assert status(host=f"localhost:{port}", origin=f"http://localhost:{port}") == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9", "http://[", "", f"http://{own}.evil.example"):
        assert status(origin=origin) == 403, origin
    assert status(sec_fetch_site="cross-site") == status(sec_fetch_site="same-site") == 403
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "127.0.0.1 evil",
        "10.0.0.7",
    ):
        assert status(host=host, origin=f"http://{host}") == 400, host
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200, "a link of another site"
    assert client.get("/report", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    plain = client.post("/api/search", content=json.dumps(text_query()), headers={"content-type": "text/plain"})
    assert plain.status_code == 415, "which a form of another site could send"


def test_public_pages_check_names_and_slow_down_guesses(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(site, host="0.0.0.0", password=PASSWORD, names=("photos.example",)) as address:
        found = {
            name: httpx.get(f"{address}/healthz", headers={"host": name}).status_code
            for name in ("photos.example", "192.0.2.1:80", "[2001:db8::1]", "evil.example")
        }
    assert list(found.values()) == [200, 200, 200, 400]
    monkeypatch.setattr("xcompat.serve.app.Login", lambda password: Login(password, clock=lambda: 0.0))
    with serving(site, password=PASSWORD) as address:
        said = [httpx.post(f"{address}/login", json={"password": f"guess {row}"}) for row in range(3)]
        said.append(httpx.post(f"{address}/login", json={"password": PASSWORD}))
    assert [each.status_code for each in said] == [403, 429, 429, 429]
    assert said[1].text.startswith("wrong password; try again in 1 s") and "retry-after" in said[1].headers


def test_nothing_is_shown_without_the_password(site: Site) -> None:
    with serving(site, password=PASSWORD) as address, httpx.Client(base_url=address, timeout=60) as client:
        assert client.get("/healthz").text == "ok"
        assert client.get("/").status_code == 401 and "shop" not in client.get("/").text
        for path in (*API, "/report", "/openapi.json", "/config", "/nowhere"):
            for verb in ("GET", "POST"):
                assert client.request(verb, path, json=text_query()).status_code == 401, path
        assert client.get("/login").status_code == 401
        for given in ("wrong", {"$ne": ""}, None, "x" * 1001):
            assert client.post("/login", json={"password": given}).status_code in (403, 422, 429)
    with serving(site, password=PASSWORD) as address, httpx.Client(base_url=address, timeout=60) as client:
        said = client.post("/login", json={"password": PASSWORD})
        cookie = said.headers["set-cookie"].lower()
        assert said.status_code == 204 and "httponly" in cookie and "samesite=strict" in cookie and PASSWORD not in cookie
        assert client.get("/login").status_code == 204
        assert client.post("/api/search", json=text_query()).status_code == 200 and "shop" in client.get("/").text
        token = dict(client.cookies)
        assert client.post("/logout").status_code == 204
        assert httpx.post(f"{address}/api/search", json=text_query(), cookies=token).status_code == 401


def test_a_client_that_reads_nothing_loses_its_connection(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, original = threading.Event(), connections.LimitedProtocol.connection_lost

    def note_loss(self: connections.LimitedProtocol, error: Exception | None) -> None:
        original(self, error)
        lost.set()

    monkeypatch.setattr(connections.LimitedProtocol, "connection_lost", note_loss)
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr("xcompat.serve.app.answer", lambda *_: "x" * 10**8)
    with serving(site) as address, connect(address) as connection:
        body = json.dumps(text_query())
        head = "POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert lost.wait(30), "the server closes the connection"


def test_wrong_passwords_wait_longer_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    login = Login(PASSWORD, clock=lambda: now[0])
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        assert login.start_session("wrong", "a") is None
        now[0] += seconds - 0.5
        with pytest.raises(BusyError, match="try again in 1 s"):
            login.start_session(PASSWORD, "a")
        assert login.start_session(PASSWORD, "b") is not None, "another address does not wait"
        now[0] += 0.5
    token = login.start_session(PASSWORD, "a")
    assert token is not None and login.has_session(token)
    now[0] += SESSION_SECONDS
    assert not login.has_session(token)
    monkeypatch.setattr("xcompat.serve.login.SESSIONS", 5)
    monkeypatch.setattr("xcompat.serve.login.ADDRESSES", 5)
    login = Login(PASSWORD)
    tokens = [login.start_session(PASSWORD, "a") for _ in range(8)]
    assert [login.has_session(token or "") for token in tokens] == [False] * 3 + [True] * 5
    for row in range(8):
        login.start_session("wrong", f"address {row}")
    assert login.start_session(PASSWORD, "address 0") is not None, "the oldest is forgotten"
    with pytest.raises(BusyError):
        login.start_session(PASSWORD, "address 7")
