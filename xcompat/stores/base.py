"""What every store can do: describe itself, stream, search, and hold several spaces of vectors beside each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
from xcompat.stores.padding import is_padded, pad_vectors
from xcompat.stores.uri import StoreUri

if TYPE_CHECKING:
    from xcompat.retrieval.fallback import OldQueries
    from xcompat.retrieval.reranking import Reranker
    from xcompat.retrieval.versions import Model


class LostConnectionError(XcompatError):
    """The store does not answer any more."""


BEFORE = "_before"
"""Ends the name of the old space after a switch."""
UNKNOWN = Fingerprint.from_string("unknown")
"""The version of hits in a space whose model nobody has named."""


@dataclass(frozen=True)
class Space:
    """One set of vectors of a store: a column, a named vector, a collection.

    Args:
        name: in the store.
        dim: of its vectors; None while it holds none and the store does not say.
        dtype: how the store keeps their numbers, such as ``float32``.
        fingerprint: the model that made them; None if nobody has said.
    """

    name: str
    dim: int | None
    dtype: str
    fingerprint: Fingerprint | None = None


class Rows(NamedTuple):
    """Rows of one space.

    Args:
        ids: of the items, as text.
        vectors_ND: (N, D) float32.
        states: what changes when somebody changes a row; one for each.
        contents: the values of the field that was asked for, one for each; None unless one was.
        copies: what else a store writes that keeps each space in a collection of its own, in its client's form; None elsewhere.
    """

    ids: list[str]
    vectors_ND: NDArray[np.float32]
    states: list[str]
    contents: list[Any] | None = None
    copies: list[Any] | None = None

    def pick(self, numbers: list[int]) -> Rows:
        """Return some of the rows."""
        rest: list[Any] = [[part[number] for number in numbers] if part is not None else None for part in self[2:]]
        return Rows([self.ids[number] for number in numbers], self.vectors_ND[numbers], *rest)


class Store(ABC):
    """A database that holds vectors, left where it is.

    Args:
        uri: its address.
        space: the name of the space that is searched.
        metric: how its vectors are compared.
        locks: whether :meth:`alone` keeps others out.
        tells: whether each search tells by the ``version`` of its hits what it has searched. Elsewhere it tells what
            :meth:`spaces` has seen last, which another process may have switched since.
    """

    uri: StoreUri
    space: str
    metric: Metric
    locks: ClassVar[bool] = False
    tells: ClassVar[bool] = False
    _known: Space | None = None
    _padded: tuple[Space, int] | None = None
    """The space whose vectors are padded, and their dimension without padding."""

    # ------------------------------------------------------------------------------------------------- reading

    @abstractmethod
    def spaces(self) -> dict[str, Space]:
        """Return all spaces by name."""

    @abstractmethod
    def count(self, space: str | None = None, without: str | None = None) -> int:
        """Return the number of rows: of all, of those with a vector in a space, or of those among them that another lacks.

        Args:
            space: its rows; None for all.
            without: counts only rows that have no vector in this space, or one of what they were before they changed.
        """

    def count_zeros(self, space: str) -> int:
        """Return the number of rows whose vector in a space is zero."""
        return sum(int((~rows.vectors_ND.any(1)).sum()) for rows in self.rows(10_000, space=space))

    def ids_without_vector(self, count: int) -> list[str]:
        """Return the ids of the first rows that have no vector in the space that is searched.

        Args:
            count: most of them.
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
            top_k: most hits of a query.
            filter: in the store's own language.
            space: another space than the one that is searched.

        Returns:
            The hits of each query, the best first.
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
        """Read the rows of a space that have a vector, always in the same order.

        A vector that services wrote into the other space themselves is newer than the row if that is the space that is
        searched. If not, they wrote it before a rollback, and the row counts as one that has none.

        Args:
            batch: rows read at a time.
            after: the id to begin behind; a store that cannot seek reads all, of which ``without`` leaves out what is done.
            without: reads only rows that have no vector in this other space, or one of what they were before they changed.
            space: another space than the one that is searched.
            content: the field to read with each, such as a text or the path of a picture.
        """

    @abstractmethod
    def sample(self, count: int, other: str, content: str | None = None) -> tuple[Rows, NDArray[np.float32]]:
        """Read about so many rows, spread over the store, and their vectors (N, D) in another space.

        Rows that have none there, or one of what they were before they changed, are left out.

        Args:
            count: of the rows.
            other: the other space.
            content: as in :meth:`rows`.
        """

    def stream(self, batch: int = 10_000) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
        """Read all ids and vectors (n, D) float32 of the space that is searched."""
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
        """Search with a model's embeddings, which are brought into the space that is searched.

        Args:
            embeds_QD: (Q, D) as the model outputs them.
            model: as :meth:`~xcompat.retrieval.Gallery.search` takes it.
            top_k: most hits of a query.
            filter: in the store's own language.
            old_queries: as :meth:`~xcompat.retrieval.Gallery.search` takes them.
            rerank: as :meth:`~xcompat.retrieval.Gallery.search` takes it. Only galleries keep new embeddings.
            rerank_queries: as :meth:`~xcompat.retrieval.Gallery.search` takes them.

        Returns:
            The hits of each query, the best first.

        Raises:
            XcompatError: nobody has said which model made the stored vectors.
            FingerprintMismatchError: the queries cannot be compared with them.
        """
        if rerank is not None:
            hits = self.find(embeds_QD, model, max(top_k, rerank.candidates), filter, old_queries)
            asked_QD = embeds_QD if rerank_queries is None else rerank_queries
            return [each[:top_k] for each in rerank.order(asked_QD, hits, metric=self.metric)]
        own = (self._known if self.tells else None) or self._look()
        try:
            hits = self.search(self._viewed(embeds_QD, model, own, old_queries), top_k, filter)
        except XcompatError:
            if self._look() == own:
                raise
        else:
            if all(hit.version == own.fingerprint for found in hits for hit in found):
                return hits
            self._known = None
        return self.find(embeds_QD, model, top_k, filter, old_queries)  # it was switched, or named, since we looked

    def _look(self) -> Space:
        """Look at what is searched."""
        self._known = self.spaces()[self.space]
        return self._known

    def _viewed(self, embeds_QD: ArrayLike, model: Model, own: Space, old_queries: OldQueries | None = None) -> ArrayLike:
        """Return a model's queries in a space."""
        if own.fingerprint is None:
            raise XcompatError(f"nobody has said which model made {self.space} of {self.uri}; {_ADOPT}")
        dim = own.dim if own.dim is not None else as_float32(embeds_QD).shape[-1]
        made = VersionRecord(digest=own.fingerprint.digest, name=own.fingerprint.name, dim=dim)
        view = query_view(model, embeds_QD, made)
        if view is None and (aliases := self.aliases()):
            made = made.model_copy(update={"shares": aliases})
            view = query_view(model, embeds_QD, made)
        if view is None:
            advice = alias_advice(model, made, self.uri) or "take that model, or one that is compatible with it"
            raise FingerprintMismatchError(
                f"queries of {identity(model)} cannot be compared with {self.space} of {self.uri}, which {own.fingerprint} made: "
                f"{advice}"
            )
        if takes_old_queries(model, made):
            if old_queries is None:
                notice_missing_old(model)
            else:
                view = old_queries.among(model, made, view)
        return self._padded_queries(view, own)

    def _padded_queries(self, queries_QD: NDArray[np.float32], own: Space) -> NDArray[np.float32]:
        """Return queries as wide as the stored vectors, where services padded these with zeros."""
        dim = queries_QD.shape[-1]
        if own.dim is None or dim >= own.dim:
            return queries_QD
        if self._padded != (own, dim):
            if not is_padded(self, dim, own.name):
                return queries_QD
            self._padded = own, dim
        return pad_vectors(np.atleast_2d(queries_QD), own.dim)

    def queries(self, vectors_QD: ArrayLike, own: Space) -> NDArray[np.float32]:
        """Return queries as (Q, D) float32, one of them as one row.

        Args:
            vectors_QD: (Q, D) or (D,).
            own: the space that they search.

        Raises:
            XcompatError: they have another dimension.
        """
        queries_QD = as_float32(vectors_QD)
        if self.metric == "cosine":  # databases square in float32
            queries_QD = normalise_rows(queries_QD)
        if own.dim is not None and queries_QD.shape[1] != own.dim:
            raise XcompatError(f"the queries have {queries_QD.shape[1]} dimensions, {own.name} of {self.uri} has {own.dim}")
        return queries_QD

    # ------------------------------------------------------------------------------------------------- writing

    @abstractmethod
    def record(self, key: str) -> dict[str, Any] | None:
        """Read what xcompat wrote down beside the user's data; None if nothing."""

    @abstractmethod
    def set_record(self, key: str, value: dict[str, Any] | None) -> None:
        """Write it down, or delete it with None."""

    def added_spaces(self) -> set[str]:
        """Return the names of spaces that stand beside the user's own because of a migration."""
        known = self.record("migration") or {}
        return {known["into"], known["space"] + BEFORE} if known else set()

    def name_model(self, space: str, model: Fingerprint) -> None:
        """Write down in the store which model made a space.

        Raises:
            XcompatError: there is no such space.
        """
        if space not in (known := self.spaces()):
            raise XcompatError(f"{self.uri} has no space {space!r}; {nearest(space, known)}")
        self.set_record("spaces", {**(self.record("spaces") or {}), space: {"digest": model.digest, "name": model.name}})

    def aliases(self) -> tuple[str, ...]:
        """Return the digests of other names of the model that made the searched space."""
        return tuple((self.record("aliases") or {}).get(self.space, ()))

    def add_alias(self, alias: Fingerprint) -> Fingerprint:
        """Write down another identity of the model that made the searched space, and return that model.

        Raises:
            XcompatError: nobody has said which model made it, or both identities are of weights, which differ.
        """
        own = self.spaces()[self.space]
        if own.fingerprint is None:
            raise XcompatError(f"nobody has said which model made {self.space} of {self.uri}; {_ADOPT}")
        aliased_version([VersionRecord(digest=own.fingerprint.digest, name=own.fingerprint.name, dim=own.dim or 1)], alias)
        known = dict.fromkeys((*self.aliases(), alias.digest))
        self.set_record("aliases", {**(self.record("aliases") or {}), self.space: list(known)})
        return own.fingerprint

    @abstractmethod
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        """Add an empty space beside the one that is searched.

        A row whose vector changes in the searched space afterwards is one that the new space lacks, for :meth:`rows` and
        :meth:`count`.

        Args:
            name: of the new space.
            dim: of its vectors.
            model: makes them.
            dtype: how the space keeps their numbers.

        Raises:
            XcompatError: there is something of that name, or the store cannot add or switch to a space here.
        """

    def check_space(self, dim: int, dtype: str) -> None:  # noqa: B027 - most stores take any
        """Refuse a space of this dimension and dtype that could not be indexed as the searched one is; nothing is written."""

    def notes(self, dim: int, dtype: str) -> list[str]:
        """Return what a migration to such a space changes for services, in sentences; nothing is written."""
        return []

    @abstractmethod
    def write(self, space: str, rows: Rows) -> int:
        """Write vectors into a space; rows that were changed since they were read are still lacking there afterwards.

        Args:
            space: added by :meth:`add_space`.
            rows: as :meth:`rows` gave them, with the vectors of this space.

        Returns:
            The number of rows that were written.
        """

    def tidy(self, space: str, like: str) -> int:
        """Delete from a space what another has no more; return how many.

        What services wrote themselves into the space that is searched stays. Nothing to do where spaces are parts of one row.
        """
        return 0

    @abstractmethod
    def index_like(self, space: str) -> list[str]:
        """Build for a space the approximate indexes that the searched one has; return their names."""

    def missing_indexes(self, space: str, like: str) -> list[str]:
        """Return the names of the indexes of one space that another lacks; none where a store indexes all it holds."""
        return []

    @abstractmethod
    def switch(self, space: str) -> None:
        """Give a space the name of the one that is searched, at once for all clients; that one is called ``…_before`` then.

        Called again after it was killed, it goes on, or does nothing.
        """

    @abstractmethod
    def switch_back(self, space: str) -> None:
        """Undo :meth:`switch`, also if it was killed half-way; called again, it goes on, or does nothing."""

    def settle(self) -> None:  # noqa: B027 - most stores leave nothing
        """Do what a switch left for when nobody has to wait for it; killed, it is called again."""

    @abstractmethod
    def drop_space(self, name: str) -> None:
        """Delete a space."""

    @abstractmethod
    def alone(self) -> AbstractContextManager[None]:
        """Keep all others from reading and writing, and do what is done inside as a whole, where the store can.

        Where it cannot, as ``locks`` says, what others write meanwhile is caught up after the switch.
        """

    @abstractmethod
    def claimed(self) -> AbstractContextManager[None]:
        """Refuse a second migration while one runs; a process that is killed gives its claim back."""

    def renew_claim(self) -> None:
        """Say that this migration still runs, where a claim ends by itself.

        Raises:
            XcompatError: it ended, and another process took it.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """End the connection."""


_ADOPT = "say it once with `xcompat migrate plan … --from MODEL`, or store.name_model(space, fingerprint)"
