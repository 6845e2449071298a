"""A map of stored vectors, and the vectors that it can map."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from xcompat.core.arrays import row_lengths
from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval.items import checked_embeddings
from xcompat.retrieval.upgrading import Block, map_block
from xcompat.retrieval.versions import identity, upgraded_version
from xcompat.stores.base import Rows, Store
from xcompat.stores.filling import Filling
from xcompat.stores.padding import is_padded, pad_vectors

if TYPE_CHECKING:
    from xcompat.models.base import CompatModel

UNIT = 1e-2
"""Largest deviation of a vector's length from 1 under inner products; half precision rounds by less."""


@dataclass(frozen=True)
class Mapping(Filling[Block, Block]):
    """A map of stored vectors: what a migration writes, and for which model's vectors it was made.

    Args:
        model: maps galleries (``direction: old_to_new``, fct, …).
    """

    model: CompatModel
    content: str | None = field(default=None, init=False)
    tried: ClassVar[int] = 2_000
    function = staticmethod(map_block)

    def __post_init__(self) -> None:
        """Refuse a model that maps queries, or needs more than vectors."""
        if not self.model.maps_galleries:
            raise XcompatError(
                f"{identity(self.model)} maps queries, so nothing needs to be written: search with it as the store is "
                "(`xcompat gallery search URI … --model RUN`)"
            )
        if self.model.metric == "l2":
            raise XcompatError(
                f"{identity(self.model)} maps embeddings of any length, and only galleries keep these; train its models with "
                "metric: cosine"
            )
        if self.model.reads_side_info:
            raise XcompatError(
                f"{identity(self.model)} also reads side-information, which a store of vectors alone does not hold"
            )

    @property
    def old(self) -> Fingerprint:
        """The model whose vectors it maps."""
        return self.model.compatible_with[0]

    @property
    def digest(self) -> str:
        """Identifies the migration's model."""
        return identity(self.model).digest

    def require_fit(self, store: Store, dtype: str) -> None:
        """Refuse a store whose vectors another model made than the map is for, or nobody knows which, or cannot take new ones."""
        own = store.spaces()[store.space]
        if own.fingerprint is None:
            raise XcompatError(f"nobody has said which model made {store.space} of {store.uri}; say it with --from MODEL")
        if own.fingerprint != self.old and self.old.digest not in store.aliases():
            raise FingerprintMismatchError(f"{own.fingerprint} made {store.space} of {store.uri}, and the map is for {self.old}")
        width, dim = self._width(store), self.old_dim
        if width not in (None, dim) and not is_padded(store, dim):
            padding = "" if width < dim else f" (numbers {dim + 1} to {width} are not only zeros, so they are no padding)"
            raise XcompatError(f"{store.space} of {store.uri} has {width} dimensions, and the map is for {dim}{padding}")
        store.check_space(self.dim_for(store), dtype)

    @property
    @override
    def old_dim(self) -> int:
        return int(self.model.config.old["dim"])

    def _width(self, store: Store) -> int | None:
        """Return the dimension of stored vectors, with padding; None if there are none."""
        own = store.spaces()[store.space]
        return own.dim or next((rows.vectors_ND.shape[1] for rows in store.rows(1)), None)

    @override
    def dim_for(self, store: Store) -> int:
        """Return the dimension of a store's new space: padded vectors stay padded, as services that pad expect it."""
        return self._dim_beside(self._width(store) or self.old_dim)

    def _dim_beside(self, width: int) -> int:
        """Return the dimension of new vectors of rows whose old vectors have ``width`` numbers."""
        return max(self.made[1], width if width > self.old_dim else 0)

    @property
    def made(self) -> tuple[Fingerprint, int]:
        """What the mapped vectors are, and their dimension."""
        version = upgraded_version(self.model)
        return Fingerprint(version.digest, version.name), version.dim

    def __call__(self, vectors_ND: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map stored vectors (N, d), of any length, to (N, D) float32, L2-normalised."""
        return map_block(self.model, Block(vectors_ND, unit=False)).embeds_nd

    @override
    def find_unusable(self, rows: Rows) -> dict[str, str]:
        vectors_ND, dim = rows.vectors_ND, self.old_dim
        reasons = {
            f"has other numbers than zeros after its first {dim}": vectors_ND[:, dim:].any(1),
            "is zero and has no direction": ~vectors_ND.any(1),
            "is not finite": ~np.isfinite(vectors_ND).all(1),
        }
        return {rows.ids[row]: reason for reason, found_N in reasons.items() for row in np.flatnonzero(found_N)}

    @override
    def given(self, store: Store, rows: Rows) -> tuple[Rows, Block]:
        unusable_N, dim = self._unusable(rows), self.old_dim
        vectors_ND = np.where(unusable_N[:, None], np.float32(dim**-0.5), rows.vectors_ND[:, :dim])  # any that can be mapped
        return rows, Block(checked(store, rows._replace(vectors_ND=vectors_ND)), unit=False)

    @override
    def taken(self, store: Store, rows: Rows, made: Block) -> Rows:
        new_ND = np.where(self._unusable(rows)[:, None], np.float32(0), made.embeds_nd)
        return rows._replace(vectors_ND=pad_vectors(new_ND, self._dim_beside(rows.vectors_ND.shape[1])))

    def _unusable(self, rows: Rows) -> NDArray[np.bool_]:
        unusable = self.find_unusable(rows)
        return np.array([item in unusable for item in rows.ids], np.bool_)


def checked(store: Store, rows: Rows) -> NDArray[np.float32]:
    """Refuse vectors that cannot be mapped: of length 0, which have no direction, and of any but 1 under inner products."""
    lengths_N = row_lengths(rows.vectors_ND)
    if store.metric == "ip" and (wrong := np.flatnonzero(np.abs(lengths_N - 1) > UNIT)).size:
        raise XcompatError(
            f"{store.space} of {store.uri} is compared by inner products, and the vector of {rows.ids[wrong[0]]!r} is of length "
            f"{lengths_N[wrong[0]]:.3g}: a map keeps directions alone; bring the vectors to length 1 first"
        )
    return checked_embeddings(
        rows.vectors_ND, "cosine", lambda row: f"the vector of {rows.ids[row]!r} in {store.space} of {store.uri}"
    )
