"""A finished run, opened again: its models, its test set, and galleries of what its old model made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.progress import console, literal
from xcompat.encoders import EncoderSource
from xcompat.evaluation import Contestant
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.models.frozen import FrozenModel, load_frozen
from xcompat.report import report_file
from xcompat.retrieval import Gallery
from xcompat.retrieval.manifest import CURRENT
from xcompat.retrieval.versions import stored_version, upgraded_version
from xcompat.training.contestants import EvaluationSet
from xcompat.training.evaluation_sets import load_test_set
from xcompat.training.judging import side_info_of
from xcompat.training.record import EVALUATED, RECIPE, Evaluated, begun_with, read_record, require_ended
from xcompat.training.stage_recipe import STAGE_PREFIX, StageRecipe
from xcompat.training.test_items import GalleryItems

GALLERIES = "galleries"
CACHES = ("cache", "../cache", "../../cache")
"""Where embedding caches are looked for, from a run's folder: the quickstart's own, and those that runs share."""


@dataclass(frozen=True)
class FinishedRun:
    """The last judged stage of a run.

    Args:
        folder: the run's.
        stage: the stage's folder, with its recipe and its model.
        settings: the stage's.
    """

    folder: Path
    stage: Path
    settings: StageRecipe

    @classmethod
    def open(cls, folder: Path) -> FinishedRun:
        """Open a run.

        Args:
            folder: the run's, or that of one of its stages.

        Raises:
            XcompatError: it is no run, it has not ended with a report, or an older version wrote its recipe otherwise.
        """
        stage = folder
        if require_ended(folder):
            judged = next(iter(read_record(folder / EVALUATED, Evaluated).models))
            stage = folder / judged if (folder / judged / RECIPE).is_file() else folder
        written = begun_with(stage)
        written.pop("seed", None)
        try:
            settings = StageRecipe.model_validate(written)
        except ValidationError:
            raise XcompatError(f"{stage / RECIPE} is of another version of xcompat; train again, or serve a gallery") from None
        return cls(folder, stage, settings)

    @property
    def model(self) -> str:
        """The folder of the new model."""
        return str(self.stage / "model")

    @property
    def report(self) -> Path | None:
        """The folder of the report; None if there is none."""
        return self.folder if report_file(self.folder).is_file() else None

    @cached_property
    def test(self) -> EvaluationSet:
        """The test set."""
        test = load_test_set(self.settings.data)
        if test is None:
            raise XcompatError(f"{self.stage} was trained without a test set, of which a gallery could be made; serve a gallery")
        return test

    def load_old(self) -> FrozenModel:
        """Load the old model, or its stored embeddings.

        Raises:
            XcompatError: the run has none.
        """
        source = self.settings.old
        if source is None:
            raise XcompatError(f"{self.stage} was trained without an old model; serve a gallery, or a stage that has one")
        frozen = load_frozen(source.model_copy(update={"name": self._resolved(source)}), device())
        return replace(frozen, reads=self.settings.data.old_reads) if isinstance(frozen, Embedder) else frozen

    def _resolved(self, source: EncoderSource) -> str:
        if not source.name.startswith(STAGE_PREFIX):
            return source.name
        whole = self.folder if self.stage != self.folder else self.folder.parent
        return str(whole / source.name.removeprefix(STAGE_PREFIX) / "model")

    def galleries(self, old: FrozenModel, model: CompatModel) -> dict[str, tuple[Path, GalleryItems]]:
        """Return galleries of what the old model made of the test set, by title; made on the first call, from the run's caches.

        A model that maps galleries has mapped its own in the newest state; old queries search the one before.

        Args:
            old: as :meth:`load_old` returns it.
            model: the new model.

        Raises:
            XcompatError: they were made of another old model, or other test data.
        """
        contestant = self.embedded(old)
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

    def embedded(self, old: FrozenModel) -> Contestant:
        """Return what the old model made of the test set, as the evaluation cached it."""
        return self.test.embed(old, self.cache_dir(old))

    def judged_rows(self, old: FrozenModel) -> dict[str, np.ndarray]:
        """Return the rows of the test set that were judged, by kind: those that can be read, in the order of a report's ranks."""
        contestant = self.embedded(old)
        numbered = {kind: np.arange(len(embeds))[:, None] for kind, embeds in contestant.matrices().items()}
        kept = contestant.with_matrices(numbered).keep(contestant.readable())
        return {kind: np.asarray(rows)[:, 0] for kind, rows in kept.matrices().items()}

    def cache_dir(self, old: FrozenModel) -> Path:
        """Return the folder of the run's embedding caches; if it is not where runs have it, what is needed is embedded anew."""
        places = [self.folder / place for place in CACHES]
        known = (place for place in places if any(place.glob(f"*-{old.fingerprint.digest[:16]}-*")))
        return next(known, places[0])


def _fill(folder: Path, old: FrozenModel, items: GalleryItems, embeds_Nd: np.ndarray, side_NS: np.ndarray | None) -> None:
    """Make a gallery unless it is there; refuse one of other embeddings."""
    readable_N = np.isfinite(embeds_Nd[:, 0])
    rows = np.flatnonzero(readable_N).tolist()
    ids = [items.ids[row] for row in rows]
    version = stored_version(old if isinstance(old, Embedder) else old.fingerprint, old.dim)
    if (folder / CURRENT).is_file():
        gallery = Gallery.open(folder)
        if gallery.manifest.versions[0].digest != version.digest or (len(gallery) and None in gallery.find(ids)):
            raise XcompatError(f"{folder} was made of another old model or of other test data; delete it to make it again")
        if len(gallery):
            return
    else:
        console.print(f"  [dim]making {literal(folder)} of what the old model embedded[/]")
        gallery = Gallery.create(folder, old if isinstance(old, Embedder) else old.fingerprint, old.dim)
    with gallery:
        about = [items.metadata[row] for row in rows]
        gallery.add(embeds_Nd[readable_N], ids, about, side_info_NS=None if side_NS is None else side_NS[readable_N])
        gallery.commit()


def _map(folder: Path, model: CompatModel) -> None:
    """Bring a gallery to a model that maps galleries, unless it is."""
    if not model.maps_galleries:
        return
    gallery = Gallery.open(folder)
    if upgraded_version(model).digest not in {version.digest for version in gallery.manifest.versions}:
        gallery.upgrade(model)
