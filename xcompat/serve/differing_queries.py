"""Test queries with the largest differences between two models, page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from PIL.Image import Image

from xcompat.core.errors import XcompatError
from xcompat.data.images import UnusableSampleError
from xcompat.evaluation.query_changes import Order, sort_by_change
from xcompat.report.wording import percent
from xcompat.serve.rendering import image_uri, link, render, words_of
from xcompat.serve.site import Shelf, Site, TestResults

if TYPE_CHECKING:
    from xcompat.retrieval import Hit

PER_PAGE, HITS = 10, 5


def pages(judged: TestResults) -> int:
    """Return a direction's page count."""
    return max(1, -(-int(((judged.old_Q >= 0) & (judged.new_Q >= 0)).sum()) // PER_PAGE))


def page(site: Site, direction: str, order: Order, number: int) -> str:
    """Return a page of queries with both models' hits."""
    if direction not in site.judged:
        raise XcompatError("this page has no queries for this direction")
    judged = site.judged[direction]
    found = sort_by_change(judged.old_Q, judged.new_Q, order)
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


def _query(site: Site, judged: TestResults, number: int) -> dict[str, object]:
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
        "image": None if asks_text else image_uri(cast("Image", query)),
        "words": questions.words(row),
        "text": query if asks_text else None,
        "item": own_id,
        "link": link({"kind": kind, kind: value, "gallery": questions.gallery}) if value else "",
        "sides": sides,
    }


def _card(shelf: Shelf, hit: Hit, matches: bool) -> dict[str, object]:
    image = shelf.image(hit.id, hit.metadata)
    return {
        "hit": hit,
        "matches": matches,
        "image": None if image is None else image_uri(image),
        "words": words_of(hit.metadata) or hit.id,
    }
