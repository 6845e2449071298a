"""Where they differ: the queries of a run's test set, those that lost or gained most first, page by page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import gradio as gr
from PIL.Image import Image

from xcompat.data.images import UnusableSampleError
from xcompat.evaluation.differing import Order, differing
from xcompat.report.wording import percent
from xcompat.serve.failing import told
from xcompat.serve.rendering import link, picture_uri, render, words_of
from xcompat.serve.search_tab import ONE_AT_A_TIME
from xcompat.serve.site import Judged, Shelf, Site

if TYPE_CHECKING:
    from xcompat.retrieval import Hit

PER_PAGE, HITS = 10, 5
ORDERS: dict[str, Order] = {"what the new query lost": "lost", "what it gained": "gained"}


def build(site: Site, tab: gr.Tab) -> None:
    """Lay out the tab, which shows its first page when it is chosen."""
    directions = [(name.replace("-", " "), name) for name in site.judged]
    with gr.Row():
        direction = gr.Radio(directions, value=directions[0][1], label="Queries", scale=2)
        order = gr.Radio(list(ORDERS), value=next(iter(ORDERS)), label="First", scale=2)
        number = gr.Number(1, minimum=1, precision=0, label="Page", scale=0, min_width=110)
        back = gr.Button("Previous", scale=0, min_width=110)
        ahead = gr.Button("Next", scale=0, min_width=110)
    shown = gr.HTML(js_on_load=None, elem_id="differing")
    asked: list[Any] = [direction, order, number]

    @told
    def show(direction: str, order: str, number: float | None) -> str:
        return page(site, direction, ORDERS[order], int(number or 1))

    def turn(by: int) -> Callable[[str, float | None], int]:
        return lambda direction, number: min(max(1, int(number or 1) + by), pages(site.judged[direction]))

    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    gr.on([tab.select, number.submit], show, asked, shown, api_name="differing", **ONE_AT_A_TIME)
    for event, change in (
        (direction.change, lambda *_: 1),
        (order.change, lambda *_: 1),
        (back.click, turn(-1)),
        (ahead.click, turn(1)),
    ):
        event(change, [direction, number], number, **quiet).then(show, asked, shown, api_visibility="private", **ONE_AT_A_TIME)


def pages(judged: Judged) -> int:
    """Return how many pages the queries of a direction take."""
    return max(1, -(-int(((judged.old_Q >= 0) & (judged.new_Q >= 0)).sum()) // PER_PAGE))


def page(site: Site, direction: str, order: Order, number: int) -> str:
    """Return one page of queries with what both models find."""
    judged = site.judged[direction]
    found = differing(judged.old_Q, judged.new_Q, order)
    number = min(max(1, number), pages(judged))
    rows = found.rows_q[(number - 1) * PER_PAGE : number * PER_PAGE].tolist()
    return render(
        "differing.html.j2",
        queries=[_query(site, judged, row) for row in rows],
        order=order,
        flips=found.flips,
        share=percent(found.flips / max(len(found.rows_q), 1)),
        total=len(found.rows_q),
        first=(number - 1) * PER_PAGE + 1,
        number=number,
        pages=pages(judged),
    )


def _query(site: Site, judged: Judged, number: int) -> dict[str, Any]:
    """Return what the template shows of one query."""
    questions, row = judged.questions, int(judged.rows_Q[number])
    shelf = site.shelves[questions.gallery]
    try:
        query = questions.query(row)
    except UnusableSampleError as error:
        return {"failed": str(error), "words": questions.words(row)}
    ranks = {"old": int(judged.old_Q[number]) + 1, "new": int(judged.new_Q[number]) + 1}
    own_id = questions.own_id(row)
    sides = []
    for side in site.sides:
        hits = [hit for hit in shelf.search(side, query, HITS + 1, None) if hit.id != own_id][:HITS]
        cards = [_card(shelf, hit, questions.matches(row, hit.id, hit.metadata or {})) for hit in hits]
        sides.append({"label": side.label, "hits": cards, "rank": ranks["old" if side is site.sides[0] else "new"]})
    asks_text = isinstance(query, str)
    kind, value = ("text", query) if asks_text else ("item", own_id)
    return {
        "failed": "",
        "picture": None if asks_text else picture_uri(cast("Image", query)),
        "words": questions.words(row),
        "text": query if asks_text else None,
        "item": own_id,
        "link": link({"kind": kind, kind: value, "gallery": questions.gallery}) if value else "",
        "sides": sides,
    }


def _card(shelf: Shelf, hit: Hit, matches: bool) -> dict[str, Any]:
    picture = shelf.picture(hit.id, hit.metadata)
    return {
        "hit": hit,
        "matches": matches,
        "picture": None if picture is None else picture_uri(picture),
        "words": words_of(hit.metadata) or hit.id,
    }
