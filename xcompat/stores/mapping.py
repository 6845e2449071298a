"""Maps for stored vectors."""

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
from xcompat.stores.padding import is_padded, pad_vectors
from xcompat.stores.vector_source import VectorSource

if TYPE_CHECKING:
    from xcompat.models.base import CompatModel

UNIT = 1e-2
"""Tolerance of length 1 under inner products. Half precision rounds by less."""


@dataclass(frozen=True)
class Mapping(VectorSource[Block, Block]):
    """Source that computes new vectors by mapping the stored vectors.

    Args:
        model: model that maps galleries (``direction: old_to_new``, fct, …).
    """

    model: CompatModel
    content: str | None = field(default=None, init=False)
    sample_size: ClassVar[int] = 2_000
    function = staticmethod(map_block)

    def __post_init__(self) -> None:
        if not self.model.maps_galleries:
            raise XcompatError(
                f"{identity(self.model)} maps queries, not stored vectors; search with `xcompat gallery search URI … --model "
                "RUN`, or fit a map of stored vectors with `xcompat map --direction old_to_new`, as in docs/tutorials/migrate.md"
            )
        if self.model.metric == "l2":
            raise XcompatError(
                f"{identity(self.model)} returns embeddings of any length, but stores need unit vectors; train its models with "
                "metric: cosine"
            )
        if self.model.reads_side_info:
            raise XcompatError(f"{identity(self.model)} also needs side-information, and stores have none; use a gallery")

    @property
    def old(self) -> Fingerprint:
        """Old model, whose vectors are mapped."""
        return self.model.compatible_with[0]

    @property
    def digest(self) -> str:
        """The model's digest."""
        return identity(self.model).digest

    def require_fit(self, store: Store, dtype: str, old: Fingerprint | None = None) -> None:
        """Raise if the stored vectors have another or unknown model, or the store cannot hold the new ones."""
        own = store.spaces()[store.space]
        if (known := own.fingerprint or old) is None:
            raise XcompatError(f"the model of {store.space} in {store.uri} is unknown; set it with --from MODEL")
        if known != self.old and self.old.digest not in store.aliases():
            raise FingerprintMismatchError(f"{store.space} in {store.uri} has vectors of {known}, but the map is for {self.old}")
        width, dim = self._width(store), self.old_dim
        if width not in (None, dim) and not is_padded(store, dim):
            padding = "" if width < dim else f" (numbers {dim + 1} to {width} are not padding: some are not zero)"
            raise XcompatError(f"{store.space} in {store.uri} has {width} dimensions, but the map is for {dim}{padding}")
        store.check_space(self.dim_for(store), dtype)

    @property
    @override
    def old_dim(self) -> int:
        return int(self.model.config.old["dim"])

    def _width(self, store: Store) -> int | None:
        """Return the stored vectors' dimension with padding, or None if there are none."""
        own = store.spaces()[store.space]
        return own.dim or next((rows.vectors_ND.shape[1] for rows in store.rows(1)), None)

    @override
    def dim_for(self, store: Store) -> int:
        """Return the new space's dimension. Padded vectors stay padded, because services expect it."""
        return self._dim_beside(self._width(store) or self.old_dim)

    def _dim_beside(self, width: int) -> int:
        """Return the new dimension for an old dimension."""
        return max(self.target[1], width if width > self.old_dim else 0)

    @property
    def target(self) -> tuple[Fingerprint, int]:
        """Fingerprint and dimension of the mapped vectors."""
        version = upgraded_version(self.model)
        return Fingerprint(version.digest, version.name), version.dim

    @property
    @override
    def shares(self) -> tuple[str, ...]:
        return upgraded_version(self.model).shares

    def __call__(self, vectors_ND: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map stored vectors (N, d) of any length to (N, D) float32, L2-normalised."""
        return map_block(self.model, Block(vectors_ND, unit=False)).embeds_nd

    @override
    def find_unusable(self, rows: Rows) -> dict[str, str]:
        vectors_ND, dim = rows.vectors_ND, self.old_dim
        reasons = {
            f"has non-zero numbers after its first {dim}": vectors_ND[:, dim:].any(1),
            "is zero and has no direction": ~vectors_ND.any(1),
            "is not finite": ~np.isfinite(vectors_ND).all(1),
        }
        return {rows.ids[row]: reason for reason, found_N in reasons.items() for row in np.flatnonzero(found_N)}

    @override
    def prepare(self, store: Store, rows: Rows) -> tuple[Rows, Block]:
        unusable_N, dim = self._unusable(rows), self.old_dim
        vectors_ND = np.where(unusable_N[:, None], np.float32(dim**-0.5), rows.vectors_ND[:, :dim])  # any usable vector
        return rows, Block(require_mappable(store, rows._replace(vectors_ND=vectors_ND)), unit=False)

    @override
    def attach(self, store: Store, rows: Rows, made: Block) -> Rows:
        new_ND = np.where(self._unusable(rows)[:, None], np.float32(0), made.embeds_nd)
        return rows._replace(vectors_ND=pad_vectors(new_ND, self._dim_beside(rows.vectors_ND.shape[1])))

    def _unusable(self, rows: Rows) -> NDArray[np.bool_]:
        unusable = self.find_unusable(rows)
        return np.array([item in unusable for item in rows.ids], np.bool_)


def require_mappable(store: Store, rows: Rows) -> NDArray[np.float32]:
    """Raise if a vector cannot be mapped: zeros, or lengths other than 1 under inner products."""
    lengths_N = row_lengths(rows.vectors_ND)
    if store.metric == "ip" and (wrong := np.flatnonzero(np.abs(lengths_N - 1) > UNIT)).size:
        raise XcompatError(
            f"{store.space} in {store.uri} uses inner products, but the vector of {rows.ids[wrong[0]]!r} has length "
            f"{lengths_N[wrong[0]]:.3g}; normalise the vectors to length 1, because maps keep only directions"
        )
    return checked_embeddings(
        rows.vectors_ND, "cosine", lambda row: f"the vector of {rows.ids[row]!r} in {store.space} of {store.uri}"
    )
