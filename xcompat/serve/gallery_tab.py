"""The gallery: what is in it, its earlier states, and whether it is whole; what changes it stands there only where it may."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

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
    """Lay out the tab, which looks at the gallery each time that it is chosen, and after each change."""
    titles = list(site.shelves)
    title = gr.Dropdown(titles, value=titles[0], label="Gallery", visible=len(titles) > 1)
    about = gr.HTML(js_on_load=None)
    said = gr.HTML(js_on_load=None, elem_id="said", render=False)
    generation = gr.Dropdown([], label="To generation", scale=0, min_width=150, render=False)

    @told
    def look(title: str) -> str:
        return described(site, title)

    def earlier(title: str) -> Any:  # noqa: ANN401 - an update of gradio
        known = [str(state.generation) for state in _open(site.shelves[title]).generations()][-2::-1]
        return gr.update(choices=known, value=known[0] if known else None)

    def does(button: gr.Button, work: Callable[..., object], *inputs: Any) -> Any:  # noqa: ANN401
        @told
        def act(title: str, *values: Any, progress: gr.Progress = gr.Progress()) -> str:  # noqa: ANN401, B008 - as gradio has it
            return spoken(lambda: work(site.shelves[title], *values), progress)

        done = button.click(act, [title, *inputs], said, **IN_TURN)
        for show, output in shown:
            done = done.then(show, title, output, **QUIET)
        return done

    shown: list[tuple[Callable[[str], Any], Any]] = [(look, about)]
    _checks(site, does)
    if site.allow_changes:
        shown.append((earlier, generation))
        _upgrade(site, does)
        _rollback(generation, does)
    said.render()
    for show, output in shown:
        gr.on([tab.select, title.change], show, title, output, **QUIET)


def described(site: Site, title: str) -> str:
    """Return what is in a gallery, by version, and which states can be returned to."""
    gallery = Gallery.open(site.shelves[title].path)
    versions = []
    for version, items in gallery.counts().items():
        record = gallery.manifest.version(version.digest)
        fitting = [side.label for side in site.sides if fits(asking(side.embedder), record)]
        share = items / max(len(gallery), 1)
        versions.append({"version": version, "count": items, "share": share, "dim": record.dim, "fitting": fitting})
    return render("gallery.html.j2", gallery=gallery, versions=versions, states=gallery.generations()[::-1])


def spoken(work: Callable[[], object], progress: gr.Progress) -> str:
    """Do work, show how far it is, and return what it prints."""

    def follow(task: Task) -> None:
        said = f"{Text.from_markup(task.description).plain}, {task.fields['rate']}"
        progress((int(task.completed), int(task.total or 0)), desc=said, unit="items")

    with console.capture() as printed, followed_by(follow):
        work()
    return render("said.html.j2", lines=Text.from_ansi(printed.get()).plain)


def _checks(site: Site, does: Does) -> None:
    """Lay out what only reads."""
    with _row("Verify", "Every file is read and compared with what was written."):
        does(_button("Verify"), lambda shelf: commands.verify(_open(shelf)))
    if _originals_known(site):
        sides = {side.label: side.embedder for side in site.sides}
        with _row("Doctor", f"At most {SAMPLE} items of each version are embedded anew, to see which model made what is stored."):
            label = gr.Radio(list(sides), value=next(iter(sides)), label="With the model of", visible=len(sides) > 1, scale=0)
            does(
                _button("Doctor"),
                lambda shelf, label: commands.doctor(_open(shelf), sides[label], shelf.originals, SAMPLE),
                label,
            )


def _upgrade(site: Site, does: Does) -> None:
    """Lay out what brings a gallery to the new model, each with a button that only says what it takes."""
    embedder = site.sides[-1].embedder
    if isinstance(model := embedder.model, CompatModel) and model.maps_galleries:
        with _row("Upgrade", "All stored embeddings are mapped to the new model; nothing is embedded."):
            does(_button("What it takes"), lambda shelf: commands.upgrade(_open(shelf), model, dry_run=True))
            does(_button("Upgrade", "primary"), lambda shelf: commands.upgrade(_open(shelf), model, dry_run=False))
    if _originals_known(site):

        def backfill(shelf: Shelf, budget: float | None, dry_run: bool = False) -> None:
            commands.backfill(_open(shelf), shelf.originals, embedder, int(budget or BUDGET), dry_run)

        with _row(
            "Backfill", "Items are embedded anew with the new model, in random order; the next backfill goes on where it ends."
        ):
            budget = gr.Number(BUDGET, minimum=1, precision=0, label="Items", scale=0, min_width=150)
            does(_button("What it takes"), partial(backfill, dry_run=True), budget)
            does(_button("Backfill", "primary"), backfill, budget)


def _rollback(generation: gr.Dropdown, does: Does) -> None:
    """Lay out the return to an earlier state, which asks first."""

    def work(shelf: Shelf, generation: str | None) -> None:
        commands.rollback(_open(shelf), int(generation) if generation else None)

    with _row("Roll back", "The gallery returns to an earlier state. None is lost: what came later can be returned to as well."):
        generation.render()
        ask, sure, no = _button("Roll back …"), _button("Yes, roll back", "stop"), _button("No, leave it")
    sure.visible = no.visible = False

    def asked(whether: bool) -> list[Any]:
        return [gr.update(visible=shown) for shown in (not whether, whether, whether)]

    ask.click(lambda: asked(True), None, [ask, sure, no], **QUIET)
    no.click(lambda: asked(False), None, [ask, sure, no], **QUIET)
    does(sure, work, generation).then(lambda: asked(False), None, [ask, sure, no], **QUIET)


def _row(verb: str, line: str) -> gr.Row:
    """Begin a row with what its buttons do."""
    with gr.Row(elem_classes="verb") as row:
        gr.HTML(render("verb.html.j2", verb=verb, line=line), js_on_load=None)
    return row


def _button(words: str, variant: Literal["primary", "secondary", "stop"] = "secondary") -> gr.Button:
    return gr.Button(words, variant=variant, size="md", scale=0, min_width=170)


def _originals_known(site: Site) -> bool:
    return any(shelf.sources for shelf in site.shelves.values())


def _open(shelf: Shelf) -> Gallery:
    return Gallery.open(shelf.path)
