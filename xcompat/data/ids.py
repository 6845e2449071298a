"""Ids of pictures: none is missing, and none stands for two pictures by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xcompat.core.errors import XcompatError
from xcompat.core.progress import notice, notice_once
from xcompat.data.overlap import same_pictures
from xcompat.data.schema import CAPTION, ID
from xcompat.data.sources import PairSource

if TYPE_CHECKING:
    import datasets

BATCH = 65536


def require_ids(dataset: datasets.Dataset, column: str, source: PairSource) -> None:
    """Refuse rows without an id, which would all be one item; say where a column that nobody named makes one of two pictures.

    An id may stand in several rows: of captions of one picture, or, if the user names the column, of pictures of one thing.

    Args:
        dataset: columns ``id``, of any type, and ``image`` (undecoded); ``caption`` if there are captions.
        column: what the column of ids was called.
        source: where the rows come from.

    Raises:
        XcompatError: naming the first row without an id.
    """
    from pandas.util import hash_array

    by_chance = source.id_column is None and not source.labels  # labelled pictures need ids of their own, which is seen to there
    lacking, hashes, before = list[int](), [np.empty(0, np.uint64)], 0
    for batch in dataset.select_columns([ID]).with_format("arrow").iter(BATCH):
        ids = batch[ID].combine_chunks() if isinstance(batch[ID], pa.ChunkedArray) else batch[ID]
        texts = ids.cast(pa.string())
        missing = pc.or_kleene(pc.is_null(ids, nan_is_null=True), pc.equal(pc.utf8_trim_whitespace(texts), ""))
        lacking += (before + np.flatnonzero(missing.to_numpy(zero_copy_only=False))).tolist()
        if by_chance and not lacking:
            hashes.append(hash_array(texts.to_numpy(zero_copy_only=False), categorize=False))
        before += len(ids)
    if lacking:
        raise XcompatError(
            f"{source.path}: row {lacking[0]:,} has no {column}, as {len(lacking):,} of {before:,} have none; fill the column, "
            "name another under id_column, or rename it, as rows are numbered where no column is called id"
        )
    if by_chance:
        _notice_one_id_of_two(dataset, np.concatenate(hashes), column, source)


def _notice_one_id_of_two(dataset: datasets.Dataset, hashes_N: np.ndarray, column: str, source: PairSource) -> None:
    """Say which rows have one id first, if these have two pictures, and two captions: pictures of one thing have one."""
    _, first, codes_N = np.unique(hashes_N, return_index=True, return_inverse=True)
    again_n = np.flatnonzero(first[codes_N] != np.arange(len(codes_N)))
    if not len(again_n):
        return
    one, other = int(first[codes_N[again_n[0]]]), int(again_n[0])
    same_caption = CAPTION in dataset.column_names and dataset[one][CAPTION] == dataset[other][CAPTION]
    if not same_caption and not next(same_pictures(dataset, [one], dataset, [other])):
        notice(
            f"{source.path}: rows {one:,} and {other:,} have the {column} {str(dataset[one][ID])!r} and different pictures, "
            "which count as one item; if they are not, name the column that tells them apart under id_column"
        )


def ids_beside(gallery: datasets.Dataset, queries: datasets.Dataset) -> list[str]:
    """Return the ids of a gallery, in which an id of a query is that of the same picture: no query finds itself.

    Pictures of two folders may have one name by chance, which is that of their path below the folder.

    Args:
        gallery: columns ``id``, each once, and ``image`` (undecoded).
        queries: likewise.

    Returns:
        The ids, of which that of another picture than the query's is told apart.
    """
    ids, asked = list(gallery[ID]), {name: row for row, name in enumerate(queries[ID])}
    rows = [row for row, name in enumerate(ids) if name in asked] if gallery is not queries else []
    same = same_pictures(gallery, rows, queries, [asked[ids[row]] for row in rows])
    others = [row for row, is_same in zip(rows, same, strict=True) if not is_same]
    taken = {*ids, *asked}
    if others:
        notice_once(
            f"{len(others):,} of {len(ids):,} images of the gallery have the id of a query and are different pictures, such as "
            f"{ids[others[0]]!r}: they count as other items"
        )
    for row in others:
        while ids[row] in taken:
            ids[row] += " (gallery)"
        taken.add(ids[row])
    return ids
