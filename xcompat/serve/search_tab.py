"""Search: one query asked by the old and the new model, side by side on one gallery."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import gradio as gr
from PIL.Image import Image

from xcompat.data.schema import TEXT
from xcompat.errors import FingerprintMismatchError, XcompatError
from xcompat.hub.endpoint import public_name
from xcompat.retrieval.showing import SEVERAL_VERSIONS, short, wanted_metadata
from xcompat.retrieval.side_by_side import DEPTH, Placed, place
from xcompat.serve.failing import told
from xcompat.serve.rendering import link, picture_uri, read, render, rest_of, words_of
from xcompat.serve.site import NEW, Shelf, Side, Site
from xcompat.serve.uploads import UPLOAD_BYTES, read_upload

if TYPE_CHECKING:
    from xcompat.retrieval import Hit

TOP_K, MOST = 10, 50
ONE_AT_A_TIME: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "models", "show_progress": "minimal"}
"""There is one model of each kind in memory: what asks them waits in one line."""
FACETS_SHOWN, ABOUT = 300, 4
LONGEST = 10_000
"""Most characters of a text or an id."""


class Asked(NamedTuple):
    """What a visitor asks; also the values of a link that restores it.

    Args:
        kind: which of the next three is the query.
        text: a text.
        picture: a picture as a ``data:`` URI.
        item: the id of an item of the gallery.
        gallery: the gallery's title.
        where: ``KEY=VALUE`` that a hit's metadata must have; of several values of one key, any.
        k: how many hits.
    """

    kind: str
    text: str
    picture: str
    item: str
    gallery: str
    where: Sequence[str]
    k: int

    def link(self) -> str:
        """Return the link that restores the search; empty for a picture, which is kept nowhere."""
        if self.kind == "picture":
            return ""
        values = {"kind": self.kind, self.kind: getattr(self, self.kind), "gallery": self.gallery}
        return link({**values, "where": list(self.where), "k": self.k if self.k != TOP_K else ""})


def build(site: Site, page: gr.Blocks) -> None:
    """Lay out the tab, and say what happens on it."""
    asked, button = _form(site)
    kind, text, picture, item, gallery, where, k = asked
    results = gr.HTML(_start(site), js_on_load=read("results.js"), elem_id="results")

    @told
    def search(*values: Any) -> str:  # noqa: ANN401 - what the components hold
        return answer(site, Asked(*values))

    def show(chosen: str) -> list[Any]:
        return [gr.update(visible=chosen == name) for name in ("text", "picture", "item")]

    def pick(event: gr.EventData) -> list[Any]:
        chosen = event._data or {}
        name = "item" if chosen.get("item") is not None else "text"
        return [name, *(chosen.get(each) if each == name else gr.skip() for each in ("text", "item"))]

    def restore(request: gr.Request) -> list[Any]:
        given = request.query_params.multi_items()
        return list(restored(site, given)) if given else [gr.skip()] * len(asked)  # a visitor may have begun to type

    def begin(*values: Any) -> str:  # noqa: ANN401
        return search(*values) if any(values[1:4]) else _start(site)

    private: dict[str, Any] = {"api_visibility": "private"}
    quiet: dict[str, Any] = {**private, "show_progress": "hidden", "queue": False}
    begun = [button.click, text.submit, item.submit, picture.change, where.change, k.release]
    gr.on(begun, search, asked, results, api_name="search", trigger_mode="always_last", **ONE_AT_A_TIME)
    kind.change(show, kind, [text, picture, item], **quiet)
    gallery.change(lambda title: _filters(site, title), gallery, where, **quiet)
    results.click(pick, None, [kind, text, item], **quiet).then(search, asked, results, **private, **ONE_AT_A_TIME)
    page.load(restore, None, asked, **quiet).then(begin, asked, results, **private, **ONE_AT_A_TIME)


def _form(site: Site) -> tuple[list[Any], gr.Button]:
    """Lay out what a visitor fills in; return the components in the order of :class:`Asked`, and the button."""
    titles, kinds = list(site.shelves), _kinds(site)
    with gr.Row(elem_classes="ask"):
        with gr.Column(scale=0, min_width=320):
            kind = gr.Radio(kinds, value=kinds[0], label="Search with")
        with gr.Column(scale=1, min_width=320):
            example, first = "a red running shoe", kinds[0]
            text = gr.Textbox(label="Text", placeholder=example, visible=first == "text", max_length=LONGEST)
            field = render("picture_input.html", limit=UPLOAD_BYTES)
            picture = gr.HTML("", html_template=field, js_on_load=read("picture_input.js"), visible=first == "picture")
            item = gr.Textbox(label="Id of an item", visible=first == "item", max_length=LONGEST)
        button = gr.Button("Search", variant="primary", scale=0, min_width=110)
    with gr.Row():
        gallery = gr.Dropdown(titles, value=titles[0], label="Gallery", visible=len(titles) > 1, scale=1)
        facets = facets_of(site.shelves[titles[0]])
        named = "Only hits with (KEY=VALUE)"
        where = gr.Dropdown(facets, value=[], label=named, multiselect=True, allow_custom_value=True, scale=3)
        k = gr.Slider(1, MOST, value=TOP_K, step=1, label="Hits", scale=1)
    return [kind, text, picture, item, gallery, where, k], button


def _kinds(site: Site) -> list[str]:
    texts = any(side.reads_texts for side in site.sides)
    pictures = any(side.reads_pictures for side in site.sides)
    return [*(["text"] if texts else []), *(["picture"] if pictures else []), "item"]


def restored(site: Site, given: Sequence[tuple[str, str]]) -> Asked:
    """Return what a link asks; what does not fit is left out."""
    values = dict(given)
    kinds, titles = _kinds(site), list(site.shelves)
    kind = values.get("kind", "")
    k = values.get("k", "")
    return Asked(
        kind if kind in kinds else kinds[0],
        values.get("text", ""),
        "",
        values.get("item", ""),
        values["gallery"] if values.get("gallery") in titles else titles[0],
        [value for key, value in given if key == "where"],
        min(max(int(k), 1), MOST) if k.isdecimal() and len(k) < 10 else TOP_K,
    )


def facets_of(shelf: Shelf) -> list[str]:
    """Return the filters that a gallery offers, as ``KEY=VALUE``; values that are no texts as JSON, as filters read them."""
    found = shelf.gallery().facets().items()
    typed = ((key, values) for key, values in found if "=" not in key)  # which a filter takes for its end
    plain = [(key, value) for key, values in typed for value in values if not isinstance(value, dict | list)]
    spelled = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in plain]
    return list(dict.fromkeys(spelled))[:FACETS_SHOWN]  # the text "true" and a true value are one filter


def _filters(site: Site, title: str) -> Any:  # noqa: ANN401 - an update of gradio
    return gr.update(choices=facets_of(site.shelves[title]), value=[])


def _start(site: Site) -> str:
    return render("start.html.j2", examples=site.examples)


def answer(site: Site, asked: Asked) -> str:
    """Search with every model, and return what the page shows."""
    shelf = site.shelves[asked.gallery]
    query = _query(shelf, asked)
    where = wanted_metadata(asked.where)
    found = {side.label: _found(shelf, side, query, where) for side in site.sides}
    if not any(found.values()):
        shelf.gallery().require_keys(where)
    return render(
        "results.html.j2",
        **shown(site, shelf, asked, found),
        picture=query if isinstance(query, Image) else None,
        words=query if isinstance(query, str) else "",
        depth=DEPTH,
    )


def _query(shelf: Shelf, asked: Asked) -> str | Image:
    if asked.kind == "picture":
        return read_upload(asked.picture)
    if asked.kind == "item":
        if not asked.item.strip():
            raise XcompatError("give the id of an item, as hits show it")
        return shelf.as_query(asked.item)
    if not asked.text.strip():
        raise XcompatError("the query is empty; give a text, or a picture")
    return asked.text


def _found(shelf: Shelf, side: Side, query: str | Image, where: dict[str, Any]) -> list[Hit] | str:
    """Return the hits of one side, or why it cannot ask."""
    if isinstance(query, Image) and not side.reads_pictures:
        return f"{side.embedder.name} embeds texts only"
    if isinstance(query, str) and not side.reads_texts:
        return f"{side.embedder.name} embeds pictures only"
    try:
        return shelf.search(side, query, DEPTH, where)
    except FingerprintMismatchError as error:
        return str(error)


def shown(site: Site, shelf: Shelf, asked: Asked, found: dict[str, list[Hit] | str]) -> dict[str, Any]:
    """Return what the template of the results fills in."""
    newest = shelf.gallery().generation
    lists = {label: hits for label, hits in found.items() if isinstance(hits, list)}
    columns: list[dict[str, Any]] = []
    for side in site.sides:
        hits = found[side.label]
        others = next((other for label, other in lists.items() if label != side.label), None)
        placed = place(hits, others, asked.k) if isinstance(hits, list) else []
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
    with_pictures = any(card["picture"] is not None for column in columns for card in column["hits"])
    return {
        "sides": columns,
        "with_pictures": with_pictures,
        "several_versions": SEVERAL_VERSIONS if ranked_by_standing else "",
        "without": _without_picture(shelf, columns),
        "summary": _summary(columns),
        "restore": asked.link(),
    }


def _without_picture(shelf: Shelf, columns: list[dict[str, Any]]) -> str:
    """Return why hits have no picture, where some are known; empty if all have one or are texts."""
    cards = [card for column in columns for card in column["hits"]]
    lacking = {card["hit"].id for card in cards if card["picture"] is None and TEXT not in (card["hit"].metadata or {})}
    if not (shelf.sources and lacking):
        return ""
    hits = f"{len(lacking)} hit{' has' if len(lacking) == 1 else 's have'} no picture"
    return (
        f"{hits}: --images knows only those of {' and '.join(str(source.path) for source in shelf.sources)}, if they can be read"
    )


def _card(shelf: Shelf, side: Side, placed: Placed, asked: Asked, compared: bool) -> dict[str, Any]:
    hit = placed.hit
    picture = shelf.picture(hit.id, hit.metadata)
    move, moved, state = _move(placed, side.label == NEW) if compared else ("", "", "")
    return {
        "hit": hit,
        "place": placed.place,
        "move": move,
        "moved": moved,
        "state": state,
        "picture": None if picture is None else picture_uri(picture),
        "words": words_of(hit.metadata),
        "about": dict(list(rest_of(hit.id, hit.metadata).items())[:ABOUT]),
        "version": public_name(hit.version.name),
        "link": asked._replace(kind="item", item=hit.id).link(),
    }


def _move(placed: Placed, is_new: bool) -> tuple[str, str, str]:
    """Return a sign for where a hit moved, the same in words, and whether that is better or worse."""
    if not is_new:
        if placed.other is None:
            return "gone", f"not among the first {DEPTH} of the new query", "worse"
        return f"→ {placed.other}", f"place {placed.other} with the new query", ""
    if placed.moved is None:
        return "new", f"not among the first {DEPTH} of the old query", "better"
    if placed.moved == 0:
        return "=", "at the same place as with the old query", ""
    higher = placed.moved > 0
    return (
        f"{'▲' if higher else '▼'} {abs(placed.moved)}",
        f"places {'higher' if higher else 'lower'} than with the old query",
        "better" if higher else "worse",
    )


def _summary(columns: list[dict[str, Any]]) -> str:
    if len(columns) < 2 or not all(column["hits"] for column in columns):
        return f"{sum(len(column['hits']) for column in columns)} hits"
    ids = [{card["hit"].id for card in column["hits"]} for column in columns]
    both, longest = len(ids[0] & ids[1]), max(map(len, ids))
    return f"{both} of {longest} hits are the same with both queries"
