"""Query and gallery ids by row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from xcompat.core.errors import XcompatError

if TYPE_CHECKING:
    import torch

Ids: TypeAlias = "Sequence[Hashable] | np.ndarray | torch.Tensor"
"""One id per row."""


def as_ids(ids_N: Ids, n_rows: int, what: str) -> list[Any]:
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
    ids = [_plain(item) for item in ids_N] if tolist is None else tolist()
    if len(ids) != n_rows:
        raise XcompatError(f"{what}: {n_rows} rows but {len(ids)} ids; give an id per row")
    is_plain = isinstance(ids_N, np.ndarray) and ids_N.ndim == 1 and ids_N.dtype != object  # numbers or strings
    for position, item in enumerate([] if is_plain else ids):
        if not isinstance(item, Hashable):
            raise XcompatError(f"{what}: id {position} is a {type(item).__name__}; ids must be strings, integers or tuples")
    return ids


def _plain(item: Any) -> Any:  # noqa: ANN401 - an id can have any type
    """Convert a NumPy scalar to Python, for readable messages."""
    return item.item() if isinstance(item, np.generic) else item


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
