"""Items to add to a gallery: checks, and conversion to the stored form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xcompat.core.arrays import normalise_rows, row_lengths
from xcompat.core.errors import XcompatError
from xcompat.core.json_values import JsonColumns
from xcompat.retrieval.manifest import Metric
from xcompat.retrieval.versions import as_float32

_UNIT = 1e-5  # deviations from length 1 below this are stored unchanged
_LONGEST = 1e18  # squares of longer embeddings overflow in float32
_NO_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # control characters, and surrogates, which UTF-8 cannot encode


@dataclass
class Items:
    """Embeddings with ids, metadata and side-information.

    Args:
        embeds: blocks (n, d) float32.
        ids: an id per embedding.
        metadata: a JSON text or None per embedding.
        side_info: blocks (n, S) float32, possibly none.
    """

    embeds: list[NDArray[np.float32]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    metadata: list[str | None] = field(default_factory=list)
    side_info: list[NDArray[np.float32]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""
        texts = sum(map(len, self.ids)) + sum(len(text) for text in self.metadata if text is not None)
        return texts + sum(block.nbytes for block in (*self.embeds, *self.side_info))

    @property
    def side_dim(self) -> int:
        """Dimension of the side-information; 0 without any."""
        return self.side_info[0].shape[1] if self.side_info else 0


def check_items(
    embeds_ND: NDArray[np.float32],
    ids: Sequence[str],
    metadata: Sequence[Mapping[str, object] | None] | None,
    side_info_NS: ArrayLike | None,
    metric: Metric,
) -> Items:
    """Check items to add, and convert them to the stored form.

    Args:
        embeds_ND: (N, d) float32, not modified; stored with length 1 for ``cosine``.
        ids: N strings.
        metadata: N JSON objects or Nones; None for no metadata.
        side_info_NS: (N, S) side-information, for methods that map galleries.
        metric: the gallery's metric.

    Returns:
        A block of items.

    Raises:
        XcompatError: counts differ, an embedding is zero or not finite, an id is empty or repeated, or metadata are not JSON.
    """
    ids = list(ids)
    side = as_float32(side_info_NS).copy() if side_info_NS is not None else None
    for name, count in (("ids", len(ids)), ("side_info", len(embeds_ND if side is None else side))):
        if count != len(embeds_ND):
            raise XcompatError(f"there are {len(embeds_ND)} embeddings but {count} {name}; give the same number of both")
    check_ids(ids)
    unit_ND = checked_embeddings(embeds_ND, metric, lambda row: f"the embedding of {ids[row]!r}")
    if side is not None:
        side = checked_embeddings(side, "l2", lambda row: f"the side-information of {ids[row]!r}")
    if np.may_share_memory(unit_ND, embeds_ND):
        unit_ND = unit_ND.copy()  # the caller may change its array before the write
    return Items([unit_ND], ids, as_json(ids, metadata), [side] if side is not None else [])


def checked_embeddings(embeds_ND: NDArray[np.float32], metric: Metric, name: Callable[[int], str]) -> NDArray[np.float32]:
    """Check that embeddings can be compared; normalise them for ``cosine``.

    Args:
        embeds_ND: (N, d) float32.
        metric: the gallery's metric.
        name: names a row in the error message.

    Returns:
        (N, d) float32; the given array if unchanged.

    Raises:
        XcompatError: an embedding is zero or not finite.
    """
    if embeds_ND.ndim != 2:
        raise XcompatError(f"embeddings must be a matrix of rows, not an array of shape {embeds_ND.shape}")
    with np.errstate(over="ignore"):
        length_N = np.sqrt(np.einsum("nd,nd->n", embeds_ND, embeds_ND))
    if metric == "cosine" and not (np.abs(length_N - 1) > _UNIT).any() and np.isfinite(length_N).all():
        return embeds_ND
    if not np.isfinite(length_N).all() or (length_N == 0).any():  # may be overflow or underflow of squares
        length_N = row_lengths(embeds_ND)
    bad = np.flatnonzero(~(length_N < (np.inf if metric == "cosine" else _LONGEST)) | ((length_N == 0) & (metric == "cosine")))
    if bad.size:
        length = length_N[bad[0]]
        what = "is zero and has no direction" if length == 0 else "is not finite"
        if np.isfinite(length) and length:
            what = f"is too long (length {length:.3g}) to be compared by {metric}: its square overflows"
        more = f" (like {bad.size - 1} more)" if bad.size > 1 else ""
        raise XcompatError(f"{name(int(bad[0]))} {what}{more}; remove it, or re-embed it")
    return normalise_rows(embeds_ND) if metric == "cosine" else embeds_ND


def check_ids(ids: Sequence[object]) -> None:
    """Raise for invalid or repeated ids."""
    try:  # check all at once: one by one takes as long as copying the embeddings
        if all(map(str.strip, ids)) and not _NO_TEXT.search("".join(ids)) and len(set(ids)) == len(ids):  # type: ignore[arg-type]
            return
    except TypeError:
        pass
    seen: set[object] = set()
    for name in ids:
        if not isinstance(name, str) or not name.strip() or _NO_TEXT.search(name):
            raise XcompatError(f"invalid id {name!r}: ids must be non-empty single-line strings")
        if name in seen:
            raise XcompatError(f"the id {name!r} is given twice; every item needs a unique id")
        seen.add(name)


def as_json(ids: Sequence[str], metadata: Sequence[Mapping[str, object] | None] | None) -> list[str | None]:
    """Return metadata as JSON texts; raise for values other than objects."""
    if metadata is None:
        return [None] * len(ids)
    if len(metadata) != len(ids):
        raise XcompatError(f"there are {len(ids)} ids but {len(metadata)} metadata dictionaries; give a dictionary per id")
    texts: list[str | None] = []
    columns = JsonColumns()
    for name, value in zip(ids, metadata, strict=True):
        if value is not None and not isinstance(value, Mapping):
            raise XcompatError(f"the metadata of {name!r} are {type(value).__name__}, not an object of keys and values")
        texts.append(None if value is None else _json_text(value, columns))
    columns.report()
    return texts


def _json_text(value: Mapping[str, object], columns: JsonColumns) -> str:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError):
        text = json.dumps(columns.convert(value, keep_empty=True), ensure_ascii=False)
    return text
