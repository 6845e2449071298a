"""From what a user names to what a page shows: a gallery with models, or a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL.Image import Image

from xcompat.core.distributed import device
from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.progress import console, notice, silence_libraries
from xcompat.core.progress import stage as stage_line
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.report import load_report
from xcompat.retrieval import Gallery
from xcompat.retrieval.manifest import CURRENT
from xcompat.retrieval.side_by_side import searchable_state
from xcompat.retrieval.upgrading import segments_to_map
from xcompat.serve.site import NEW, OLD, Judged, Shelf, Side, Site, Source
from xcompat.training.finished import FinishedRun

if TYPE_CHECKING:
    from xcompat.models.frozen import FrozenModel
    from xcompat.report import Report
    from xcompat.training.test_items import GalleryItems

EXAMPLES = 8


def load_site(target: str, model: str | None, old: str | None, sources: Sequence[Path], allow_changes: bool) -> Site:
    """Load what a page shows.

    Args:
        target: folder of a gallery, or of a run that ended with a report.
        model: the new model; needed for a gallery, and the run's own of a run.
        old: the old model; None to search a gallery with the new one alone.
        sources: the pictures or texts that a gallery was built from, as far as they are known.
        allow_changes: whether the page may change galleries.

    Raises:
        XcompatError: there is no such target, a model is not named, or it searches nothing that is there.
    """
    silence_libraries()
    folder = Path(target)
    with stage_line(f"open {target}"):
        if (folder / CURRENT).is_file():
            site = _of_gallery(folder, model, old, sources)
        else:
            if sources:
                raise XcompatError("--images and --texts are of a gallery; a run knows its test set: leave them out")
            site = _of_run(FinishedRun.open(folder), model, old)
    site.allow_changes = allow_changes
    for side in site.sides:  # a model that does not fit is refused before anything is served
        for shelf in site.shelves.values():
            _require_searchable(shelf, side, allow_changes)
    return site


def _require_searchable(shelf: Shelf, side: Side, allow_changes: bool) -> None:
    try:
        searchable_state(shelf.path, side.embedder)
    except FingerprintMismatchError:
        model = side.embedder.model
        if not (allow_changes and isinstance(model, CompatModel) and model.maps_galleries):
            raise
        segments_to_map(Gallery.open(shelf.path), model)  # the page is where it is upgraded


def _of_gallery(folder: Path, model: str | None, old: str | None, sources: Sequence[Path]) -> Site:
    if not model:
        raise XcompatError("name the model that asks with --model: a run's folder, a checkpoint, or a model by name")
    sides = [Side(label, load_embedder(name, device())) for label, name in ((OLD, old), (NEW, model)) if name]
    name = folder.resolve().name
    return Site(name, {name: Shelf(name, folder, list(map(Source, sources)))}, sides)


def _of_run(run: FinishedRun, model: str | None, old: str | None) -> Site:
    embedded = run.load_old()
    asking = load_embedder(old, device()) if old else embedded
    new = load_embedder(model or run.model, device())
    if not isinstance(new.model, CompatModel):
        raise XcompatError(f"{new.name} was made compatible with nothing; leave --model out, or name a run's model")
    made = run.galleries(embedded, new.model)
    shelves = {title: Shelf(title, path, show=_pictures(items)) for title, (path, items) in made.items()}
    sides = [Side(OLD, asking)] if isinstance(asking, Embedder) else []
    if not sides:
        console.print(f"  [yellow]![/] {asking.name} holds embeddings and no model: there are no old queries to compare with")
    report = load_report(run.report) if run.report is not None else None
    site = Site(run.folder.resolve().name, shelves, [*sides, Side(NEW, new)], run.report)
    if report is not None and sides:
        site.judged = _judged(run, embedded, report)
        site.examples = _examples(report, site)
    return site


def _pictures(items: GalleryItems) -> Callable[[str], Image | None]:
    """Return what gives the picture of an item."""
    rows = {name: row for row, name in enumerate(items.ids)}

    def show(item: str) -> Image | None:
        return items.picture(rows[item]) if items.picture is not None and item in rows else None

    return show


def _judged(run: FinishedRun, old: FrozenModel, report: Report) -> dict[str, Judged]:
    """Return the test queries with what the report says of each; none where the test set has changed since."""
    rows, found = run.judged_rows(old), {}
    for direction, questions in run.test.questions().items():
        old_Q, new_Q = (report.ranks.get((who, "old", direction)) for who in ("old", "new"))
        if old_Q is None or new_Q is None:
            continue
        if len(old_Q) != len(rows[questions.kind]):
            notice(f"the test set is not the one of {run.report}: evaluate again to see where queries differ")
            return {}
        found[direction] = Judged(questions, rows[questions.kind], old_Q, new_Q)
    return found


def _examples(report: Report, site: Site) -> list[str]:
    """Return texts to begin with: those of the report, and more of the test set."""
    texts: list[str] = []
    for judged in site.judged.values():
        spread = judged.rows_Q[:: max(1, len(judged.rows_Q) // EXAMPLES)].tolist()
        words = [each for row in spread if isinstance(each := judged.questions.query(row), str)]
        texts = texts or (words and [*(example.query_text for example in report.examples), *words])
    return list(dict.fromkeys(texts))[:EXAMPLES]
