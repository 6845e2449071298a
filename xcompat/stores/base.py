"""Base class for stores, and their spaces and rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xcompat.core.arrays import normalise_rows
from xcompat.core.errors import FingerprintMismatchError, XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval import Hit
from xcompat.retrieval.manifest import Metric, VersionRecord
from xcompat.retrieval.versions import (
    alias_advice,
    aliased_version,
    as_float32,
    identity,
    notice_missing_old,
    query_view,
    takes_old_queries,
)
from xcompat.stores.new_embeddings import find_cache
from xcompat.stores.padding import is_padded, pad_vectors
from xcompat.stores.uri import StoreUri

if TYPE_CHECKING:
    from xcompat.retrieval.fallback import OldQueries
    from xcompat.retrieval.reranking import Reranker
    from xcompat.retrieval.versions import Model


class LostConnectionError(XcompatError):
    """The store no longer answers."""


BEFORE = "_before"
"""Suffix of the old space after a switch."""
UNKNOWN = Fingerprint.from_string("unknown")
"""Version of hits in a space without a recorded model."""


@dataclass(frozen=True)
class Space:
    """A set of vectors: a column, named vector or collection.

    Args:
        name: name in the store.
        dim: dimension, None if empty and undeclared.
        dtype: stored number type, e.g. ``float32``.
        fingerprint: the vectors' model, None if unknown.
    """

    name: str
    dim: int | None
    dtype: str
    fingerprint: Fingerprint | None = None


class Rows(NamedTuple):
    """Rows in a space.

    Args:
        ids: item ids as text.
        vectors_ND: (N, D) float32.
        states: values that change with the rows.
        contents: values of the requested field, or None.
        copies: other data to copy, for stores with a collection per space.
    """

    ids: list[str]
    vectors_ND: NDArray[np.float32]
    states: list[str]
    contents: list[Any] | None = None
    copies: list[Any] | None = None

    def pick(self, numbers: list[int]) -> Rows:
        """Return the rows with these numbers."""
        rest: list[Any] = [[part[number] for number in numbers] if part is not None else None for part in self[2:]]
        return Rows([self.ids[number] for number in numbers], self.vectors_ND[numbers], *rest)

    def join(self, others: Sequence[Rows]) -> Rows:
        """Return these rows and others with the same fields."""
        ids, vectors, *rest = zip(self, *others, strict=True)
        joined: list[Any] = [None if parts[0] is None else [*chain(*parts)] for parts in rest]
        return Rows([*chain(*ids)], np.concatenate(vectors), *joined)


def take_rows(blocks: Iterable[Rows], left: int | None) -> Iterator[Rows]:
    """Yield blocks until a number of rows, or all.

    Args:
        blocks: blocks of rows. Empty blocks are skipped.
        left: number of rows, or None.
    """
    for rows in blocks:
        if left is not None and left <= len(rows.ids):
            yield rows.pick([*range(left)])
            return
        left = None if left is None else left - len(rows.ids)
        if rows.ids:
            yield rows


class Store(ABC):
    """Database with vectors.

    Args:
        uri: address.
        space: the searched space's name.
        metric: search metric.
        supports_locking: whether it can keep other clients out.
        reports_version: whether ``version`` in hits is the searched version. Else it is the version last seen, and another
            process can have switched since.
        supports_cache: whether :meth:`read_current` works, so that re-ranked searches cache new embeddings.
        renames: whether a switch gives the new vectors the old name. Else services must use their new name.
        condition: condition to limit the store's rows, None for all rows.
        models_record: key of the record with the spaces' models.
    """

    uri: StoreUri
    space: str
    metric: Metric
    supports_locking: ClassVar[bool] = False
    reports_version: ClassVar[bool] = False
    supports_cache: ClassVar[bool] = False
    renames: ClassVar[bool] = True
    condition: str | None = None
    models_record: str = "spaces"
    _known: Space | None = None
    _padded: tuple[Space, int] | None = None
    """Space with padded vectors, and their dimension without padding."""

    def restrict(self, condition: str | None) -> None:
        """Limit the store to the rows of a condition, e.g. one collection in a shared table.

        Args:
            condition: condition in the store's language, None to use all rows.

        Raises:
            XcompatError: the store does not support conditions, or the condition is invalid.
        """
        if condition is not None:
            raise XcompatError(f"{self.uri}: --where works only with PostgreSQL tables; remove --where to migrate all rows")

    def restrict_to_part(self, condition: str) -> None:
        """Limit the store to a condition's rows, if their model is recorded apart. Else do nothing."""
        return

    # ------------------------------------------------------------------------------------------------- reading

    @abstractmethod
    def spaces(self) -> dict[str, Space]:
        """Return all spaces by name."""

    @abstractmethod
    def count(self, space: str | None = None, without: str | None = None) -> int:
        """Count rows.

        Args:
            space: count only rows with a vector in this space.
            without: count only rows with a missing or outdated vector in this space.
        """

    def count_zeros(self, space: str) -> int:
        """Count the zero vectors in a space."""
        return sum(int((~rows.vectors_ND.any(1)).sum()) for rows in self.rows(10_000, space=space))

    def ids_without_vector(self, count: int) -> list[str]:
        """Return ids of rows without a vector in the searched space.

        Args:
            count: maximum number of ids.
        """
        return []

    @abstractmethod
    def search(
        self,
        vectors_QD: ArrayLike,
        top_k: int = 10,
        filter: Any = None,  # noqa: A002, ANN401
        space: str | None = None,
    ) -> list[list[Hit]]:
        """Find the nearest vectors.

        Args:
            vectors_QD: (Q, D) queries in the space.
            top_k: maximum hits per query.
            filter: filter in the store's language.
            space: space to search, default :attr:`space`.

        Returns:
            Hits per query, best first.
        """

    @abstractmethod
    def rows(
        self,
        batch: int,
        after: str | None = None,
        without: str | None = None,
        space: str | None = None,
        content: str | None = None,
    ) -> Iterator[Rows]:
        """Read a space's rows in a fixed order.

        Vectors that services wrote into the ``without`` space are current if it is searched. Else they predate a rollback and
        count as missing.

        Args:
            batch: rows per block.
            after: start after this id. Stores without seek ignore it.
            without: read only rows with a missing or outdated vector in this space.
            space: space to read, default :attr:`space`.
            content: field to read too, e.g. a text or an image path.
        """

    @abstractmethod
    def sample(self, count: int, other: str, content: str | None = None) -> tuple[Rows, NDArray[np.float32]]:
        """Read rows spread over the store, and their current vectors (N, D) in another space.

        Args:
            count: approximate number of rows.
            other: the other space.
            content: field to read too.
        """

    def read_current(
        self, ids: Sequence[str], space: str, content: str | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], Rows]:
        """Read rows by id.

        Args:
            ids: row ids. Unknown ids and rows without a searched vector are skipped.
            space: another space.
            content: field to read too, of rows without a current vector in that space.

        Returns:
            Id -> current vector (D,) in the other space, and the rows without one, with searched vectors.

        Raises:
            XcompatError: :attr:`supports_cache` is False.
        """
        raise XcompatError(f"{self.uri} does not read rows by id")

    def read_fields(self, ids: Sequence[str], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Read fields of rows, e.g. to show them beside hits.

        Args:
            ids: row ids. Unknown ids are skipped.
            fields: column, payload or metadata keys.

        Returns:
            Id -> field -> value. Keys that a row lacks are skipped.

        Raises:
            XcompatError: the store has no such column.
        """
        raise XcompatError(f"{self.uri} does not read fields by id")

    def count_demand(self, ids: Iterable[str]) -> None:
        """Count rows as candidates of a search, so that a migration can embed frequent ones first.

        Raises:
            XcompatError: the store does not support it.
        """
        raise XcompatError(f"{self.uri} does not record demand: only PostgreSQL does")

    def demanded_ids(self) -> list[str]:
        """Return the counted rows, most frequent first."""
        return []

    def stream(self, batch: int = 10_000) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
        """Read ids and vectors (n, D) float32 in the searched space."""
        return ((rows.ids, rows.vectors_ND) for rows in self.rows(batch))

    def describe(self) -> dict[str, Any]:
        """Return ``rows``, ``dim``, ``metric``, ``spaces`` (name -> dim) and ``fingerprint`` (a digest, or None)."""
        spaces = self.spaces()
        own = spaces[self.space]
        return {
            "rows": self.count(),
            "dim": own.dim,
            "metric": self.metric,
            "spaces": {name: space.dim for name, space in spaces.items()},
            "fingerprint": own.fingerprint.digest if own.fingerprint is not None else None,
        }

    def find(
        self,
        embeds_QD: ArrayLike,
        model: Model,
        top_k: int = 10,
        filter: Any = None,  # noqa: A002, ANN401
        old_queries: OldQueries | None = None,
        rerank: Reranker | None = None,
        rerank_queries: ArrayLike | None = None,
    ) -> list[list[Hit]]:
        """Search with a compatible model's embeddings.

        Args:
            embeds_QD: (Q, D) model outputs.
            model: as in :meth:`~xcompat.retrieval.Gallery.search`.
            top_k: maximum hits per query.
            filter: filter in the store's language.
            old_queries: as in ``Gallery.search``.
            rerank: as in ``Gallery.search``. New embeddings are cached in the new space of a migration to this model.
            rerank_queries: as in ``Gallery.search``.

        Returns:
            Hits per query, best first.

        Raises:
            XcompatError: the stored vectors' model is unknown.
            FingerprintMismatchError: the models are not compatible.
        """
        if rerank is not None:
            hits = self.find(embeds_QD, model, max(top_k, rerank.candidates), filter, old_queries)
            asked_QD = embeds_QD if rerank_queries is None else rerank_queries
            ordered = rerank.order(asked_QD, hits, metric=self.metric, cache=find_cache(self, rerank))
            return [each[:top_k] for each in ordered]
        own = (self._known if self.reports_version else None) or self._refresh()
        try:
            hits = self.search(self._to_query_space(embeds_QD, model, own, old_queries), top_k, filter)
        except XcompatError:
            if self._refresh() == own:
                raise
        else:
            if all(hit.version == own.fingerprint for found in hits for hit in found):
                return hits
            self._known = None
        return self.find(embeds_QD, model, top_k, filter, old_queries)  # switched or named in the meantime

    def _refresh(self) -> Space:
        self._known = self.spaces()[self.space]
        return self._known

    def _to_query_space(self, embeds_QD: ArrayLike, model: Model, own: Space, old_queries: OldQueries | None = None) -> ArrayLike:
        if own.fingerprint is None:
            raise XcompatError(f"the model of {self.space} in {self.uri} is unknown; {self.model_advice}")
        dim = own.dim if own.dim is not None else as_float32(embeds_QD).shape[-1]
        made = VersionRecord(digest=own.fingerprint.digest, name=own.fingerprint.name, dim=dim)
        view = query_view(model, embeds_QD, made)
        if view is None and (aliases := self.aliases()):
            made = made.model_copy(update={"shares": aliases})
            view = query_view(model, embeds_QD, made)
        if view is None:
            advice = alias_advice(model, made, self.uri) or "use that model or a compatible one"
            raise FingerprintMismatchError(
                f"queries of {identity(model)} cannot be compared with {self.space} in {self.uri}, made by {own.fingerprint}: "
                f"{advice}"
            )
        if takes_old_queries(model, made):
            if old_queries is None:
                notice_missing_old(model)
            else:
                view = old_queries.replace_or_mix(model, made, view)
        return self._padded_queries(view, own)

    def _padded_queries(self, queries_QD: NDArray[np.float32], own: Space) -> NDArray[np.float32]:
        """Pad queries with zeros if the stored vectors are padded."""
        dim = queries_QD.shape[-1]
        if own.dim is None or dim >= own.dim:
            return queries_QD
        if self._padded != (own, dim):
            if not is_padded(self, dim, own.name):
                return queries_QD
            self._padded = own, dim
        return pad_vectors(np.atleast_2d(queries_QD), own.dim)

    def queries(self, vectors_QD: ArrayLike, own: Space) -> NDArray[np.float32]:
        """Return queries as (Q, D) float32.

        Args:
            vectors_QD: (Q, D) or (D,).
            own: searched space.

        Raises:
            XcompatError: the dimension differs.
        """
        queries_QD = as_float32(vectors_QD)
        if self.metric == "cosine":  # databases compute squares in float32
            queries_QD = normalise_rows(queries_QD)
        if own.dim is not None and queries_QD.shape[1] != own.dim:
            raise XcompatError(f"the queries have {queries_QD.shape[1]} dimensions, but {own.name} in {self.uri} has {own.dim}")
        return queries_QD

    # ------------------------------------------------------------------------------------------------- writing

    @abstractmethod
    def record(self, key: str) -> dict[str, Any] | None:
        """Read an xcompat record from the store, or None."""

    @abstractmethod
    def set_record(self, key: str, value: Mapping[str, object] | None) -> None:
        """Write a record, or delete it with None."""

    def added_spaces(self) -> set[str]:
        """Return the names of spaces added by a migration."""
        known = self.record("migration") or {}
        return {known["into"], known["space"] + BEFORE} if known else set()

    @property
    def model_advice(self) -> str:
        """The fix for a searched space without a recorded model."""
        return "set it with `xcompat gallery doctor URI --model MODEL --record` or store.name_model(space, fingerprint)"

    def name_model(self, space: str, model: Fingerprint) -> None:
        """Record a space's model in the store.

        Raises:
            XcompatError: the space does not exist.
        """
        if space not in (known := self.spaces()):
            raise XcompatError(f"{self.uri} has no space {space!r}; {nearest(space, known)}")
        known_models = self.record(self.models_record) or {}
        self.set_record(self.models_record, {**known_models, space: {"digest": model.digest, "name": model.name}})

    def aliases(self) -> tuple[str, ...]:
        """Return the digests of other names for the searched space's model, and of models whose queries fit it."""
        own = self.spaces()[self.space].fingerprint
        return tuple((self.record("aliases") or {}).get(own.digest, ())) if own is not None else ()

    def set_aliases(self, model: Fingerprint, digests: Iterable[str]) -> None:
        """Record the digests for vectors of a model, in any space."""
        if known := list(dict.fromkeys(digests)):
            self.set_record("aliases", {**(self.record("aliases") or {}), model.digest: known})

    def add_alias(self, alias: Fingerprint) -> Fingerprint:
        """Record another identity for the searched space's model, and return the model.

        Raises:
            XcompatError: the model is unknown, or the identities are different weights.
        """
        own = self.spaces()[self.space]
        if own.fingerprint is None:
            raise XcompatError(f"the model of {self.space} in {self.uri} is unknown; {self.model_advice}")
        aliased_version([VersionRecord(digest=own.fingerprint.digest, name=own.fingerprint.name, dim=own.dim or 1)], alias)
        self.set_aliases(own.fingerprint, (*self.aliases(), alias.digest))
        return own.fingerprint

    @abstractmethod
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        """Add an empty space.

        Rows whose searched vector changes later count as missing here.

        Args:
            name: the new space's name.
            dim: dimension.
            model: its vectors' model.
            dtype: stored number type.

        Raises:
            XcompatError: the name exists, or the store cannot add or switch to a space.
        """

    def check_space(self, dim: int, dtype: str) -> None:  # noqa: B027 - most stores accept any
        """Raise if such a space cannot be indexed."""

    def notes(self, dim: int, dtype: str) -> list[str]:
        """Return sentences about changes that services would notice."""
        return []

    @abstractmethod
    def write(self, space: str, rows: Rows) -> int:
        """Write vectors into a space, except for rows changed since they were read.

        Args:
            space: space from :meth:`add_space`.
            rows: rows from :meth:`rows`, with new vectors.

        Returns:
            Number of written rows.
        """

    def delete_orphans(self, space: str, like: str) -> int:
        """Delete rows missing from another space, and return their number.

        Rows that services added to the searched space stay. Stores with one row for all spaces do nothing.
        """
        return 0

    @abstractmethod
    def index_like(self, space: str) -> list[str]:
        """Copy the searched space's approximate indexes to another space. Return the names."""

    def missing_indexes(self, space: str, like: str) -> list[str]:
        """Return the indexes in ``like`` that a space lacks."""
        return []

    @abstractmethod
    def switch(self, space: str) -> None:
        """Give a space the searched name, atomically for all clients. The old space becomes ``…_before``.

        Repeat the call to complete an interrupted switch.
        """

    @abstractmethod
    def switch_back(self, space: str) -> None:
        """Undo a complete or interrupted :meth:`switch`. Can be repeated."""

    def finish_switch(self) -> None:  # noqa: B027 - most stores finish at once
        """Finish a switch's slow parts while clients work. Can be repeated."""

    @abstractmethod
    def drop_space(self, name: str) -> None:
        """Delete a space."""

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[None]:
        """Keep other clients out, and commit the block as a whole.

        If :attr:`supports_locking` is False, concurrent writes are caught up after the switch.
        """

    @abstractmethod
    def migration_lease(self) -> AbstractContextManager[None]:
        """Prevent a second migration. The lock ends with the process."""

    def renew_lease(self) -> None:
        """Renew the migration lease, if it can expire.

        Raises:
            XcompatError: another process took the lease.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""
