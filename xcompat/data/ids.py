"""Checks of image ids: none missing, and no accidental duplicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xcompat.core.errors import XcompatError
from xcompat.core.progress import notice, notice_once
from xcompat.data.overlap import same_images
from xcompat.data.schema import CAPTION, ID
from xcompat.data.sources import PairSource

if TYPE_CHECKING:
    import datasets

BATCH = 65536


def require_ids(dataset: datasets.Dataset, column: str, source: PairSource) -> None:
    """Raise if a row has no id. Print a notice if a detected column gives two images the same id.

    Rows may share an id: captions of the same image or, in a column named by the user, images of the same object.

    Args:
        dataset: columns ``id`` (any type), ``image`` (undecoded) and optionally ``caption``.
        column: original name of the id column.
        source: source of the rows.

    Raises:
        XcompatError: names the first row without id.
    """
    from pandas.util import hash_array

    by_chance = source.id_column is None and not source.labels  # load_labelled checks unique ids itself
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
            f"{source.path}: row {lacking[0]:,} has no {column} ({len(lacking):,} of {before:,} rows have none); "
            "fill the column, set id_column to another column, or rename the column (without a column named id, rows are "
            "numbered)"
        )
    if by_chance:
        _notice_duplicate_id(dataset, np.concatenate(hashes), column, source)


def _notice_duplicate_id(dataset: datasets.Dataset, hashes_N: np.ndarray, column: str, source: PairSource) -> None:
    """Report the first repeated id if image and caption differ. Equal captions mean the same object."""
    _, first, codes_N = np.unique(hashes_N, return_index=True, return_inverse=True)
    again_n = np.flatnonzero(first[codes_N] != np.arange(len(codes_N)))
    if not len(again_n):
        return
    one, other = int(first[codes_N[again_n[0]]]), int(again_n[0])
    same_caption = CAPTION in dataset.column_names and dataset[one][CAPTION] == dataset[other][CAPTION]
    if not same_caption and not next(same_images(dataset, [one], dataset, [other])):
        notice(
            f"{source.path}: rows {one:,} and {other:,} have the {column} {str(dataset[one][ID])!r} but different images, "
            "and count as one item; if that is wrong, set id_column to a column with unique ids"
        )


def disambiguate_ids(gallery: datasets.Dataset, queries: datasets.Dataset) -> list[str]:
    """Return the gallery's ids, with the suffix `` (gallery)`` where a different image has a query's id.

    A query then excludes only its own image. Images in two folders can share an id (their relative path).

    Args:
        gallery: columns ``id`` (unique) and ``image`` (undecoded).
        queries: the same columns.

    Returns:
        The ids.
    """
    ids, asked = list(gallery[ID]), {name: row for row, name in enumerate(queries[ID])}
    rows = [row for row, name in enumerate(ids) if name in asked] if gallery is not queries else []
    same = same_images(gallery, rows, queries, [asked[ids[row]] for row in rows])
    others = [row for row, is_same in zip(rows, same, strict=True) if not is_same]
    taken = {*ids, *asked}
    if others:
        notice_once(
            f"{len(others):,} of {len(ids):,} images of the gallery have the id of a different query image, e.g. "
            f"{ids[others[0]]!r}: they count as separate items"
        )
    for row in others:
        while ids[row] in taken:
            ids[row] += " (gallery)"
        taken.add(ids[row])
    return ids


def match_file_names(ids: Sequence[str], paths: Sequence[str]) -> list[str] | None:
    """Rename ids to the paths of images with the same file name, then with the same name without suffix.

    Args:
        ids: stored ids.
        paths: ids of images, as relative paths.

    Returns:
        The ids, renamed where exactly 1 path has the name; None if an id is a path already, or no name matches.

    Example:
        >>> match_file_names(["7", "8"], ["a/7.jpg", "a/9.jpg"])
        ['a/7.jpg', '8']
    """
    if not set(paths).isdisjoint(ids):
        return None
    for name_of in (lambda path: PurePosixPath(path).name, lambda path: PurePosixPath(path).stem):
        count = Counter(map(name_of, paths))
        by_name = {name: path for path in paths if count[name := name_of(path)] == 1}
        renamed = [by_name.get(name_of(each), each) for each in ids]
        if not set(paths).isdisjoint(renamed):
            return renamed
    return None
