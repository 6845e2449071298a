"""Query and gallery ids by row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from xcompat.core.errors import XcompatError

if TYPE_CHECKING:
    import torch

Ids: TypeAlias = "Sequence[Hashable] | np.ndarray | torch.Tensor"
"""One id per row."""


def as_ids(ids_N: Ids, n_rows: int, what: str) -> list[object]:
    """Return ids as a list with a hashable per row.

    Args:
        ids_N: N hashables (strings, integers, tuples), or a one-dimensional array.
        n_rows: rows.
        what: name in messages.

    Returns:
        A list of length ``n_rows``.

    Raises:
        XcompatError: the number is wrong, or an id is not hashable.
    """
    tolist = getattr(ids_N, "tolist", None)  # NumPy and torch
    ids = list(ids_N) if tolist is None else tolist()
    if len(ids) != n_rows:
        raise XcompatError(f"{what}: {n_rows} rows but {len(ids)} ids; give an id per row")
    kinds = set(map(type, ids))  # few, while checking each id takes longer than most metrics
    for kind in kinds:
        if not issubclass(kind, Hashable):
            position = next(row for row, item in enumerate(ids) if isinstance(item, kind))
            raise XcompatError(f"{what}: id {position} is a {kind.__name__}; ids must be strings, integers or tuples")
    if any(issubclass(kind, np.generic) for kind in kinds):  # for readable messages
        return [item.item() if isinstance(item, np.generic) else item for item in ids]
    return ids


def id_codes(query_ids: Sequence[Hashable], gallery_ids: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers for the ids, equal for equal ids; ``1`` and ``"1"`` are different ids.

    Args:
        query_ids: Q hashables.
        gallery_ids: G hashables.

    Returns:
        int64 ``(Q,)`` and ``(G,)``.

    Example:
        >>> [codes.tolist() for codes in id_codes(["a", "b"], ["b", "c"])]
        [[0, 1], [1, 2]]
    """
    known: dict[Hashable, int] = {}
    codes = [
        np.fromiter((known.setdefault(item, len(known)) for item in ids), np.int64, len(ids)) for ids in (query_ids, gallery_ids)
    ]
    return codes[0], codes[1]
