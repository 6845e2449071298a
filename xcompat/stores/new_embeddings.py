"""Cache of new embeddings in a migration's new space, for re-ranked searches of a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from xcompat.core.progress import notice_once

if TYPE_CHECKING:
    from xcompat.retrieval.reranking import Reranker


class CachingStore(Protocol):
    """A :class:`~xcompat.stores.base.Store`, as far as a cache uses it."""

    supports_cache: ClassVar[bool]
    condition: str | None

    @property
    def uri(self) -> object:
        """Address of the store."""

    def read_current(self, ids: Sequence[str], space: str) -> tuple[dict[str, NDArray[np.float32]], Any]:
        """Return current embeddings by id, and the rows without one."""

    def write(self, space: str, rows: Any) -> int:  # noqa: ANN401 - rows as the store returned them
        """Write the embeddings of unchanged rows."""

    def count_demand(self, ids: Iterable[str]) -> None:
        """Count a query's candidates."""

    def record(self, name: str) -> dict[str, Any] | None:
        """Return a record by name."""

    def spaces(self) -> Mapping[str, Any]:
        """Return the spaces by name."""


class StoreEmbeddings:
    """New embeddings of a store's rows, in the space that a migration fills.

    The migration continues with these embeddings. A row that changes loses its embedding, as in ``Store.add_space``.

    Args:
        store: the searched store.
        space: the migration's new space.
    """

    def __init__(self, store: CachingStore, space: str) -> None:
        self.store, self.space = store, space
        self._missing: dict[str, Any] = {}

    def get(self, ids: Sequence[str], generation: int) -> dict[str, NDArray[np.float32]]:
        """Return the rows' current embeddings.

        Args:
            ids: row ids.
            generation: ignored, because the store knows which rows changed.
        """
        found, missing = self.store.read_current(ids, self.space)
        self._missing |= {item: missing.pick([row]) for row, item in enumerate(missing.ids)}
        return found

    def put(self, embeds: Mapping[str, NDArray[np.float32]], generation: int) -> None:
        """Write embeddings of rows that are unchanged since :meth:`get`; skip rows that it did not find.

        Args:
            embeds: id -> (D,).
            generation: ignored.
        """
        rows = [
            self._missing[item]._replace(vectors_ND=embed_D[None]) for item, embed_D in embeds.items() if item in self._missing
        ]
        self._missing.clear()
        if rows:
            self.store.write(self.space, rows[0].join(rows[1:]))

    def count_demand(self, ids: Iterable[str]) -> None:
        """Count a query's candidates, without storing the query."""
        self.store.count_demand(ids)


def find_cache(store: CachingStore, rerank: Reranker) -> StoreEmbeddings | None:
    """Return the cache for a re-ranker's model, or None with a notice.

    Args:
        store: the searched store.
        rerank: the re-ranker.
    """
    if not rerank.keep:
        return None
    if not store.supports_cache:
        notice_once(f"{store.uri} does not cache new embeddings: only PostgreSQL, Qdrant and SQLite do")
        return None
    known, spaces = store.record("migration") or {}, store.spaces()
    is_same = (known.get("state"), known.get("model")) == ("filling", rerank.fingerprint.digest)
    into = spaces.get(known.get("into", "")) if is_same and known.get("where") == store.condition else None
    if into is None or into.dim != rerank.dim:
        notice_once(
            f"new embeddings of {rerank.fingerprint} are not cached in {store.uri}; run `xcompat migrate start` with this model, "
            "--embed and --budget 0 first to cache them"
        )
        return None
    return StoreEmbeddings(store, into.name)
