"""Models, test set and galleries of a finished run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.precision import default_autocast
from xcompat.core.progress import console, literal
from xcompat.encoders import EncoderSource
from xcompat.evaluation import EvaluatedModel
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.models.frozen import FrozenModel
from xcompat.report import report_file
from xcompat.retrieval import Gallery
from xcompat.retrieval.manifest import CURRENT
from xcompat.retrieval.versions import stored_version, upgraded_version
from xcompat.training.evaluation_models import EvaluationSet
from xcompat.training.evaluation_sets import load_test_set
from xcompat.training.model_evaluation import side_info_of
from xcompat.training.record import ADDED, EVALUATED, RECIPE, EvaluationRecord, read_record, read_started_settings, require_ended
from xcompat.training.stage import embedding_autocast
from xcompat.training.stage_recipe import STAGE_PREFIX, StageRecipe
from xcompat.training.stored_models import load_frozen
from xcompat.training.test_items import GalleryItems

GALLERIES = "galleries"
CACHES = ("cache", "../cache", "../../cache")
"""Cache folders relative to a run: the quickstart's, and shared ones."""


@dataclass(frozen=True)
class FinishedRun:
    """The last evaluated stage of a run.

    Args:
        folder: run folder.
        stage: stage folder.
        settings: stage settings.
    """

    folder: Path
    stage: Path
    settings: StageRecipe

    @classmethod
    def open(cls, folder: Path) -> FinishedRun:
        """Open a run.

        Args:
            folder: run or stage folder.

        Raises:
            XcompatError: not a run, no report, or written by another version.
        """
        stage = folder
        if require_ended(folder):
            judged = next(iter(read_record(folder / EVALUATED, EvaluationRecord).models))
            stage = folder / judged if (folder / judged / RECIPE).is_file() else folder
        written = read_started_settings(stage)
        try:
            settings = StageRecipe.model_validate({key: value for key, value in written.items() if key not in ADDED})
        except ValidationError:
            raise XcompatError(
                f"{stage / RECIPE} was written by another version of xcompat; train again, or serve a gallery"
            ) from None
        return cls(folder, stage, settings)

    @property
    def model(self) -> str:
        """The folder of the new model."""
        return str(self.stage / "model")

    @property
    def report(self) -> Path | None:
        """The report folder, or None."""
        return self.folder if report_file(self.folder).is_file() else None

    @cached_property
    def test(self) -> EvaluationSet:
        """The test set."""
        test = load_test_set(self.settings.data)
        if test is None:
            raise XcompatError(f"{self.stage} was trained without a test set to build a gallery from; serve a gallery instead")
        return test

    def load_old(self) -> FrozenModel:
        """Load the old model, or its stored embeddings.

        Raises:
            XcompatError: there is none.
        """
        source = self.settings.old
        if source is None:
            raise XcompatError(f"{self.stage} was trained without an old model; serve a gallery, or a stage with an old model")
        with default_autocast(embedding_autocast(self.settings.training)):  # as in its caches
            frozen = load_frozen(source.model_copy(update={"name": self._resolve(source)}), device())
        return replace(frozen, reads=self.settings.data.old_reads) if isinstance(frozen, Embedder) else frozen

    def _resolve(self, source: EncoderSource) -> str:
        if not source.name.startswith(STAGE_PREFIX):
            return source.name
        whole = self.folder if self.stage != self.folder else self.folder.parent
        return str(whole / source.name.removeprefix(STAGE_PREFIX) / "model")

    def galleries(self, old: FrozenModel, model: CompatModel) -> dict[str, tuple[Path, GalleryItems]]:
        """Return galleries of the test set by title, built from caches when first called.

        Gallery maps add a mapped version; old queries search the previous version.

        Args:
            old: from :meth:`load_old`.
            model: the new model.

        Raises:
            XcompatError: a gallery belongs to another model or other data.
        """
        contestant = self.embed_test_set(old)
        matrices = contestant.matrices()
        found = {}
        for items in self.test.galleries():
            folder = self.folder / GALLERIES / items.title
            embeds_Nd = np.asarray(matrices[items.kind], np.float32)
            side = side_info_of(model, self.test, self.cache_dir(old)) if model.maps_galleries else None
            side_NS = None if side is None else np.asarray(side.matrices()[items.kind], np.float32)
            _fill(folder, old, items, embeds_Nd, side_NS)
            _map(folder, model)
            found[items.title] = folder, items
        return found

    def embed_test_set(self, old: FrozenModel) -> EvaluatedModel:
        """Return cached old test set embeddings."""
        return self.test.embed(old, self.cache_dir(old))

    def judged_rows(self, old: FrozenModel) -> dict[str, np.ndarray]:
        """Return kind (e.g. ``queries``) -> row numbers of the evaluated items in the test set, in the report's order."""
        contestant = self.embed_test_set(old)
        numbered = {kind: np.arange(len(embeds))[:, None] for kind, embeds in contestant.matrices().items()}
        kept = contestant.with_matrices(numbered).keep(contestant.readable())
        return {kind: np.asarray(rows)[:, 0] for kind, rows in kept.matrices().items()}

    def cache_dir(self, old: FrozenModel) -> Path:
        """Return the run's folder for embedding caches, or its default."""
        places = [self.folder / place for place in CACHES]
        known = (place for place in places if any(place.glob(f"*-{old.fingerprint.digest[:16]}-*")))
        return next(known, places[0])


def _fill(folder: Path, old: FrozenModel, items: GalleryItems, embeds_Nd: np.ndarray, side_NS: np.ndarray | None) -> None:
    readable_N = np.isfinite(embeds_Nd[:, 0])
    rows = np.flatnonzero(readable_N).tolist()
    ids = [items.ids[row] for row in rows]
    version = stored_version(old if isinstance(old, Embedder) else old.fingerprint, old.dim)
    if (folder / CURRENT).is_file():
        gallery = Gallery.open(folder)
        if gallery.manifest.versions[0].digest != version.digest or (len(gallery) and None in gallery.find(ids)):
            raise XcompatError(
                f"{folder} was built from another old model or other test data; delete the folder to rebuild the gallery"
            )
        if len(gallery):
            return
    else:
        console.print(f"  [dim]building {literal(folder)} from old embeddings[/]", soft_wrap=True)
        gallery = Gallery.create(folder, old if isinstance(old, Embedder) else old.fingerprint, old.dim)
    with gallery:
        about = [items.metadata[row] for row in rows]
        gallery.add(embeds_Nd[readable_N], ids, about, side_info_NS=None if side_NS is None else side_NS[readable_N])
        gallery.commit()


def _map(folder: Path, model: CompatModel) -> None:
    if not model.maps_galleries:
        return
    gallery = Gallery.open(folder)
    if upgraded_version(model).digest not in {version.digest for version in gallery.manifest.versions}:
        gallery.upgrade(model)
