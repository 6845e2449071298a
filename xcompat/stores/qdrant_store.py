"""Store for Qdrant. Spaces are collections with the same ids, and a switch moves an alias."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ValidationError
from qdrant_client import models
from typing_extensions import override

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval import Hit
from xcompat.retrieval.versions import as_float32
from xcompat.stores.base import BEFORE, UNKNOWN, Rows, Space, Store
from xcompat.stores.lease import Lease
from xcompat.stores.qdrant_collections import (
    MARK,
    STATE,
    Connection,
    Point,
    collection_named,
    dense_vectors,
    made_like,
    metadata_of,
    metric_of,
    numbers_in,
    plain_errors,
    point_id,
    point_of,
    space_of,
    vector_of,
    with_vector,
)
from xcompat.stores.uri import StoreUri

PAGE = 1000
"""Maximum points per read request."""
POINTS, NUMBERS = 64, 1_000_000
"""Maximum points and numbers per write request. Servers accept 32 MB."""


class QdrantStore(Store):
    """Qdrant alias and its collection.

    The records are in the old collection's metadata, ``<alias>_before`` after the switch. So a switch only changes aliases.
    """

    supports_cache = True

    def __init__(self, uri: StoreUri, connection: Connection) -> None:
        self.uri = uri
        self.client, self.embedded = connection.client, connection.embedded
        self.lease: Lease | None = None
        self.space, self.vector, params = self._choose_space(connection.name)
        self.before = self.space + BEFORE
        self.metric = metric_of(uri, params)
        self.known = self.spaces()

    def _choose_space(self, name: str) -> tuple[str, str, models.VectorParams]:
        """Return the searched space, its vector's name and its settings."""
        info = self._info(self._real(name))
        vector = vector_of(self.uri, info)
        return name, vector, dense_vectors(info)[vector]

    # ------------------------------------------------------------------------------------------------- collections

    def _aliases(self) -> dict[str, str]:
        with plain_errors(self.uri):
            return {alias.alias_name: alias.collection_name for alias in self.client.get_aliases().aliases}

    def _names(self) -> set[str]:
        with plain_errors(self.uri):
            return {found.name for found in self.client.get_collections().collections}

    def _real(self, name: str) -> str:
        """Return a name's collection."""
        return collection_named(self.uri, self.client, name)

    def _home(self) -> str:
        """Return the collection with the records."""
        known = self._aliases()
        return known.get(self.before) or known.get(self.space, self.space)

    def _info(self, collection: str) -> models.CollectionInfo:
        with plain_errors(self.uri):
            return self.client.get_collection(collection)

    def _read_metadata(self, collection: str) -> dict[str, Any]:
        """Return xcompat's metadata in a collection."""
        return metadata_of(self._info(collection))

    def _note(self, collection: str, **values: Any) -> None:  # noqa: ANN401
        with plain_errors(self.uri):
            self.client.update_collection(collection, metadata={MARK + key: value for key, value in values.items()})

    def _collection(self, space: str) -> str:
        """Return the collection or alias with a space's vectors."""
        return space

    def _vector(self, space: str) -> str:
        """Return the name of a space's vector."""
        return self.vector

    def _vectors_read(self, space: str) -> bool | list[str]:
        """Return the vectors to read with a space's points."""
        return True

    def _is_copy(self, name: str, of: str) -> bool:
        """Return whether a migration copied a collection from another collection."""
        real = self._real(name)
        return real != of and self._read_metadata(real).get("copies") == of

    @override
    def spaces(self) -> dict[str, Space]:
        aliases, home = self._aliases(), self._home()
        found = {name: aliases[name] for name in (self.space, self.before) if name in aliases} or {self.space: self.space}
        begun = self.record("migration")
        into = begun["into"] if begun else None
        if into in self._names() and into not in found.values() and self._is_copy(into, home):
            found[into] = into
        self.known = {name: self._space(name, self._info(real)) for name, real in found.items()}
        return dict(self.known)

    def _space(self, name: str, info: models.CollectionInfo) -> Space:
        if (params := dense_vectors(info).get(self.vector)) is None:
            raise XcompatError(f"{self.uri}: {name} no longer has a single dense vector {self.vector!r}")
        return space_of(name, params, metadata_of(info).get("model"))

    # ------------------------------------------------------------------------------------------------- reading

    @override
    def count(self, space: str | None = None, without: str | None = None) -> int:
        if without is not None and space is not None and self.count(without):
            return sum(len(rows.ids) for rows in self.rows(PAGE, None, without, space))
        wanted, name = self._filter(space, True) if space is not None else None, self._collection(space or self.space)
        with plain_errors(self.uri):
            return self.client.count(name, wanted, exact=True).count

    @override
    def ids_without_vector(self, count: int) -> list[str]:
        name, wanted = self._collection(self.space), self._filter(self.space, False)
        with plain_errors(self.uri):
            found, _ = self.client.scroll(name, wanted, count, with_payload=False)
        return [str(record.id) for record in found]

    def _filter(self, space: str, has_vector: bool) -> models.Filter:
        has = models.HasVectorCondition(has_vector=self._vector(space))
        return models.Filter(must=[has]) if has_vector else models.Filter(must_not=[has])

    @override
    def search(
        self,
        vectors_QD: ArrayLike,
        top_k: int = 10,
        filter: models.Filter | dict[str, Any] | str | None = None,
        space: str | None = None,
    ) -> list[list[Hit]]:
        queries_QD = as_float32(vectors_QD)
        own = self._find_space(space or self.space, queries_QD.shape[1])
        self.queries(queries_QD, own)
        name = self._collection(own.name)
        asked: dict[str, Any] = {"using": self._vector(own.name) or None, "limit": top_k, "with_payload": False}
        wanted = self._read_filter(filter)
        with plain_errors(self.uri):
            if len(queries_QD) == 1:  # the client is slower for a batch of one
                found = [self.client.query_points(name, queries_QD[0].tolist(), query_filter=wanted, **asked)]
            else:
                requests = [models.QueryRequest(query=query, filter=wanted, **asked) for query in queries_QD.tolist()]
                found = self.client.query_batch_points(name, requests)
        version = own.fingerprint or UNKNOWN
        return [[Hit(str(hit.id), self._score(hit.score), version, None) for hit in each.points] for each in found]

    def _read_filter(self, given: models.Filter | dict[str, Any] | str | None) -> models.Filter | None:
        """Return a search's filter; refuse a wrong one with its first mistake, as each of Qdrant's conditions has another."""
        try:
            if isinstance(given, str):
                return models.Filter.model_validate_json(given)
            return models.Filter.model_validate(given) if isinstance(given, dict) else given
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"] if "[" not in str(part)) or repr(given)
            raise XcompatError(f"{self.uri}: filter {place}: {first['msg']}; see Qdrant's conditions") from None

    def _find_space(self, name: str, dim: int) -> Space:
        """Return a space to search, read again if it may have been switched."""
        own = self.known.get(name)
        return own if own is not None and own.dim == dim else self.spaces()[name]

    def _score(self, score: float) -> float:
        """Return a score in :class:`~xcompat.retrieval.Hit`'s convention: higher is better."""
        return -(score**2) if self.metric == "l2" else score

    def _points(
        self, space: str, page: int, after: str | None = None, without: str | None = None, has_vector: bool = True
    ) -> Iterator[list[Point]]:
        """Yield points in id order, page by page."""
        lacking = self._lacking(without, space) if without is not None else list
        wanted, offset = self._filter(space, has_vector), point_id(after)
        read: dict[str, Any] = {"with_payload": True, "with_vectors": self._vectors_read(space)}
        while True:
            with plain_errors(self.uri):
                records, offset = self.client.scroll(self._collection(space), wanted, page, offset=offset, **read)
            yield lacking([self._point(record, space) for record in records if str(record.id) != after])
            if offset is None:
                return

    def _point(self, found: models.Record | models.ScoredPoint, space: str) -> Point:
        return point_of(found, self._vector(space), self.metric)

    def _lacking(self, space: str, other: str) -> Callable[[list[Point]], list[Point]]:
        """Return a filter for points missing or outdated in a space."""
        is_copy = self._is_copy(space, self._real(other))
        newer = {None} if space == self.space else set()

        def lacking(points: list[Point]) -> list[Point]:
            there = self._states(space, [point.rest.id for point in points])
            return [
                point
                for point in points
                if point.rest.id not in there or (is_copy and there[point.rest.id] not in newer | {point.state})
            ]

        return lacking

    def _states(self, space: str, ids: list[Any]) -> dict[Any, str | None]:
        """Return the states by id. A state is None if a service wrote the point."""
        with plain_errors(self.uri):
            found = self.client.retrieve(space, ids, with_payload=[STATE]) if ids else []
        return {record.id: (record.payload or {}).get(STATE) for record in found}

    @override
    def rows(
        self,
        batch: int,
        after: str | None = None,
        without: str | None = None,
        space: str | None = None,
        content: str | None = None,
    ) -> Iterator[Rows]:
        found: list[Point] = []
        for points in self._points(space or self.space, min(batch, PAGE), after, without):
            found += points
            while len(found) >= batch:
                yield self._rows(found[:batch], content)
                del found[:batch]
        if found:
            yield self._rows(found, content)

    def _rows(self, points: list[Point], content: str | None = None) -> Rows:
        vectors_ND = np.stack([point.vector_D for point in points if point.vector_D is not None])
        contents = [(point.rest.payload or {}).get(content) for point in points] if content is not None else None
        return Rows([str(point.rest.id) for point in points], vectors_ND, [point.state for point in points], contents, [*points])

    @override
    def sample(self, count: int, other: str, content: str | None = None) -> tuple[Rows, NDArray[np.float32]]:
        random, own = models.SampleQuery(sample=models.Sample.RANDOM), self.space
        read: dict[str, Any] = {"with_payload": True, "with_vectors": self._vectors_read(own)}
        wanted = self._filter(own, True)
        with plain_errors(self.uri):
            drawn = self.client.query_points(self._collection(own), random, query_filter=wanted, limit=count, **read).points
        points = {hit.id: self._point(hit, own) for hit in drawn}
        for point in self._lacking(other, self.space)(list(points.values())):
            del points[point.rest.id]
        if not points:
            empty = np.empty((0, 0), np.float32)
            return Rows([], empty, []), empty
        theirs = self._read_vectors(other, list(points))
        both = [(point, vector_D) for name, point in points.items() if (vector_D := theirs.get(name)) is not None]
        return self._rows([point for point, _ in both], content), np.stack([vector_D for _, vector_D in both])

    def _read_vectors(self, space: str, ids: list[Any]) -> dict[Any, NDArray[np.float32]]:
        with plain_errors(self.uri):
            name, read = self._collection(space), self._vectors_read(space)
            found = self.client.retrieve(name, ids, with_payload=False, with_vectors=read) if ids else []
        return {each.id: vector_D for each in found if (vector_D := self._point(each, space).vector_D) is not None}

    @override
    def read_current(
        self, ids: Sequence[str], space: str, content: str | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], Rows]:
        names = [name for item in ids if (name := point_id(item)) is not None]
        read: dict[str, Any] = {"with_payload": True, "with_vectors": self._vectors_read(self.space)}
        with plain_errors(self.uri):
            found = self.client.retrieve(self._collection(self.space), names, **read)
        points = [point for record in found if (point := self._point(record, self.space)).vector_D is not None]
        lacking = self._lacking(space, self.space)(points)
        missing = {point.rest.id for point in lacking}
        stored = self._read_vectors(space, [point.rest.id for point in points if point.rest.id not in missing])
        current = {str(name): vector_D for name, vector_D in stored.items()}
        return current, self._rows(lacking, content) if lacking else Rows([], np.empty((0, 0), np.float32), [])

    @override
    def read_fields(self, ids: Sequence[str], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
        names = [name for item in ids if (name := point_id(item)) is not None]
        with plain_errors(self.uri):
            found = self.client.retrieve(self._collection(self.space), names, with_payload=[*fields], with_vectors=False)
        return {str(each.id): each.payload or {} for each in found}

    # ------------------------------------------------------------------------------------------------- writing

    @override
    def check_space(self, dim: int, dtype: str) -> None:
        if self.space not in (aliases := self._aliases()):
            or_else = ", or migrate in place with in_place=true" if self.vector else ""
            raise XcompatError(
                f"{self.uri} is a collection, but a switch needs an alias; create an alias "
                f"(client.update_collection_aliases), and use it in your services and in the address{or_else}"
            )
        self._require_no_shard_keys(self._info(aliases[self.space]))

    @override
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        self.check_space(dim, dtype)
        aliases, names = self._aliases(), self._names()
        for taken in (name, self.before):
            if taken in aliases or taken in names:
                raise XcompatError(f"{self.uri} already has a collection or alias {taken!r}; choose another name")
        own = aliases[self.space]
        info = self._info(own)
        kept = {key: value for key, value in (info.config.metadata or {}).items() if not key.startswith(MARK)}
        ours = {MARK + "model": {"digest": model.digest, "name": model.name}, MARK + "copies": own}
        with plain_errors(self.uri):
            self.client.create_collection(name, **made_like(info, self.vector, dim, dtype), metadata={**kept, **ours})
        self._index(name, info)

    def _require_no_shard_keys(self, info: models.CollectionInfo) -> None:
        if info.config.params.sharding_method == models.ShardingMethod.CUSTOM:
            raise XcompatError(f"{self.uri} has custom shard keys, which xcompat does not support; migrate it by hand")

    @override
    def name_model(self, space: str, model: Fingerprint) -> None:
        if space not in (known := self.spaces()):
            raise XcompatError(f"{self.uri} has no space {space!r}; {nearest(space, known)}")
        self._note(self._real(space), model={"digest": model.digest, "name": model.name})
        self.known = self.spaces()

    @override
    def write(self, space: str, rows: Rows) -> int:
        return self._upload(space, rows.copies or [], rows.vectors_ND)

    def _upload(self, space: str, points: list[Point], vectors_ND: NDArray[np.float32] | None) -> int:
        """Write points with new vectors, or unchanged without any."""
        dim = vectors_ND.shape[1] if vectors_ND is not None else 0
        size = max(1, dim + max(map(numbers_in, points), default=0))
        new = vectors_ND if vectors_ND is not None else [None] * len(points)
        made = (with_vector(point, self.vector, vector_D) for point, vector_D in zip(points, new, strict=True))
        with plain_errors(self.uri):
            self.client.upload_points(space, made, batch_size=min(POINTS, max(1, NUMBERS // size)), wait=True)
        return len(points)

    @override
    def delete_orphans(self, space: str, like: str) -> int:
        """Delete points missing from another space, and copy points without the searched vector."""
        for points in self._points(like, PAGE, without=space, has_vector=False):
            self._upload(space, points, None)
        gone, offset = 0, None
        while True:
            with plain_errors(self.uri):
                records, offset = self.client.scroll(space, None, PAGE, offset=offset, with_payload=[STATE])
                ours = [record.id for record in records if space != self.space or STATE in (record.payload or {})]
                kept = {record.id for record in self.client.retrieve(like, ours, with_payload=False)} if ours else set()
                if lost := [name for name in ours if name not in kept]:
                    self.client.delete(space, models.PointIdsList(points=lost), wait=True)
            gone += len(lost)
            if offset is None:
                return gone

    @override
    def index_like(self, space: str) -> list[str]:
        """Create the same payload indexes, and wait until the vectors are indexed."""
        made = self._index(space, self._info(self._real(self.space)))
        self._wait_for_index(self._real(space))
        return made

    def _wait_for_index(self, collection: str) -> None:
        while (status := self._info(collection).status) == models.CollectionStatus.YELLOW:
            self.renew_lease()
            time.sleep(1)
        if status == models.CollectionStatus.RED:
            raise XcompatError(f"{self.uri}: the server cannot index {collection}; check its log, then run start again")

    @override
    def missing_indexes(self, space: str, like: str) -> list[str]:
        made = self._info(self._real(space)).payload_schema
        return [name for name in self._info(self._real(like)).payload_schema if name not in made]

    def _index(self, space: str, like: models.CollectionInfo) -> list[str]:
        """Create payload indexes, before the points, so that the vector graph uses them."""
        for field, index in like.payload_schema.items():
            with plain_errors(self.uri):
                self.client.create_payload_index(space, field, index.params or index.data_type, wait=True)
        return list(like.payload_schema)

    @override
    def switch(self, space: str) -> None:
        if self._real(self.space) != space:
            self._alias({self.before: self._home(), self.space: space})

    @override
    def switch_back(self, space: str) -> None:
        if self.before in self._aliases():
            self._alias({self.space: self._home()}, self.before)

    def _alias(self, names: dict[str, str], gone: str | None = None) -> None:
        """Point aliases at collections in one atomic request."""
        actions: list[models.CreateAliasOperation | models.DeleteAliasOperation] = [
            models.CreateAliasOperation(create_alias=models.CreateAlias(collection_name=collection, alias_name=name))
            for name, collection in names.items()
        ]
        if gone is not None:
            actions.append(models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=gone)))
        with plain_errors(self.uri):
            self.client.update_collection_aliases(actions)

    @override
    def drop_space(self, name: str) -> None:
        """Delete a collection. After a switch, move the records and clean the new payloads first."""
        own, gone = self._real(self.space), self._real(name)
        if name == self.before:
            noted = self._read_metadata(gone)
            with plain_errors(self.uri):  # before the records move, so that it can be repeated
                self.client.delete_payload(own, [STATE], models.FilterSelector(filter=models.Filter()), wait=True)
            self._note(own, copies=None, **{key: noted.get(key) for key in ("migration", "claim", "aliases")})
        with plain_errors(self.uri):
            self.client.delete_collection(gone)

    # ------------------------------------------------------------------------------------------------- lease and records

    @override
    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    @contextmanager
    def migration_lease(self) -> Iterator[None]:
        if self.embedded:  # the client locks the folder
            yield
            return
        self.lease = Lease(self)
        try:
            with self.lease.hold():
                yield
        finally:
            self.lease = None

    @override
    def renew_lease(self) -> None:
        if self.lease is not None:
            self.lease.renew()

    @override
    def record(self, key: str) -> dict[str, Any] | None:
        return self._read_metadata(self._home()).get(key)

    @override
    def set_record(self, key: str, value: Mapping[str, object] | None) -> None:
        self._note(self._home(), **{key: value})

    @override
    def close(self) -> None:
        self.client.close()
