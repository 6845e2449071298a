"""Comparison of several models' rankings for a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from PIL.Image import Image

from xcompat.core.distributed import device
from xcompat.embeddings.provider import query_model
from xcompat.models.base import CompatModel
from xcompat.retrieval.fallback import Fallback, OldQueries
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.searching import Hit
from xcompat.retrieval.versions import fits, require_views

if TYPE_CHECKING:
    from torch import Tensor

    from xcompat.encoders.base import Space
    from xcompat.models.embedder import Embedder
    from xcompat.retrieval.reranking import Reranker

DEPTH = 100
"""Hits of each model to compare. A hit that moved further counts as new."""


class PlacedHit(NamedTuple):
    """A hit and its places in two rankings.

    Args:
        hit: the hit.
        place: its place, from 1.
        other: its place in the other ranking; None if not found there.
    """

    hit: Hit
    place: int
    other: int | None

    @property
    def places_gained(self) -> int | None:
        """Return how many places higher the hit is than in the other ranking."""
        return None if self.other is None else self.other - self.place


def pair_places(hits: Sequence[Hit], others: Sequence[Hit] | None, top_k: int) -> list[PlacedHit]:
    """Return a ranking's first hits with their places in another ranking.

    Args:
        hits: best first.
        others: the other ranking's hits, if any.
        top_k: number of hits to return.

    Example:
        >>> from xcompat import Fingerprint
        >>> old, new = ([Hit(name, 1.0, Fingerprint("0", "m"), None) for name in names] for names in ("abc", "cxa"))
        >>> [(each.hit.id, each.places_gained) for each in pair_places(new, old, 2)]
        [('c', 2), ('x', None)]
    """
    elsewhere = {hit.id: row for row, hit in enumerate(others or (), 1)}
    return [PlacedHit(hit, row, elsewhere.get(hit.id)) for row, hit in enumerate(hits[:top_k], 1)]


def embed_query(embedder: Embedder, query: str | Image, space: Space = "own") -> Tensor:
    """Embed a text or image, in the model's own space or its galleries' space: (1, D).

    Raises:
        XcompatError: the model embeds no texts, or no images.
    """
    if isinstance(query, Image):
        return embedder.embed({"pixel_values": embedder.processor.images([query])}, space)
    return embedder.embed(embedder.processor.for_queries().texts([query]), space)


def find(
    gallery: Gallery,
    embedder: Embedder,
    query: str | Image,
    top_k: int,
    where: Mapping[str, object] | None,
    rerank: Reranker | None = None,
) -> list[Hit]:
    """Search a gallery with a model.

    Args:
        gallery: the gallery, from :func:`searchable_state`.
        embedder: the model.
        query: a text or image.
        top_k: largest number of hits.
        where: as in :meth:`~xcompat.retrieval.snapshot.Snapshot.search`.
        rerank: reorders the first hits.
    """
    model, embeds_1D, old_queries = query_model(embedder), embed_query(embedder, query), None
    if isinstance(model, CompatModel) and (old := _old_model(model)) is not None:
        old_1d = old.old_queries(model, gallery.manifest, embeds_1D, lambda _: embed_query(old.model, query, "stored"))
        old_queries = OldQueries(old.model, old_1d, old.share)
    kept = dict(where) if where else None
    return gallery.search(embeds_1D, model, top_k, kept, old_queries=old_queries, rerank=rerank)[0]


@lru_cache(maxsize=4)
def _old_model(model: CompatModel) -> Fallback | None:
    """Load the old model if a map uses it in searches."""
    return Fallback.for_model(model, device())


def searchable_state(path: Path, embedder: Embedder) -> Gallery:
    """Open the newest state that a model can search, e.g. the state before an upgrade for the old model.

    Raises:
        FingerprintMismatchError: the model can search none.
    """
    gallery = Gallery.open(path)
    model = query_model(embedder)
    if all(fits(model, version) for version in gallery.manifest.present()):
        return gallery
    for manifest in reversed(gallery.generations()):
        if manifest.rows and all(fits(model, version) for version in manifest.present()):
            return Gallery(path, manifest)
    require_views(model, gallery.manifest, gallery.path)
    return gallery
