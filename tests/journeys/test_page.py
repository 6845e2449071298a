"""Journey: real photos, a map and a gallery by the command line, then the page by a browser and by raw HTTP."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import warm
import yaml

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

pytest.importorskip("starlette")
SHARED = Path(__file__).resolve().parents[3] / "shared"
PHOTOS, MODELS = SHARED / "data" / "tiny-imagenet" / "val-0000.tar.gz", SHARED / "models"
OLD, NEW = MODELS / "mobilenet_v1_0.25_128", MODELS / "mobilenet_v1_0.5_160"
CHROMIUM = shutil.which("chromium")
CLASSES, STORED, ASKED = 8, 10, 3
PASSWORD = "correct horse battery"
LUCK = 0.25
"""Two standard errors of a share of 24 queries."""
pytestmark = pytest.mark.skipif(not (PHOTOS.is_file() and NEW.is_dir()), reason="../shared has no photos or no models")


def run_xcompat(*words: object, folder: Path) -> str:
    """Run a command in a process of its own."""
    done = warm.run("-m", "xcompat", *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass
class Page:
    """A page that runs in a process of its own.

    Args:
        folder: where the photos, the gallery and the files of the server are.
        address: of the page.
        process: the server.
    """

    folder: Path
    address: str
    process: subprocess.Popen[str]

    def log_in(self) -> httpx.Client:
        """Return a client with a session."""
        client = httpx.Client(base_url=self.address, timeout=300)
        assert client.post("/login", json={"password": PASSWORD}).status_code == 204
        return client


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with photos of some classes, photos to ask with, a map between two models, and a gallery of the old one."""
    folder = tmp_path_factory.mktemp("shop")
    seen: Counter[int] = Counter()
    with tarfile.open(PHOTOS) as shard:
        sample: dict[str, bytes] = {}
        for member in shard:
            stem, _, kind = member.name.partition(".")
            file = shard.extractfile(member)
            assert file is not None
            sample[kind] = file.read()
            if kind != "json":
                continue
            label = int(sample["cls"])
            if label < CLASSES and seen[label] < STORED + ASKED:
                place = folder / ("queries" if seen[label] < ASKED else "photos") / f"{label:03}"
                place.mkdir(parents=True, exist_ok=True)
                (place / f"{stem}.jpg").write_bytes(sample["jpg"])
                seen[label] += 1
            sample = {}
    recipe = {
        "method": "ridge",
        "old": str(OLD),
        "new": str(NEW),
        "data": {"images": {"path": "photos"}, "queries": {"path": "queries"}},
        "evaluation": {"resamples": 100, "ks": [1, 5], "examples": 0, "tsne_pairs": 0},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_xcompat("train", "recipe.yaml", "output_dir=run", folder=folder)
    run_xcompat("gallery", "build", "photos", "--model", OLD, "--out", "gallery", folder=folder)
    return folder


@pytest.fixture(scope="module")
def page(shop: Path) -> Iterator[Page]:
    (shop / "password.txt").write_text(f"{PASSWORD}\n")
    (shop / "secret.txt").write_text("a secret of the server")
    (shop / "tmp").mkdir()
    words = ["serve", "gallery", "--model", "run", "--old", OLD, "--images", "photos", "--allow-changes"]
    words += ["--password-file", "password.txt", "--no-browser", "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(shop / "tmp"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "xcompat", *map(str, words)], cwd=shop, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address = next((word for line in process.stdout for word in line.split() if word.startswith("http://")), None)
    assert address is not None, "the page does not start"
    wait_until_ready(address)
    yield Page(shop, address, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) in (0, 130, -signal.SIGINT)


def wait_until_ready(address: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if httpx.get(f"{address}/healthz", timeout=5).text == "ok":
                return
        except httpx.TransportError:
            continue
    raise AssertionError("the page is not ready")


def find_ids(html: str, side: str) -> list[str]:
    """Return the ids of the hits of one side."""
    column = html.partition(f'aria-label="{side}"')[2].partition("</section>")[0]
    return [unescape(name) for name in re.findall(r'data-item="([^"]*)"', column)]


def measure_quality(page: Page, client: httpx.Client) -> dict[str, float]:
    """Return by model the share of photos that find their class among the first five hits."""
    found: Counter[str] = Counter()
    queries = sorted((page.folder / "queries").rglob("*.jpg"))
    for file in queries:
        html = client.post("/api/search/image?k=5", content=file.read_bytes()).text
        for side in ("old query", "new query"):
            found[side] += any(name.startswith(f"{file.parent.name}/") for name in find_ids(html, side))
    return {side: found[side] / len(queries) for side in ("old query", "new query")}


def work(client: httpx.Client, verb: str, **values: object) -> str:
    """Do some work on the gallery through the page, and return what it says."""
    job = client.post("/api/work", json={"gallery": "gallery", "verb": verb, **values}).json()
    end = time.monotonic() + 300
    while time.monotonic() < end:
        state = client.post("/api/job", json=job).json()
        if state["done"]:
            assert not state["failed"], state["said"]
            return str(state["said"])
    raise AssertionError(f"{verb} does not end")


def test_quality_holds_while_the_page_changes_the_gallery(page: Page) -> None:
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
    file = sorted((page.folder / "queries").rglob("*.jpg"))[0]
    searched = run_xcompat("gallery", "search", "gallery", file, "--model", OLD, "--top-k", 5, "--json", folder=page.folder)
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
    item = sorted((page.folder / "photos").rglob("*.jpg"))[0].relative_to(page.folder / "photos").as_posix()
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
    visitor.get_by_label("Image (or drop one").set_input_files(sorted((page.folder / "queries").rglob("*.jpg"))[0])
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


@pytest.mark.nightly
def test_a_flood_of_one_visitor_lets_others_search(page: Page) -> None:
    greedy, visitor = page.log_in(), page.log_in()
    image = sorted((page.folder / "queries").rglob("*.jpg"))[0].read_bytes()
    order: list[str] = []

    def search(client: httpx.Client, name: str) -> int:
        status = client.post("/api/search/image?k=5", content=image).status_code
        order.append(name)
        return status

    with ThreadPoolExecutor(31) as threads:
        flood = [threads.submit(search, greedy, "flood") for _ in range(30)]
        while len(order) < 2:
            time.sleep(0)
        assert threads.submit(search, visitor, "visitor").result() == 200
        assert httpx.get(f"{page.address}/healthz", timeout=10).text == "ok"
        assert {each.result() for each in flood} <= {200, 429, 503}
    assert order.index("visitor") < 25, "the visitor did not wait for the whole flood"
