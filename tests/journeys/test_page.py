"""Journey: real photos, a map and a gallery by the command line, then the page by a browser and by raw HTTP."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import warm
from test_photos import NEW, OLD, PHOTOS, Desk

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

pytest.importorskip("starlette")
CHROMIUM = shutil.which("chromium")
CLASSES = 8
PASSWORD = "correct horse battery"
LUCK = 0.25
"""Two standard errors of a share of 24 queries."""
pytestmark = pytest.mark.skipif(not (PHOTOS.exists() and NEW.is_dir()), reason="../shared has no photos or no models")


@dataclass
class Page:
    """A page that a process of its own serves, from a folder with photos and a gallery."""

    folder: Path
    address: str
    process: subprocess.Popen[str]

    def log_in(self) -> httpx.Client:
        client = httpx.Client(base_url=self.address, timeout=300)
        assert client.post("/login", json={"password": PASSWORD}).status_code == 204
        return client


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """Return a folder with photos of some classes, photos to ask with, a map between two models, and a gallery of the old one."""
    desk = Desk(tmp_path_factory.mktemp("shop"), CLASSES, (10, 10, 3))
    desk.type("train", "recipe.yaml", "output_dir=run")
    desk.type("gallery", "build", "stored", "--model", OLD, "--out", "gallery")
    return desk


@pytest.fixture(scope="module")
def page(desk: Desk) -> Iterator[Page]:
    shop = desk.folder
    (shop / "password.txt").write_text(f"{PASSWORD}\n")
    (shop / "secret.txt").write_text("a secret of the server")
    (shop / "tmp").mkdir()
    command = [sys.executable, "-m", "xcompat", "serve", "gallery", "--model", "run", "--old", str(OLD), "--images", "stored"]
    command += ["--allow-changes", "--password-file", "password.txt", "--no-browser", "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(shop / "tmp"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=shop, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = next((word for line in process.stdout for word in line.split() if word.startswith("http://")), None)
    assert address is not None, "the page does not start"
    warm.wait_until(lambda: is_ready(address), "the page is not ready", 60)
    yield Page(shop, address, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def is_ready(address: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{address}/healthz", timeout=5).text == "ok"
    return False


def find_ids(html: str, side: str) -> list[str]:
    column = html.partition(f'aria-label="{side}"')[2].partition("</section>")[0]
    return [unescape(name) for name in re.findall(r'data-item="([^"]*)"', column)]


def measure_quality(page: Page, client: httpx.Client) -> dict[str, float]:
    """Return by model the share of photos that find their class among the first five hits."""
    found: Counter[str] = Counter()
    queries = sorted((page.folder / "asked").rglob("*.jpg"))
    for file in queries:
        html = client.post("/api/search/image?k=5", content=file.read_bytes()).text
        for side in ("old query", "new query"):
            found[side] += any(name.startswith(f"{file.parent.name}/") for name in find_ids(html, side))
    return {side: found[side] / len(queries) for side in ("old query", "new query")}


def work(client: httpx.Client, verb: str, **values: object) -> str:
    state = job = client.post("/api/work", json={"gallery": "gallery", "verb": verb, **values}).json()

    def is_done() -> bool:
        nonlocal state
        state = client.post("/api/job", json=job).json()
        return bool(state["done"])

    warm.wait_until(is_done, f"{verb} does not end", 300)
    assert not state["failed"], state["said"]
    return str(state["said"])


def test_quality_holds_while_the_page_changes_the_gallery(page: Page, desk: Desk) -> None:
    client = page.log_in()
    untouched = measure_quality(page, client)
    assert untouched["old query"] > 2 / CLASSES, "more than luck"
    for budget in (1, 7, 32):
        assert "embedded" in work(client, "backfill", budget=budget)
        quality = measure_quality(page, client)
        assert min(quality.values()) >= untouched["old query"] - LUCK, (budget, untouched, quality)
    assert "is whole" in work(client, "verify")
    assert page.folder.name not in work(client, "doctor", side="old query")
    work(client, "rollback", generation=1)
    assert measure_quality(page, client) == untouched
    file = sorted((page.folder / "asked").rglob("*.jpg"))[0]
    searched = desk.type("gallery", "search", "gallery", file, "--model", OLD, "--top-k", 5, "--json").stdout
    html = client.post("/api/search/image?k=5", content=file.read_bytes()).text
    assert find_ids(html, "old query") == re.findall(r'"id": "([^"]+)"', searched)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium; install it with `apt-get install chromium`")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


def test_a_visitor_logs_in_searches_and_comes_back(page: Page, browser: Browser) -> None:
    visitor = browser.new_context().new_page()
    visitor.set_default_timeout(120_000)
    foreign: list[str] = []
    visitor.on("request", lambda to: None if to.url.startswith((page.address, "data:")) else foreign.append(to.url))
    item = sorted((page.folder / "stored").rglob("*.jpg"))[0].relative_to(page.folder / "stored").as_posix()
    visitor.goto(f"{page.address}/?kind=item&item={item}&k=6")
    visitor.get_by_label("Password").fill("wrong")
    visitor.get_by_role("button", name="Log in").click()
    visitor.get_by_role("alert").get_by_text("wrong password").wait_for()
    visitor.get_by_label("Password").fill(PASSWORD)
    with visitor.expect_response(lambda answer: "/api/search" in answer.url, timeout=120_000):
        while visitor.get_by_role("button", name="Log in").count():  # until the wait after the wrong password is over
            visitor.get_by_role("button", name="Log in").click()
            visitor.wait_for_timeout(300)

    def ids(side: str) -> list[str]:
        column: Locator = visitor.get_by_role("region", name=side)
        column.locator("li").first.wait_for()
        return column.locator(".id").all_inner_texts()

    assert ids("old query")[0] == ids("new query")[0] == item, "the link of before the login"
    assert visitor.get_by_role("region", name="new query").locator("li img").count() == 6
    visitor.get_by_label("image", exact=True).check()
    visitor.get_by_label("Image (or drop one").set_input_files(sorted((page.folder / "asked").rglob("*.jpg"))[0])
    visitor.wait_for_function("() => !location.search")
    visitor.get_by_role("region", name="new query").locator("a.pick").first.click()
    visitor.wait_for_url(re.compile("kind=item"))
    visitor.get_by_role("tab", name="The gallery").click()
    visitor.get_by_role("button", name="Verify").click()
    visitor.get_by_role("status").get_by_text("is whole").wait_for()
    assert not foreign


def test_an_attacker_gets_no_file_and_stops_nobody(page: Page) -> None:
    secret = page.folder / "secret.txt"
    client = page.log_in()
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0)
        names = [str(secret), "/dev/zero", f"http://127.0.0.1:{other.getsockname()[1]}/", "file:///etc/passwd"]
        for name in names:
            described = {"path": name, "url": name, "meta": {"_type": "gradio.FileData"}}
            for value in (name, described, [described]):
                for field in ("text", "item", "gallery", "where", "k", "kind"):
                    query = {"kind": "item" if field == "item" else "text", "text": "a", field: value}
                    assert "secret of" not in client.post("/api/search", json=query).text
                data = ["text", value, "", "", "gallery", [], 1]
                assert "secret of" not in client.post("/gradio_api/call/search", json={"data": data}).text
            client.post("/api/search/image", content=name.encode())
        with pytest.raises(BlockingIOError):
            other.accept()
    assert client.post("/api/search", content=b'{"text": "' + b"a " * 4_500_000 + b'"}').status_code == 413
    for path in ("/openapi.json", "/config", *(f"/gradio_api/{name}" for name in ("queue/data", "reset", "upload", "info"))):
        assert httpx.get(page.address + path).status_code == httpx.post(page.address + path, json={}).status_code == 401
    assert list((page.folder / "tmp").iterdir()) == []
    assert PASSWORD.encode() not in Path(f"/proc/{page.process.pid}/cmdline").read_bytes()
