"""Who is who among queries and items: an identity per row, of any kind that can be compared."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from xcompat.core.errors import XcompatError

if TYPE_CHECKING:
    import torch

Ids: TypeAlias = "Sequence[Hashable] | np.ndarray | torch.Tensor"
"""One identity per row."""


def as_ids(ids_N: Ids, n_rows: int, what: str) -> list[Any]:
    """Return ids as a list of hashables, one per row.

    Args:
        ids_N: N hashables: strings, integers, tuples, or a one-dimensional array.
        n_rows: the number of rows.
        what: their name in messages.

    Returns:
        A list of length ``n_rows``.

    Raises:
        XcompatError: if the number is wrong, or one of them is not hashable.
    """
    tolist = getattr(ids_N, "tolist", None)  # of NumPy and torch
    ids = [_plain(item) for item in ids_N] if tolist is None else tolist()
    if len(ids) != n_rows:
        raise XcompatError(f"{what}: {n_rows} rows but {len(ids)} ids; give one id per row")
    for position, item in enumerate(ids):
        if not isinstance(item, Hashable):
            raise XcompatError(f"{what}: id {position} is a {type(item).__name__}; ids must be strings, integers or tuples")
    return ids


def _plain(item: Any) -> Any:  # noqa: ANN401 - an id may be anything
    """Turn a NumPy scalar into a Python one, which is easier to read in messages."""
    return item.item() if isinstance(item, np.generic) else item


def id_codes(query_ids: Sequence[Hashable], gallery_ids: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """Give every id a number, equal ids the same; ``1`` and ``"1"`` are different ids.

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
