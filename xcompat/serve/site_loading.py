"""Page loading from a gallery or faiss index with models, or from a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL.Image import Image

from xcompat.core.distributed import device
from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.progress import console, notice, silence_libraries
from xcompat.core.progress import stage as stage_line
from xcompat.embeddings.provider import query_model
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.report import load_report
from xcompat.retrieval import Gallery
from xcompat.retrieval.canary import FIX, check_canary
from xcompat.retrieval.fallback import old_model_of
from xcompat.retrieval.index_gallery import open_index, require_ids
from xcompat.retrieval.manifest import CURRENT
from xcompat.retrieval.originals import merge_originals
from xcompat.retrieval.ranking_comparison import searchable_state
from xcompat.retrieval.upgrading import segments_to_map
from xcompat.serve.site import NEW, OLD, Shelf, Side, Site, Source, TestResults
from xcompat.stores.places import is_index
from xcompat.training.finished_run import FinishedRun

if TYPE_CHECKING:
    from xcompat.models.frozen import FrozenModel
    from xcompat.report import Report
    from xcompat.training.test_items import GalleryItems

EXAMPLES = 8


def load_site(
    target: str,
    model: str | None,
    old: str | None,
    sources: Sequence[Path],
    allow_changes: bool,
    ids: Path | None = None,
) -> Site:
    """Load a page's content.

    Args:
        target: folder of a gallery, or of a run with a report, or a faiss index.
        model: the new model. Required for a gallery or an index, default is the run's model.
        old: the old model. None to search a gallery only with the new model.
        sources: known images or texts used to build a gallery.
        allow_changes: whether the page may change galleries.
        ids: file with an index's ids, see :func:`~xcompat.retrieval.index_gallery.open_index`.

    Raises:
        XcompatError: the target or a model is missing, or a model cannot search the gallery.
    """
    silence_libraries()
    folder = Path(target)
    with stage_line(f"open {target}"):
        if (folder / CURRENT).is_file():
            Gallery.open(folder)  # raises before models are loaded
            site = _gallery_site(folder, folder.resolve().name, _sides(model, old), list(map(Source, sources)))
        elif is_index(folder):
            known = list(map(Source, sources))
            require_ids(folder, ids, merge_originals([source.originals for source in known]) if known else None)
            sides = _sides(model, old)
            site = _gallery_site(_adopt(folder, ids, sides, known), folder.name, sides, known)
        else:
            if sources:
                raise XcompatError(
                    "--images and --texts apply to galleries and indexes; remove them, as a run has its own test set"
                )
            site = _load_run_site(FinishedRun.open(folder), model, old)
    site.allow_changes = allow_changes
    for side in site.sides:  # refuse models that do not fit before serving
        for shelf in site.shelves.values():
            _require_searchable(shelf, side, allow_changes)
            _check_canary(shelf, side)
    return site


def _check_canary(shelf: Shelf, side: Side) -> None:
    found = check_canary(Gallery.open(shelf.path), side.embedder)
    if found is not None and not found.passed:
        notice(
            f"{side.embedder.name} no longer makes the test embeddings of {shelf.path} (smallest cosine {found.cosine:.2f}), "
            f"so it can find less: {FIX}"
        )


def _require_searchable(shelf: Shelf, side: Side, allow_changes: bool) -> None:
    try:
        searchable_state(shelf.path, side.embedder)
    except FingerprintMismatchError:
        model = side.embedder.model
        if not (allow_changes and isinstance(model, CompatModel) and model.maps_galleries):
            raise
        segments_to_map(Gallery.open(shelf.path), model)  # the page will upgrade the gallery


def _sides(model: str | None, old: str | None) -> list[Side]:
    if not model:
        raise XcompatError("set the query model with --model: a run's folder, a checkpoint, or a model name")
    new = load_embedder(model, device())
    named = old or old_model_of(new)  # a map that mixes both queries loads the old model in any case
    return [*([Side(OLD, load_embedder(named, device()))] if named else []), Side(NEW, new)]


def _adopt(index: Path, ids: Path | None, sides: Sequence[Side], sources: Sequence[Source]) -> Path:
    """Return the gallery folder for an index."""
    old = sides[0].embedder if len(sides) > 1 else None
    originals = merge_originals([source.originals for source in sources]) if sources else None
    return open_index(index, query_model(sides[-1].embedder), ids, old, originals).path


def _gallery_site(folder: Path, name: str, sides: list[Side], sources: Sequence[Source]) -> Site:
    return Site(name, {name: Shelf(name, folder, sources)}, sides)


def _load_run_site(run: FinishedRun, model: str | None, old: str | None) -> Site:
    embedded = run.load_old()
    asking = load_embedder(old, device()) if old else embedded
    new = load_embedder(model or run.model, device())
    if not isinstance(new.model, CompatModel):
        raise XcompatError(f"{new.name} is not compatible with any model; remove --model, or use a run's model")
    made = run.galleries(embedded, new.model)
    shelves = {title: Shelf(title, path, show=_image_reader(items)) for title, (path, items) in made.items()}
    sides = [Side(OLD, asking)] if isinstance(asking, Embedder) else []
    if not sides:
        console.print(
            f"  [yellow]![/] {asking.name} contains embeddings but no model: old queries cannot be compared", soft_wrap=True
        )
    report = load_report(run.report) if run.report is not None else None
    site = Site(run.folder.resolve().name, shelves, [*sides, Side(NEW, new)], run.report)
    if report is not None and sides:
        site.judged = _load_test_results(run, embedded, report)
        site.examples = _examples(report, site)
    return site


def _image_reader(items: GalleryItems) -> Callable[[str], Image | None]:
    rows = {name: row for row, name in enumerate(items.ids)}

    def show(item: str) -> Image | None:
        return items.image(rows[item]) if items.image is not None and item in rows else None

    return show


def _load_test_results(run: FinishedRun, old: FrozenModel, report: Report) -> dict[str, TestResults]:
    """Return the test queries with their ranks, or none if the test set has changed."""
    rows, found = run.judged_rows(old), {}
    for direction, questions in run.test.questions().items():
        old_Q, new_Q = (report.ranks.get((who, "old", direction)) for who in ("old", "new"))
        if old_Q is None or new_Q is None:
            continue
        if len(old_Q) != len(rows[questions.kind]):
            notice(f"the test set differs from that of {run.report}: evaluate again to see where queries differ")
            return {}
        found[direction] = TestResults(questions, rows[questions.kind], old_Q, new_Q)
    return found


def _examples(report: Report, site: Site) -> list[str]:
    texts: list[str] = []
    for judged in site.judged.values():
        spread = judged.rows_Q[:: max(1, len(judged.rows_Q) // EXAMPLES)].tolist()
        words = [each for row in spread if isinstance(each := judged.questions.query(row), str)]
        texts = texts or (words and [*(example.query_text for example in report.examples), *words])
    return list(dict.fromkeys(texts))[:EXAMPLES]
