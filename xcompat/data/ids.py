"""Ids of pictures: none is missing, and none stands for two pictures by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xcompat.data.overlap import same_picture
from xcompat.data.schema import ID
from xcompat.data.sources import PairSource
from xcompat.errors import XcompatError
from xcompat.progress import notice

if TYPE_CHECKING:
    import datasets

BATCH = 65536


def require_ids(dataset: datasets.Dataset, column: str, source: PairSource) -> None:
    """Refuse rows without an id, which would all be one item; say where a column that nobody named makes one of two pictures.

    An id may stand in several rows: of captions of one picture, or, if the user names the column, of pictures of one thing.

    Args:
        dataset: columns ``id``, of any type, and ``image`` (undecoded).
        column: what the column of ids was called.
        source: where the rows come from.

    Raises:
        XcompatError: naming the first row without an id.
    """
    from pandas.util import hash_array

    lacking, hashes, before = list[int](), [np.empty(0, np.uint64)], 0
    for batch in dataset.select_columns([ID]).with_format("arrow").iter(BATCH):
        ids = batch[ID].combine_chunks() if isinstance(batch[ID], pa.ChunkedArray) else batch[ID]
        texts = ids.cast(pa.string())
        missing = pc.or_kleene(pc.is_null(ids, nan_is_null=True), pc.equal(pc.utf8_trim_whitespace(texts), ""))
        lacking += (before + np.flatnonzero(missing.to_numpy(zero_copy_only=False))).tolist()
        if not lacking:
            hashes.append(hash_array(texts.to_numpy(zero_copy_only=False), categorize=False))
        before += len(ids)
    if lacking:
        raise XcompatError(
            f"{source.path}: row {lacking[0]:,} has no {column}, as {len(lacking):,} of {before:,} have none; fill the column, "
            "name another under id_column, or rename it, as rows are numbered where no column is called id"
        )
    if source.id_column is None and not source.labels:  # each labelled picture needs an id of its own, which is seen to there
        _notice_one_id_of_two(dataset, np.concatenate(hashes), column, source)


def _notice_one_id_of_two(dataset: datasets.Dataset, hashes_N: np.ndarray, column: str, source: PairSource) -> None:
    """Say which rows have one id first, if these have two pictures."""
    _, first, codes_N = np.unique(hashes_N, return_index=True, return_inverse=True)
    again_n = np.flatnonzero(first[codes_N] != np.arange(len(codes_N)))
    if not len(again_n):
        return
    one, other = int(first[codes_N[again_n[0]]]), int(again_n[0])
    if not same_picture((dataset, one), (dataset, other)):
        notice(
            f"{source.path}: rows {one:,} and {other:,} have the {column} {str(dataset[one][ID])!r} and different pictures, "
            "which count as one item; if they are not, name the column that tells them apart under id_column"
        )
