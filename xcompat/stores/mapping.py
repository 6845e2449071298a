"""A map of stored vectors, and the vectors that it can map."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from xcompat.errors import FingerprintMismatchError, XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.retrieval.items import checked_embeddings
from xcompat.retrieval.upgrading import Block, map_block
from xcompat.retrieval.versions import identity, upgraded_version
from xcompat.stores.base import Rows, Store
from xcompat.stores.filling import Filling

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
        if own.fingerprint != self.old:
            raise FingerprintMismatchError(f"{own.fingerprint} made {store.space} of {store.uri}, and the map is for {self.old}")
        dim = self.model.config.old["dim"]
        if own.dim is not None and own.dim != dim:
            raise XcompatError(f"{store.space} of {store.uri} has {own.dim} dimensions, and the map is for {dim}")
        store.check_space(self.made[1], dtype)

    @property
    def made(self) -> tuple[Fingerprint, int]:
        """What the mapped vectors are, and their dimension."""
        version = upgraded_version(self.model)
        return Fingerprint(version.digest, version.name), version.dim

    def __call__(self, vectors_ND: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map stored vectors (N, d), of any length, to (N, D) float32, L2-normalised."""
        return map_block(self.model, Block(vectors_ND, unit=False)).embeds_nd

    @override
    def given(self, store: Store, rows: Rows) -> tuple[Rows, Block]:
        return rows, Block(checked(store, rows), unit=False)

    @override
    def taken(self, store: Store, rows: Rows, made: Block) -> Rows:
        return rows._replace(vectors_ND=made.embeds_nd)


def checked(store: Store, rows: Rows) -> NDArray[np.float32]:
    """Refuse vectors that cannot be mapped: of length 0, which have no direction, and of any but 1 under inner products."""
    lengths_N = np.linalg.norm(rows.vectors_ND, axis=1)
    if store.metric == "ip" and (wrong := np.flatnonzero(np.abs(lengths_N - 1) > UNIT)).size:
        raise XcompatError(
            f"{store.space} of {store.uri} is compared by inner products, and the vector of {rows.ids[wrong[0]]!r} is of length "
            f"{lengths_N[wrong[0]]:.3g}: a map keeps directions alone; bring the vectors to length 1 first"
        )
    return checked_embeddings(
        rows.vectors_ND, "cosine", lambda row: f"the vector of {rows.ids[row]!r} in {store.space} of {store.uri}"
    )
