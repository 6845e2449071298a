"""Check of originals with known ids against the originals that the gallery embedded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError
from xcompat.core.progress import notice
from xcompat.data import BadSamples
from xcompat.data.schema import TEXT
from xcompat.models.embedder import Embedder
from xcompat.retrieval.doctor import OTHER, StoredSample, find_dividing_cosine
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.originals import Originals
from xcompat.retrieval.versions import require_like_sides

LOOKED_AT = 32
"""Sample size without stored texts. If a tenth differ, one sample in 29 misses them."""
BLOCK = 8192


class _ChangedOriginals(NamedTuple):
    """Originals that differ from the embedded ones.

    Args:
        rows: their row numbers; if a sample found them, all rows that may differ.
        named: the first id and their number, for a message.
        on_side: whether they are photos that an earlier version embedded on their side.
    """

    rows: NDArray[np.int64]
    named: str
    on_side: bool = False


def select_missing(
    gallery: Gallery,
    originals: Originals,
    wanted: NDArray[np.int64],
    embedder: Embedder,
    replace: bool,
    side_info: Embedder | None,
) -> NDArray[np.int64]:
    """Return rows not embedded by this model; with ``replace`` also changed originals."""
    originals.require_same(gallery)
    ids = originals.ids
    place = gallery.find([ids[row] for row in wanted.tolist()])
    if not replace:
        foreign = [
            row for row, version in zip(wanted.tolist(), place, strict=True) if version not in (None, embedder.fingerprint)
        ]
        if foreign:
            raise XcompatError(
                f"{ids[foreign[0]]!r} and {len(foreign) - 1} more are in the gallery already, embedded by another model; "
                "remove them from the input, or replace their embeddings (--replace)"
            )
    missing_n = np.array([version != embedder.fingerprint for version in place], dtype=bool)
    if (found := _find_changed_originals(gallery, originals, wanted[~missing_n], embedder)) is not None:
        if found.on_side and not replace:
            notice(
                f"{gallery.path} holds {found.named} on their side, as embedded before EXIF orientation was applied; "
                "run xcompat gallery add --replace to re-embed them"
            )
        elif not replace:
            raise XcompatError(
                f"{gallery.path} has other {originals.kind} under the same ids: {found.named}; {originals.tell_apart}, or "
                "replace the stored ones (xcompat gallery add --replace)"
            )
        else:
            missing_n |= np.isin(wanted, found.rows)
    missing = wanted[missing_n]
    if len(missing) or side_info is not None:  # else there is nothing to add
        _require_sides(gallery, embedder, side_info)
    return missing


def _require_sides(gallery: Gallery, embedder: Embedder, side_info: Embedder | None) -> None:
    """Raise before hours of embedding if side-information differs from the gallery's."""
    digest = embedder.fingerprint.digest
    have = {segment.side_dim for segment in gallery.segments if segment.record.version == digest}
    known = next((version for version in gallery.manifest.versions if version.digest == digest), None)
    if have and known is not None:
        by = side_info.fingerprint.digest if side_info is not None else None
        require_like_sides(known, have, side_info.dim if side_info is not None else 0, by)


def _find_changed_originals(
    gallery: Gallery, originals: Originals, rows: NDArray[np.int64], embedder: Embedder
) -> _ChangedOriginals | None:
    """Find originals that differ from the embedded originals, by stored texts or by re-embedding a sample."""
    differing_n, kept_n = _by_text(gallery, originals, rows)
    if differing_n.any():
        return _ChangedOriginals(rows[differing_n], _describe_originals(originals, rows[differing_n]))
    unknown = rows[~kept_n]
    drawn = np.sort(np.random.default_rng(0).choice(unknown, min(LOOKED_AT, len(unknown)), replace=False))
    found = _by_embedding(gallery, originals, drawn, embedder)
    if len(found) and all(map(originals.has_orientation, found)):
        turned = np.array([row for row in unknown if originals.has_orientation(row)], np.int64)
        return _ChangedOriginals(turned, _describe_originals(originals, turned), on_side=True)
    return _ChangedOriginals(unknown, _describe_originals(originals, found, f" of {len(drawn)} checked")) if len(found) else None


def _by_text(gallery: Gallery, originals: Originals, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return masks for texts that differ from the stored text, and for texts with a stored text."""
    differing_n, kept_n = np.zeros((2, len(rows)), bool)
    for start in range(0, len(rows) if TEXT in originals.dataset.column_names else 0, BLOCK):
        block = rows[start : start + BLOCK]
        stored, now = gallery.metadata([originals.ids[row] for row in block.tolist()]), originals.metadata(block)
        for place, pair in enumerate(zip(stored, now, strict=True), start):
            texts = [about[TEXT] for about in pair if about is not None and TEXT in about]
            kept_n[place] = len(texts) == 2
            differing_n[place] = len(texts) == 2 and texts[0] != texts[1]
    return differing_n, kept_n


def _by_embedding(gallery: Gallery, originals: Originals, rows: NDArray[np.int64], embedder: Embedder) -> NDArray[np.int64]:
    """Return readable originals if their embedding differs from the stored embedding."""
    if not len(rows):
        return rows
    ids, every = [originals.ids[row] for row in rows.tolist()], np.arange(len(rows))
    stored = StoredSample.of_gallery(gallery, embedder.fingerprint, ids, rows)
    fresh_nd = stored.to_stored_form(originals.embed(embedder, rows, BadSamples(1.0, len(rows), quiet=True)), every)
    every = np.flatnonzero(np.isfinite(fresh_nd[:, 0]))
    cosines_n = stored.cosines(fresh_nd[every], every)
    if len(every) < 2:
        return rows[every[cosines_n < OTHER]]
    chance = float(np.median(stored.cosines(fresh_nd[every], np.roll(every, 1))))
    return rows[every[cosines_n < find_dividing_cosine(cosines_n, chance)]]


def _describe_originals(originals: Originals, rows: NDArray[np.int64], of: str = "") -> str:
    return f"{originals.ids[int(rows[0])]!r}{f' and {len(rows) - 1:,} more' if len(rows) > 1 else ''}{of}"
