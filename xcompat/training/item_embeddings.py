"""A folder's embeddings, in the old model's item order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import copy_rows, read_lines
from xcompat.core.errors import XcompatError
from xcompat.core.progress import notice
from xcompat.evaluation.identities import Ids
from xcompat.mapping.sides import holds_one_kind, read_sides
from xcompat.stores.places import READ_AS_IT_IS, Place, Reading
from xcompat.vectors import CheckedRows, check_rows, read_vectors
from xcompat.vectors.formats import stored_at


def read_embeddings(
    place: Place, kind: str, max_bad_share: float, like: Ids | None = None, reading: Reading = READ_AS_IT_IS
) -> tuple[NDArray[np.floating], list[str]]:
    """Read the embeddings of a single kind with their ids.

    Args:
        place: a folder with ``KIND_embeds.npy`` and ``KIND_ids.txt``, or a table ``KIND_embeds``; or any other place with
            embeddings (:func:`~xcompat.mapping.sides.read_sides`).
        kind: e.g. ``image``.
        max_bad_share: maximum share of unusable rows, and of ``like`` items without a row.
        like: old ids, for the order.
        reading: column names, and a file with ids.

    Returns:
        (N, D) unit embeddings, NaN if unusable, and N ids; row numbers without ids.

    Raises:
        XcompatError: the file is damaged, counts differ, or too many rows are unusable.
    """
    if not isinstance(place, Path) or holds_one_kind(place):
        return _read_one_kind(place, max_bad_share, like, reading)
    if reading.ids is not None:
        raise XcompatError(f"{place} has ids of its own; remove --ids")
    file = stored_at(place / f"{kind}_embeds")
    assert file is not None
    vectors = read_vectors(file, reading.columns)
    array, names = vectors.rows_ND, vectors.ids if vectors.ids is not None else read_lines(place / f"{kind}_ids.txt")
    if array.ndim != 2 or len(array) != len(names):
        raise XcompatError(f"{file} has shape {array.shape}, but {kind}_ids.txt has {len(names)} lines; they must be N x D and N")
    found = check_rows(array, file, names, max_bad_share)
    for line in found.notes:
        notice(line)
    return _order_like(found.readable_rows(), names, like, file, max_bad_share)


def _read_one_kind(place: Place, max_bad_share: float, like: Ids | None, reading: Reading) -> tuple[NDArray[Any], list[str]]:
    (side,) = read_sides(place, max_bad_share, reading).values()
    for line in side.notes:
        notice(line)
    rows_ND = CheckedRows(side.embeds_ND, side.usable_N, ()).readable_rows()
    names = side.ids if side.ids is not None else number_rows(len(rows_ND))
    if like is not None and are_row_numbers(like) != (side.ids is None):
        have, old_have = ("no ids", "ids") if side.ids is None else ("ids", "none")
        raise XcompatError(
            f"{place} has {have}, but the old side has {old_have}; give both ids (--ids for the old side), or neither"
        )
    if like is not None and side.ids is None and len(like) != len(names):
        raise XcompatError(
            f"{place} has {len(names):,} rows, but the old side {len(like):,}; rows without ids must be the same items in the "
            "same order"
        )
    return _order_like(rows_ND, names, like, place, max_bad_share)


def number_rows(count: int) -> list[str]:
    """Return ids for rows without ids."""
    return [f"row {row}" for row in range(count)]


def are_row_numbers(ids: Ids) -> bool:
    """Return whether ids come from :func:`number_rows`."""
    return list(ids) == number_rows(len(ids))


def _order_like(
    rows_ND: NDArray[Any], names: list[str], like: Ids | None, where: Place, max_bad_share: float
) -> tuple[NDArray[Any], list[str]]:
    if like is None or names == list(like):
        return rows_ND, names
    return order_rows(rows_ND, names, [str(name) for name in like], where, max_bad_share)


def order_rows(
    rows_ND: NDArray[np.floating], ids: Sequence[str], like: Sequence[str], where: Place, max_bad_share: float
) -> tuple[NDArray[np.floating], list[str]]:
    """Sort rows into the order of other ids; print how many are missing or extra.

    Args:
        rows_ND: rows.
        ids: id of each row.
        like: ids in the new order.
        where: path, for messages.
        max_bad_share: maximum share of ``like`` without a row.

    Returns:
        A row per id of ``like``, NaN if missing, and these ids.

    Raises:
        XcompatError: too many are missing.

    Example:
        >>> rows, names = order_rows(np.array([[1.0], [2.0]]), ["a", "b"], ["b", "a"], Path("new"), 0)
        >>> rows.tolist(), names
        ([[2.0], [1.0]], ['b', 'a'])
    """
    given, wanted = Counter(ids), Counter(like)
    place = {key: row for row, key in enumerate(_numbered_ids(ids)) if given[key[0]] == wanted[key[0]]}
    places_N = np.array([place.get(key, -1) for key in _numbered_ids(like)], np.int64)
    missing = [name for name, row in zip(like, places_N.tolist(), strict=True) if row < 0]
    if len(missing) > max_bad_share * len(like) or len(missing) == len(like):
        raise XcompatError(
            f"{where} has no row for {len(missing):,} of the {len(like):,} items of the old model, e.g. {missing[0]!r}; "
            "embed the same items with both models, or increase --max-bad-share"
        )
    extra = [name for name in ids if given[name] != wanted[name]]
    for names, said in ((missing, "items of the old model have no row"), (extra, "rows have no item of the old model")):
        if names:
            notice(f"{where}: {len(names):,} {said} and are skipped, e.g. {names[0]!r}")
    if missing and rows_ND.dtype != np.float64:
        rows_ND = np.asarray(rows_ND, np.float32)
    ordered_ND = copy_rows(rows_ND, np.maximum(places_N, 0))
    ordered_ND[places_N < 0] = np.nan
    return ordered_ND, list(like)


def _numbered_ids(ids: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield each id with its number among equal ids."""
    seen = Counter[str]()
    for name in ids:
        yield name, seen[name]
        seen[name] += 1
