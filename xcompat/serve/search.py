"""Gallery search with the old and the new model, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.data.schema import TEXT
from xcompat.hub.endpoint import public_name
from xcompat.retrieval.hit_output import SEVERAL_VERSIONS, short, wanted_metadata
from xcompat.retrieval.ranking_comparison import DEPTH, PlacedHit, pair_places
from xcompat.serve.queries import FILTERS, LONGEST, LONGEST_FILTER, MOST, TOP_K, SearchQuery
from xcompat.serve.rendering import image_uri, link, render, rest_of, words_of
from xcompat.serve.site import OLD, Shelf, Side, Site
from xcompat.serve.uploads import read_upload

if TYPE_CHECKING:
    from xcompat.retrieval import Hit

FACETS_SHOWN, ABOUT = 300, 4


def list_kinds(site: Site) -> list[str]:
    """Return the query types supported by any model."""
    texts = any(side.reads_texts for side in site.sides)
    images = any(side.reads_images for side in site.sides)
    return [*(["text"] if texts else []), *(["image"] if images else []), "item"]


def restore_query(site: Site, given: Sequence[tuple[str, str]]) -> SearchQuery:
    """Return a link's search. Invalid values are dropped.

    Args:
        site: the page.
        given: the link's names and values.
    """
    values = dict(given)
    kinds, titles = list_kinds(site), list(site.shelves)
    k = values.get("k", "")
    filters = [value for key, value in given if key == "where" and len(value) <= LONGEST_FILTER]
    return SearchQuery(
        kind=kinds[0] if values.get("kind") not in kinds else values["kind"],  # type: ignore[arg-type]
        text=values.get("text", "")[:LONGEST],
        item=values.get("item", "")[:LONGEST],
        gallery=values["gallery"] if values.get("gallery") in titles else titles[0],
        where=filters[:FILTERS],
        k=min(max(int(k), 1), MOST) if k.isdecimal() and len(k) < 10 else TOP_K,
        rerank=values.get("rerank") == "true" and site.reranks,
    )


def link_to(query: SearchQuery) -> str:
    """Return the link to restore a search. Empty for an image, which is not stored."""
    if query.kind == "image":
        return ""
    values = {"kind": query.kind, query.kind: getattr(query, query.kind), "gallery": query.gallery}
    beside = {"k": query.k if query.k != TOP_K else "", "rerank": "true" if query.rerank else ""}
    return link({**values, "where": list(query.where), **beside})


def facets_of(shelf: Shelf) -> list[str]:
    """Return a gallery's filters as ``KEY=VALUE``, with JSON for values other than text."""
    found = shelf.gallery().facets().items()
    typed = ((key, values) for key, values in found if "=" not in key)  # a filter's key ends at the first "="
    plain = [(key, value) for key, values in typed for value in values if not isinstance(value, dict | list)]
    spelled = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in plain]
    return [each for each in dict.fromkeys(spelled) if len(each) <= LONGEST_FILTER][
        :FACETS_SHOWN
    ]  # the text "true" and a true value are one filter


def answer(site: Site, asked: SearchQuery, image: bytes = b"") -> str:
    """Search with every model, and return the results as HTML.

    Args:
        site: the page.
        asked: the search.
        image: a query image's bytes.

    Raises:
        XcompatError: no model embeds the query, it is empty, unknown or unreadable, or a filter does not fit.
    """
    _require_kind(site, asked.kind)
    shelf = site.shelf(asked.gallery)
    query = _read_query(shelf, asked, image)
    where = wanted_metadata(asked.where)
    found = {
        side.label: _search_side(shelf, side, query, where, site.allow_changes) for side in site.sides_for_search(asked.rerank)
    }
    if not any(found.values()):
        shelf.gallery().require_keys(where)
    return render(
        "results.html.j2",
        **result_values(site, shelf, asked, found),
        image=query if isinstance(query, Image) else None,
        words=query if isinstance(query, str) else "",
        depth=DEPTH,
    )


def _require_kind(site: Site, kind: str) -> None:
    """Raise if no model of the page embeds this type of query."""
    if kind not in (kinds := list_kinds(site)):
        names = {"text": "a text", "image": "an image", "item": "the id of an item"}
        others = " or ".join(names[each] for each in kinds)
        raise XcompatError(f"no model of this page embeds {kind}s; search with {others}")


def _read_query(shelf: Shelf, asked: SearchQuery, image: bytes) -> str | Image:
    if asked.kind == "image":
        return read_upload(image)
    if asked.kind == "item":
        if not asked.item.strip():
            raise XcompatError("enter the id of an item, as shown with a hit")
        return shelf.as_query(asked.item)
    if not asked.text.strip():
        raise XcompatError("the query is empty; enter a text or choose an image")
    return asked.text


def _search_side(shelf: Shelf, side: Side, query: str | Image, where: Mapping[str, object], keep: bool) -> list[Hit] | str:
    """Return a model's hits, or the reason it cannot search."""
    if isinstance(query, Image) and not side.reads_images:
        return f"{side.embedder.name} embeds texts only"
    if isinstance(query, str) and not side.reads_texts:
        return f"{side.embedder.name} embeds images only"
    try:
        return shelf.search(side, query, DEPTH, where, keep)
    except FingerprintMismatchError as error:
        return str(error)


def result_values(site: Site, shelf: Shelf, asked: SearchQuery, found: dict[str, list[Hit] | str]) -> dict[str, object]:
    """Return the results' template values."""
    newest = shelf.gallery().generation
    lists = {label: hits for label, hits in found.items() if isinstance(hits, list)}
    columns: list[dict[str, Any]] = []
    for side in site.sides_for_search(asked.rerank):
        hits = found[side.label]
        others = next((other for label, other in lists.items() if label != side.label), None)
        placed = pair_places(hits, others, asked.k) if isinstance(hits, list) else []
        generation = shelf.gallery(side).generation if placed else newest
        columns.append(
            {
                "label": side.label,
                "model": short(side.embedder.version),
                "generation": generation if generation != newest else None,
                "confidence": placed[0].hit.confidence if placed else None,
                "refused": hits if isinstance(hits, str) else "",
                "hits": [_card(shelf, side, each, asked, others is not None) for each in placed],
            }
        )
    ranked_by_standing = any(card["hit"].standing is not None for column in columns for card in column["hits"])
    with_images = any(card["image"] is not None for column in columns for card in column["hits"])
    return {
        "sides": columns,
        "with_images": with_images,
        "several_versions": SEVERAL_VERSIONS if ranked_by_standing else "",
        "without": _without_image(shelf, columns),
        "summary": _summary(columns),
        "restore": link_to(asked),
    }


def _without_image(shelf: Shelf, columns: list[dict[str, Any]]) -> str:
    cards = [card for column in columns for card in column["hits"]]
    lacking = {card["hit"].id for card in cards if card["image"] is None and TEXT not in (card["hit"].metadata or {})}
    if not (shelf.sources and lacking):
        return ""
    hits = f"{len(lacking)} hit{' has' if len(lacking) == 1 else 's have'} no image"
    return f"{hits}: --images has only readable images of {' and '.join(source.path.name for source in shelf.sources)}"


def _card(shelf: Shelf, side: Side, placed: PlacedHit, asked: SearchQuery, compared: bool) -> dict[str, object]:
    hit = placed.hit
    image = shelf.image(hit.id, hit.metadata)
    move, moved, state = _move(placed, side.label != OLD) if compared else ("", "", "")
    return {
        "hit": hit,
        "place": placed.place,
        "move": move,
        "moved": moved,
        "state": state,
        "image": None if image is None else image_uri(image),
        "words": words_of(hit.metadata),
        "about": dict(list(rest_of(hit.id, hit.metadata).items())[:ABOUT]),
        "version": public_name(hit.version.name),
        "link": link_to(asked.model_copy(update={"kind": "item", "item": hit.id})),
    }


def _move(placed: PlacedHit, is_new: bool) -> tuple[str, str, str]:
    """Return a sign for a hit's move, its description, and whether it is better or worse."""
    if not is_new:
        if placed.other is None:
            return "gone", f"not among the first {DEPTH} of the new query", "worse"
        return f"→ {placed.other}", f"place {placed.other} with the new query", ""
    if placed.places_gained is None:
        return "new", f"not among the first {DEPTH} of the old query", "better"
    if placed.places_gained == 0:
        return "=", "at the same place as with the old query", ""
    higher = placed.places_gained > 0
    return (
        f"{'▲' if higher else '▼'} {abs(placed.places_gained)}",
        f"places {'higher' if higher else 'lower'} than with the old query",
        "better" if higher else "worse",
    )


def _summary(columns: list[dict[str, Any]]) -> str:
    if len(columns) < 2 or not all(column["hits"] for column in columns):
        return f"{sum(len(column['hits']) for column in columns)} hits"
    ids = [{card["hit"].id for card in column["hits"]} for column in columns]
    both, longest = len(ids[0] & ids[1]), max(map(len, ids))
    return f"{both} of {longest} hits are the same with both queries"
