"""The page that searches with old and new side by side, in a real browser: what it shows, refuses, and never does."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from xcompat import XbtModel
from xcompat.embedding_provider import asking
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.side_by_side import embed_query

pytest.importorskip("gradio")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

from xcompat.serve.site import NEW, OLD, Shelf, Side, Site

HOSTILE = "<img src=x onerror=alert(1)>${7*7}{{7*7}}.png"
COUNT = 40
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def old(old_folder: str) -> Embedder:
    return load_embedder(old_folder)


@pytest.fixture(scope="module")
def new(folder_of: dict[str, str], old: Embedder, tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    folder = tmp_path_factory.mktemp("serve") / "xbt"
    XbtModel.from_encoder(folder_of["clip"], old=old.describe_old()).export(folder)
    return load_embedder(str(folder))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(COUNT):
        pixels = np.random.default_rng(number).integers(0, 255, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def gallery(old: Embedder, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "shop"
    made = Gallery.create(folder, old)
    pictures = [Image.open(photos / f"{number}.png") for number in range(COUNT)]
    about = [{"colour": ["red", "green"][number % 2], "caption": f"thing number {number}"} for number in range(COUNT)]
    embeds = old.embed({"pixel_values": old.processor.images(pictures)})
    made.add(embeds, [*(f"{number}.png" for number in range(COUNT - 1)), HOSTILE], about)
    made.commit()
    return folder


@pytest.fixture(scope="module")
def site(old: Embedder, new: Embedder, gallery: Path, photos: Path) -> Site:
    return Site("shop", {"shop": Shelf("shop", gallery, photos)}, [Side(OLD, old), Side(NEW, new)])


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    """Serve the page in a thread of this process."""
    import uvicorn

    from xcompat.serve.app import Options, listen, make_app

    socket = listen(Options(port=0))
    server = uvicorn.Server(uvicorn.Config(make_app(site), log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    yield f"http://127.0.0.1:{socket.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here; `apt-get install chromium` brings it")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


Open = Callable[..., "Page"]


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Open]:
    """Return what opens pages, which must ask this server alone for what they show, and complain of nothing."""
    complaints: list[str] = []
    pages = []

    def opened(query: str = "", width: int = 1300, scheme: Any = "light") -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda to: None if to.url.startswith((address, "data:", "blob:")) else complaints.append(to.url))
        page.goto(address + query)
        page.get_by_role("button", name="Search").wait_for()
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert complaints == []


@pytest.fixture
def page(visit: Open) -> Page:
    return visit()


def ids(page: Page, side: str) -> list[str]:
    column = page.get_by_role("region", name=side)
    column.locator("li").first.wait_for()
    return column.locator(".id").all_inner_texts()


def found(gallery: Path, embedder: Embedder, query: Any, k: int = 10, **where: str) -> list[str]:
    """Return what a search without the page finds."""
    hits = Gallery.open(gallery).search(embed_query(embedder, query), asking(embedder), k, where or None)[0]
    return [hit.id for hit in hits]


def ask(page: Page, text: str) -> None:
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Search").click()
    page.get_by_text(text, exact=True).wait_for()


def test_a_text_is_searched_with_both_models(page: Page, gallery: Path, old: Embedder, new: Embedder) -> None:
    ask(page, "a red shoe")
    assert ids(page, OLD) == found(gallery, old, "a red shoe")
    assert ids(page, NEW) == found(gallery, new, "a red shoe")
    deep = found(gallery, old, "a red shoe", COUNT)
    for place, name in enumerate(ids(page, NEW), 1):
        moved = deep.index(name) + 1 - place
        said = page.get_by_role("region", name=NEW).locator("li", has=page.get_by_text(name, exact=True)).locator(".move")
        assert said.inner_text().split()[:2] == (["=", "at"] if moved == 0 else ["▲" if moved > 0 else "▼", str(abs(moved))])
    with_pictures = page.get_by_role("region", name=OLD).locator("li img")
    assert with_pictures.count() == sum(name != HOSTILE for name in ids(page, OLD))


def test_the_link_restores_the_search(page: Page, visit: Open) -> None:
    ask(page, "two dogs")
    before = ids(page, NEW)
    page.wait_for_url(re.compile("text=two\\+dogs"))
    assert ids(visit(page.url.partition("/?")[2].join(("?", ""))), NEW) == before
    assert len(ids(visit("?kind=text&text=two+dogs&k=3&where=colour%3Dred&gallery=no+such&unknown=1"), NEW)) == 3
