"""The page that searches with old and new side by side, in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from conftest import Run, raw_recipe, recipe_of, store
from PIL import Image
from schedule import mostly_nightly_rows
from test_labelled_run import write_classes

from xcompat import Fingerprint, XcompatError
from xcompat.embeddings.provider import query_model
from xcompat.evaluation.query_changes import Order, sort_by_change
from xcompat.models.embedder import Embedder
from xcompat.report import report_file
from xcompat.retrieval import Gallery
from xcompat.retrieval.hit_output import wanted_metadata
from xcompat.retrieval.originals import load_originals
from xcompat.retrieval.ranking_comparison import DEPTH, embed_query
from xcompat.retrieval.reranking import Reranker
from xcompat.training.run import run_recipe

pytest.importorskip("starlette")

from test_serve_attacks import serving

from xcompat.serve.differing_queries import PER_PAGE
from xcompat.serve.differing_queries import page as differing_page
from xcompat.serve.queries import SearchQuery
from xcompat.serve.search import answer, facets_of, restore_query
from xcompat.serve.site import NEW, OLD, Shelf, Side, Site, Source
from xcompat.serve.site_loading import load_site

Open = Callable[..., Any]
Serve = Callable[[Site], str]
HOSTILE = "<img src=x onerror=alert(1)>${7*7}{{7*7}}.png"
NAMES = [f"{number:02}.png" for number in range(40)]
COUNT = len(NAMES)
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def gallery(old: Embedder, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Gallery.create(tmp_path_factory.mktemp("served") / "shop", old)
    images = [Image.open(photos / name) for name in NAMES]
    about = [{"colour": ["red", "green"][number % 2], "caption": f"thing number {number}"} for number in range(COUNT)]
    embeds = old.embed({"pixel_values": old.processor.images(images)})
    return store(made, embeds, [*NAMES[:-1], HOSTILE], about).path


@pytest.fixture(scope="module")
def mixed(gallery: Path, new: Embedder, photos: Path) -> Path:
    folder = gallery.with_name("mixed")
    shutil.copytree(gallery, folder)
    names = NAMES[:-1:3]
    embeds = new.embed({"pixel_values": new.processor.images([Image.open(photos / name) for name in names])})
    return store(Gallery.open(folder), embeds, names, version=new, replace=True).path


@pytest.fixture(scope="module")
def texts(old: Embedder, gallery: Path) -> Path:
    lines = [f"sentence {number} of many" for number in range(COUNT)]
    names, about = [f"line {number}" for number in range(COUNT)], [{"text": line} for line in lines]
    return store(Gallery.create(gallery.with_name("texts"), old), old.embed(old.processor.texts(lines)), names, about).path


@pytest.fixture(scope="module")
def site(old: Embedder, new: Embedder, gallery: Path, mixed: Path, texts: Path, photos: Path) -> Site:
    shelves = [Shelf("shop", gallery, [Source(photos)]), Shelf("mixed", mixed, [Source(photos)]), Shelf("texts", texts)]
    return Site("shop", {shelf.title: shelf for shelf in shelves}, [Side(OLD, old), Side(NEW, new)])


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    with ExitStack() as servers:
        yield lambda site: f"{servers.enter_context(serving(site))}/"


@pytest.fixture(scope="module")
def address(serve: Serve, site: Site) -> str:
    return serve(site)


def learn(folder: Path, old: str, new: str, data: dict[str, Any], **evaluation: Any) -> Path:
    raw = raw_recipe(folder, old, new, "") | {"method": "ridge", "data": data}
    run_recipe(recipe_of(raw, evaluation={"resamples": 100, "examples": 0, **evaluation}))
    return folder / "run"


@pytest.fixture(scope="module")
def run(
    folder_of: dict[str, str], old_folder: str, pairs_folder: str, texts_file: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    data = {"texts": [{"path": texts_file}], "test": {"path": pairs_folder}}
    return learn(tmp_path_factory.mktemp("served_run"), old_folder, folder_of["clip"], data, examples=1)


@pytest.fixture(scope="module")
def run_site(run: Path) -> Site:
    return load_site(str(run), None, None, [], allow_changes=False)


@pytest.fixture(scope="module")
def upgradable(old_folder: str, upgrading_folder: str, gallery: Path, photos: Path) -> Site:
    folder = shutil.copytree(gallery, gallery.with_name("upgradable"))
    return load_site(str(folder), upgrading_folder, old_folder, [photos], allow_changes=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here; `apt-get install chromium` brings it")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_context()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Open]:
    """Return what opens pages, which must ask their server alone for what they show, and complain of nothing."""
    complaints: list[str] = []
    pages = []
    refused = re.compile("Failed to load resource: the server responded with a status of 4")

    def note(said: Any) -> None:
        if said.type in ("error", "warning") and not refused.match(said.text):  # Chromium's own words for a refused request
            complaints.append(said.text)

    def opened(query: str = "", at: str = address, width: int = 1300, scheme: Any = "light") -> Any:
        page = browser.new_page()  # all in one context, whose cache has the page's scripts
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda to: None if to.url.startswith((at, "data:", "blob:")) else complaints.append(to.url))
        page.goto(at + query)
        page.get_by_role("button", name="Search").wait_for()
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert complaints == []


@pytest.fixture
def page(visit: Open) -> Any:
    return visit()


def ids(page: Any, side: str) -> list[str]:
    column = page.get_by_role("region", name=side)
    column.locator("li").first.wait_for()
    return column.locator(".id").all_inner_texts()


def found(gallery: Path, embedder: Embedder, query: Any, k: int = 10, **where: str) -> list[str]:
    hits = Gallery.open(gallery).search(embed_query(embedder, query), query_model(embedder), k, where or None)[0]
    return [hit.id for hit in hits]


def ask(page: Any, text: str) -> None:
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Search").click()
    page.get_by_text(text, exact=True).wait_for()


def test_a_text_is_searched_with_both_models(page: Any, visit: Open, gallery: Path, old: Embedder, new: Embedder) -> None:
    ask(page, "a red shoe")
    assert ids(page, OLD) == found(gallery, old, "a red shoe")
    assert ids(page, NEW) == found(gallery, new, "a red shoe")
    deep = found(gallery, old, "a red shoe", COUNT)
    for place, name in enumerate(ids(page, NEW), 1):
        moved = deep.index(name) + 1 - place
        said = page.get_by_role("region", name=NEW).locator("li", has=page.get_by_text(name, exact=True)).locator(".move")
        assert said.inner_text().split()[:2] == (["=", "at"] if moved == 0 else ["▲" if moved > 0 else "▼", str(abs(moved))])
    with_images = page.get_by_role("region", name=OLD).locator("li img")
    assert with_images.count() == sum(name != HOSTILE for name in ids(page, OLD))
    assert "standing" not in page.inner_text("#results"), "one model embedded everything"
    before = ids(page, NEW)
    page.wait_for_url(re.compile("text=a\\+red\\+shoe"))
    assert ids(visit(page.url.partition("/?")[2].join(("?", ""))), NEW) == before, "the link restores the search"
    assert len(ids(visit("?kind=text&text=two+dogs&k=3&where=colour%3Dred&gallery=no+such&unknown=1"), NEW)) == 3


def test_an_item_is_searched_by_a_click_or_by_its_id(page: Any, visit: Open, gallery: Path, photos: Path, new: Embedder) -> None:
    ask(page, "a red shoe")
    name = next(name for name in ids(page, NEW) if name != HOSTILE)
    page.get_by_role("region", name=NEW).locator(f'a[data-item="{name}"]').click()
    page.get_by_alt_text("query image").wait_for()
    assert ids(page, NEW) == found(gallery, new, Image.open(photos / name))
    assert page.get_by_label("Id of an item").input_value() == name
    page.get_by_label("Id of an item").fill("no such item")
    page.get_by_label("Id of an item").press("Enter")
    page.get_by_role("alert").get_by_text("has no item 'no such item'").wait_for()
    restored = visit("?" + urlencode({"kind": "item", "item": HOSTILE}))
    restored.get_by_role("alert").get_by_text(f"{HOSTILE!r} has no known image or text").wait_for()


def test_hits_are_filtered_and_counted(page: Any, visit: Open, gallery: Path, new: Embedder) -> None:
    ask(page, "a red shoe")
    page.wait_for_function("() => [...document.querySelectorAll('#facets option')].some(each => each.value === 'colour=red')")
    page.get_by_label("Only hits with").fill("colour=red")
    page.get_by_label("Only hits with").press("Enter")
    page.get_by_role("link", name="link to this search").and_(page.locator("[href*=colour]")).wait_for()
    assert ids(page, NEW) == found(gallery, new, "a red shoe", colour="red")
    page.get_by_label("Hits", exact=True).fill("4")
    page.get_by_label("Hits", exact=True).press("Tab")
    page.get_by_role("link", name="link to this search").and_(page.locator("[href*='k=4']")).wait_for()
    assert ids(page, NEW) == found(gallery, new, "a red shoe", 4, colour="red")
    alone = visit("?kind=text&text=a+red+shoe&where=red")
    alone.get_by_role("alert").get_by_text("the filter 'red' is not KEY=VALUE").wait_for()
    unknown = visit("?kind=text&text=a+red+shoe&where=colur%3Dred")
    unknown.get_by_role("alert").get_by_text("has the key 'colur'; did you mean 'colour'?").wait_for()


def test_galleries_of_several_versions_and_of_texts(visit: Open, mixed: Path, texts: Path, new: Embedder, old: Embedder) -> None:
    page = visit("?kind=text&text=a+red+shoe&gallery=mixed&k=40")
    hits = Gallery.open(mixed).search(embed_query(new, "a red shoe"), query_model(new), COUNT)[0]
    assert ids(page, NEW) == [hit.id for hit in hits]
    badges = page.get_by_role("region", name=NEW).locator("li .badge:not(.plain)").all_inner_texts()
    assert badges == [hit.version.name.rpartition("/")[2] for hit in hits] and len(set(badges)) == 2
    standings = page.get_by_role("region", name=NEW).locator("li .standing").all_inner_texts()
    assert standings == [f"standing {hit.standing:.2f}" for hit in hits]
    assert page.get_by_text("they are ranked by standing").count() == 1
    assert ids(page, OLD) == found(mixed, old, "a red shoe", COUNT), "what the new model adds fits old queries"
    page = visit("?kind=item&item=line+7&gallery=texts")
    assert ids(page, OLD) == found(texts, old, "sentence 7 of many")
    assert page.get_by_role("region", name=OLD).get_by_text("sentence 7 of many").count() == 1
    assert page.locator("#results li img, #results .blank").count() == 0


def test_everything_is_reached_by_the_keyboard(page: Any) -> None:
    def reach(target: Any) -> None:
        for _ in range(40):
            if target.evaluate("element => element === document.activeElement"):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"no key leads to {target}")

    reach(page.get_by_label("Text", exact=True))
    page.keyboard.type("a red shoe")
    page.keyboard.press("Enter")
    ids(page, NEW)
    reach(page.locator("a.pick").nth(1))
    outline = page.locator("a.pick").nth(1).evaluate("element => getComputedStyle(element).outlineStyle")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("kind=item"))
    assert outline == "solid"


@pytest.mark.parametrize(
    ("width", "scheme"), mostly_nightly_rows([(1300, "light"), (390, "dark")], lambda width, _: width == 390)
)
def test_every_tab_is_accessible(visit: Open, serve: Serve, run_site: Site, upgradable: Site, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def look(page: Any, at: str, shown: str) -> None:
        page.locator(shown).first.wait_for()
        page.wait_for_function("() => document.querySelector('[aria-busy]') === null")
        page.wait_for_function("() => document.getAnimations().every(each => each.playState !== 'running')")
        found = axe.run(page, options={"iframes": False}).response["violations"]
        broken = [each for each in found if each["impact"] in ("serious", "critical")]
        assert [(at, each["id"], [node["html"] for node in each["nodes"]]) for each in broken] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{at} is wider than the screen"

    page = visit("?kind=text&text=thing+number+3", serve(run_site), width, scheme)
    look(page, "Search", "#results li")
    sides = [page.get_by_role("region", name=side).bounding_box() for side in (OLD, NEW)]
    assert [side and side["x"] for side in sides].count(sides[0] and sides[0]["x"]) == (1 if width > 720 else 2)
    for tab, shown in (("Where they differ", ".flips"), ("The numbers", "iframe"), ("The galleries", ".about")):
        page.get_by_role("tab", name=tab).click()
        look(page, tab, shown)
    for verb in ("Upgrade", "Backfill", "Roll back"):
        assert page.get_by_role("button", name=verb).count() == 0, "this page may change nothing"
    page = visit("", serve(upgradable), width, scheme)
    page.get_by_role("tab", name="The gallery").click()
    page.get_by_role("button", name="Roll back …").click()
    look(page, "changes", "button:has-text('Yes, roll back')")


def test_the_page_shows_what_the_report_says(visit: Open, serve: Serve, run_site: Site) -> None:
    page = visit("", serve(run_site))
    page.get_by_role("tab", name="Where they differ").click()
    judged = run_site.judged["text-to-image"]

    def expected(order: Order, number: int) -> list[str]:
        rows = sort_by_change(judged.old_Q, judged.new_Q, order).rows_q[PER_PAGE * (number - 1) : PER_PAGE * number]
        ranks = [(judged.questions.words(int(judged.rows_Q[row])), judged.old_Q[row], judged.new_Q[row]) for row in rows]
        return [f"{question}: {before + 1}, {after + 1}" for question, before, after in ranks]

    def shown(number: int, order: str) -> list[str]:
        page.locator(f".flips[data-page='{number}'][data-order='{order}']").wait_for()
        questions = page.locator(".question").all_inner_texts()
        said = re.compile(r"(.+)\s+first match: rank (\d+) with the old query, (\d+) with the new query")
        return [f"{match[1]}: {match[2]}, {match[3]}" for text in questions if (match := said.fullmatch(text))]

    assert shown(1, "lost") == expected("lost", 1)
    page.get_by_role("button", name="Next").click()
    assert shown(2, "lost") == expected("lost", 2)
    page.get_by_label("gained with the new query").check()
    assert shown(1, "gained") == expected("gained", 1)
    first = page.locator(".questions > li").first
    rank = int(judged.new_Q[sort_by_change(judged.old_Q, judged.new_Q, "gained").rows_q[0]])
    marked = first.get_by_role("region", name=NEW).locator("li")
    assert [("right" in (card.get_attribute("class") or "")) for card in marked.all()] == [place == rank for place in range(5)]
    page.get_by_label("image to text").check()
    page.locator(".question img").first.wait_for()
    page.get_by_role("tab", name="The numbers").click()
    frame = page.frame_locator("iframe")
    for heading in ("Retrieval quality", "Failed comparisons"):
        frame.get_by_role("heading", name=heading).wait_for()
    written = report_file(run_site.report).with_name("report.html").read_text(encoding="utf-8")
    assert frame.locator("img").count() == written.count("<img") > 2


def test_a_gallery_is_upgraded_rolled_back_and_backfilled(visit: Open, serve: Serve, upgradable: Site) -> None:
    address = serve(upgradable)
    page = visit("?kind=text&text=a+red+shoe", address)
    page.get_by_role("region", name=NEW).get_by_text("run `xcompat gallery upgrade` with it first").wait_for()
    folder = next(iter(upgradable.shelves.values())).path
    tab, said = page.get_by_role("tab", name="The gallery"), page.get_by_role("status")

    def press(name: str, line: str | re.Pattern[str]) -> None:
        page.get_by_role("button", name=name, exact=True).click()
        said.get_by_text(line).wait_for()

    tab.click()
    press("Upgrade", f"{COUNT} embeddings mapped; generation 2")
    page.get_by_role("cell", name="upgrade to").wait_for()
    page.get_by_role("button", name="Roll back …").click()
    page.get_by_role("button", name="No, leave it").click()
    page.get_by_role("button", name="Roll back …").click()
    assert Gallery.open(folder).generation == 2
    press("Yes, roll back", "restored generation 1 as generation 3")
    press("Upgrade", "generation 4")
    page.get_by_label("Items", exact=True).fill("10")
    page.get_by_role("button", name="Backfill").click()
    page.close()  # what was begun goes on
    page = visit("?kind=text&text=a+red+shoe", address)
    page.get_by_role("tab", name="The gallery").click()
    page.get_by_role("button", name="Verify").click()  # waits in the same line
    page.get_by_role("status").get_by_text("is whole").wait_for()
    assert Gallery.open(folder).generation == 5
    page.get_by_role("tab", name="Search").click()
    assert page.get_by_role("region", name=OLD).get_by_text("generation 3").is_visible()
    assert page.get_by_role("region", name=NEW).locator("li").count() == 10


@pytest.fixture(scope="module")
def labelled_site(image_folder_of: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("labelled")
    data = {"images": {"path": write_classes(folder / "train", 6, 0)}, "queries": {"path": write_classes(folder / "test", 3, 1)}}
    run = learn(folder, image_folder_of["vit"], image_folder_of["resnet"], data, ks=[1, 2])
    return load_site(str(run), None, None, [], allow_changes=False)


@pytest.fixture(scope="module")
def judged_site(folder_of: dict[str, str], old_folder: str, texts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("judged")
    judged: dict[str, Any] = {"qrels": str(folder / "qrels.tsv")}
    for name in ("queries", "passages"):
        judged[name] = {"path": str(folder / f"{name}.jsonl")}
        rows = [{"id": f"{name[0]}{row}", "text": f"{row} of the {name}"} for row in range(12)]
        Path(judged[name]["path"]).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "qrels.tsv").write_text("query\tpassage\tgain\n" + "\n".join(f"q{row}\tp{row}\t1" for row in range(12)))
    run = learn(folder, old_folder, folder_of["clip"], {"texts": [{"path": texts_file}], "judged_texts": judged}, tsne_pairs=0)
    return load_site(str(run), None, None, [], allow_changes=False)


def test_several_folders(
    gallery: Path, new: Embedder, photos: Path, run_xcompat: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `build` and `add` filled from two folders, and a list of images with captions in the place of one of them."""
    first, listed, second = (tmp_path / name for name in ("first", "listed", "second"))
    for folder in (first, listed, second):
        folder.mkdir()
    for number, name in enumerate(NAMES[:-1]):
        shutil.copy(photos / name, first if number % 2 else listed if number < 5 else second)
    shutil.copy(photos / "03.png", second / "01.png")  # an id that both have: the first one's image is shown
    (listed / "captions.csv").write_text("image,caption\n" + "\n".join(f"{n:02}.png,thing {n}" for n in (0, 2, 4)))

    typed: list[Any] = []
    monkeypatch.setattr("xcompat.serve.serve_target", lambda *given: typed.extend(given[4]))
    monkeypatch.setattr("xcompat.training.preflight.require_model", lambda name: None)
    images = ("--images", first, "--images", listed / "captions.csv", "--images", second)
    run_xcompat("serve", gallery, "--model", "x", *images)
    assert typed == [first, listed / "captions.csv", second]

    shelf = Shelf("shop", gallery, list(map(Source, typed)))
    for name in [*NAMES[:3], NAMES[6]]:
        image, stored = shelf.image(name, None), Image.open(photos / name)
        assert image is not None and np.array_equal(image, stored)
    assert sorted(shelf.originals.ids) == NAMES[:-1]
    assert shelf.originals.metadata(np.array([shelf.originals.ids.index("04.png")])) == [{"caption": "thing 4"}]

    for sources, said in ((typed, "1 hit has no image: --images has only readable images of first"), (typed[:1], "21 hits have")):
        site = Site("shop", {"shop": Shelf("shop", gallery, list(map(Source, sources)))}, [Side(NEW, new)])
        shown = unescape(answer(site, SearchQuery(kind="text", text="a red shoe", gallery="shop", k=COUNT)))
        assert shown.count(said) == 1


@pytest.mark.parametrize("kind", ["run_site", "labelled_site", "judged_site"])
def test_first_matches_stand_where_the_report_has_them(kind: str, request: pytest.FixtureRequest) -> None:
    site: Site = request.getfixturevalue(kind)
    assert site.judged
    for direction, judged in site.judged.items():
        shown = differing_page(site, direction, "lost", 1)
        rows = sort_by_change(judged.old_Q, judged.new_Q, "lost").rows_q[:PER_PAGE]
        sides = re.findall(r'<section class="side small".*?</section>', shown, re.DOTALL)
        assert len(sides) == 2 * len(rows)
        for row, old_side, new_side in zip(rows, sides[::2], sides[1::2], strict=True):
            for rank, side in ((judged.old_Q[row], old_side), (judged.new_Q[row], new_side)):
                marked = ["right" in card for card in re.findall("<li[^>]*>", side)]
                assert (marked.index(True) if any(marked) else 5) == min(rank, 5)


def test_models_that_read_images_alone_are_not_asked_texts(labelled_site: Site) -> None:
    name = next(iter(labelled_site.shelves))
    item = labelled_site.shelves[name].gallery().search(np.ones((1, 16)), labelled_site.sides[0].embedder.fingerprint)[0][0].id
    assert restore_query(labelled_site, [("kind", "text"), ("text", "x")]).kind == "image"
    with pytest.raises(XcompatError, match="no model of this page embeds texts; search with an image or the id of an item"):
        answer(labelled_site, SearchQuery(kind="text", text="a red shoe"))
    asked = restore_query(labelled_site, [("kind", "item"), ("item", item), ("k", "3")])
    assert answer(labelled_site, asked).count('data-item="') == 6


def test_links_with_any_number_and_offered_filters_find_items(site: Site, tmp_path: Path) -> None:
    for k, hits in (("7", 7), ("0", 1), ("999", 50), *((wrong, 10) for wrong in ("²", "9" * 5000, "-1", "", "x"))):
        assert restore_query(site, [("k", k)]).k == hits
    values = [True, False, None, 5, 1.5, "red", "true", "5", "null", "None", '"quoted"']
    made, names = Gallery.create(tmp_path / "kinds", Fingerprint.from_string("m"), dim=2), list(map(str, range(2 * len(values))))
    store(made, np.ones((len(names), 2)), names, [{"x": each, "a=b": "c"} for each in values] * 2)
    offered = facets_of(Shelf("kinds", tmp_path / "kinds"))
    assert len(offered) == len(set(offered)) == len(values) - 3, "true, 5 and null may be texts too, and a=b=c is no filter"
    for value in values:
        spelled = value if isinstance(value, str) else json.dumps(value)
        hits = made.search(np.ones((1, 2)), made.versions[0], 50, where=wanted_metadata([f"x={spelled}"]))[0]
        assert f"x={spelled}" in offered and any(type(hit.metadata["x"]) is type(value) for hit in hits if hit.metadata), value


@pytest.mark.parametrize("title", ["shop", "texts"])
def test_a_third_column_shows_what_a_re_ranking_finds(title: str, site: Site, new: Embedder, photos: Path) -> None:
    asked = SearchQuery(kind="text", text="a red shoe", gallery=title, k=COUNT, rerank=True)
    html = answer(site, asked)
    columns = html.split('aria-label="re-ranked"')
    shelf = site.shelf(title)
    originals = load_originals(photos) if title == "shop" else None
    rerank = Reranker(new, originals, keep=False)
    embeds_1D = new.embed(new.processor.for_queries().texts(["a red shoe"]), "own")
    wanted = [hit.id for hit in shelf.gallery().search(embeds_1D, new.model, DEPTH, rerank=rerank)[0]]
    assert [unescape(name) for name in re.findall(r'data-item="([^"]*)"', columns[1])] == wanted[:COUNT]
    assert 'class="columns three"' in html and "rerank=true" in html
    assert 'aria-label="re-ranked"' not in answer(site, asked.model_copy(update={"rerank": False}))
    assert not (shelf.path / "new_embeddings").exists(), "a page that changes nothing keeps nothing"
    assert restore_query(site, [("text", "a"), ("rerank", "true")]).rerank and not restore_query(site, [("rerank", "1")]).rerank


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["GALLERY", "--host", "0.0.0.0"], "set a password in XCOMPAT_SERVE_PASSWORD, or in a file with --password-file"),
        (["GALLERY", "--password-file", "no/such/file"], "--password-file no/such/file cannot be read"),
        (["GALLERY"], "set the query model with --model"),
        (["no/such/folder"], "no/such/folder does not exist"),
        (["qdrant://localhost:6333/items"], "search a store with `xcompat gallery search`"),
        (["RUN", "--images", "photos"], "--images and --texts apply to galleries"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments: list[str], said: str, gallery: Path, run: Path, run_xcompat: Run) -> None:
    typed = [{"GALLERY": str(gallery), "RUN": str(run)}.get(word, word) for word in arguments]
    code, _, err = run_xcompat("serve", *typed, "--no-browser")
    assert code == 2 and said in err.splitlines()[-1]
