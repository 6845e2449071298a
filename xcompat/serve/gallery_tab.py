"""The gallery: what is in it, its earlier states, and whether it is whole; what changes it stands there only where it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import gradio as gr
from rich.text import Text

from xcompat.embedding_provider import asking
from xcompat.models.base import CompatModel
from xcompat.progress import console, followed_by
from xcompat.retrieval import Gallery, commands
from xcompat.retrieval.doctor import SAMPLE
from xcompat.retrieval.versions import fits
from xcompat.serve.failing import told
from xcompat.serve.rendering import render

if TYPE_CHECKING:
    from rich.progress import Task

    from xcompat.serve.site import Shelf, Site

IN_TURN: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "galleries", "api_visibility": "private"}
"""What reads or changes a whole gallery waits in a line of its own, so that searches go on meanwhile."""
QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
BUDGET = 1000


class Does(Protocol):
    """Lets a button do work on the gallery that is chosen, with the values of some components."""

    def __call__(self, button: gr.Button, work: Callable[..., object], *inputs: Any) -> Any:  # noqa: ANN401
        """Return the event that comes once the work is done."""


def build(site: Site, tab: gr.Tab) -> None:
    """Lay out the tab, which looks at the gallery each time that it is chosen."""
    titles = list(site.shelves)
    title = gr.Dropdown(titles, value=titles[0], label="Gallery", visible=len(titles) > 1)
    about = gr.HTML(js_on_load=None)
    said = gr.HTML(render("said.html.j2", lines=""), js_on_load=None, elem_id="said", render=False)

    @told
    def look(title: str) -> str:
        return described(site, title)

    def does(button: gr.Button, work: Callable[..., object], *inputs: Any) -> Any:  # noqa: ANN401
        @told
        def act(title: str, *values: Any, progress: gr.Progress = gr.Progress()) -> str:  # noqa: ANN401, B008 - as gradio has it
            return spoken(lambda: work(site.shelves[title], *values), progress)

        return button.click(act, [title, *inputs], said, **IN_TURN).then(look, title, about, **QUIET)

    _checks(site, does)
    if site.allow_changes:
        _upgrade(site, does)
        _rollback(site, tab, title, does)
    said.render()
    gr.on([tab.select, title.change], look, title, about, **QUIET)


def described(site: Site, title: str) -> str:
    """Return what is in a gallery, by version, and which states can be returned to."""
    gallery = Gallery.open(site.shelves[title].path)
    versions = []
    for version, items in gallery.counts().items():
        record = gallery.manifest.version(version.digest)
        fitting = [side.label for side in site.sides if fits(asking(side.embedder), record)]
        share = items / max(len(gallery), 1)
        versions.append({"version": version, "items": items, "share": share, "dim": record.dim, "fitting": fitting})
    return render("gallery.html.j2", gallery=gallery, title=title, versions=versions, states=gallery.generations()[::-1])


def spoken(work: Callable[[], object], progress: gr.Progress) -> str:
    """Do work, show how far it is, and return what it prints."""

    def follow(task: Task) -> None:
        progress((int(task.completed), int(task.total or 0)), desc=task.description, unit="items")

    with console.capture() as printed, followed_by(follow):
        work()
    return render("said.html.j2", lines=Text.from_ansi(printed.get()).plain)


def _checks(site: Site, does: Does) -> None:
    """Lay out what only reads."""
    with gr.Row(equal_height=True):
        does(gr.Button("Verify: read every file"), lambda shelf: commands.verify(_open(shelf)))
        if _originals_known(site):
            sides = {side.label: side.embedder for side in site.sides}
            button = gr.Button(f"Doctor: embed {SAMPLE} items anew, and compare")
            label = gr.Radio(list(sides), value=next(iter(sides)), label="With the model of", visible=len(sides) > 1)
            does(button, lambda shelf, label: commands.doctor(_open(shelf), sides[label], shelf.originals, SAMPLE), label)


def _upgrade(site: Site, does: Does) -> None:
    """Lay out what brings a gallery to the new model."""
    embedder = site.sides[-1].embedder
    if isinstance(model := embedder.model, CompatModel) and model.maps_galleries:

        def upgrade(shelf: Shelf, dry_run: bool) -> None:
            commands.upgrade(_open(shelf), model, dry_run)

        _section("Upgrade", "All stored embeddings are mapped to the new model; nothing is embedded.", does, upgrade)
    if _originals_known(site):

        def backfill(shelf: Shelf, budget: float | None, dry_run: bool) -> None:
            commands.backfill(_open(shelf), shelf.originals, embedder, int(budget or BUDGET), dry_run)

        line = "Items are embedded anew with the new model, in random order; the next backfill continues where this one ends."
        budget = gr.Number(BUDGET, minimum=1, precision=0, label="Items to embed anew", render=False)
        _section("Backfill", line, does, backfill, budget)


def _section(verb: str, line: str, does: Does, work: Callable[..., object], *inputs: Any) -> None:  # noqa: ANN401 - components
    """Lay out a change with two buttons: what it would take, and the change."""
    with gr.Row(equal_height=True, elem_classes="change"):
        gr.HTML(render("change.html.j2", verb=verb, line=line), js_on_load=None, scale=3)
        for component in inputs:
            component.render()
        for words, variant, dry_run in ((f"{verb}: say what it takes", "secondary", True), (verb, "primary", False)):
            button = gr.Button(words, variant=variant, min_width=140)  # type: ignore[arg-type]
            does(button, lambda shelf, *values, dry_run=dry_run: work(shelf, *values, dry_run), *inputs)


def _rollback(site: Site, tab: gr.Tab, title: gr.Dropdown, does: Does) -> None:
    """Lay out the return to an earlier state, which asks first."""
    with gr.Row(equal_height=True, elem_classes="change"):
        line = "The gallery returns to an earlier state. No state is lost: what came later can be returned to as well."
        gr.HTML(render("change.html.j2", verb="Roll back", line=line), js_on_load=None, scale=3)
        generation = gr.Dropdown([], label="To generation", min_width=140)
        ask = gr.Button("Roll back …", min_width=140)
        sure = gr.Button("Yes, roll back", variant="stop", visible=False, min_width=140)
        no = gr.Button("No, leave it", visible=False, min_width=140)

    def earlier(title: str) -> Any:  # noqa: ANN401 - an update of gradio
        known = [str(state.generation) for state in _open(site.shelves[title]).generations()][-2::-1]
        return gr.update(choices=known, value=known[0] if known else None)

    def asked(whether: bool) -> list[Any]:
        return [gr.update(visible=shown) for shown in (not whether, whether, whether)]

    def work(shelf: Shelf, generation: str | None) -> None:
        commands.rollback(_open(shelf), int(generation) if generation else None)

    buttons = [ask, sure, no]
    ask.click(lambda: asked(True), None, buttons, **QUIET)
    no.click(lambda: asked(False), None, buttons, **QUIET)
    done = does(sure, work, generation)
    done.then(lambda: asked(False), None, buttons, **QUIET).then(earlier, title, generation, **QUIET)
    gr.on([tab.select, title.change], earlier, title, generation, **QUIET)


def _originals_known(site: Site) -> bool:
    return any(shelf.source is not None for shelf in site.shelves.values())


def _open(shelf: Shelf) -> Gallery:
    return Gallery.open(shelf.path)
