"""Checks of embeddings: unusable rows, and rows that do not have unit length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import forget_pages, normalise_rows, row_lengths
from xcompat.core.errors import XcompatError
from xcompat.vectors.spool import BLOCK, Spool

if TYPE_CHECKING:
    from torch import Tensor

UNIT = 1e-2
"""Largest deviation of an embedding's length from 1; float16 rounds by less."""
BAD_SHARE = 0.1
"""Default share of the rows of a file that may have no usable embedding."""
_NAMED = 3  # unusable rows in a message


class CheckedRows(NamedTuple):
    """Checked embeddings.

    Args:
        rows_ND: the embeddings, of length 1 if they are usable.
        usable_N: (N,) bool, False for rows without a usable embedding.
        notes: sentences for the user about skipped rows and rows that did not have unit length.
    """

    rows_ND: NDArray[Any]
    usable_N: NDArray[np.bool_]
    notes: tuple[str, ...]

    def readable_rows(self) -> NDArray[Any]:
        """Return the embeddings, with NaN for unusable rows."""
        if self.usable_N.all():
            return self.rows_ND
        return np.where(self.usable_N[:, None], self.rows_ND, np.float32("nan")).astype(np.float32)


def check_rows(
    rows_ND: NDArray[Any],
    where: object,
    ids: Sequence[str] | None = None,
    max_bad_share: float = BAD_SHARE,
    *,
    keep_lengths: bool = False,
    option: str = "--max-bad-share",
) -> CheckedRows:
    """Find rows without a usable embedding, and normalise the others.

    A row is unusable if it is missing (NaN everywhere), holds a non-finite number, or only zeros.

    Args:
        rows_ND: stored floats; they are not changed.
        where: the file, for messages.
        ids: the id of each row, for messages.
        max_bad_share: tolerated share of unusable rows.
        keep_lengths: whether rows keep their lengths.
        option: option for the share, for messages; empty if there is none.

    Returns:
        The rows. They are not copied if all have length 1, up to :data:`UNIT`.

    Raises:
        XcompatError: the rows are not floats, or too many are unusable; the message names the first ones.
    """
    require_floats(rows_ND, where)
    lengths_N = np.concatenate([_lengths(rows_ND, start) for start in range(0, len(rows_ND), BLOCK)])
    usable_N = np.isfinite(lengths_N) & (lengths_N > 0)
    bad, notes = np.flatnonzero(~usable_N), list[str]()
    if bad.size:
        named = "; ".join(f"row {row}{_quote(ids, row)} {_describe_row(rows_ND[row])}" for row in bad[:_NAMED].tolist())
        more = f"; and {bad.size - _NAMED:,} more" if bad.size > _NAMED else ""
        found = f"{bad.size:,} of {len(rows_ND):,} rows of {where} have no usable embedding"
        raising = f", or raise {option}" if option else ""
        if bad.size > max_bad_share * len(rows_ND) or bad.size == len(rows_ND):
            raise XcompatError(f"{found}, more than the share {max_bad_share:g}: {named}{more}; fix them{raising}")
        notes.append(f"{found} and are left out: {named}{more}.")
    other = np.flatnonzero(usable_N & ~(np.abs(lengths_N - 1) < UNIT))
    if other.size and not keep_lengths:
        row = int(other[0])
        notes.append(
            f"{other.size:,} of {len(rows_ND):,} rows of {where} are not of length 1 (row {row}{_quote(ids, row)}: "
            f"{lengths_N[row]:.3g}) and are divided by their length: do the same with the vectors in your service."
        )
        spool = Spool(np.float32)
        for start in range(0, len(rows_ND), BLOCK):
            spool.add(normalise_rows(rows_ND[start : start + BLOCK]))
            forget_pages(rows_ND)
        rows_ND = spool.map_rows()
    return CheckedRows(rows_ND, usable_N, tuple(notes))


def require_floats(rows_ND: NDArray[np.number], where: object) -> None:
    """Raise unless an array is a matrix of floats with at least 1 row."""
    if rows_ND.ndim != 2 or not rows_ND.size or rows_ND.dtype.kind != "f":
        raise XcompatError(f"{where} holds {rows_ND.dtype} of shape {rows_ND.shape}; embeddings are floats, N x D")


def first_not_unit(embeds_BD: Tensor) -> tuple[int, str] | None:
    """Find the first embedding that is not finite or does not have unit length.

    Args:
        embeds_BD: float32 embeddings.

    Returns:
        Its row, and the problem with its fix; None if there is none.
    """
    import torch

    lengths_B = torch.linalg.vector_norm(embeds_BD, dim=1)
    wrong = torch.nonzero(~((lengths_B - 1).abs() < UNIT))  # NaN too
    if not len(wrong):
        return None
    row, length = int(wrong[0]), float(lengths_B[wrong[0]])
    problem, fix = f"is of length {length:.4g}, not 1", "divide embeddings by their norm, here and in your service"
    if not embeds_BD[row].isfinite().all():
        problem, fix = "holds values that are not finite", "leave such items out"
    elif not length:
        problem, fix = "holds only zeros", "leave such items out"
    return row, f"{problem}; {fix}"


def _lengths(rows_ND: NDArray[np.number], start: int) -> NDArray[np.float64]:
    """Return the row lengths of a block, in float64 if float32 cannot tell them from 1."""
    rows_BD = np.asarray(rows_ND[start : start + BLOCK])
    with np.errstate(over="ignore", invalid="ignore"):
        wide_BD = rows_BD.astype(np.float32, copy=False)
        lengths_B: NDArray[np.float64] = np.sqrt(np.einsum("bd,bd->b", wide_BD, wide_BD)).astype(np.float64)
    odd_B = ~(np.abs(lengths_B - 1) < UNIT / 2)
    if odd_B.any():
        lengths_B[odd_B] = row_lengths(rows_BD[odd_B])
    forget_pages(rows_ND)
    return lengths_B


def _quote(ids: Sequence[str] | None, row: int) -> str:
    return f" ({ids[row]!r})" if ids is not None else ""


def _describe_row(row_D: NDArray[np.number]) -> str:
    if np.isnan(row_D).all():
        return "has no embedding"
    return "holds only zeros" if np.isfinite(row_D).all() else "holds values that are not finite"
