"""Origin check for stored embeddings, by re-embedding a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from xcompat.core.arrays import normalise_rows, row_lengths
from xcompat.core.fingerprint import Fingerprint
from xcompat.data import BadSamples, iterate_images
from xcompat.models.embedder import Embedder
from xcompat.retrieval.faiss_index import FaissIndex
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.originals import Images, Originals, Parts, origins_of
from xcompat.retrieval.preprocessing import Preparation, nearest_preparation, own_preparation
from xcompat.retrieval.segment import Segment, id_hashes

SAMPLE = 400
"""Items to re-embed per version. If 1 % are foreign, one sample in 55 misses all."""
SAMPLED, WAYS = 16, 3
"""Images for other preprocessing, and the largest number of variants."""
SAME, EXACT = 0.995, 0.9999
"""Cosines from which embeddings are equal in half precision, and from which no explanation is needed."""
OTHER = 0.98
"""Cosine below which an embedding is another model's, if the model makes the rest exactly."""
MADE = 0.9
"""Share of the way from chance to 1 below which the median cosine is not the model's own, but e.g. of a map into its space.

Photos recompressed as JPEG (quality 75 to 95) and models in 8 bits reach at least 0.93, maps at most 0.87.
"""
_95 = 1.959964


@dataclass(frozen=True)
class Finding:
    """Result for a stored version.

    Args:
        version: model of the stored version.
        items: number of its embeddings.
        looked_at: number of re-embedded originals.
        claimed: whether the examined model has this fingerprint.
        elsewhere: whether the model has another version in the same gallery.
        made: preprocessing ("" for the model's own) -> number of embeddings the model made with it.
        cosine: median cosine of these to new embeddings, or of all if there are none; NaN if nothing was compared.
        limit: smallest cosine among the model's embeddings.
        foreign: ids of embeddings that the model did not make; with ``elsewhere``, of those that it made.
        fits: whether the embeddings are in the model's space, but not its own.
        length: median length of the stored embeddings.
        note: further information.
    """

    version: Fingerprint
    items: int
    looked_at: int = 0
    claimed: bool = False
    elsewhere: bool = False
    made: dict[str, int] = field(default_factory=dict)
    cosine: float = math.nan
    limit: float = math.nan
    foreign: tuple[str, ...] = ()
    fits: bool = False
    length: float = math.nan
    note: str = ""

    @property
    def share(self) -> float:
        """Share of foreign embeddings in the sample."""
        return len(self.foreign) / self.looked_at if self.looked_at else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval for the version's share of foreign embeddings."""
        return wilson(len(self.foreign), self.looked_at)


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share (Wilson 1927, eq. 4), also near 0.

    Args:
        count: number of hits.
        total: sample size.

    Example:
        >>> [round(end, 3) for end in wilson(0, 100)], [round(end, 3) for end in wilson(50, 100)]
        ([0.0, 0.037], [0.404, 0.596])
    """
    if not total:
        return 0.0, 1.0
    share, z2 = count / total, _95**2 / total
    middle = (share + z2 / 2) / (1 + z2)
    half = _95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def examine(gallery: Gallery, originals: Originals, embedder: Embedder, sample: int = SAMPLE) -> list[Finding]:
    """Re-embed a sample from each stored version, and find the embeddings made by the model.

    Args:
        gallery: the gallery.
        originals: its images or texts, with their ids in the gallery.
        embedder: the model.
        sample: originals per version.

    Returns:
        A finding per version.

    Raises:
        XcompatError: no original is in the gallery, or the model cannot embed them.
    """
    originals.require(embedder)
    origins = origins_of(gallery, originals)
    findings, counts = [], gallery.counts()
    for version, items in counts.items():
        claimed = version == embedder.fingerprint
        plain = Finding(version, items, claimed=claimed, elsewhere=not claimed and embedder.fingerprint in counts)
        dim, rows = gallery.manifest.version(version.digest).dim, np.flatnonzero([origin == version for origin in origins])
        if dim != embedder.dim:
            findings.append(replace(plain, note=f"{dim} dimensions, but {embedder.name} makes {embedder.dim}"))
        elif not len(rows):
            findings.append(replace(plain, note=f"none of the {originals.kind} is in this version"))
        else:
            drawn = np.sort(np.random.default_rng(0).choice(rows, min(sample, len(rows)), replace=False))
            ids = [originals.ids[row] for row in drawn.tolist()]
            stored = StoredSample.of_gallery(gallery, version, ids, drawn)
            findings.append(judge_embeddings(plain, stored, originals, embedder))
    return findings


@dataclass(frozen=True)
class StoredSample:
    """Stored embeddings of some originals.

    Args:
        ids: n ids.
        rows: (n,) row numbers of their originals, ascending.
        vectors_nd: (n, d) float32, as stored.
        adopted: segments with a quantising index, and positions in ``rows``.
        length: length of adopted embeddings.
    """

    ids: Sequence[str]
    rows: NDArray[np.int64]
    vectors_nd: NDArray[np.float32]
    adopted: Sequence[tuple[Segment, NDArray[np.int64]]] = ()
    length: float = 1.0

    @classmethod
    def of_gallery(cls, gallery: Gallery, version: Fingerprint, ids: Sequence[str], rows: NDArray[np.int64]) -> Self:
        """Read embeddings in a version by their ids."""
        record, adopted, hashes_n = gallery.manifest.version(version.digest), [], id_hashes(ids)
        vectors_nd = np.empty((len(rows), record.dim), np.float32)
        for segment in gallery.segments:
            if segment.record.version == version.digest:
                places, found = segment.rows_of(ids, hashes_n)
                vectors_nd[places] = segment.vectors(found) if len(found) else 0
                if segment.record.adopted is not None:  # other segments also store unquantised vectors
                    adopted.append((segment, places))
        return cls(ids, rows, vectors_nd, adopted, record.length)

    def to_stored_form(self, parts: Parts, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Convert new embeddings to the stored form.

        Args:
            parts: the embeddings.
            places: (n,) positions in :attr:`rows`.

        Returns:
            (n, d), NaN for unreadable originals.
        """
        fresh_nd = np.full_like(self.vectors_nd, np.nan)
        for kept, embeds in parts:
            fresh_nd[np.searchsorted(self.rows, kept)] = embeds
        for segment, inside in self.adopted:  # quantise them like the stored embeddings
            readable = inside[np.isfinite(fresh_nd[inside, 0])]
            assert isinstance(segment.index, FaissIndex)
            fresh_nd[readable] = segment.index.as_stored(self.length * fresh_nd[readable])
        return fresh_nd[places]

    def cosines(self, fresh_nd: NDArray[np.float32], places: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return cosines with the stored embeddings at some positions; -1 for NaN embeddings."""
        one, other = (normalise_rows(rows_nd).astype(np.float64) for rows_nd in (fresh_nd, self.vectors_nd[places]))
        return np.nan_to_num(np.einsum("nd,nd->n", one, other), nan=-1)


def judge_embeddings(plain: Finding, stored: StoredSample, originals: Originals, embedder: Embedder) -> Finding:
    """Compare embeddings, try other preprocessing, and separate the model's from others.

    Args:
        plain: the finding so far.
        stored: a sample.
        originals: images or texts.
        embedder: the examined model.
    """
    parts = originals.embed(embedder, stored.rows, BadSamples(1.0, len(stored.rows)))
    fresh_nd = stored.to_stored_form(parts, np.arange(len(stored.rows)))
    every = np.flatnonzero(np.isfinite(fresh_nd[:, 0]))
    if not len(every):
        return replace(plain, note=f"none of the {originals.kind} can be read")
    fresh_nd = fresh_nd[every]
    cosines_n, ways_n = stored.cosines(fresh_nd, every), np.full(len(every), "", object)
    if isinstance(originals, Images):
        _try_other_preparations(stored, originals, embedder, every, cosines_n, ways_n)
    chance = float(np.median(stored.cosines(fresh_nd, np.roll(every, 1)))) if len(every) > 1 else 0.0
    limit = find_dividing_cosine(cosines_n, chance)
    own_n, fits = cosines_n >= limit, False
    if own_n.any() and np.median(cosines_n[own_n]) < min(SAME, chance + MADE * (1 - chance)):
        own_n, fits = np.zeros_like(own_n), bool(own_n.mean() >= 0.5)
    has_made_most = bool(own_n.mean() >= 0.5)
    is_as_recorded = plain.elsewhere and not has_made_most
    foreign_n, lengths_n = own_n if is_as_recorded else ~own_n, row_lengths(stored.vectors_nd)
    notes = [] if plain.claimed and not fits else [_describe_origin(embedder.name, originals.kind, has_made_most, fits)]
    notes += ["as recorded"] if is_as_recorded else []
    notes += [f"zero vectors: {zeros:,}"] if (zeros := int((lengths_n == 0).sum())) else []
    return replace(
        plain,
        looked_at=len(every),
        made={name: int((ways_n[own_n] == name).sum()) for name in sorted(set(ways_n[own_n].tolist()))},
        cosine=float(np.median(cosines_n[own_n] if own_n.any() else cosines_n)),
        limit=limit,
        foreign=tuple(np.array(stored.ids, object)[every[foreign_n]]),
        fits=fits,
        length=float(np.median(lengths_n)),
        note="; ".join(notes),
    )


def _describe_origin(name: str, kind: str, has_made_most: bool, fits: bool) -> str:
    if fits:
        return f"in the space of {name}, but not made by it from these {kind}: mapped, or by a compatible model"
    return f"made by {name} under another name" if has_made_most else f"not made by {name}"


def _try_other_preparations(
    stored: StoredSample,
    images: Images,
    embedder: Embedder,
    every: NDArray[np.int64],
    cosines_n: NDArray[np.float64],
    ways_n: NDArray[np.object_],
) -> None:
    """Try other preprocessing for unexplained images; update cosines and variants in place."""

    def agreement(way: Preparation, places: NDArray[np.int64]) -> NDArray[np.float64]:
        parts = images.embed(embedder, stored.rows[places], BadSamples(1.0, len(places)), prepare=way)
        return stored.cosines(stored.to_stored_form(parts, places), places)

    for _ in range(WAYS):
        left = np.flatnonzero((cosines_n < EXACT) & (ways_n == ""))
        if not len(left):
            return
        way, own = _other_preparation(stored, images, embedder, every[left], agreement)
        if way == own:
            return
        found = agreement(way, every[left])
        nearer = found > cosines_n[left]
        exactly = nearer & (found >= SAME)
        taken = exactly if exactly.any() else nearer
        cosines_n[left[taken]] = found[taken]
        ways_n[left[taken]] = ("" if exactly.any() else "closest: ") + way.unlike(own)
        if not exactly.any():
            return


def _other_preparation(
    stored: StoredSample,
    images: Images,
    embedder: Embedder,
    left: NDArray[np.int64],
    agreement: Callable[[Preparation, NDArray[np.int64]], NDArray[np.float64]],
) -> tuple[Preparation, Preparation]:
    """Return the preprocessing that matches unexplained embeddings best, and the model's own."""
    tried = left[np.linspace(0, len(left) - 1, min(SAMPLED, len(left))).astype(np.int64)]
    rows = stored.rows[tried].tolist()
    read: list[list[Image]] = [batch for _, batch in iterate_images(images.dataset, SAMPLED, rows=rows, prepare=list)]
    own = own_preparation(embedder.processor, read[0])
    # not the minimum: some may be another model's
    return nearest_preparation(own, lambda way: float(np.quantile(agreement(way, tried), 0.75))), own


def find_dividing_cosine(cosines_n: NDArray[np.float64], chance: float) -> float:
    """Return the cosine that separates the model's embeddings from others.

    If the upper tenth matches exactly, the limit is ``OTHER``, or the middle between chance and 1 if higher. If it matches only
    nearly (unknown preprocessing), the limit is the middle between the upper tenth and chance.

    Args:
        cosines_n: (n,) between the same item's stored and new embeddings.
        chance: median cosine between different items.

    Example:
        >>> exactly, nearly = np.array([0.1, 1.0, 1.0]), np.array([0.1, 0.95, 0.95])
        >>> find_dividing_cosine(exactly, chance=0.5), round(find_dividing_cosine(nearly, chance=0.5), 3)
        (0.98, 0.725)
    """
    top = float(np.quantile(cosines_n, 0.9))
    between = (1 + chance) / 2
    return max(OTHER, between) if top >= SAME or top < between else min(OTHER, (top + chance) / 2)
