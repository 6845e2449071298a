"""Galleries on the page: content, states, and jobs on a whole gallery."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from xcompat.core.errors import XcompatError
from xcompat.core.progress import console, redirect_bars
from xcompat.embeddings.provider import query_model
from xcompat.models.base import CompatModel
from xcompat.retrieval import Gallery, commands
from xcompat.retrieval.doctor import SAMPLE
from xcompat.retrieval.versions import fits
from xcompat.serve.error_responses import answer_failure, hide_folders
from xcompat.serve.lane import BusyError, Client, Lane
from xcompat.serve.rendering import render

if TYPE_CHECKING:
    from rich.progress import Task

    from xcompat.serve.queries import WorkQuery
    from xcompat.serve.site import Shelf, Site

KEPT = 64
"""Maximum jobs whose results are kept."""
CHANGING = ("upgrade", "backfill", "rollback")


def describe_gallery(site: Site, title: str) -> str:
    """Return a gallery's versions and states as HTML."""
    gallery = Gallery.open(site.shelf(title).path)
    versions = []
    for version, items in gallery.counts().items():
        record = gallery.manifest.version(version.digest)
        fitting = [side.label for side in site.sides if fits(query_model(side.embedder), record)]
        share = items / max(len(gallery), 1)
        versions.append({"version": version, "count": items, "share": share, "dim": record.dim, "fitting": fitting})
    return render("gallery.html.j2", gallery=gallery, versions=versions, states=gallery.generations()[::-1])


def prepare_work(site: Site, query: WorkQuery) -> Callable[[], object]:
    """Return the function for a gallery job.

    Args:
        site: the page.
        query: the job.

    Raises:
        XcompatError: the page does not allow the job, or there is no such gallery or model.
    """
    shelf, embedder = site.shelf(query.gallery), site.sides[-1].embedder
    if query.verb in CHANGING and not site.allow_changes:
        raise XcompatError("this page is read-only; start it with --allow-changes")
    if query.verb == "verify":
        return lambda: commands.verify(_open(shelf))
    if query.verb == "doctor":
        asked = next((side.embedder for side in site.sides if side.label == query.side), None)
        if asked is None:
            raise XcompatError("this page has no such model")
        return lambda: commands.doctor(_open(shelf), asked, shelf.originals, SAMPLE)
    if query.verb == "upgrade":
        model = embedder.model
        if not (isinstance(model, CompatModel) and model.maps_galleries):
            raise XcompatError("this model does not map galleries; backfill the gallery")
        return lambda: commands.upgrade(_open(shelf), model, dry_run=query.dry_run)
    if query.verb == "backfill":
        return lambda: commands.backfill(_open(shelf), shelf.originals, embedder, query.budget, query.dry_run)
    return lambda: commands.rollback(_open(shelf), query.generation)


@dataclass
class Job:
    """State of a gallery job.

    Args:
        said: its progress, and at the end its result.
        done: whether it has ended.
        failed: whether it ended with an error.
    """

    said: str = "waits for other work on galleries"
    done: bool = False
    failed: bool = False


class Jobs:
    """Jobs on galleries, run sequentially. They continue when their visitor leaves.

    Args:
        lane: queue for the jobs.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, client: Client, work: Callable[[], object]) -> str:
        """Start a job and return its id.

        Raises:
            BusyError: the queue is full.
        """
        if self.lane.waiting >= self.lane.capacity:
            raise BusyError(503, "too many gallery jobs are waiting; try again later")
        name, job = secrets.token_urlsafe(16), Job()
        for old in [key for key, each in self._jobs.items() if each.done][: max(0, len(self._jobs) + 1 - KEPT)]:
            del self._jobs[old]
        self._jobs[name] = job
        task = asyncio.get_running_loop().create_task(self._run(client, work, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return name

    def find(self, name: str) -> Job | None:
        """Return a job, or None if it has expired."""
        return self._jobs.get(name)

    async def _run(self, client: Client, work: Callable[[], object], job: Job) -> None:
        try:
            job.said = await self.lane.run(client, lambda: _run_captured(work, job))
        except Exception as error:
            job.said, job.failed = bytes(answer_failure(error).body).decode(), True
        job.done = True


def _run_captured(work: Callable[[], object], job: Job) -> str:
    def follow(task: Task) -> None:
        total = f" of {task.total:,.0f}" if task.total else ""
        rate = f", {task.fields['rate']}" if task.fields["rate"] else ""
        job.said = f"{Text.from_markup(task.description).plain}: {task.completed:,.0f}{total}{rate}"

    job.said = "runs"
    with console.capture() as printed, redirect_bars(follow):
        work()
    return hide_folders(Text.from_ansi(printed.get()).plain)


def _open(shelf: Shelf) -> Gallery:
    return Gallery.open(shelf.path)
