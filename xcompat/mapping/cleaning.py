"""Removal of wrong pairs and exact copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcompat.mapping.candidates import Paired
from xcompat.mapping.pair_checks import find_right_pairs, first_of_copies
from xcompat.mapping.paired import CaptionedEmbeddings, PairedEmbeddings


class RightPairs(NamedTuple):
    """Pairs without the wrong ones.

    Args:
        pairs: kept pairs, with a note if some were dropped.
        rows_R: their rows; None if none was dropped, or the pairs are images and captions.
        dropped: number of dropped pairs.
    """

    pairs: Paired
    rows_R: NDArray[np.int64] | None = None
    dropped: int = 0


def drop_wrong_pairs(pairs: Paired, seed: int = 0) -> RightPairs:
    """Drop embedding pairs of different items (:func:`~xcompat.mapping.pair_checks.find_right_pairs`)."""
    if isinstance(pairs, CaptionedEmbeddings):
        images, texts = (drop_wrong_pairs(side, seed) for side in (pairs.images, pairs.texts))
        if not (dropped := images.dropped + texts.dropped):
            return RightPairs(pairs)
        assert isinstance(images.pairs, PairedEmbeddings) and isinstance(texts.pairs, PairedEmbeddings)
        notes = (*pairs.notes, _describe_dropped(dropped, len(pairs)))
        whole = CaptionedEmbeddings.join_complete(images.pairs, texts.pairs, notes)
        return RightPairs(replace(whole, are_questions=pairs.are_questions), None, dropped)
    kept_N = find_right_pairs(pairs.new_ND, pairs.old_Nd, seed)
    if kept_N is None or kept_N.all():
        return RightPairs(pairs)
    rows_R, dropped = np.flatnonzero(kept_N), int((~kept_N).sum())
    notes = (*pairs.notes, _describe_dropped(dropped, len(pairs)))
    return RightPairs(replace(pairs.narrowed(rows_R), notes=notes), rows_R, dropped)


def leave_out_copies(pairs: Paired, texts: Sequence[str] | None) -> tuple[Paired, Sequence[str] | None, int]:
    """Keep a single item of each group of exact copies, as folds must not search items they learned from.

    Args:
        pairs: the pairs. Images with captions are unchanged, because a caption can describe several images.
        texts: their texts.

    Returns:
        The pairs, their texts, and the number of dropped copies.
    """
    if not isinstance(pairs, PairedEmbeddings) or (rows_R := first_of_copies(pairs.new_ND, pairs.old_Nd)) is None:
        return pairs, texts, 0
    kept = [texts[row] for row in rows_R.tolist()] if texts is not None else None
    return replace(pairs.narrowed(rows_R), notes=pairs.notes), kept, len(pairs) - len(rows_R)


def _describe_dropped(dropped: int, count: int) -> str:
    return (
        f"Dropped {dropped:,} of {count:,} pairs ({100 * dropped / count:.0f} %): their old and new embeddings do not match. "
        "Check that ids or rows name the same items on both sides."
    )
